import io
import json

import pytest
import torch
from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

from tests.trainers.helpers import rollout
from toolkit.reports import (
    Answers,
    MetricsFile,
    ProgressBar,
    peak_memory_gb,
    read_jsonl_metrics,
    read_result,
    sample_rows,
    samples_table,
    versions,
    write_jsonl,
    write_report,
    write_result,
)

RESULT = {
    "recipe": "r", "stage": "ppo", "seed": 0, "seconds": 1.5, "peak_memory_gb": {"resident": 1.0},
    "versions": {"trl": "1"},
    "before": {"score": 1.0, "accuracy_ci": [0.1, 0.2]}, "after": {"score": 2.0, "accuracy_ci": [0.3, 0.4]},
}  # fmt: skip


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
    assert read_jsonl_metrics(path) == rows
    again = MetricsFile(path)
    again.lines = saved["lines"]
    again.on_train_begin(None, state, TrainerControl())
    assert read_jsonl_metrics(path) == rows[:1]
    log(again, 2)
    assert read_jsonl_metrics(path) == rows and again.state()["attributes"] == {"lines": 2}


def test_result_is_written_aside(tmp_path):
    assert read_result(tmp_path) is None
    write_result(tmp_path, RESULT)
    assert read_result(tmp_path) == RESULT
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_memory_and_versions():
    assert 0.05 < peak_memory_gb()["resident"] < 24
    assert versions()["trl"].startswith("1.12.") and "python" in versions()


def test_samples(tmp_path):
    before = Answers.of(rollout([[5, 2]] * 4), torch.tensor([0.1] * 4))
    rows = sample_rows(before, Answers.of(rollout([[6, 2]] * 4), torch.tensor([0.2] * 4)))
    write_jsonl(tmp_path / "samples.jsonl", rows)
    assert [json.loads(x) for x in (tmp_path / "samples.jsonl").read_text().splitlines()] == rows
    assert rows[0]["before"] == "2" and rows[0]["after"] == "3"
    stream = io.StringIO()
    rows[0]["after"] = "[bold]not markup[/bold]"
    Console(file=stream, width=120).print(samples_table(rows, limit=2))
    assert "[bold]not markup[/bold]" in stream.getvalue() and "0.10 → 0.20" in stream.getvalue()
    with pytest.raises(ValueError, match="of the same prompts"):
        sample_rows(before, Answers.of(rollout([[6, 2]], [[1, 4]]), torch.tensor([0.2])))


def test_report_is_one_page_that_escapes_what_models_write(tmp_path):
    metrics = [{"step": 1, "score": 0.5, "kl": 0.0}, {"step": 2, "score": 0.7, "kl": 0.1}]
    samples = [{"prompt": "<script>", "before": "a", "before_score": 0.1, "after": "b & c", "after_score": 0.2}]
    page = write_report(tmp_path, RESULT, metrics, samples, "ppo: {}\n").read_text()
    assert page.count("<svg") == 1 and "<script>" not in page and "&lt;script&gt;" in page and "b &amp; c" in page
    assert "0.3000 – 0.4000" in page and "src=" not in page and "http://www.w3.org" in page  # no outside file is loaded
    plain = write_report(tmp_path, RESULT, metrics[:1], [], "").read_text()
    assert "<svg" not in plain and "Samples" not in plain


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
