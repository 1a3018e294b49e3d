"""A trained run measured again."""

import json

import pytest

from toolkit.inference.evaluate import evaluate
from toolkit.inference.saved_run import open_run
from toolkit.spec.validate import measured_names


def test_evaluation_gives_the_figures_of_training(trained, monkeypatch):
    folder, recipe = trained
    monkeypatch.chdir(folder)
    result = evaluate(open_run("chat"))
    trained_result = json.loads((recipe.stage_folder("ppo") / "result.json").read_text())
    assert set(result["before"]) == set(measured_names(recipe.values, "ppo"))  # what a recipe may name is measured
    for moment in ("before", "after"):
        assert result[moment] == pytest.approx(trained_result[moment], rel=1e-3, abs=1e-3)
    assert json.loads((recipe.folder / "eval" / "result.json").read_text())["stage"] == "eval"
    samples = (recipe.folder / "eval" / "samples.jsonl").read_text().splitlines()
    assert len(samples) == 6
    assert json.loads((recipe.stage_folder("ppo") / "result.json").read_text()) == trained_result  # left as it was
