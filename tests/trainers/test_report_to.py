"""What other tools are told, by the real packages, which are no dependencies; skipped where they are not installed."""

import json
import sqlite3

import pytest

from tests.tiny_models import shared_base
from tests.trainers.helpers import count_reward, trainer
from toolkit.reports import MetricsFile, read_jsonl

SHOWN = {"train/score", "train/kl", "train/explained_variance", "eval/score"}


def told(folder, tool, *, evaluated_first=False, **settings):
    """A run, perhaps after an evaluation by hand, that tells a tool what it measures: by the tool's name and step each
    figure of its metrics file."""
    settings |= {"report_to": tool, "eval_strategy": "steps", "eval_steps": 2}
    ours = trainer(folder, shared_base(), count_reward(9), **settings)
    ours.add_callback(MetricsFile(folder / "metrics.jsonl"))
    if evaluated_first:
        ours.evaluate()
    ours.train()
    figures = {}
    for row in read_jsonl(folder / "metrics.jsonl"):
        for name, value in row.items():
            if name != "step":
                tag = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
                figures[tag, row["step"]] = value
    assert {tag for tag, _ in figures} >= SHOWN
    return figures


def test_tensorboard_has_every_figure_under_its_name(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    figures = told(tmp_path, "tensorboard", evaluated_first=True)
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    assert tmp_path in events.parents  # and nowhere else
    read = EventAccumulator(str(events)).Reload()
    found = {(tag, one.step): one.value for tag in read.Tags()["scalars"] for one in read.Scalars(tag)}
    assert {key: found[key] for key in figures} == pytest.approx(figures, rel=1e-5)


def test_trackio_has_every_figure_under_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read as it is imported
    pytest.importorskip("trackio")
    figures = told(tmp_path, "trackio", project="of-a-test", run_name="mine")
    (path,) = (path for path in tmp_path.rglob("*.db") if "of-a-test" in path.name)
    rows = sqlite3.connect(path).execute("select metrics from metrics where run_name = 'mine'")
    found = {}
    for row in (json.loads(text) for (text,) in rows):
        found |= {(name, row["train/global_step"]): value for name, value in row.items()}
    assert {key: found[key] for key in figures} == pytest.approx(figures, rel=1e-5)


def test_mlflow_has_every_figure_under_its_name(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    store = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of-a-test")
    named = {"train": "", "eval": "eval_"}  # as in the metrics file: transformers renames nothing here
    figures = {
        (named[tag.split("/")[0]] + tag.split("/", 1)[1], step): value
        for (tag, step), value in told(tmp_path, "mlflow").items()
    }
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("of-a-test").experiment_id])
    history = {tag: client.get_metric_history(run.info.run_id, tag) for tag, _ in figures}
    found = {(tag, one.step): one.value for tag, of in history.items() for one in of}
    assert {key: found[key] for key in figures} == pytest.approx(figures, rel=1e-5)


def test_wandb_offline_has_the_last_of_every_figure_under_its_name(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "PROJECT": "of-a-test", "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    last = {tag: value for (tag, _), value in told(tmp_path, "wandb").items()}  # a row after the other
    found = dict(wandb.run.summary)
    wandb.finish()
    assert len(list(tmp_path.rglob("offline-run-*/*.wandb"))) == 1
    assert {tag: found[tag] for tag in last} == pytest.approx(last, rel=1e-5)
