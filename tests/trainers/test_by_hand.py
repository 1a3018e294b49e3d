"""A trainer that a notebook makes by hand: what would end a run hours later is said at once, or does not happen."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import PartialState
from datasets import Dataset
from rich.console import Console
from transformers import TrainerCallback

from tests.tiny_models import shared_base, tiny_model
from tests.trainers.helpers import PROMPTS, config, count_reward, dataset, trainer
from toolkit.data import doubling
from toolkit.errors import CheckpointError, ConfigError, DataError, RewardError, ToolkitError
from toolkit.models import save_role
from toolkit.reports import Progress
from toolkit.trainers import common
from toolkit.trainers.ppo import PPOTrainer

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}


def made(folder, train=None, held_out=None, base=None, **changes):
    held_out = dataset(1) if held_out is None else held_out
    args = (doubling.tokenizer(), base or shared_base(), count_reward(5), dataset() if train is None else train)
    return PPOTrainer(config(folder, **changes), *args, held_out, callbacks=[])


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ([*PROMPTS, []], "a prompt has no token"),
        ([*PROMPTS, [1, -1]], "a prompt has the token id -1, and the base has embeddings for 0 to 41"),
        ([*PROMPTS, [1, 42]], "of id 42, and the base has embeddings for 0 to 41"),
    ],
)
@pytest.mark.parametrize("held_out", [False, True])
def test_prompts_that_cannot_be_read(rows, wrong, held_out, tmp_path):
    with pytest.raises(DataError, match=wrong):
        made(tmp_path, **{"held_out" if held_out else "train": Dataset.from_dict({"input_ids": rows})})


def test_no_held_out_prompts(tmp_path):
    none = dataset(1).select([])
    made(tmp_path, held_out=none)
    for asked in (EVALUATED, {"eval_on_start": True}):
        with pytest.raises(DataError, match="there are no held-out prompts to evaluate"):
            made(tmp_path, held_out=none, **asked)


@pytest.mark.parametrize("value", ["separate", "shared"])
def test_another_value_role_than_the_settings_say(value, tmp_path):
    other = {"separate": "shared", "shared": "separate"}[value]
    with pytest.raises(ConfigError, match=rf"^value: is {other}, and the value role has .*Set {value}\."):
        made(tmp_path, base=shared_base(value=value), value=other)


def test_the_loop_of_trl_is_not_this_one(tmp_path):
    args = config(tmp_path)
    args.loop = "trl"
    with pytest.raises(ConfigError, match=r"^loop: is trl, and this is the toolkit's own loop"):
        PPOTrainer(args, doubling.tokenizer(), shared_base(), count_reward(5), dataset(), callbacks=[])


@pytest.mark.parametrize(("name", "known"), [(None, False), ("scroe", False), ("eval_score", True), ("mine", None)])
def test_a_best_checkpoint_by_what_is_not_measured(name, known, tmp_path):
    """transformers' own, where none is named, is the loss, which PPO does not measure."""
    saved = {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": name}
    ours = made(tmp_path, **EVALUATED, **saved, max_steps=1)
    if known is None:
        ours.metrics = lambda rollout: {"mine": 1.0}
    if known is not False:
        ours.train()
        assert ours.state.best_metric is not None
        return
    with pytest.raises(ConfigError, match=f"'{name or 'loss'}' is nothing that is measured here"):
        ours.train()
    assert ours.state.global_step == 0


def test_metrics_of_other_types_of_numbers(tmp_path):
    ours = made(tmp_path, **EVALUATED, save_strategy="steps", save_steps=1)
    ours.metrics = lambda rollout: {"a": torch.tensor(rollout.lengths).float().mean(), "b": np.float32(0.5), "c": 3}
    ours.train()
    (first, *_) = [row for row in ours.state.log_history if "eval_a" in row]
    assert (type(first["eval_a"]), first["eval_b"], first["eval_c"]) == (float, 0.5, 3.0)
    json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())


@pytest.mark.parametrize(
    ("metrics", "wrong"),
    [
        (lambda rollout: {"a": "many"}, "^metrics gave 'many' as 'a', which is no number"),
        (lambda rollout: rollout.columns["nothing"], "^metrics raised KeyError: 'nothing'"),
        (lambda rollout: None, "^metrics raised TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_metrics_that_fail_leave_the_run_saved(metrics, wrong, tmp_path):
    ours = made(tmp_path, **EVALUATED)
    ours.metrics = metrics
    with pytest.raises(RewardError, match=f"{wrong}.*All up to update 1 is saved"):
        ours.train()


def test_data_sets_that_are_set_to_give_tensors(tmp_path):
    plain, tensors = trainer(tmp_path / "plain", **EVALUATED), None
    tensors = made(tmp_path / "tensors", dataset().with_format("torch"), dataset(1).with_format("torch"),
                   plain.roles, **EVALUATED)  # fmt: skip
    assert tensors.train_dataset[0]["input_ids"] == PROMPTS[0]
    found = [one.evaluate_rollout(rows) for one, rows in ((plain, dataset(2)), (tensors, tensors.eval_dataset))]
    assert found[1].rollout.prompt_ids == PROMPTS and len(found[0].rollout) == 8
    repeated = tensors.evaluate_rollout(dataset(2).with_format("torch"))
    assert repeated.rollout.prompt_ids == found[0].rollout.prompt_ids
    tensors.train()


def test_checkpointing_that_an_earlier_trainer_switched_on(tmp_path):
    first = trainer(tmp_path, gradient_checkpointing=True)
    assert first.roles.causal_lm.is_gradient_checkpointing
    second = trainer(tmp_path, first.roles)
    assert not second.roles.causal_lm.is_gradient_checkpointing


def test_a_trainer_is_where_its_settings_say_whatever_an_earlier_one_had(tmp_path, monkeypatch):
    args = config(tmp_path)
    monkeypatch.setitem(PartialState._shared_state, "device", torch.device("meta"))
    ours = PPOTrainer(args, doubling.tokenizer(), shared_base(), count_reward(5), dataset(), callbacks=[])
    assert ours.accelerator.device.type == "cpu"


def test_settings_that_are_made_beside_a_trainer(tmp_path):
    """transformers clears what accelerate knows of the trainer that there is."""
    ours = made(tmp_path)
    batch = next(iter(ours.batches()))
    config(tmp_path / "another")
    responses = ours.generate(batch)
    ours.step(batch, responses, ours.score(batch, responses))
    config(tmp_path / "another")
    ours.train()
    assert ours.state.global_step == 2


def test_tensorboard_has_its_folder_before_training(tmp_path, monkeypatch):
    """Told by an evaluation before, it would write to the working directory, and keep to it."""

    class Told(TrainerCallback):
        logging_dir = None

    monkeypatch.setattr(common, "TensorBoardCallback", Told)
    ours = PPOTrainer(
        config(tmp_path), doubling.tokenizer(), shared_base(), count_reward(5), dataset(), callbacks=[Told()]
    )
    (told,) = (one for one in ours.callback_handler.callbacks if isinstance(one, Told))
    assert Path(told.logging_dir).is_relative_to(tmp_path)


def test_an_evaluation_by_hand_shows_that_something_goes_on(tmp_path):
    ours, progress = made(tmp_path), Progress("mine", Console(file=io.StringIO()))
    ours.add_callback(progress)
    ours.evaluate()
    assert "mine: evaluation …" in progress.console.file.getvalue() and progress._open is None
    with progress:
        ours.evaluate()
        assert progress._open is not None  # whoever has entered it leaves it


def test_a_checkpoint_by_hand_after_the_best_came_back(tmp_path):
    ours = made(tmp_path, **EVALUATED, save_strategy="steps", save_steps=1, load_best_model_at_end=True,
                metric_for_best_model="score", max_steps=3)  # fmt: skip
    ours.metrics = lambda rollout: {"mine": -ours.state.global_step}
    ours.args.metric_for_best_model, ours.args.greater_is_better = "mine", True
    ours.train()
    before = (tmp_path / "checkpoint-3" / "policy" / "adapter_model.safetensors").read_bytes()
    with pytest.raises(
        CheckpointError, match="best checkpoint's weights, not those of step 3.* checkpoint-3 has those of step 3"
    ):
        ours.save_checkpoint()
    assert (tmp_path / "checkpoint-3" / "policy" / "adapter_model.safetensors").read_bytes() == before


def test_what_is_no_batch(tmp_path):
    ours = made(tmp_path)
    for given in (["hello"], {"input_ids": torch.ones(1, 2, dtype=torch.long)}):
        with pytest.raises(DataError, match="a batch of a collator is needed, and this is a (list|dict) without"):
            ours.generate(given)


@pytest.mark.parametrize(
    ("callbacks", "silent", "shown"),
    [(None, False, {"Progress"}), ([TrainerCallback()], False, set()), (None, True, {"PrinterCallback"})],
)
def test_its_progress_is_ours_unless_callbacks_say_otherwise(callbacks, silent, shown, tmp_path, capsys):
    args = config(tmp_path, disable_tqdm=silent, max_steps=1, run_name="mine")
    ours = PPOTrainer(args, doubling.tokenizer(), shared_base(), count_reward(5), dataset(), callbacks=callbacks)
    there = {type(one).__name__ for one in ours.callback_handler.callbacks}
    assert there & {"Progress", "ProgressCallback", "PrinterCallback"} == shown
    ours.train()
    said = capsys.readouterr()
    assert ("mine 1/1" in said.err, "samples_per_second" in said.out) == ("Progress" in shown, silent)


def test_the_arguments_of_trls_trainer(tmp_path):
    with pytest.raises(ToolkitError, match=r"^model and data_collator: arguments of TRL's own .* Give roles, a Shared"):
        PPOTrainer(config(tmp_path), doubling.tokenizer(), model=None, train_dataset=dataset(), data_collator=None)


def test_a_script_of_ones_own_as_the_page_has_it(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^```python\n(from peft .*?)^```", page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    save_role(shared_base(), "reward", tmp_path / "my-reward", pad_token_id=0, base_name="x")
    made = {"model": tiny_model("llama"), "tokenizer": doubling.tokenizer(), "path": "models/x"}
    exec(lines, made | {"args": config("out"), "train_dataset": dataset(), "eval_dataset": dataset(1)})
    assert {one.name for one in Path("my-policy").iterdir() if one.is_dir()} == {"policy", "value"}
    saved = json.loads(Path("my-policy/policy/adapter_config.json").read_text(encoding="utf-8"))
    assert saved["base_model_name_or_path"] == "models/x" and saved["r"] == 16


def test_predictions_are_none_of_its(tmp_path):
    with pytest.raises(ToolkitError, match="Take evaluate_rollout"):
        made(tmp_path).predict(dataset(1))
