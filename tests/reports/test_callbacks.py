import io

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

from toolkit.reports import MetricsFile, ProgressBar, read_jsonl


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


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_shows_what_matters(terminal, tmp_path):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=160)
    bar, state, control = ProgressBar("run ppo", console), TrainerState(), TrainerControl()
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    state.max_steps, state.global_step = 4, 2
    bar.on_train_begin(args, state, control)
    bar.on_log(
        args, state, control, logs={"score": 1.25, "kl": 0.5, "length": 9.0, "samples_per_second": 3.0, "ratio": 1.0}
    )
    bar.on_step_end(args, state, control)
    bar.on_train_end(args, state, control)
    text = stream.getvalue()
    assert "score 1.250 · KL 0.500 · length 9.0 · 3.0 samples/s" in text
    assert "2/4" in text and "run ppo" in text
