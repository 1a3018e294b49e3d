"""Which stages of a run folder stand when settings change, what may be deleted there, what another run can take."""

import errno
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_runs import PAIRS, REPOSITORY, chat_recipe
from toolkit import recipes
from toolkit.checkpoints import whole_folder
from toolkit.disk import sealed_files
from toolkit.errors import RecipeError, ToolkitError
from toolkit.runs import owned, stages
from toolkit.runs.differences import _MAY_CHANGE, _ROWS_OF_A_STEP, _SHOWN_BY, may_change
from toolkit.runs.folder import check_outputs, claim, conflict, finished, settle
from toolkit.runs.folder import finish as finish_stage
from toolkit.runs.longer import result_comes_back
from toolkit.runs.owned import begin
from toolkit.runs.result import rows_read, sources_read
from toolkit.runs.take_over import take_over
from toolkit.spec.plan import STAGES

RULE = {"kind": "function", "function": "toolkit.rewards.rules:plain_words"}
LORA = {"r": 4, "target_modules": "all-linear"}
OTHER_LORA = {"r": 2, "target_modules": "all-linear"}
FEW = {"max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no"}
OTHER = {**FEW, "max_steps": 1}
PAIRS_DATA = {"task": "preferences", "train": str(PAIRS), "validation": str(PAIRS), "max_validation_rows": 6}
COLLECT = {"response_length": 6, "batch_size": 4}


def finish(recipe, *names):
    """Stand-ins for finished stages: what they hold is not read here."""
    for name in names:
        claim(recipe, name)
        (recipe.stage_folder(name) / "result.json").write_text(json.dumps({"stage": name}))


def there(recipe):
    return {name for name in STAGES if (recipe.stage_folder(name) / "result.json").is_file()}


def tensors(folder):
    return {
        f"{path.relative_to(folder)} {name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


# ---------------------------------------------------------------------- what a stage reads

DOWNSTREAM = {"about": "other", "ppo": {**OTHER, "response_length": 3}, "q": {**OTHER, "response_length": 3}}
CASES = {
    "sft": (
        {"sft": FEW, "adapters": {"policy": LORA, "value": LORA, "reward": LORA}},
        {
            **DOWNSTREAM, "reward": OTHER, "collect": {"response_length": 3}, "reward_data": PAIRS_DATA, "scorer": RULE,
            "adapters": {"policy": LORA, "value": OTHER_LORA, "reward": OTHER_LORA, "q": LORA},
            "value_head": {"bias": True}, "start": {"policy": "nowhere"},
        },
    ),
    "reward": (
        {"sft": FEW, "reward": FEW, "adapters": {"policy": LORA, "value": LORA, "reward": LORA}},
        {
            **DOWNSTREAM, "sft": OTHER, "collect": {"response_length": 3}, "sft_data": PAIRS_DATA, "scorer": RULE,
            "adapters": {"policy": OTHER_LORA, "value": OTHER_LORA, "reward": LORA, "q": LORA},
            "value_head": {"bias": True}, "start": {"policy": "nowhere"},
        },
    ),
    "collect": (
        {"collect": COLLECT, "scorer": RULE, "reward": None, "adapters": {"policy": LORA, "value": LORA}},
        {
            **DOWNSTREAM, "adapters": {"policy": LORA, "value": OTHER_LORA, "q": LORA},
            "value_head": {"bias": True},
        },
    ),
    "ppo": (
        {"scorer": RULE, "reward": None, "adapters": {"policy": LORA, "value": LORA}},
        {
            "about": "other", "collect": COLLECT, "q": {**OTHER, "response_length": 3},
            "adapters": {"policy": LORA, "value": LORA, "q": LORA},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("stage", CASES)
def test_what_a_stage_is_said_not_to_read_changes_no_bit_of_it(stage, tmp_path, checkpoint):
    """Two whole runs of the stage with everything else different: what it leaves is equal, and counts as the same."""
    sections, changes = CASES[stage]
    base = {"base": {"model": str(checkpoint), "dtype": "float32"}}
    one = chat_recipe(tmp_path, checkpoint, name="one", **base, **sections)
    other = chat_recipe(tmp_path, checkpoint, name="other", **base, **{**sections, **changes})
    results = [stages.run(recipe, stage)["after"] for recipe in (one, other)]
    assert results[0] == results[1]
    left = [tensors(recipe.stage_folder(stage)) for recipe in (one, other)]
    assert left[0].keys() == left[1].keys() and bool(left[0]) == (stage != "collect")
    assert all(torch.equal(left[0][name], left[1][name]) for name in left[0])
    if stage == "collect":
        files = [recipe.stage_folder(stage) / "responses.jsonl" for recipe in (one, other)]
        assert files[0].read_text() == files[1].read_text()
    (other.folder / "recipe.yaml").write_text((one.folder / "recipe.yaml").read_text())
    assert finished(other, stage) is not None


@pytest.mark.parametrize(
    "change, outdated",
    [
        ("about=other", set()),
        ("sft.logging_steps=3", set()),
        ("ppo.rollouts_shown=9", set()),
        ("base.pack_rows=false", set()),
        ("reward.report_to=none", set()),
        ("ppo.kl_coef=0.3", {"ppo"}),
        ("scorer.kind=function", {"ppo"}),
        ("adapters.value.r=2", {"ppo"}),
        ("start.value=reward", {"ppo"}),
        ("adapters.policy.r=2", {"sft", "ppo"}),
        ("sft.max_steps=3", {"sft", "ppo"}),
        ("reward.max_steps=3", {"reward", "ppo"}),
        ("adapters.reward.r=2", {"reward", "ppo"}),
        ("reward_head.num_labels=2", {"reward", "ppo"}),
        ("data.max_train_rows=3", {"sft", "ppo"}),  # the reward has data of its own
        ("reward_data.max_train_rows=3", {"reward", "ppo"}),
        ("base.dtype=float32", {"sft", "reward", "ppo"}),
        ("seed=1", {"sft", "reward", "ppo"}),
    ],
)
def test_a_stage_stands_unless_it_or_one_before_it_reads_what_changed(change, outdated, tmp_path, checkpoint):
    sections = {"sft": FEW, "reward_data": PAIRS_DATA, "base": {"model": str(checkpoint)}}
    finish(chat_recipe(tmp_path, checkpoint, **sections), "sft", "reward", "ppo")
    function = [f"scorer.function={RULE['function']}"] if change.startswith("scorer") else []
    other = chat_recipe(tmp_path, checkpoint, change, *function, **sections)
    assert {name for name in ("sft", "reward", "ppo") if finished(other, name) is None} == outdated
    assert (conflict(other) is None) == (not outdated)


def test_an_empty_section_is_no_key_beside_those_that_another_has(tmp_path, checkpoint):
    finish(chat_recipe(tmp_path, checkpoint, reward={}), "reward")
    for change, stands in {"logging_steps": True, "max_steps": False}.items():
        other = chat_recipe(tmp_path, checkpoint, f"reward.{change}=3", reward={})
        assert (finished(other, "reward") is not None) is stands


def test_a_base_that_sft_makes_is_read_by_all(tmp_path):
    doubling = recipes.load("doubling", runs_dir=tmp_path)
    finish(doubling, "sft", "reward", "ppo")
    other = recipes.load("doubling", "sft.max_steps=3", runs_dir=tmp_path)
    assert all(finished(other, name) is None for name in ("sft", "reward", "ppo"))
    assert finished(recipes.load("doubling", "reward.max_steps=3", runs_dir=tmp_path), "sft") is not None
    policy = recipes.load("doubling", "adapters.policy.r=2", runs_dir=tmp_path)  # which sft does not train here
    assert [finished(policy, name) is None for name in ("sft", "reward", "ppo")] == [False, False, True]


# ---------------------------------------------------------------------- what may be deleted


def test_other_settings_are_refused_with_the_keys_and_the_ways_on(tmp_path, checkpoint):
    recipe = chat_recipe(tmp_path, checkpoint, sft=FEW)
    finish(recipe, "sft", "reward", "ppo")
    other = chat_recipe(tmp_path, checkpoint, "ppo.kl_coef=0.3", "ppo.max_steps=9", sft=FEW)
    with pytest.raises(RecipeError) as caught:
        claim(other, "ppo")
    folder = recipe.folder
    assert str(caught.value) == (
        f"{folder} holds a run of another recipe or other settings: ppo.max_steps is 2 there and 9 here; ppo.kl_coef "
        'is not set there and 0.3 here. Name a new run (run="name"), which can begin with the sft and reward of chat '
        '(from_run="name"). Or give overwrite=True to delete its ppo, and keep its sft and reward.'
    )
    with pytest.raises(RecipeError, match=r"The run goes on with its own recipe, .*recipe.yaml, and resume=True.$"):
        claim(other, "ppo", resume=True)
    assert there(recipe) == {"sft", "reward", "ppo"}
    assert (folder / "recipe.yaml").read_text() == recipe.to_yaml()
    inside = chat_recipe(tmp_path, checkpoint, f"start.policy={folder}/ppo/policy", sft=FEW)
    with pytest.raises(RecipeError, match=r"start.policy is not set there .* Name a new run \(.*\)\.$"):
        claim(inside, "ppo")  # which overwriting would delete
    with pytest.raises(RecipeError, match=r"start.policy: .*ppo/policy is in a stage that would be replaced. Name a"):
        claim(inside, "ppo", overwrite=True)
    assert there(recipe) == {"sft", "reward", "ppo"}


def test_what_was_measured_of_a_policy_stays_where_q_values_are_trained_beside_it(tmp_path, checkpoint):
    adapters = {"policy": LORA, "value": LORA, "q": LORA}
    stages = {"collect": COLLECT, "q": {**FEW, "response_length": 3}, "reward": None}
    recipe = chat_recipe(tmp_path, checkpoint, scorer=RULE, adapters=adapters, **stages)
    finish(recipe, "ppo")
    measured = recipe.folder / "eval"
    begin(measured)
    finish(recipe, "collect", "q")
    finish_stage(recipe.stage_folder("q"), {"stage": "q"})
    assert measured.exists()
    claim(recipe, "ppo", overwrite=True)
    assert not measured.exists()
    # The run responds by its Q-values now, until it has a policy again.
    begin(measured)
    claim(recipe, "ppo", overwrite=True)
    assert measured.exists()
    finish_stage(recipe.stage_folder("ppo"), {"stage": "ppo"})
    assert not measured.exists()


def test_overwriting_deletes_what_is_outdated_and_nothing_else(tmp_path, checkpoint):
    recipe = chat_recipe(tmp_path, checkpoint, sft=FEW)
    finish(recipe, "sft", "reward", "ppo")
    begin(recipe.folder / "eval")
    (recipe.folder / "mine").mkdir()
    claim(chat_recipe(tmp_path, checkpoint, "ppo.kl_coef=0.3", sft=FEW), "ppo", overwrite=True)
    assert there(recipe) == {"sft", "reward"}
    assert not (recipe.folder / "eval").exists() and (recipe.folder / "mine").is_dir()
    # Another reward makes what PPO learnt by the old one outdated, whichever stage is asked for.
    last = chat_recipe(tmp_path, checkpoint, "ppo.kl_coef=0.3", sft=FEW)
    finish(last, "ppo")
    other = chat_recipe(tmp_path, checkpoint, "reward.max_steps=9", "ppo.kl_coef=0.3", sft=FEW)
    with pytest.raises(RecipeError, match="to delete its reward and ppo, and keep its sft"):
        claim(other, "reward")
    claim(other, "reward", overwrite=True)
    assert there(recipe) == {"sft"}


def test_a_stage_that_left_nothing_of_worth_is_tried_again_with_other_settings(tmp_path, checkpoint):
    """Out of memory before the first checkpoint, a smaller batch, and on; not even with --resume by the old figures."""
    recipe = chat_recipe(tmp_path, checkpoint)
    finish(recipe, "reward")
    for resume in (False, True):
        claim(recipe, "ppo")
        (recipe.stage_folder("ppo") / "before.json").write_text("{}")
        other = chat_recipe(tmp_path, checkpoint, "ppo.per_device_train_batch_size=1")
        claim(other, "ppo", resume=resume)
        assert there(recipe) == {"reward"} and [path.name for path in other.stage_folder("ppo").iterdir()] == [
            "manifest.json"
        ]


@pytest.mark.parametrize(
    "changes, allowed",
    [
        (["ppo.max_steps=9", "ppo.logging_steps=5", "reward.logging_steps=5"], True),
        (["ppo.gradient_checkpointing=true", "ppo.local_rollout_forward_batch_size=1", "ppo.save_steps=7"], True),
        (["ppo.per_device_train_batch_size=1", "ppo.gradient_accumulation_steps=4"], True),
        (["ppo.use_cpu=true"], True),  # which a machine without a card has anyway
        (["ppo.per_device_train_batch_size=1"], False),
        (["ppo.learning_rate=1e-3"], False),
        (["ppo.max_steps=9", "ppo.kl_coef=0.3"], False),
        (["ppo.max_steps=1"], False),  # what is done cannot be of a shorter run
        (["reward.save_steps=7"], False),  # which is not what goes on
    ],
)
def test_a_stage_goes_on_with_settings_that_change_nothing_of_its_past(changes, allowed, tmp_path, checkpoint):
    recipe = chat_recipe(tmp_path, checkpoint)
    finish(recipe, "reward")
    claim(recipe, "ppo")
    saved = recipe.stage_folder("ppo") / "checkpoint-2"
    saved.mkdir()
    (saved / "trainer_state.json").touch()
    other = chat_recipe(tmp_path, checkpoint, *changes)
    with pytest.raises(RecipeError, match="other settings"):
        claim(other, "ppo")
    if allowed:
        claim(other, "ppo", resume=True)
        assert (recipe.folder / "recipe.yaml").read_text() == other.to_yaml()
    else:
        with pytest.raises(RecipeError, match="other settings"):
            claim(other, "ppo", resume=True)
    assert saved.is_dir() and there(recipe) >= ({"reward"} if changes[0] != "reward.save_steps=7" else set())


@pytest.mark.parametrize("dropped", [False, True])
def test_rows_of_a_pass_may_change_where_its_steps_stay(dropped, tmp_path, checkpoint):
    """Of 13 rows 4 · 2 are one whole step and a part, 8 · 1 are one where last rows are dropped."""
    reward = {"max_steps": -1, "num_train_epochs": 3, "dataloader_drop_last": dropped}
    rows = [{"per_device_train_batch_size": n, "gradient_accumulation_steps": 8 // n} for n in (4, 8)]
    begun, goes_on = (chat_recipe(tmp_path, checkpoint, reward={**reward, **of_step}) for of_step in rows)
    claim(begun, "reward")
    allowed = may_change(goes_on, "reward", begun.folder)
    assert ("reward.per_device_train_batch_size" in allowed) is not dropped


def test_a_finished_stage_without_checkpoints_is_not_begun_anew_by_resuming(tmp_path, checkpoint):
    recipe = chat_recipe(tmp_path, checkpoint)
    finish(recipe, "reward", "ppo")
    for change in ("ppo.logging_steps=7", "ppo.max_steps=9"):
        with pytest.raises(RecipeError, match="a ppo stage and no checkpoint of it to go on from. Name a new"):
            claim(chat_recipe(tmp_path, checkpoint, change), "ppo", resume=True)
    assert there(recipe) == {"reward", "ppo"}


def test_weights_that_a_notebook_saved_are_not_deleted_unasked(tmp_path, checkpoint):
    recipe = chat_recipe(tmp_path, checkpoint)
    claim(recipe, "ppo")
    saved = recipe.stage_folder("ppo") / "policy" / "adapter_model.safetensors"
    saved.parent.mkdir()
    saved.write_bytes(b"x")
    with pytest.raises(RecipeError, match="holds weights that were saved without a checkpoint to go on from"):
        claim(recipe, "ppo")
    with pytest.raises(RecipeError, match="no checkpoint of it to go on from"):
        claim(recipe, "ppo", resume=True)
    with pytest.raises(RecipeError, match="other settings"):
        claim(chat_recipe(tmp_path, checkpoint, "ppo.kl_coef=0.3"), "ppo")
    assert saved.is_file()
    claim(recipe, "ppo", overwrite=True)
    assert not saved.exists()


def test_a_collection_without_a_response_is_nothing_to_lose(tmp_path, checkpoint):
    recipe = chat_recipe(tmp_path, checkpoint, collect=COLLECT)
    claim(recipe, "collect")
    partial = recipe.stage_folder("collect") / "responses.jsonl.partial"
    partial.touch()
    claim(chat_recipe(tmp_path, checkpoint, "collect.batch_size=2", collect=COLLECT), "collect")
    for name in ("responses.jsonl.partial", "responses.jsonl"):  # a kill came before the result
        file = partial.with_name(name)
        file.write_text("{}\n")
        with pytest.raises(RecipeError, match="responses of a collect stage that was not finished"):
            claim(chat_recipe(tmp_path, checkpoint, "collect.batch_size=2", collect=COLLECT), "collect")
        claim(chat_recipe(tmp_path, checkpoint, "collect.batch_size=2", collect=COLLECT), "collect", overwrite=True)
        assert not file.exists()  # what is collected next would go on with it


def test_stages_whose_recipe_is_lost_are_not_deleted_unasked(tmp_path, checkpoint):
    recipe = chat_recipe(tmp_path, checkpoint)
    finish(recipe, "reward")
    for damage in ("{", "- 1", None):
        (recipe.folder / "recipe.yaml").unlink(missing_ok=True)
        if damage is not None:
            (recipe.folder / "recipe.yaml").write_text(damage)
        with pytest.raises(RecipeError, match=r"its recipe.yaml is missing or cannot be read.* delete its reward\."):
            claim(recipe, "ppo")
    assert there(recipe) == {"reward"}


def test_a_recipe_of_ones_own_in_the_run_folder_is_not_written_over(tmp_path, checkpoint):
    recipe = chat_recipe(tmp_path, checkpoint)
    recipe.folder.mkdir(parents=True)
    own = recipe.folder / "recipe.yaml"
    own.write_text(f"# mine\n{recipe.to_yaml()}")
    for way in ({}, {"overwrite": True}):
        with pytest.raises(RecipeError, match="recipe.yaml is not known to be the toolkit's: no stage beside it has"):
            claim(recipe, "ppo", **way)
    assert own.read_text() == f"# mine\n{recipe.to_yaml()}" and [path.name for path in recipe.folder.iterdir()] == [
        own.name
    ]


# ---------------------------------------------------------------------- stages of another run


def test_a_run_takes_what_agrees_from_another_and_says_what_does_not(tmp_path, checkpoint):
    first = chat_recipe(tmp_path, checkpoint, sft=FEW)
    finish(first, "sft", "reward")
    (first.stage_folder("sft") / "checkpoint-2").mkdir()
    (first.stage_folder("sft") / "policy").mkdir()
    config = {"base_model_name_or_path": first.base_path}
    (first.stage_folder("sft") / "policy" / "adapter_config.json").write_text(json.dumps(config))
    second = chat_recipe(tmp_path, checkpoint, "reward.max_steps=9", name="second", sft=FEW)
    assert take_over(second, "chat", ["sft", "reward"]) == [
        f"sft is taken from {first.stage_folder('sft')}.",
        f"reward is run anew: reward.max_steps is 2 there and 9 here ({first.folder} and {second.folder}).",
    ]
    taken = json.loads((second.stage_folder("sft") / "result.json").read_text())
    assert taken == {"stage": "sft", "taken_from": str(first.stage_folder("sft"))}
    assert sorted(path.name for path in second.stage_folder("sft").iterdir()) == [
        "manifest.json", "policy", "result.json",
    ]  # fmt: skip
    assert not second.stage_folder("reward").exists() and finished(second, "sft") == taken
    assert there(first) == {"sft", "reward"} and not (second.folder / ".taken").exists()
    assert take_over(second, "chat", ["sft"]) == []  # it has it by now
    (again,) = take_over(second, "chat", ["sft", "reward"])  # as after a kill, with the same command
    assert again.startswith("reward is run anew")
    own = chat_recipe(tmp_path, checkpoint, "reward.max_steps=9", name="own", sft=FEW)
    finish(own, "sft")
    with pytest.raises(RecipeError, match='nothing can be taken from the run "chat": reward is run anew'):
        take_over(own, "chat", ["sft", "reward"])
    copied = second.stage_folder("sft") / "policy" / "adapter_config.json"
    assert set(sealed_files(second.stage_folder("sft"))) == {"policy/adapter_config.json"}
    whole = copied.read_text()
    copied.write_text(f"{whole[:-1]} ")
    with pytest.raises(ToolkitError, match=r"adapter_config.json is damaged: its SHA-256 .* run the sft stage again"):
        check_outputs(second.folder, ["sft"])
    copied.write_text(whole)
    third = chat_recipe(tmp_path, checkpoint, "ppo.kl_coef=0.3", name="third", sft=FEW)
    (first.stage_folder("reward") / "result.json").unlink()
    assert take_over(third, "chat", ["sft", "reward"])[1] == f"reward is run anew: {first.folder} has not finished it."


def test_a_stage_that_lies_aside_in_the_other_run_is_no_reason_to_run_it_anew(tmp_path, checkpoint):
    first = chat_recipe(tmp_path, checkpoint, sft=FEW)
    finish(first, "sft", "reward")
    shutil.copy(first.values["data"]["train"], tmp_path / "other.jsonl")
    claim(chat_recipe(tmp_path, checkpoint, f"data.train={tmp_path}/other.jsonl", sft=FEW), "sft", overwrite=True)
    second = chat_recipe(tmp_path, checkpoint, name="second", sft=FEW)
    with pytest.raises(ToolkitError, match="chat keeps its earlier sft and reward aside"):
        take_over(second, "chat", ["sft"])
    with pytest.raises(RecipeError, match="nothing can be taken"):  # nor does reward come back by itself
        take_over(second, "chat", ["q"])
    moving = {"into": None, "moves": [[".taken/policy/role.json", "q/policy/role.json"]]}
    (first.folder / ".moves.json").write_text(json.dumps(moving))
    with pytest.raises(ToolkitError, match="files were being moved there when a kill came"):
        take_over(second, "chat", ["q"])


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are text there")
def test_a_stage_is_taken_in_a_folder_whose_name_is_not_utf_8(tmp_path, checkpoint):
    first = replace(chat_recipe(tmp_path, checkpoint, sft=FEW), runs_dir=Path(f"{tmp_path}/r\udcffns"))
    finish(first, "sft")
    second = replace(first, run="second")
    for sentences in ([f"sft is taken from {first.stage_folder('sft')}."], []):
        assert take_over(second, "chat", ["sft"]) == sentences
    written = (second.stage_folder("sft") / "result.json").read_bytes()
    assert json.loads(written)["taken_from"] == str(first.stage_folder("sft"))


def test_a_copy_that_does_not_fit_leaves_its_room(tmp_path, checkpoint, monkeypatch):
    first = chat_recipe(tmp_path, checkpoint, sft=FEW)
    finish(first, "sft")
    second = chat_recipe(tmp_path, checkpoint, name="second", sft=FEW)
    begun = second.folder / ".taken"

    def full(source, target, **how):
        begun.mkdir(parents=True)
        (begun / "half").write_text("of it")
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch, pytest.raises(ToolkitError, match="Make room, then repeat"):
        patch.setattr("toolkit.runs.take_over.copy_contents", full)
        take_over(second, "chat", ["sft"])
    assert not begun.exists()
    begun.mkdir()  # as a kill leaves it
    settle(second, "sft")
    assert not begun.exists()


def test_a_stage_that_a_kill_has_left_aside_is_not_trained_anew_in_silence(tmp_path, checkpoint):
    sections = {"sft": FEW, "reward_data": PAIRS_DATA}
    first = chat_recipe(tmp_path, checkpoint, **sections)
    finish(first, "sft", "reward")
    other = chat_recipe(tmp_path, checkpoint, "reward_data.train=other.jsonl", **sections)
    claim(other, "reward", overwrite=True)  # and a kill
    second = chat_recipe(tmp_path, checkpoint, name="second", **sections)
    moving = first.folder / ".moves.json"
    moving.write_text('{"into": null, "moves": []}')
    with pytest.raises(ToolkitError, match="files were being moved there when a kill came"):
        take_over(second, "chat", ["sft"])  # which may be half of one
    moving.unlink()
    assert take_over(second, "chat", ["sft"]) == [f"sft is taken from {first.stage_folder('sft')}."]
    with pytest.raises(ToolkitError, match="chat keeps its earlier reward aside"):
        take_over(second, "chat", ["sft", "reward"])


def test_what_stands_on_a_stage_that_is_not_taken_is_not_taken(tmp_path):
    """A reward on a base that the other run no longer has, and that this one will train anew."""
    first = recipes.load("doubling", runs_dir=tmp_path)
    finish(first, "sft", "reward")
    (first.stage_folder("sft") / "result.json").unlink()
    second = recipes.load("doubling", run="second", runs_dir=tmp_path)
    with pytest.raises(RecipeError, match="reward is run anew: sft, which it needs, is not finished here"):
        take_over(second, "doubling", ["sft", "reward"])
    assert there(second) == set()


def test_a_copied_adapter_names_the_copy_of_its_base(tmp_path):
    first = recipes.load("doubling", runs_dir=tmp_path)
    finish(first, "sft", "reward")
    folder = first.stage_folder("reward") / "reward"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": first.base_path, "r": 4}))
    second = recipes.load("doubling", "ppo.kl_coef=0.3", run="second", runs_dir=tmp_path)
    take_over(second, "doubling", ["sft", "reward"])
    copied = json.loads((second.stage_folder("reward") / "reward" / "adapter_config.json").read_text())
    assert copied == {"base_model_name_or_path": str(tmp_path / "second" / "sft" / "model"), "r": 4}


def test_a_stage_whose_data_have_changed_is_told_of_and_not_taken(tmp_path, checkpoint, monkeypatch, capsys):
    pairs = Path(shutil.copy(PAIRS, tmp_path / "mine.jsonl"))

    def made(*overrides, **named):
        return chat_recipe(tmp_path, checkpoint, *overrides, reward_data={**PAIRS_DATA, "train": str(pairs)}, **named)

    def said_by(start):
        start()
        return " ".join(capsys.readouterr().out.split())

    def begins(*_, **__):
        raise RecipeError("it would begin here")

    first, second, third = made(), made("ppo.kl_coef=0.3", name="second"), made("ppo.kl_coef=0.4", name="third")
    finish(first, "reward", "ppo")
    result = json.dumps({"stage": "reward", **rows_read(first, "reward"), **sources_read(first, "reward")})
    (first.stage_folder("reward") / "result.json").write_text(result)
    assert take_over(second, "chat", ["reward"]) == [f"reward is taken from {first.stage_folder('reward')}."]
    assert "changed" not in said_by(lambda: stages.run(first, "ppo"))
    pairs.write_text("".join(pairs.read_text().splitlines(keepends=True)[1:]))
    told = f"{pairs} has changed since reward of this run was run. Repeat reward with "
    for stage in ("reward", "ppo"):
        said = said_by(lambda stage=stage: stages.run(first, stage))
        assert f"{stage} of this run is finished" in said and said.count("has changed") == 1
        assert said.endswith(f"{told}--overwrite (make: OVERWRITE=1).")
    assert said_by(lambda: first.run_stage("reward")).endswith(f"{told}overwrite=True.")
    assert [note.text() for note in recipes.check(second).notes] == [f"{told}overwrite=True."]
    with pytest.raises(
        RecipeError, match=re.escape(f"reward is run anew: {pairs} has changed since {first.folder} ran it.")
    ):
        take_over(third, "chat", ["reward"])
    with monkeypatch.context() as patch, pytest.raises(RecipeError, match="it would begin here"):
        patch.setattr(stages, "claim", begins)
        stages.run(second, "ppo")
    assert told in " ".join(capsys.readouterr().out.split())
    pairs.unlink()  # of which nothing is known then
    assert "changed" not in said_by(lambda: stages.run(first, "reward"))


def test_what_cannot_be_taken_is_said(tmp_path, checkpoint):
    first = chat_recipe(tmp_path, checkpoint)
    second = chat_recipe(tmp_path, checkpoint, "reward.max_steps=9", name="second")
    claim(replace(first, runs_dir=tmp_path / "others"), "reward")
    for source, stage_names, message in (
        ("nowhere", ["reward"], f'the run "nowhere" to take from is not in {tmp_path}'),
        ("second", ["reward"], 'the run "second" to take from is this run itself'),
        ("runs/chat", ["reward"], '^"runs/chat" is a path. Name the run: from_run="name", here "chat".$'),
        (
            str(tmp_path / "others" / "chat"),
            ["reward"],
            'is a path, and .* by its name.* Name the run, here "chat", with its folder: from_run="name", and '
            f'runs_dir="folder", here {re.escape(str(tmp_path / "others"))}. The new run is written there, too.$',
        ),
        ("chat", [], 'no stage comes before this one. Leave from_run="name" out'),
        ("chat", ["reward"], "nothing can be taken .*: reward is run anew: reward.max_steps is 2 there and 9 here"),
    ):
        finish(first, "reward") if source == "chat" and stage_names else None
        claim(first, "ppo") if not first.folder.exists() else None
        with pytest.raises(RecipeError, match=message):
            take_over(second, source, stage_names)
        assert not second.folder.exists()


def test_a_stage_that_this_run_has_begun_is_not_replaced(tmp_path, checkpoint):
    finish(chat_recipe(tmp_path, checkpoint), "reward")
    second = chat_recipe(tmp_path, checkpoint, name="second")
    claim(second, "reward")
    with whole_folder(second.stage_folder("reward") / "checkpoint-1") as new:
        (new / "trainer_state.json").touch()
    with pytest.raises(RecipeError, match="reward stage that was not finished, saved up to step 1"):
        take_over(second, "chat", ["reward"])
    assert take_over(second, "chat", ["reward"], resume=True) == ["reward goes on here."]
    assert (second.stage_folder("reward") / "checkpoint-1").is_dir()
    take_over(second, "chat", ["reward"], overwrite=True)
    assert there(second) == {"reward"} and not (second.stage_folder("reward") / "checkpoint-1").exists()


def test_a_stage_is_finished_once_its_weights_are_listed(tmp_path, checkpoint, monkeypatch):
    recipe = chat_recipe(tmp_path, checkpoint)
    claim(recipe, "reward")

    def full(folder):
        raise ToolkitError("no room for the manifest")

    monkeypatch.setattr(owned, "seal_weights", full)
    with pytest.raises(ToolkitError, match="no room for the manifest"):
        finish_stage(recipe.stage_folder("reward"), {"stage": "reward"})
    assert there(recipe) == set()


def test_files_that_need_not_come_back_are_not_read(tmp_path, checkpoint, monkeypatch):
    """Of a stage that has not finished, whose rollouts may be larger than the memory."""
    recipe = chat_recipe(tmp_path, checkpoint)
    folder = recipe.stage_folder("ppo")
    folder.mkdir(parents=True)
    (folder / "rollouts.jsonl").write_text("{}\n")
    plain = Path.read_text

    def read(path, *arguments, **named):
        assert path.name != "rollouts.jsonl"
        return plain(path, *arguments, **named)

    monkeypatch.setattr(Path, "read_text", read)
    with result_comes_back(recipe, "ppo"):
        pass


def test_a_copy_that_fails_leaves_nothing_that_looks_finished(tmp_path, checkpoint, monkeypatch):
    from toolkit.runs import take_over as module

    finish(chat_recipe(tmp_path, checkpoint), "reward")
    second = chat_recipe(tmp_path, checkpoint, name="second")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "copy_contents", full)
    with pytest.raises(ToolkitError, match=r"cannot be written \(No space left on device\). Make room"):
        take_over(second, "chat", ["reward"])
    assert finished(second, "reward") is None


def test_what_may_change_is_what_the_docs_say():
    text = (REPOSITORY / "docs" / "resuming.md").read_text(encoding="utf-8")
    told = text.partition("## With other settings")[2].partition("So a run that ran out")[0]
    of_trackio = {name for name in _SHOWN_BY if name.startswith("trackio")} | {"project", "hub_private_repo"}
    known = {*_SHOWN_BY, *_MAY_CHANGE, *_ROWS_OF_A_STEP, "dataloader_drop_last"}
    assert {*re.findall(r"`(\w+)`", told)} == known - of_trackio


def test_a_reward_model_and_rated_rows_are_read_by_their_stages(tmp_path, checkpoint):
    own = {
        "reward_model": {"model": "m", "dtype": "float32"},
        "scorer": {"kind": "model"},
        "adapters": {"policy": LORA, "value": LORA},
    }
    finish(chat_recipe(tmp_path, checkpoint, **own), "reward", "ppo")
    other = chat_recipe(tmp_path, checkpoint, "reward_model.model=n", **own)
    assert [finished(other, name) for name in ("reward", "ppo")] == [None, None]
    rated = {
        "reward": None,
        "ppo": None,
        "q": FEW,
        "q_data": {"task": "rated", "train": "a.jsonl"},
        "adapters": {"q": LORA},
        "scorer": RULE,
    }
    finish(chat_recipe(tmp_path, checkpoint, name="q", **rated), "q")
    assert finished(chat_recipe(tmp_path, checkpoint, "q_data.train=b.jsonl", name="q", **rated), "q") is None
