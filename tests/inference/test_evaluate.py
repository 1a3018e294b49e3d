"""A trained run measured again."""

import json
import shutil
import sys
from dataclasses import fields, replace

import pytest
import yaml
from transformers import TrainingArguments

from tests.tiny_runs import PAIRS, command_here
from toolkit.errors import ColumnError, RecipeError, ToolkitError
from toolkit.inference.evaluate import as_trained, evaluate, measured, trained_on
from toolkit.inference.generate import generate_best
from toolkit.inference.saved_run import open_run
from toolkit.runs import build
from toolkit.spec.validate import measured_names
from toolkit.trainers.ppo_config import PPOConfig
from toolkit.trainers.rollouts import Rollouts


def test_evaluation_gives_the_figures_of_training(trained, monkeypatch):
    folder, recipe = trained
    monkeypatch.chdir(folder)
    result = evaluate(open_run("chat"))
    assert "changed" not in result and result["run"] == "chat"
    trained_result = json.loads((recipe.stage_folder("ppo") / "result.json").read_text())
    assert set(result["before"]) == set(measured_names(recipe.values, "ppo"))  # what a recipe may name is measured
    for moment in ("before", "after"):
        assert result[moment] == pytest.approx(trained_result[moment], rel=1e-3, abs=1e-3)
    assert json.loads((recipe.folder / "eval" / "result.json").read_text())["stage"] == "eval"
    samples = (recipe.folder / "eval" / "samples.jsonl").read_text().splitlines()
    assert len(samples) == 6
    assert json.loads((recipe.stage_folder("ppo") / "result.json").read_text()) == trained_result  # left as it was


def test_what_was_measured_is_shown_where_it_cannot_be_written(trained, monkeypatch, capsys):
    folder, _ = trained
    monkeypatch.chdir(folder)

    def full(*given):
        raise ToolkitError("no space left")

    monkeypatch.setattr("toolkit.inference.evaluate.write_jsonl", full)
    with pytest.raises(ToolkitError, match="no space left"):
        evaluate(open_run("chat", "ppo.temperature=null"))
    assert "score" in capsys.readouterr().out


def test_what_is_asked_for_otherwise_is_told_and_what_would_have_no_effect_refused(trained, monkeypatch):
    folder, recipe = trained
    monkeypatch.chdir(folder)
    asked = open_run("chat", "ppo.response_length=null", "ppo.temperature=0.5")
    assert asked.values["ppo"].keys() == recipe.values["ppo"].keys() - {"response_length"} | {"temperature"}
    read, made = set(), build.make_rollouts

    def seen(config, name):
        read.add(name)
        return object.__getattribute__(config, name)

    def then_seen(*given):
        rollouts = made(*given)
        monkeypatch.setattr(PPOConfig, "__getattribute__", seen)
        return rollouts

    monkeypatch.setattr(build, "make_rollouts", then_seen)
    assert measured(asked)[0]["changed"] == {"ppo.response_length": None, "ppo.temperature": 0.5}
    monkeypatch.undo()
    own = {one.name for one in fields(PPOConfig)} - {one.name for one in fields(TrainingArguments)}
    assert read & own <= Rollouts.reads <= read
    monkeypatch.chdir(folder)
    with pytest.raises(RecipeError) as raised:
        measured(open_run("chat", "ppo.learning_rate=1", "ppo.temperature=0.5", "seed=3", "adapters.policy.r=64"))
    told = {problem.field: problem.wrong[:20] for problem in raised.value.problems}
    assert told == dict.fromkeys(("ppo.learning_rate", "adapters.policy.r"), "would have no effect")
    others = ("sft_data.train", "reward_data.train", "q_data.train", "value_head.init", "adapters.value.r")
    asked = replace(recipe, values={**recipe.values, **{name.split(".")[0]: {"train": "x"} for name in others[:3]}})
    asked.values["value_head"] = {"init": "zero"}
    asked.values["adapters"] = {**recipe.values["adapters"], "value": {**recipe.values["adapters"]["value"], "r": 9}}
    with pytest.raises(RecipeError) as raised:
        measured(asked)
    assert {problem.field for problem in raised.value.problems} == {*others}


def test_it_is_measured_by_one_process_at_a_time(trained):
    _, recipe = trained
    lock = recipe.folder / ".lock"
    lock.write_text(json.dumps({"pid": 1, "host": "elsewhere", "started": 1}))
    try:
        with pytest.raises(RecipeError, match="is in use: process 1 on elsewhere is at work in it"):
            evaluate(recipe)
    finally:
        lock.unlink()


def test_a_run_whose_data_have_changed_is_told_of(trained, monkeypatch):
    folder, recipe = trained
    monkeypatch.chdir(folder)
    path = recipe.stage_folder("ppo") / "before.json"
    kept = path.read_text()
    assert "other_prompts" not in evaluate(open_run("chat"))
    path.write_text(json.dumps({**json.loads(kept), "held_out": "of other rows"}))

    def closed(sentence):
        if "held out: its data have changed since then, or the toolkit reads them otherwise, and" in sentence:
            raise BrokenPipeError

    monkeypatch.setattr("toolkit.inference.evaluate.say", closed)
    with pytest.raises(BrokenPipeError):  # as by a pager that is quit: by then all is written
        evaluate(open_run("chat"))
    path.write_text(kept)
    assert json.loads((recipe.folder / "eval" / "result.json").read_text())["other_prompts"] is True


def test_a_base_an_adapter_or_a_reward_that_has_changed_is_told_of(trained, tmp_path, monkeypatch):
    folder, recipe = trained
    monkeypatch.chdir(folder)
    shutil.copytree(recipe.folder, tmp_path / "runs" / "chat")
    path = tmp_path / "runs" / "chat" / "ppo" / "before.json"
    kept = json.loads(path.read_text())
    then = kept["made_with"]
    assert then["reward"].keys() == {"shorter_for_test.py"}
    for made, others in (
        (then, None),
        ({**then, "base": "another"}, ["base"]),
        ({**then, "base": "another", "dtype": "float64"}, None),  # whose numbers are others
        ({**then, "adapters": {"policy": "another", "gone": "x"}}, ["policy adapter"]),
        ({**then, "reward": {"shorter_for_test.py": "another", "gone.py": "x"}}, ["shorter_for_test.py"]),
    ):
        path.write_text(json.dumps({**kept, "made_with": made}))
        run = open_run("chat", runs_dir=tmp_path / "runs")
        result, _ = measured(run)
        found, told = as_trained(run, result)
        assert found.get("not_as_trained") == others
        assert [sentence.partition(":")[0] for sentence in told] == (others or [])
        asked = {**result, "changed": {"start.policy": "elsewhere"}}
        assert as_trained(run, asked)[0].get("not_as_trained") == (None if others == ["policy adapter"] else others)
    path.write_text(json.dumps(kept))  # in other bits a base has other digests
    whole = measured(open_run("chat", "base.quantization=null", runs_dir=tmp_path / "runs"))[0]
    assert whole["made_with"]["base"] != then["base"] and "not_as_trained" not in as_trained(run, whole)[0]
    path.write_text("{")
    (told,) = as_trained(run, {**result, "changed": {"data.test_size": 9}})[1][-1:]
    assert told.startswith("whether base, adapters and reward are those of the training is not known: ")
    (tmp_path / "shorter_for_test.py").write_text(
        "def rule(rollout):\n    return [float(n) for n in rollout.lengths]\n"
    )
    path.write_text(json.dumps(kept))
    monkeypatch.delitem(sys.modules, "shorter_for_test")
    monkeypatch.syspath_prepend(tmp_path)
    done = command_here("eval", "chat", cwd=tmp_path)
    assert "shorter_for_test.py: changed since the run was trained." in done.stdout
    result = json.loads((tmp_path / "runs" / "chat" / "eval" / "result.json").read_text())
    assert result["not_as_trained"] == ["shorter_for_test.py"]


def test_prompts_of_other_data_that_were_trained_on_are_counted(trained, monkeypatch, capsys):
    folder, _ = trained
    monkeypatch.chdir(folder)
    unseen = [{"prompt": "Never asked", "chosen": "a", "rejected": "b"}]
    (folder / "unseen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in unseen))
    assert "trained_on" not in evaluate(open_run("chat"))
    # The run's held-out rows are its training rows, all of them; and one is neither.
    more = evaluate(open_run("chat", f"data.validation=[{PAIRS},unseen.jsonl]", "data.max_validation_rows=null"))
    prompts = len(PAIRS.read_text(encoding="utf-8").splitlines())
    assert more["trained_on"] == prompts
    assert more["changed"] == {"data.validation": [str(PAIRS), "unseen.jsonl"], "data.max_validation_rows": None}
    said = f"{prompts} of these {prompts + 1} prompts are training prompts of the run's ppo stage."
    assert said in " ".join(capsys.readouterr().out.split())


def test_a_run_whose_data_are_gone_is_told_of(trained, tmp_path):
    _, recipe = trained
    shutil.copytree(recipe.folder, tmp_path / "runs" / "chat")
    path = tmp_path / "runs" / "chat" / "recipe.yaml"
    values = yaml.safe_load(path.read_text())
    values["data"]["train"] = str(tmp_path / "gone.jsonl")
    path.write_text(yaml.safe_dump(values))
    found, (said,) = trained_on(open_run("chat", f"data.train={PAIRS}", runs_dir=tmp_path / "runs"))
    assert found == {} and "gone.jsonl: there is no such file" in said
    assert said.startswith("data: which of these are training prompts of the run is not known: ")


def test_other_held_out_prompts_need_no_training_data(trained, tmp_path, monkeypatch, capsys):
    folder, recipe = trained
    monkeypatch.chdir(folder)
    shutil.copytree(recipe.folder, tmp_path / "runs" / "chat")
    path = tmp_path / "runs" / "chat" / "recipe.yaml"
    values = yaml.safe_load(path.read_text())
    values["data"]["train"] = str(tmp_path / "gone.jsonl")
    path.write_text(yaml.safe_dump(values))
    (other := tmp_path / "other.jsonl").write_text("".join(PAIRS.read_text().splitlines(True)[:3]))
    result = evaluate(open_run("chat", f"data.validation={other}", runs_dir=tmp_path / "runs"))
    assert result["changed"] == {"data.validation": str(other)} and "trained_on" not in result
    said = capsys.readouterr().out
    assert "data: validation: " in said and "is not known: " in said and "gone.jsonl" in said


def test_a_reward_that_reads_columns_needs_those_of_the_held_out_prompts_alone(trained, tmp_path, monkeypatch):
    folder, recipe = trained
    monkeypatch.chdir(folder)
    shutil.copytree(recipe.folder, tmp_path / "runs" / "chat")
    path = tmp_path / "runs" / "chat" / "recipe.yaml"
    asked = {word: [{"rule": "contains", "words": [word], "number": 1}] for word in ("one", "two", "three")}
    rows = [{"prompt": f"Say {word}.", "asked": rules} for word, rules in asked.items()]
    (other := tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    by_rules = {"kind": "rules", "column": "asked"}
    data = {"task": "prompts", "train": str(tmp_path / "gone.jsonl"), "validation": str(other)}
    values = yaml.safe_load(path.read_text()) | {"data": data, "scorer": by_rules, "judge": by_rules}
    path.write_text(yaml.safe_dump(values))
    run = open_run("chat", runs_dir=tmp_path / "runs")
    after = evaluate(run)["after"]
    assert 0.0 <= after["judge"] == after["score"] <= 1.0
    (best,) = generate_best(run, number=1, num_samples=2)
    assert best["prompt"].count("Say one.") == 1
    with pytest.raises(ColumnError, match='no column "asked"'):
        generate_best(run, texts=["Hi"], num_samples=2)


def test_nothing_measured_is_lost_where_the_run_s_own_base_is_not_here(trained, tmp_path):
    """It is needed to read what the run was trained on, of which there is a sentence."""
    _, recipe = trained
    shutil.copytree(recipe.folder, tmp_path / "runs" / "chat")
    path = tmp_path / "runs" / "chat" / "recipe.yaml"
    path.write_text(path.read_text().replace(str(recipe.base.model), "/moved/away"))
    given = (f"base.model={recipe.base.model}", "data.max_validation_rows=null")
    found, (said,) = trained_on(open_run("chat", *given, runs_dir=tmp_path / "runs"))
    assert found == {} and "is not known: " in said and "/moved/away" in said


def test_a_result_that_is_not_the_toolkit_s_is_not_written_over(trained, tmp_path, monkeypatch):
    _, recipe = trained
    monkeypatch.setattr("toolkit.inference.evaluate.measured", lambda _: pytest.fail("it was measured"))
    shutil.copytree(recipe.folder, tmp_path / "chat", ignore=shutil.ignore_patterns("eval"))
    own = tmp_path / "chat" / "eval" / "result.json"
    own.parent.mkdir()
    own.write_text("mine")
    with pytest.raises(RecipeError, match="eval/result.json is not known to be the toolkit's: .*Move that folder away"):
        evaluate(replace(recipe, runs_dir=tmp_path))
    assert own.read_text() == "mine" and list(own.parent.iterdir()) == [own]


def test_a_base_that_was_moved_is_told_of_by_what_can_be_done(trained, tmp_path, monkeypatch):
    _, recipe = trained
    monkeypatch.setenv("HOME", str(tmp_path))  # no shell expands ~ after "="
    shutil.copytree(recipe.folder, tmp_path / "runs" / "moved")
    path = tmp_path / "runs" / "moved" / "recipe.yaml"
    path.write_text(path.read_text().replace(str(recipe.base.model), "/moved/away"))
    done = command_here("eval", "moved", "--runs-dir=~/runs")
    assert done.returncode == 1 and "/moved/away" in done.stderr
    assert "If it was moved, add base.model=/new/place." in done.stderr and "MODEL=" not in done.stderr


def test_the_command_measures_on_what_is_named(trained):
    folder, _ = trained
    done = command_here("eval", "chat", "data.validation=gone.jsonl", cwd=folder)
    assert done.returncode == 1 and "DataError: data.validation: " in done.stderr
    assert "gone.jsonl: there is no such file" in done.stderr
