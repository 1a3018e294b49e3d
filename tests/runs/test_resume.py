"""Stages that are stopped, killed and gone on with, by the command line and from Python."""

import errno
import gc
import json
import os
import re
import shutil
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.tiny_models import needs_trl_loop
from tests.tiny_runs import PAIRS, begun, chat_recipe, cut_short, ended, finished
from toolkit import recipes
from toolkit.checkpoints import checkpoint_folders, read_state
from toolkit.errors import CheckpointError, RecipeError, RewardError, RunInterrupted, SelfCheckError, ToolkitError
from toolkit.inference.saved_run import open_run
from toolkit.reports import read_jsonl
from toolkit.runs import aside, stages
from toolkit.runs.folder import settle
from toolkit.runs.listing import state_of
from toolkit.runs.lock import acquire, owner_of
from toolkit.runs.longer import result_comes_back
from toolkit.runs.memory import card_holds, out_of_memory
from toolkit.runs.owned import BEFORE_FILE, begin
from toolkit.sampling import Evaluator
from toolkit.trainers import ppo_base
from toolkit.trainers.trl_compat import HAS_PPO

SMALL = (
    "sft.max_steps=40", "sft.save_steps=1", "reward.max_steps=2", "ppo.max_steps=2", "ppo.eval_steps=1",
    "ppo.save_steps=1", "ppo.per_device_train_batch_size=8", "data.validation_size=8", "data.test_size=8",
    "base.config.n_layer=1", "ppo.num_ppo_epochs=1",
)  # fmt: skip
SAVING = {"save_strategy": "steps", "save_steps": 1}
REWARD = {"max_steps": 2, "per_device_train_batch_size": 2, **SAVING}
OF_REWARD = ("recipe.yaml", "reward/result.json", "reward/manifest.json")
RULE = {"kind": "function", "function": "toolkit.rewards.rules:plain_words"}


def chat(tmp_path, checkpoint, *, reward=None, name="chat", **changes):
    """A recipe of ppo by a rule, which needs no stage before it; or by a reward that is trained."""
    ppo = {"max_steps": 3, "num_ppo_epochs": 1, "per_device_train_batch_size": 2, "response_length": 6,
           "logging_steps": 1, **SAVING}  # fmt: skip
    scorer = {} if reward else {"scorer": RULE}
    return chat_recipe(tmp_path, checkpoint, reward=reward, ppo={**ppo, **changes}, name=name, **scorer)


def test_an_unfinished_stage_is_gone_on_with(tmp_path, checkpoint, capsys, monkeypatch):
    recipe = chat(tmp_path, checkpoint)
    cut_short(recipe, "ppo", at=2)
    folder = recipe.stage_folder("ppo")
    before = (folder / BEFORE_FILE).read_text()
    with pytest.raises(
        RecipeError, match=r"ppo stage that was not finished, saved up to step 2.*resume=True.*overwrite=True"
    ):
        stages.run(recipe, "ppo")
    with pytest.raises(RecipeError, match="exclude each other. Give overwrite=True or resume=True"):
        stages.run(recipe, "ppo", overwrite=True, resume=True)
    with pytest.raises(RecipeError, match=r"has not finished. Run that stage of .*recipe.yaml again with resume=True"):
        open_run(recipe.run, runs_dir=recipe.runs_dir)
    assert len(checkpoint_folders(folder)) == 2  # a refusal deletes nothing
    monkeypatch.setattr(ppo_base, "read_state", lambda folder: {**read_state(folder), "seconds": 1e6})
    result = stages.run(recipe, "ppo", resume=True)
    assert 1e6 < result["seconds"] < 1.001e6  # with what was spent before
    assert "ppo goes on from" in capsys.readouterr().out
    assert result["resumed_at"] == [2] and result["before"] == json.loads(before)["metrics"]
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 6
    assert stages.run(recipe, "ppo", resume=True) == result  # finished: not repeated


@pytest.mark.parametrize("in_another", [False, True])
def test_a_full_disk_says_how_a_stage_goes_on(in_another, tmp_path, checkpoint, monkeypatch):
    """By itself, and run by the command of a later stage."""
    recipe, opened = chat(tmp_path, checkpoint), Path.open
    metrics, begun_at = recipe.stage_folder("ppo") / "metrics.jsonl", "checkpoint-2"

    def full(file, mode="r", *args, **named):
        if mode == "a" and file == metrics and (metrics.parent / begun_at).is_dir():
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(file, mode, *args, **named)

    wrong = r"metrics.jsonl: cannot be written \(No space left.*written there, ppo goes on with resume=True\.$"
    with monkeypatch.context() as patch, pytest.raises(ToolkitError, match=wrong):
        patch.setattr(Path, "open", full)
        if in_another:
            patch.setattr(stages, "at_work", lambda *_: nullcontext(False))
        stages.run(recipe, "ppo")
    result = stages.run(recipe, "ppo", resume=True)
    assert result["resumed_at"] == [2]
    begun_at = "."
    with monkeypatch.context() as patch, pytest.raises(ToolkitError, match=r"No space left .* can be written\.$"):
        patch.setattr(Path, "open", full)
        stages.run(recipe, "ppo", overwrite=True)  # before it has saved anything to go on from
    assert stages.run(recipe, "ppo") == result
    with monkeypatch.context() as patch, pytest.raises(ToolkitError, match=r"No space left .* can be written\.$"):
        patch.setattr(Path, "open", full)
        patch.setattr(aside, "put_back", lambda *_, **__: full(metrics, "a"))  # which has to write, too
        stages.run(recipe, "ppo", overwrite=True)
    assert stages.run(recipe, "ppo") == result


def test_other_held_out_rows_are_found_before_anything_is_trained(tmp_path, checkpoint):
    held_out = tmp_path / "held_out.jsonl"
    lines = PAIRS.read_text(encoding="utf-8").splitlines()
    held_out.write_text("\n".join(lines[:4]), encoding="utf-8")
    data = {"task": "preferences", "train": str(PAIRS), "validation": str(held_out)}
    ppo = {"max_steps": 2, "num_ppo_epochs": 1, "per_device_train_batch_size": 2, "response_length": 4, **SAVING}

    def recipe_now():
        return chat_recipe(tmp_path, checkpoint, data=data, reward=None, scorer=RULE, ppo=ppo)

    recipe = recipe_now()
    cut_short(recipe, "ppo", at=1)
    held_out.write_text("\n".join(lines[:5]), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"before.json was measured on other held-out rows.*overwrite=True"):
        stages.run(recipe_now(), "ppo", resume=True)
    held_out.write_text("\n".join(lines[:4]), encoding="utf-8")
    assert stages.run(recipe_now(), "ppo", resume=True)["resumed_at"] == [1]


def test_what_holds_no_checkpoint_begins_anew_and_says_so(tmp_path, checkpoint, capsys):
    recipe = chat(tmp_path, checkpoint)
    cut_short(recipe, "ppo", at=1)
    folder = recipe.stage_folder("ppo")
    (folder / "checkpoint-1" / "state.json").unlink()
    capsys.readouterr()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint there is whole. Save what you want of them, .*overwrite=True"
    ):
        stages.run(recipe, "ppo", resume=True)
    assert "checkpoint-1 is skipped: state.json is missing." in " ".join(capsys.readouterr().out.split())
    assert (folder / "checkpoint-1" / "policy").is_dir()
    shutil.rmtree(folder / "checkpoint-1")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"st')  # cut short by the kill
    result = stages.run(recipe, "ppo", resume=True)
    assert "holds no checkpoint: ppo begins anew" in " ".join(capsys.readouterr().out.split())
    assert "resumed_at" not in result
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_a_finished_stage_is_made_longer(tmp_path, checkpoint):
    recipe = chat(tmp_path, checkpoint, reward=REWARD, max_steps=2, lr_scheduler_type="constant")
    stages.run(recipe, "reward")
    shorter = stages.run(recipe, "ppo")
    longer = chat(tmp_path, checkpoint, reward=REWARD, max_steps=3, lr_scheduler_type="constant", logging_steps=3)
    with pytest.raises(RecipeError, match="ppo.max_steps is 2 there and 3 here"):
        stages.run(longer, "ppo")
    result = stages.run(longer, "ppo", resume=True)
    assert result["resumed_at"] == [2] and result["before"] == shorter["before"] and result["after"] != shorter["after"]
    assert "resumed_at" not in json.loads((longer.stage_folder("reward") / "result.json").read_text())


def test_a_longer_run_that_is_stopped_is_not_taken_for_the_shorter_one(tmp_path, checkpoint):
    recipe = chat(tmp_path, checkpoint, max_steps=2, lr_scheduler_type="constant")
    stages.run(recipe, "ppo")
    begin(recipe.folder / "eval")
    longer = chat(tmp_path, checkpoint, max_steps=4, lr_scheduler_type="constant")
    cut_short(longer, "ppo", at=3, resume=True)
    assert stages.finished(longer, "ppo") is None and not (recipe.folder / "eval").exists()
    with pytest.raises(RecipeError, match="has not finished"):
        open_run(recipe.run, runs_dir=recipe.runs_dir)
    assert stages.run(longer, "ppo", resume=True)["resumed_at"] == [2, 3]


def test_a_finished_stage_that_cannot_go_on_is_finished_still(tmp_path, checkpoint):
    path = tmp_path / "pairs.jsonl"
    path.write_text(PAIRS.read_text(encoding="utf-8"), encoding="utf-8")
    data = {"task": "preferences", "train": str(path), "validation": str(PAIRS), "max_validation_rows": 6}

    def recipe_of(**changes):
        ppo = {"num_ppo_epochs": 1, "per_device_train_batch_size": 2, "response_length": 6,
               "lr_scheduler_type": "constant", **SAVING}  # fmt: skip
        return chat_recipe(tmp_path, checkpoint, data=data, reward=None, scorer=RULE, ppo={**ppo, **changes})

    recipe = recipe_of(max_steps=2)
    result = stages.run(recipe, "ppo")
    begin(recipe.folder / "eval")
    before = {file: file.read_bytes() for file in recipe.folder.rglob("*") if file.is_file()}
    text = path.read_text(encoding="utf-8")
    of_ppo = ("result.json", "manifest.json", "report.html", "metrics.jsonl")
    for gone, wrong in ((False, "was written on other training data"), (True, "no such file")):
        path.unlink() if gone else path.write_text(text.replace("France", "Spain"), encoding="utf-8")
        with pytest.raises(ToolkitError, match=wrong):
            stages.run(recipe_of(max_steps=3), "ppo", resume=True)
        assert open_run(recipe.run, runs_dir=recipe.runs_dir).values == recipe.values
        assert stages.run(recipe, "ppo") == result
        for file in ("recipe.yaml", *(f"ppo/{name}" for name in of_ppo), "eval/manifest.json"):
            assert (recipe.folder / file).read_bytes() == before[recipe.folder / file], (file, wrong)
    path.write_text(text, encoding="utf-8")
    again = stages.run(recipe_of(max_steps=3), "ppo", resume=True)
    assert again["resumed_at"] == [2] and not (recipe.folder / "eval").exists()


def test_ctrl_c_says_what_works_next(tmp_path, checkpoint, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    recipe = chat(tmp_path, checkpoint, reward=REWARD)
    with monkeypatch.context() as patch:
        patch.setattr(stages, "check_stages", interrupted)
        with pytest.raises(KeyboardInterrupt) as nothing:
            stages.run(recipe, "ppo")
    assert nothing.value.way_on == ""
    stages.run(recipe, "reward")
    with monkeypatch.context() as patch:
        patch.setattr(stages, "train_stage", interrupted)
        with pytest.raises(KeyboardInterrupt) as begun_:
            stages.run(recipe, "ppo")
        assert begun_.value.way_on == "resume"
        if HAS_PPO:
            with pytest.raises(KeyboardInterrupt) as by_trl:
                stages.run(chat(tmp_path, checkpoint, reward=REWARD, loop="trl"), "ppo", overwrite=True)
            assert by_trl.value.way_on == "overwrite"
    stages.run(recipe, "ppo", overwrite=True)
    with monkeypatch.context() as patch:
        patch.setattr(stages, "train_stage", interrupted)
        with pytest.raises(KeyboardInterrupt) as again:
            stages.run(recipe, "ppo", overwrite=True)
        assert again.value.way_on == "" and stages.finished(recipe, "ppo")
        longer = chat(tmp_path, checkpoint, reward=REWARD, max_steps=4)
        with pytest.raises(KeyboardInterrupt) as made_longer:
            stages.run(longer, "ppo", resume=True)
        assert made_longer.value.way_on == "resume" and stages.finished(recipe, "ppo")
    other = chat(tmp_path, checkpoint, reward=REWARD, kl_coef=0.3)
    with monkeypatch.context() as patch:
        patch.setattr(stages, "train_stage", interrupted)
        with pytest.raises(KeyboardInterrupt) as replaced:
            stages.run(other, "ppo", overwrite=True)
    assert replaced.value.way_on == ""
    with pytest.raises(RecipeError, match="ppo.kl_coef"):
        stages.run(other, "ppo", resume=True)

    def stopped(*_):
        raise RunInterrupted("reward was interrupted", 2)

    with monkeypatch.context() as patch:
        patch.setattr(stages, "run_stage", stopped)
        reward = {**other.values["reward"], "learning_rate": 0.5}
        taught_else = chat_recipe(tmp_path, checkpoint, reward=reward, ppo=other.values["ppo"])
        with pytest.raises(RunInterrupted) as earlier:
            stages.run(taught_else, "ppo", overwrite=True)
    assert earlier.value.way_on == ""


def test_weights_without_a_checkpoint_are_begun_anew(tmp_path, checkpoint, monkeypatch):
    def interrupted(trainer, *_, **__):
        if trainer.state.global_step:
            raise KeyboardInterrupt
        return {"score": 0.0}, None

    recipe = chat(tmp_path, checkpoint, save_strategy="no")
    with monkeypatch.context() as patch:
        patch.setattr("toolkit.runs.stage._measure", lambda recipe, stage, trainer: interrupted(trainer))
        with pytest.raises(KeyboardInterrupt) as after:
            stages.run(recipe, "ppo")
    assert after.value.way_on == "overwrite" and "--overwrite" in state_of(recipe.folder).command
    with pytest.raises(RecipeError, match="weights that were saved without a checkpoint|no checkpoint of it to go on"):
        stages.run(recipe, "ppo", resume=True)


def test_a_stage_that_failed_with_other_weights_is_not_what_it_was(tmp_path, checkpoint, monkeypatch):
    """Made longer without checkpoints, it has saved its weights, and failed before its result."""
    recipe = chat(tmp_path, checkpoint, lr_scheduler_type="constant")
    stages.run(recipe, "ppo")
    longer = chat(tmp_path, checkpoint, lr_scheduler_type="constant", max_steps=4, save_strategy="no")
    with monkeypatch.context() as patch:
        patch.setattr("toolkit.runs.stage.figures", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stages.run(longer, "ppo", resume=True)
    assert not (recipe.stage_folder("ppo") / "result.json").exists()
    with pytest.raises(RecipeError, match="has not finished"):
        open_run(recipe.run, runs_dir=recipe.runs_dir)
    assert stages.run(longer, "ppo", resume=True)["resumed_at"] == [3]


def test_a_kill_before_the_next_checkpoint_leaves_a_finished_stage_finished(tmp_path, checkpoint, monkeypatch):
    recipe = chat(tmp_path, checkpoint, lr_scheduler_type="constant")
    stages.run(recipe, "ppo")
    run, of_a_kill = recipe.folder, tmp_path / "kept"

    def files():
        return {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}

    before = files()
    longer = chat(tmp_path, checkpoint, lr_scheduler_type="constant", max_steps=4)
    for made_on_the_way in ((), ("checkpoint-4/trainer_state.json",)):

        def killed(*_, made=made_on_the_way, **__):
            for name in (*made, "metrics.jsonl"):
                path = recipe.stage_folder("ppo") / name
                path.parent.mkdir(exist_ok=True)
                path.write_text("{}\n")
            shutil.copytree(run, of_a_kill, ignore=shutil.ignore_patterns(".lock"))  # whose process is alive here
            raise ZeroDivisionError

        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr("toolkit.runs.stages.train_stage", killed)
            stages.run(longer, "ppo", resume=True)
        if not made_on_the_way:
            assert files() == before
        shutil.rmtree(run)
        of_a_kill.rename(run)
        if made_on_the_way:
            with pytest.raises(RecipeError, match="has not finished"):
                open_run(recipe.run, runs_dir=recipe.runs_dir)
            assert settle(recipe, "ppo") == "" and not [*run.rglob("was_finished.json")]
        else:
            with pytest.raises(ToolkitError, match="keeps its earlier ppo aside"):
                open_run(recipe.run, runs_dir=recipe.runs_dir)
            assert stages.run(recipe, "ppo") and files() == before


def test_a_kernel_that_dies_leaves_a_finished_stage_finished(tmp_path, checkpoint):
    recipe = chat(tmp_path, checkpoint, lr_scheduler_type="constant")
    stages.run(recipe, "ppo")
    result, kept = recipe.stage_folder("ppo") / "result.json", recipe.stage_folder("ppo") / "was_finished.json"
    before = result.read_bytes()
    longer = chat(tmp_path, checkpoint, lr_scheduler_type="constant", max_steps=4)
    for trains in (False, True):
        trainer = longer.ppo_trainer(resume=True)
        assert not result.exists() and kept.exists()
        if trains:
            trainer.train(resume_from_checkpoint=True)
        del trainer
        gc.collect()
        (recipe.folder / ".lock").unlink(missing_ok=True)  # whose process is alive here
        if not trains:
            assert stages.run(recipe, "ppo") and result.read_bytes() == before
    with pytest.raises(RecipeError, match="has not finished"):
        open_run(recipe.run, runs_dir=recipe.runs_dir)
    assert settle(recipe, "ppo") == "" and not kept.exists()


@pytest.mark.parametrize("text", ['{"checkpoints": {}, "files": {"recipe.yaml": 1, "result.json": 2}}', "[]", "{"])
def test_what_a_finished_stage_comes_back_by_may_be_damaged(text, tmp_path, checkpoint):
    recipe = chat(tmp_path, checkpoint, lr_scheduler_type="constant")
    finished(recipe, "ppo")
    (recipe.stage_folder("ppo") / "was_finished.json").write_text(text)
    there = {path: path.read_bytes() for path in recipe.folder.rglob("*") if path.is_file()}
    with pytest.raises(ToolkitError, match="was_finished.json .*Delete it"):
        stages.run(chat(tmp_path, checkpoint, lr_scheduler_type="constant", max_steps=4), "ppo", resume=True)
    assert there == {path: path.read_bytes() for path in recipe.folder.rglob("*") if path.is_file()}


def test_a_finished_stage_comes_back_to_who_runs_one_with_the_recipe_that_it_had(tmp_path, checkpoint):
    """As where a stage that reads no scorer was made longer with another one, and killed."""
    recipe = chat(tmp_path, checkpoint)
    finished(recipe, "ppo")
    path, result = recipe.folder / "recipe.yaml", recipe.stage_folder("ppo") / "result.json"
    before, named = path.read_text(), recipe.stage_folder("ppo") / "was_finished.json"
    files = {name: (result.parent / name).read_text() for name in ("result.json", "manifest.json")}
    named.write_text(json.dumps({"checkpoints": {}, "files": {"recipe.yaml": before, **files}}))
    result.unlink()
    path.write_text(before.replace(RULE["function"], "mine.py:run"))
    said = f"{recipe.folder} has its earlier ppo again. Its recipe.yaml is the earlier one, too."
    assert settle(recipe, "ppo") == said
    assert path.read_text() == before and result.is_file() and not named.exists() and settle(recipe, "ppo") == ""


def test_what_a_finished_stage_warned_of_is_as_before_too(tmp_path, checkpoint):
    recipe = chat(tmp_path, checkpoint)
    finished(recipe, "ppo")
    folder = recipe.stage_folder("ppo")
    warned, rollouts = folder / "warnings.jsonl", folder / "rollouts.jsonl"
    rollouts.write_text('{"step": 1}\n')
    for before in (None, '{"update": 3, "warning": "judge_falls"}\n'):
        if before is None:
            warned.unlink(missing_ok=True)
        else:
            warned.write_text(before)
        drawn = rollouts.read_bytes()
        with pytest.raises(ZeroDivisionError), result_comes_back(recipe, "ppo"):
            warned.write_text("{}\n")
            rollouts.write_bytes(drawn + b"{}\n")
            raise ZeroDivisionError
        assert (warned.read_text() if warned.exists() else None) == before
        assert rollouts.read_bytes() == drawn and (folder / "result.json").exists()


def test_an_sft_that_lacks_but_its_result_is_written_up(tmp_path, checkpoint):
    sft = {"max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1, **SAVING}
    recipe = chat_recipe(tmp_path, checkpoint, sft=sft, reward=None, ppo=None)
    stages.run(recipe, "sft")
    folder = recipe.stage_folder("sft")
    path = folder / "metrics.jsonl"
    measured = sum("eval_loss" in row for row in read_jsonl(path))
    (folder / "result.json").unlink()
    path.write_text(path.read_text() + '{"step": 2, "lo')  # a full disk
    assert stages.run(recipe, "sft", resume=True)["resumed_at"] == [2]
    assert sum("eval_loss" in row for row in read_jsonl(path)) == measured


def test_a_full_disk_does_not_hide_what_it_has_ended(tmp_path, checkpoint, monkeypatch):
    recipe = chat(tmp_path, checkpoint)
    finished(recipe, "ppo")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="the first error"):  # noqa: SIM117
        with result_comes_back(recipe, "ppo"):
            patch.setattr("toolkit.runs.longer.write_whole", full)
            raise CheckpointError("the first error")


def test_a_finished_stage_whose_manifest_is_gone_says_so(tmp_path, checkpoint):
    recipe = chat(tmp_path, checkpoint, lr_scheduler_type="constant")
    finished(recipe, "ppo")
    folder = recipe.stage_folder("ppo")
    (folder / "checkpoint-3").mkdir()
    (folder / "checkpoint-3" / "trainer_state.json").write_text("{}")
    (folder / "manifest.json").unlink()
    with pytest.raises(RecipeError, match="is not known to be the toolkit's: .* has no manifest.json"):
        stages.run(chat(tmp_path, checkpoint, lr_scheduler_type="constant", max_steps=4), "ppo", resume=True)


def test_a_notebook_does_not_unfinish_a_run(tmp_path, checkpoint):
    recipe = chat(tmp_path, checkpoint)
    finished(recipe, "ppo")
    before = {name: (recipe.stage_folder("ppo") / name).read_bytes() for name in ("result.json", "manifest.json")}
    with pytest.raises(RecipeError, match=r"ppo of this run is finished.*max_steps makes it longer"):
        recipe.ppo_trainer(resume=True)
    assert before == {name: (recipe.stage_folder("ppo") / name).read_bytes() for name in before}


def test_what_the_last_evaluation_measured_is_not_measured_again(tmp_path, checkpoint):
    """But where it was of other weights or of other prompts."""
    asked, measure = [], Evaluator.__call__

    def counted(self, prompts, **given):
        asked.append(len(prompts))
        return measure(self, prompts, **given)

    def run(name, **changes):
        asked.clear()
        recipe = chat(tmp_path, checkpoint, name=name, learning_rate=3e-2, **changes)
        return stages.run(recipe, "ppo"), read_jsonl(recipe.stage_folder("ppo") / "samples.jsonl"), len(asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "__call__", counted)
        apart, once = run("apart"), run("once", eval_strategy="steps", eval_steps=2)
        by = {"metric_for_best_model": "kl", "greater_is_better": False, "load_best_model_at_end": True}
        best = run("best", eval_strategy="steps", eval_steps=1, **by)
    assert once[0]["after"] == apart[0]["after"] != once[0]["before"] and once[1] == apart[1]
    assert re.match("The weights are those of step [12] of 3", best[0]["ended"])
    # Before; after; at steps 2 and 3; at steps 1, 2 and 3.
    assert (apart[2], once[2], best[2]) == (2, 3, 5)


def test_a_stage_made_shorter_has_not_stopped_early(tmp_path, checkpoint):
    recipe = chat(tmp_path, checkpoint, reward=REWARD)
    reward = {**recipe.values["reward"], "max_steps": 4, "lr_scheduler_type": "constant"}
    cut_short(chat_recipe(tmp_path, checkpoint, reward=reward, ppo=recipe.values["ppo"]), "reward", at=2)
    shorter = chat_recipe(tmp_path, checkpoint, reward={**reward, "max_steps": 2}, ppo=recipe.values["ppo"])
    assert "ended" not in stages.run(shorter, "reward", resume=True)


def test_a_page_does_not_say_that_a_run_goes_on_which_has_failed(tmp_path, checkpoint):
    recipe = chat(tmp_path, checkpoint, eval_strategy="steps", eval_steps=1)
    for at in (2, 3):  # begun, and resumed
        cut_short(recipe, "ppo", at=at, resume=at > 2)
        page = (recipe.stage_folder("ppo") / "report.html").read_text()
        assert f"Stopped: step {at} of 3" in page and "Running:" not in page and 'http-equiv="refresh"' not in page
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("toolkit.runs.stage.how_it_ended", lambda trainer: 1 / 0)
        stages.run(recipe, "ppo", resume=True)
    page = (recipe.stage_folder("ppo") / "report.html").read_text()
    assert "Stopped: step 3 of 3" in page and 'http-equiv="refresh"' not in page
    before = page.partition("Stopped: ")[2][:20]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):  # before anything is read
        patch.setattr("toolkit.trainers.ppo_loop.PPOLoop.check_checkpoint", lambda *_: 1 / 0)
        stages.run(recipe, "ppo", resume=True)
    assert before in (recipe.stage_folder("ppo") / "report.html").read_text()


def test_a_checkpoint_that_lacks_but_its_name_is_gone_on_from(tmp_path, checkpoint):
    recipe = chat(tmp_path, checkpoint)
    cut_short(recipe, "ppo", at=1)
    whole = recipe.stage_folder("ppo") / "checkpoint-1"
    whole.rename(whole.with_name("checkpoint-1.partial"))
    with pytest.raises(RecipeError, match="was not finished, saved up to step 1"):
        stages.run(recipe, "ppo")
    assert stages.run(recipe, "ppo", resume=True)["resumed_at"] == [1]


def test_a_run_that_was_made_too_long_goes_back_to_what_has_been_done(tmp_path, checkpoint):
    """Where 4 were asked for and 2 are done the run could be finished by no other number; nor could one that failed."""
    recipe = chat(tmp_path, checkpoint, max_steps=2, lr_scheduler_type="constant")
    shorter = stages.run(recipe, "ppo")
    longer = chat(tmp_path, checkpoint, max_steps=9, lr_scheduler_type="constant")
    stages.claim(longer, "ppo", resume=True)  # and then it fails as it loads
    again = stages.run(recipe, "ppo", resume=True)
    assert again["after"] == shorter["after"] and stages.finished(recipe, "ppo") is not None
    cut_short(longer, "ppo", at=4, resume=True)
    with pytest.raises(RecipeError, match="ppo.max_steps is 9 there and 2 here"):
        stages.run(recipe, "ppo", resume=True)
    four = chat(tmp_path, checkpoint, max_steps=4, lr_scheduler_type="constant")
    assert stages.run(four, "ppo", resume=True)["resumed_at"] == [2, 4]


def test_a_stage_before_it_is_made_longer_too(tmp_path, checkpoint, stages_here, monkeypatch):
    """By a command of its own, which must not find the shorter one's result; if it fails, that stands."""
    recipe = chat(tmp_path, checkpoint, reward=REWARD)
    result = stages.run(recipe, "reward")
    before = {name: (recipe.folder / name).read_bytes() for name in OF_REWARD}
    longer = chat_recipe(tmp_path, checkpoint, reward={**REWARD, "max_steps": 3}, ppo=recipe.values["ppo"])

    def fails(command, earlier, stage):
        assert not (longer.stage_folder(earlier) / "result.json").exists()
        stages.claim(longer, earlier, resume=True)  # as that process does
        raise ToolkitError("the reward stage failed")

    with monkeypatch.context() as patch, pytest.raises(ToolkitError, match="the reward stage failed"):
        patch.setattr(stages, "run_stage", fails)
        stages.run(longer, "ppo", resume=True)
    assert {name: (recipe.folder / name).read_bytes() for name in OF_REWARD} == before
    assert stages.finished(recipe, "reward") == result
    stages.run(longer, "ppo", resume=True)
    made = json.loads((longer.stage_folder("reward") / "result.json").read_text())
    assert made["resumed_at"] == [2]
    assert checkpoint_folders(longer.stage_folder("reward"))[-1].name == "checkpoint-3"


def test_memory_that_runs_out_says_what_to_change(tmp_path, checkpoint, monkeypatch):
    recipe = chat(tmp_path, checkpoint)

    def runs_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with monkeypatch.context() as patch:
        patch.setattr("toolkit.trainers.ppo.PPOTrainer._backward_micro_batch", runs_out)
        with pytest.raises(ToolkitError, match=r"^ppo ran out of GPU memory, with as few rows at a time as there can"
                           r" be. Halve ppo.logprob_chunk_size, and run it again: nothing had been saved yet. A run"
                           r" that begins anew can have shorter rows \(ppo.response_length"):  # fmt: skip
            stages.run(recipe, "ppo")
    with monkeypatch.context() as patch:
        patch.setattr("transformers.AutoModelForCausalLM.from_pretrained", runs_out)
        with pytest.raises(
            ToolkitError, match=r"^base: the weights of the models do not fit .* Load the base in 4 bits"
        ):
            whole = chat_recipe(
                tmp_path, checkpoint, base={"model": str(checkpoint)}, reward=None, scorer=RULE, name="w"
            )
            stages.run(whole, "ppo")
    merged = chat(tmp_path, checkpoint, gradient_checkpointing=False, generation="merged")
    told = str(out_of_memory(merged, "ppo", one_row=True))
    assert "Set ppo.gradient_checkpointing=true, or halve ppo.logprob_chunk_size, and run it again" in told
    assert "can have ppo.generation=eager or shorter rows (ppo.response_length, data.max_prompt_length)" in told
    by_trl = chat(tmp_path, checkpoint, loop="trl", gradient_checkpointing=False, name="trl") if HAS_PPO else None
    told = str(out_of_memory(by_trl, "ppo", one_row=False)) if by_trl else ""
    assert "gradient_checkpointing" not in told and "toolkit plan" not in told
    of_reward = chat(tmp_path, checkpoint, reward={**REWARD, "gradient_checkpointing": False}, name="reward")
    told = str(out_of_memory(of_reward, "reward", one_row=True))
    assert "Set reward.gradient_checkpointing=true, and run it again" in told
    assert "rows (data.max_prompt_length, data.max_response_length); toolkit plan says" in told
    cut_short(recipe, "ppo", at=1)
    with monkeypatch.context() as patch:
        patch.setattr("toolkit.trainers.ppo.PPOTrainer._backward_micro_batch", runs_out)
        with pytest.raises(ToolkitError, match=r"and go on with resume=True"):
            stages.run(recipe, "ppo", resume=True)
    smaller = chat(tmp_path, checkpoint, per_device_train_batch_size=1, gradient_accumulation_steps=2,
                   gradient_checkpointing=True)  # fmt: skip
    assert stages.run(smaller, "ppo", resume=True)["resumed_at"] == [1]


@pytest.mark.parametrize(("error", "said"), [
    # As torch raises them where a card's own memory runs out, of rows that nothing has halved.
    (torch.OutOfMemoryError("CUDA out of memory."), r"^ppo ran out of GPU memory\. Halve ppo.per_device_train_batch_siz"
     r"e, with ppo.gradient_accumulation_steps doubled, or halve ppo.logprob_chunk_size, and "),
    (torch.AcceleratorError("CUDA error: out of memory\nSearch for"), r"^ppo ran out of GPU memory\. Halve .*, and "),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), r"^ppo ran out of GPU memory\. .*, and "),
    (torch.AcceleratorError("CUDA error: unspecified launch failure\nSearch for"),
     r"^the GPU failed: CUDA error: unspecified launch failure\. See .* Then "),
])  # fmt: skip
def test_a_card_that_fails_in_a_stage_says_how_to_go_on(error, said, tmp_path, checkpoint, monkeypatch):
    def fails(*_, **__):
        raise error

    recipe = chat(tmp_path, checkpoint, per_device_train_batch_size=2)
    with pytest.raises(ToolkitError, match=f"{said}run it again: nothing"), card_holds(recipe, "ppo"):
        fails()
    monkeypatch.setattr("toolkit.runs.memory.checkpoints_in", lambda folder: {1: folder})
    monkeypatch.setattr(stages, "train_stage", fails)
    with pytest.raises(ToolkitError, match=f"{said}go on with resume=True"):
        stages.run(recipe, "ppo")


def test_another_error_of_a_stage_is_raised_as_it_is(tmp_path, checkpoint):
    for error in (RuntimeError("shapes differ"), SelfCheckError("CUDA error: out of memory, said another")):
        with pytest.raises(type(error)) as raised, card_holds(chat(tmp_path, checkpoint), "ppo"):
            raise error
        assert raised.value is error
    none_halved = chat(tmp_path, checkpoint, per_device_train_batch_size=1)
    assert "per_device_train_batch_size" not in str(out_of_memory(none_halved, "ppo", one_row=False))


def test_to_go_on_with_a_run_that_is_not_there_is_a_mistake(tmp_path, checkpoint):
    recipe = chat(tmp_path, checkpoint, reward=REWARD)
    with pytest.raises(RecipeError, match='there is nothing to go on with: no run "chat" in .*There is none yet'):
        stages.run(recipe, "ppo", resume=True)
    finished(recipe, "reward")
    kept = recipes.load(recipe.folder / "recipe.yaml", runs_dir=recipe.runs_dir)
    assert (kept.name, kept.run, kept.folder) == ("chat", "chat", recipe.folder)
    with pytest.raises(
        RecipeError, match="is the recipe of the run chat in .*runs, and the runs are in .*others. Give"
    ):
        recipes.load(recipe.folder / "recipe.yaml", runs_dir=tmp_path / "others")
    other = chat_recipe(tmp_path, checkpoint, name="other")
    with pytest.raises(RecipeError, match='no run "other" in .*There are chat'):
        stages.run(other, "reward", resume=True)


def test_overwrite_begins_an_unfinished_stage_anew(tmp_path, checkpoint):
    recipe = chat(tmp_path, checkpoint, reward=REWARD)
    cut_short(recipe, "reward", at=1)
    with pytest.raises(RecipeError, match="reward stage that was not finished"):
        stages.run(recipe, "ppo")  # the prerequisite's checkpoints are not deleted either
    assert "resumed_at" not in stages.run(recipe, "reward", overwrite=True)


def test_trainers_of_a_notebook(tmp_path, checkpoint):
    recipe = chat(tmp_path, checkpoint)
    cut_short(recipe, "ppo", at=1)
    with pytest.raises(RecipeError, match="resume=True"):
        recipe.ppo_trainer()
    trainer = recipe.ppo_trainer(resume=True)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.resumed_at == (1,) and trainer.state.global_step == 3
    assert len(checkpoint_folders(recipe.stage_folder("ppo"))) == 3
    again = recipe.ppo_trainer(overwrite=True)
    assert checkpoint_folders(recipe.stage_folder("ppo")) == []
    again.save_model()
    assert not aside.settle(recipe.folder)  # done: what it replaced does not come back


def test_a_function_of_a_notebook_goes_on_from_a_file(tmp_path, checkpoint):
    def rule(rollout):
        return [-float(n) for n in rollout.lengths]

    trainer = chat(tmp_path, checkpoint, reward=REWARD).ppo_trainer(rule)
    folder = Path(trainer.args.output_dir)
    for batch in trainer.dataloader:
        responses = trainer.generate(batch)
        trainer.step(batch, responses, trainer.score(batch, responses))
        trainer.save_checkpoint()
        break
    trainer.save_model(str(tmp_path / "saved"))
    written = {path.relative_to(tmp_path / "saved").as_posix() for path in (tmp_path / "saved").rglob("*.json")}
    assert {*trainer.last_saved} == {"policy/role.json", "value/role.json"} <= written
    own, runs = folder.parent / "recipe.yaml", {"runs_dir": tmp_path / "runs"}
    with pytest.raises(RewardError, match='has no function ".*rule". A notebook or script has given it: put it into'):
        stages.run(recipes.load(own, **runs), "ppo", resume=True)
    (tmp_path / "mine.py").write_text("def shorter(rollout):\n    return [-float(n) for n in rollout.lengths]\n")
    by_file = recipes.load(own, f"scorer.function={tmp_path / 'mine.py'}:shorter", **runs)
    assert stages.run(by_file, "ppo", resume=True)["resumed_at"] == [1]
    other = recipes.load(own, f"scorer.function={tmp_path / 'mine.py'}:longer", **runs)  # one of a file stays
    with pytest.raises(RecipeError, match="other settings: scorer.function is"):
        stages.run(other, "ppo", resume=True)


def test_the_command_goes_on_with_what_a_notebook_began(tmp_path, checkpoint):
    recipe = chat(tmp_path, checkpoint)
    whole = chat(tmp_path, checkpoint, name="whole")
    expected = stages.run(whole, "ppo")
    trainer = recipe.ppo_trainer()
    for batch in trainer.dataloader:
        responses = trainer.generate(batch)
        trainer.step(batch, responses, trainer.score(batch, responses))
        trainer.save_checkpoint()
        break
    result = stages.run(recipe, "ppo", resume=True)
    assert result["resumed_at"] == [1]
    assert (result["before"], result["after"]) == (expected["before"], expected["after"])
    (first,) = read_state(recipe.stage_folder("ppo") / "checkpoint-3")["own"]["watch"]["first"].values()
    assert first["metrics"] == result["before"]  # which the checkpoint of the notebook did not know


@needs_trl_loop
def test_trl_s_own_loop_saves_no_checkpoints_and_says_so(tmp_path, checkpoint):
    recipe = chat_recipe(tmp_path, checkpoint, "ppo.loop=trl", "ppo.save_strategy=steps")
    with pytest.raises(RecipeError, match="there is nothing to go on with"):
        stages.run(recipe, "ppo", resume=True)
    stages.claim(recipe, "ppo")
    with pytest.raises(RecipeError, match=r"ppo.loop: trl saves no checkpoints.*trl#2657"):
        stages.run(recipe, "ppo", resume=True)


def saving(stage, tmp_path):
    """A command whose sft, which it would be long at, has saved; and its words."""
    longer = ["sft.max_steps=100000" if one.startswith("sft.max_steps=") else one for one in SMALL]
    arguments = (stage, "doubling", *longer, "--run", "cut")
    process = begun(*arguments, cwd=tmp_path)
    while not checkpoint_folders(tmp_path / "runs" / "cut" / "sft"):
        assert process.is_alive(), ended(process, tmp_path)
        time.sleep(0.01)
    return process, arguments


def assert_stopped(process, arguments, number, tmp_path):
    done = ended(process, tmp_path)
    said = done.stderr
    assert done.returncode == 128 + number, said
    # Without a terminal the command passes Ctrl-C on as SIGTERM, which may come to the stage before Ctrl-C itself.
    assert re.search(rf"sft stopped by ({number.name}|SIGTERM) after step", said) and "everything is saved in" in said
    assert f"To go on: toolkit {' '.join(arguments)} --resume (make: RESUME=1)" in said
    assert said.count("To go on") == 1 and "Traceback" not in said and "Warning" not in said


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to catch")
def test_a_signal_to_the_command_reaches_the_stage_that_runs(tmp_path):
    """The stage is a child of the command: SIGTERM goes to the parent alone."""
    process, arguments = saving("reward", tmp_path)
    run = tmp_path / "runs" / "cut"
    # The run is the stage's, an interpreter of its own.
    assert owner_of(run)["pid"] not in (process.pid, os.getpid())
    with pytest.raises(RecipeError, match="is in use: process"):
        acquire(run)
    process.terminate()
    assert_stopped(process, arguments, signal.SIGTERM, tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no group of processes to send it to")
def test_ctrl_c_stops_a_command_and_the_stage_that_is_its_child(tmp_path):
    """It goes to both, and the command passes it on besides."""
    process, arguments = saving("reward", tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    assert_stopped(process, arguments, signal.SIGINT, tmp_path)
