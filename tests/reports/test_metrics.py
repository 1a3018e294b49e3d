from transformers import TrainerControl, TrainerState

from toolkit.reports import MetricsFile, read_jsonl


def test_metrics_file_goes_on_behind_a_checkpoint(tmp_path):
    path, state = tmp_path / "sub" / "metrics.jsonl", TrainerState()

    def log(callback, *steps):
        for state.global_step in steps:
            callback.on_log(None, state, TrainerControl(), logs={"score": state.global_step / 2})

    first = MetricsFile(path)
    log(first, 1)
    saved = first.state()["attributes"]
    log(first, 2)
    with path.open("a") as file:
        file.write('{"step": 3, "sc')  # where a kill cut it
    rows = [{"step": 1, "score": 0.5}, {"step": 2, "score": 1.0}]
    assert read_jsonl(path) == rows
    again = MetricsFile(path)
    again.lines = saved["lines"]
    again.on_train_begin(None, state, TrainerControl())
    assert read_jsonl(path) == rows[:1]
    log(again, 2)
    assert read_jsonl(path) == rows and again.state()["attributes"] == {"lines": 2}
