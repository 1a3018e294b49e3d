"""What other tools are told, by the real packages; skipped where they are not installed."""

import pytest

from tests.conftest import shared_base
from tests.trainers.helpers import count_reward, trainer
from toolkit.reports import MetricsFile, read_jsonl


def test_tensorboard_has_every_figure_under_its_name(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {"report_to": "tensorboard", "eval_strategy": "steps", "eval_steps": 2}
    ours = trainer(tmp_path, shared_base(), count_reward(9), **settings)
    ours.add_callback(MetricsFile(tmp_path / "metrics.jsonl"))
    ours.train()
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    assert tmp_path in events.parents  # and nowhere else
    read = EventAccumulator(str(events)).Reload()
    for row in read_jsonl(tmp_path / "metrics.jsonl"):
        for name, value in row.items():
            if name != "step":
                tag = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
                found = {event.step: event.value for event in read.Scalars(tag)}
                assert found[row["step"]] == pytest.approx(value, rel=1e-5), name
    assert {"train/score", "train/kl", "train/explained_variance", "eval/score"} <= set(read.Tags()["scalars"])
