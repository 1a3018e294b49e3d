"""What is overwritten stays until the new one has finished, whatever ends it."""

import json
import re
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.tiny_runs import Stop, chat_recipe, command_here, cut_short, finished
from toolkit.disk import REPLACED, UNFINISHED, damage
from toolkit.errors import RecipeError, RunInterrupted, ToolkitError
from toolkit.inference.saved_run import open_run
from toolkit.runs import build, stages
from toolkit.runs import result as result_module
from toolkit.runs import stage as stage_module
from toolkit.runs.comparison import compare
from toolkit.runs.folder import claim, finish, way_on
from toolkit.runs.lock import at_work
from toolkit.runs.take_over import take_over
from toolkit.trainers.resume import ResumableTrainer

RULE = {"kind": "function", "function": "toolkit.rewards.rules:plain_words"}
SAVING = {"max_steps": 2, "num_ppo_epochs": 1, "per_device_train_batch_size": 2, "response_length": 4,
          "save_strategy": "steps", "save_steps": 1, "logging_steps": 1}  # fmt: skip


def recipe_of(tmp_path, checkpoint, *overrides, reward=None, name="chat"):
    scorer = {} if reward else {"scorer": RULE}
    return chat_recipe(tmp_path, checkpoint, *overrides, reward=reward, ppo=SAVING, name=name, **scorer)


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------------- what cannot be built

UNBUILT = {  # of what makes a trainer, the first step and the last
    "a base that is not there": "base.model=nowhere/at/all",
    "a batch larger than the data": "ppo.per_device_train_batch_size=4000",
}


@pytest.mark.parametrize("override", UNBUILT.values(), ids=UNBUILT)
def test_a_finished_stage_outlives_one_that_cannot_be_built(override, tmp_path, checkpoint):
    recipe = recipe_of(tmp_path, checkpoint)
    finished(recipe, "ppo")
    before, other = content(recipe.folder), recipe_of(tmp_path, checkpoint, override)
    with pytest.raises(ToolkitError, match=r"base\.model|fewer than one batch"):
        stages.run(other, "ppo", overwrite=True)
    assert content(recipe.folder) == before


STEPS = {
    "built": (build.MAKERS, "ppo"),
    "measured first": (stage_module, "_measure"),
    "saved": (result_module, "finish"),
    "reported": (result_module.reports, "write_report"),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_finished_stage_comes_back_wherever_the_new_one_fails(step, tmp_path, checkpoint, monkeypatch, capsys):
    recipe = recipe_of(tmp_path, checkpoint)
    finished(recipe, "ppo")
    before = content(recipe.folder)
    owner, name = STEPS[step]

    def fails(*_, **__):
        assert not (recipe.stage_folder("ppo") / "result.json").exists()  # it was moved aside by now
        raise Stop

    (monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr)(owner, name, fails)
    with pytest.raises(Stop):
        stages.run(recipe, "ppo", overwrite=True)
    after = content(recipe.folder)
    assert {name: data for name, data in after.items() if not name.startswith(UNFINISHED)} == before
    assert (recipe.folder / UNFINISHED).exists() == (step in ("saved", "reported"))  # a checkpoint is worth keeping
    assert f"{recipe.folder} has its earlier ppo again." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("replaces", "ended_by"),
    [(True, KeyboardInterrupt), (True, BrokenPipeError), (True, RuntimeError), (False, KeyboardInterrupt)],
)
def test_what_has_finished_stays_whatever_ends_the_command_after_it(
    replaces, ended_by, tmp_path, checkpoint, monkeypatch
):
    recipe = recipe_of(tmp_path, checkpoint)
    if replaces:
        finished(recipe, "ppo")

    def shown(*_):
        raise ended_by

    monkeypatch.setattr(stage_module, "show_result", shown)
    with pytest.raises(ended_by) as end:
        stages.run(recipe, "ppo", overwrite=replaces)
    assert end.value.way_on == "finished"
    assert (kept := stages.finished(recipe, "ppo")) is not None and "mark" not in kept
    assert damage(recipe.stage_folder("ppo")) is None
    assert not any((recipe.folder / name).exists() for name in (REPLACED, UNFINISHED))
    assert stages.run(recipe, "ppo") == kept
    monkeypatch.setattr(stages, "say", shown)  # that it is finished
    with pytest.raises(ended_by) as end:
        stages.run(recipe, "ppo")
    assert getattr(end.value, "way_on", "finished") == "finished"


def test_an_overwrite_that_was_stopped_goes_on_and_then_replaces(tmp_path, checkpoint):
    recipe = recipe_of(tmp_path, checkpoint)
    finished(recipe, "ppo")
    before = content(recipe.folder)
    other = recipe_of(tmp_path, checkpoint, "ppo.kl_coef=0.3")
    cut_short(other, "ppo", 1, overwrite=True)
    here = {name: data for name, data in content(recipe.folder).items() if not name.startswith(UNFINISHED)}
    assert here == before and (recipe.folder / UNFINISHED / "ppo" / "checkpoint-1").is_dir()
    assert stages.run(recipe, "ppo")["mark"] == "old"
    assert open_run(recipe.run, runs_dir=recipe.runs_dir).values == recipe.values
    result = stages.run(other, "ppo", resume=True)
    assert result["resumed_at"] == [1] and stages.finished(other, "ppo") == result
    assert sorted(path.name for path in recipe.folder.iterdir()) == ["eval", "ppo", "recipe.yaml"]
    assert [path.name for path in (recipe.folder / "eval").iterdir()] == ["judge.py"]


def test_what_was_begun_outlives_an_overwrite_that_fails_at_once(tmp_path, checkpoint):
    recipe = recipe_of(tmp_path, checkpoint)
    finished(recipe, "ppo")
    other = recipe_of(tmp_path, checkpoint, "ppo.kl_coef=0.3")
    cut_short(other, "ppo", 1, overwrite=True)
    (recipe.stage_folder("ppo") / "checkpoint-9").mkdir()  # whose files were deleted, but for
    (recipe.stage_folder("ppo") / "checkpoint-9" / "notes.md").write_text("mine")
    before = content(recipe.folder)
    assert f"{UNFINISHED}/ppo/checkpoint-1/state.json" in before
    with pytest.raises(ToolkitError, match=r"base\.model"):
        stages.run(recipe_of(tmp_path, checkpoint, UNBUILT["a base that is not there"]), "ppo", overwrite=True)
    assert content(recipe.folder) == before
    # One that comes further takes its place, one that ends lets go of both.
    third = recipe_of(tmp_path, checkpoint, "ppo.kl_coef=0.4")
    cut_short(third, "ppo", 2, overwrite=True)
    assert (recipe.folder / UNFINISHED / "ppo" / "checkpoint-2").is_dir()
    assert stages.run(third, "ppo", resume=True)["resumed_at"] == [2]
    assert sorted(path.name for path in recipe.folder.iterdir()) == ["eval", "ppo", "recipe.yaml"]


def test_a_later_stage_goes_on_with_what_it_stands_on(tmp_path, checkpoint, monkeypatch):
    """And not with what was begun in the place of that, in between, and stopped."""
    reward = {"max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 1}
    recipe = recipe_of(tmp_path, checkpoint, reward=reward)
    done = stages.run(recipe, "reward")
    cut_short(recipe, "reward", 1, overwrite=True)
    cut_short(recipe, "ppo", 1)
    assert way_on(recipe, "ppo") == "resume"
    monkeypatch.setattr(stages, "run_stage", lambda *_: pytest.fail("reward is trained again"))
    assert stages.run(recipe, "ppo", resume=True)["resumed_at"] == [1]
    assert stages.finished(recipe, "reward") == done


def test_what_was_replaced_is_not_given_up_for_what_was_begun_before(tmp_path, checkpoint, monkeypatch):
    """A second overwrite was killed; the run goes on with it, by its settings and not by those of the first."""
    recipe = recipe_of(tmp_path, checkpoint)
    finished(recipe, "ppo")
    before = content(recipe.folder)
    cut_short(recipe_of(tmp_path, checkpoint, "ppo.kl_coef=0.3"), "ppo", 1, overwrite=True)
    with monkeypatch.context() as patch:
        patch.setattr(stages, "restore", lambda run: "")  # a kill leaves it no chance
        cut_short(recipe_of(tmp_path, checkpoint, "ppo.kl_coef=0.4"), "ppo", 1, overwrite=True)
    with pytest.raises(RecipeError, match="ppo.kl_coef is 0.4 there"):
        stages.run(recipe_of(tmp_path, checkpoint, "ppo.kl_coef=0.3"), "ppo", resume=True)
    here = content(recipe.folder)
    assert {name: data for name, data in here.items() if not name.startswith(UNFINISHED)} == before


def test_what_was_saved_is_named_where_it_is_now(tmp_path, checkpoint, monkeypatch):
    recipe = recipe_of(tmp_path, checkpoint)
    finished(recipe, "ppo")
    save = ResumableTrainer.save_checkpoint

    def asked_to_stop(self):
        self._request.received = signal.SIGTERM
        self._request.met = self.control.should_training_stop = True
        return save(self)

    monkeypatch.setattr(ResumableTrainer, "save_checkpoint", asked_to_stop)
    with pytest.raises(RunInterrupted) as stop:
        stages.run(recipe_of(tmp_path, checkpoint, "ppo.kl_coef=0.3"), "ppo", overwrite=True)
    named = re.search(r"everything is saved in (.*checkpoint-1)\.", str(stop.value))[1]
    assert UNFINISHED in named and Path(named).is_dir()


def test_a_killed_overwrite_is_undone_by_the_next_start(tmp_path, checkpoint, capsys):
    """A kill leaves no chance to put anything back; each of these is a start."""
    recipe = recipe_of(tmp_path, checkpoint)
    other = recipe_of(tmp_path, checkpoint, "ppo.kl_coef=0.3")
    finished(recipe, "ppo")
    before = content(recipe.folder)

    starts = (
        (lambda: stages.run(recipe, "ppo"), nullcontext()),
        (lambda: stages.run(other, "ppo"), pytest.raises(RecipeError, match="ppo.kl_coef is not set there")),
    )
    for start, outcome in starts:
        claim(other, "ppo", overwrite=True)
        (other.stage_folder("ppo") / "metrics.jsonl").write_text("of the new one")
        with outcome:
            start()
        assert content(recipe.folder) == before
    said = "has its earlier ppo again. Its recipe.yaml is the earlier one, too."
    assert said in " ".join(capsys.readouterr().out.split())


def test_a_killed_overwrite_stays_as_it_is_for_those_who_read(tmp_path, checkpoint):
    recipe = recipe_of(tmp_path, checkpoint)
    other = recipe_of(tmp_path, checkpoint, "scorer.function=toolkit.rewards.rules:no_comma")
    finished(recipe, "ppo")
    claim(other, "ppo", overwrite=True)
    before = content(recipe.folder)
    taker = recipe_of(tmp_path, checkpoint, "ppo.kl_coef=0.3", name="taker")
    for reader in (
        lambda: compare(["chat", "chat"], tmp_path / "compared.html", runs_dir=recipe.runs_dir),
        lambda: take_over(taker, "chat", ["reward"]),
    ):
        with pytest.raises(RecipeError):
            reader()
    told = "chat keeps its earlier ppo aside: what was begun instead has not finished. Run the ppo stage of "
    with pytest.raises(ToolkitError, match=re.escape(told)):
        open_run(recipe.run, runs_dir=recipe.runs_dir)
    with at_work(recipe.folder), pytest.raises(RecipeError, match="its ppo stage has not finished"):
        open_run(recipe.run, runs_dir=recipe.runs_dir)
    assert told in command_here("runs", "--runs-dir", recipe.runs_dir).stdout
    assert content(recipe.folder) == before
    assert stages.run(recipe, "ppo")["mark"] == "old" and open_run("chat", runs_dir=recipe.runs_dir)
    assert not (recipe.folder / REPLACED).exists()


def test_a_prerequisite_that_has_finished_is_not_lost_with_the_stage_that_failed(tmp_path, checkpoint, monkeypatch):
    reward = {"max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no"}
    recipe = recipe_of(tmp_path, checkpoint, reward=reward)
    finished(recipe, "reward", "ppo")
    before = content(recipe.folder)
    other = recipe_of(tmp_path, checkpoint, "reward.max_steps=3", reward=reward)
    ran = []

    def runs(command, earlier, stage):
        ran.append(earlier)
        claim(other, earlier)  # as that process does
        finish(other.stage_folder(earlier), {"stage": earlier, "mark": "new"})

    monkeypatch.setattr(stages, "run_stage", runs)

    def fails(recipe, **named):
        raise Stop

    monkeypatch.setitem(build.MAKERS, "ppo", fails)
    with pytest.raises(Stop):
        stages.run(other, "ppo", overwrite=True)
    here = {name: data for name, data in content(recipe.folder).items() if not name.startswith(UNFINISHED)}
    assert here == before and ran == ["reward"]
    mended = recipe_of(tmp_path, checkpoint, "reward.max_steps=3", "ppo.kl_coef=0.3", reward=reward)
    with pytest.raises(Stop):
        stages.run(mended, "ppo", overwrite=True)
    assert ran == ["reward"]  # it was there
    kept = json.loads((recipe.folder / UNFINISHED / "reward" / "result.json").read_text())
    assert kept == {"stage": "reward", "mark": "new"}
    here = {name: data for name, data in content(recipe.folder).items() if not name.startswith(UNFINISHED)}
    assert here == before


def test_two_commands_do_not_write_to_one_run(tmp_path, checkpoint, monkeypatch):
    recipe = recipe_of(tmp_path, checkpoint)
    (recipe.folder).mkdir(parents=True)
    monkeypatch.setattr("toolkit.runs.lock.owner_of", lambda run: {"pid": 7, "host": "elsewhere", "started": 0})
    (recipe.folder / ".lock").write_text("{}")
    for start in (lambda: stages.run(recipe, "ppo", resume=True), recipe.ppo_trainer):
        with pytest.raises(RecipeError, match="is in use: process 7 on elsewhere is at work in it"):
            start()
    assert [path.name for path in recipe.folder.iterdir()] == [".lock"]


def test_what_a_stage_leaves_is_sealed(tmp_path, checkpoint):
    recipe = recipe_of(tmp_path, checkpoint)
    read = stages.run(recipe, "ppo")["sources"]
    folder = recipe.stage_folder("ppo")
    assert damage(folder) is None and read.keys() == {recipe.values["data"]["train"]}
    for name in ("policy/adapter_model.safetensors", "value/adapter_model.safetensors", "policy/adapter_config.json"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(ToolkitError, match=rf"{name} is damaged: its SHA-256 .* run the ppo stage again"):
            open_run(recipe.run, runs_dir=recipe.runs_dir)
        (folder / name).write_bytes(whole)
    open_run(recipe.run, runs_dir=recipe.runs_dir)


def test_a_later_stage_reads_no_damaged_one(tmp_path, checkpoint):
    reward = {"max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no"}
    recipe = recipe_of(tmp_path, checkpoint, reward=reward)
    finished(recipe, "reward")
    (recipe.stage_folder("reward") / "policy" / "adapter_model.safetensors").write_bytes(b"weights of another one")
    for start in (lambda: stages.run(recipe, "ppo"), recipe.ppo_trainer):
        with pytest.raises(ToolkitError, match="adapter_model.safetensors is damaged: its SHA-256 is not the one"):
            start()
    second = chat_recipe(tmp_path, checkpoint, reward=reward, ppo=SAVING, name="second")
    with pytest.raises(ToolkitError, match="adapter_model.safetensors is damaged"):
        stages.run(second, "ppo", from_run="chat")


def test_a_stage_that_is_repeated_names_what_stands_on_the_one_before(tmp_path, checkpoint, capsys):
    recipe = recipe_of(tmp_path, checkpoint, reward={"max_steps": 1, "per_device_train_batch_size": 2})
    finished(recipe, "reward", "ppo")
    stages.run(recipe, "reward", overwrite=True)
    said = "ppo of this run was trained on the reward that is now replaced; --overwrite repeats it (make: OVERWRITE=1)."
    assert said in " ".join(capsys.readouterr().out.split())
    assert (recipe.stage_folder("ppo") / "result.json").is_file()  # it stays
