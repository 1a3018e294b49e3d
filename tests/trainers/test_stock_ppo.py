from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback, set_seed

from tests.tiny_models import shared_base
from tests.trainers.helpers import config, count_reward, dataset, trainer
from toolkit.data import doubling
from toolkit.errors import ConfigError, ToolkitError
from toolkit.trainers.stock_ppo import _InOurNames, stock_ppo_trainer, stock_rollouts

TRLPPOTrainer = pytest.importorskip("trl.experimental.ppo", reason="TRL 1.12 is the last with PPO").PPOTrainer


class Sees(TrainerCallback):
    def __init__(self, look):
        self.on_step_end = lambda *_, **__: look()


def stock(folder, base=None, tokenizer=None, **changes):
    args = config(folder, loop="trl", **changes)
    return stock_ppo_trainer(args, tokenizer or doubling.tokenizer(), base or shared_base(), dataset(), callbacks=[])


def test_the_unmodified_trainer_trains_policy_and_value_on_the_shared_base(tmp_path):
    base = shared_base()
    before = {n: p.detach().clone() for n, p in base.named_parameters()}
    trainer = stock(tmp_path, base, max_steps=2, num_ppo_epochs=2)
    assert isinstance(trainer, TRLPPOTrainer)
    assert trainer.stop_token_id == trainer.processing_class.eos_token_id == 2  # TRL's default never stops
    trainer.train()
    assert trainer.state.global_step == 2
    changed = {n for n, p in base.named_parameters() if not torch.equal(p, before[n])}
    assert (
        any(".policy." in n for n in changed)
        and any(".value." in n for n in changed)
        and "heads.value.weight" in changed
    )
    assert all(".policy." in n or ".value." in n or n == "heads.value.weight" for n in changed)
    with pytest.raises(ToolkitError, match=r"push_to_hub would .* what it makes there: policy or value\."):
        trainer.push_to_hub()


def test_measuring_takes_nothing_from_trls_loop(tmp_path):
    """A trainer of ours made beside it would leave its own accumulation and precision in accelerate's shared state."""
    trainer = stock(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    before = trainer.accelerator.gradient_accumulation_steps, trainer.accelerator.mixed_precision
    measured = stock_rollouts(trainer).evaluator(count_reward(7))(dataset(1))
    assert len(measured.rollout) == 4 and before[0] == 2
    assert (trainer.accelerator.gradient_accumulation_steps, trainer.accelerator.mixed_precision) == before


def test_trainers_that_are_made_since_change_nothing_of_its_training(tmp_path):
    """accelerate's accumulation is that of the last one made, and of a shared base what the last one trains."""
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1}
    bases = shared_base(), shared_base()
    for base in bases:
        made = stock(tmp_path, base, **changes)
        if base is bases[1]:
            trainer(tmp_path / "beside", max_steps=1)
            base.train_roles("reward")
        set_seed(0)
        made.train()
    for one, other in zip(*(base.named_parameters() for base in bases), strict=True):
        assert torch.equal(one[1], other[1]), one[0]


def test_the_base_has_its_dropout_after_training_without(tmp_path):
    base = shared_base(architecture="gpt2")
    dropouts = [one for one in base.modules() if isinstance(one, torch.nn.Dropout)]
    for one in dropouts:
        one.p = 0.25
    made, during = stock(tmp_path, base, max_steps=1), set()
    made.add_callback(Sees(lambda: during.update(one.p for one in dropouts)))
    assert dropouts and {one.p for one in dropouts} == {0.25}
    made.train()
    assert during == {0.0} and {one.p for one in dropouts} == {0.25}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": "shared"}, "value — TRL's loop runs policy and value one after the other: it must be separate"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing — TRL's loop does not switch it on"),
        ({"fp16": True}, "fp16 — TRL's loop has no loss scaler, without which small gradients are 0"),
    ],
)
def test_what_trl_cannot_honour_is_refused(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        stock(tmp_path, shared_base(value=changes.get("value", "separate")), **changes)


def test_pad_equal_to_eos_and_class_heads_are_refused(tmp_path):
    tokenizer = doubling.tokenizer()
    tokenizer.pad_token = "E"
    with pytest.raises(ConfigError, match="pad and eos are one token"):
        stock(tmp_path, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="reward adapter of one output"):
        stock(tmp_path, shared_base(labels=3))


def test_a_reward_that_was_taught_beyond_the_end_is_refused(tmp_path):
    tokenizer, base = doubling.tokenizer(), shared_base()
    base.head("reward").elsewhere = True
    turn = "{% for m in messages %}{{ m.content }}" + tokenizer.eos_token + "{{ behind }}{% endfor %}"
    tokenizer.chat_template = turn.replace("{{ behind }}", "")
    stock(tmp_path, base, tokenizer=tokenizer)  # it ends where TRL's loop reads
    tokenizer.chat_template = turn.replace("{{ behind }}", "1")
    with pytest.raises(ConfigError, match="and this reward was taught beyond it. Or use loop: toolkit"):
        stock(tmp_path, base, tokenizer=tokenizer)
    base.head("reward").elsewhere = False
    stock(tmp_path, base, tokenizer=tokenizer)


@pytest.mark.parametrize(("penalty", "name"), [(None, "score"), (3.0, "shaped_score")])
def test_a_score_from_which_trl_has_taken_a_penalty_is_called_so(penalty, name):
    theirs = {"objective/scores": -1.0, "objective/kl": 0.5, "loss/policy_avg": 0.1, "loss/value_avg": 0.2,
              "policy/approxkl_avg": 0.3, "policy/clipfrac_avg": 0.4, "val/clipfrac_avg": 0.6, "val/ratio": 1.1,
              "lr": 0.7, "objective/entropy": 0.8, "objective/rlhf_reward": 0.9, "val/num_eos_tokens": 5}  # fmt: skip
    ours = {name: -1.0, "kl": 0.5, "policy_loss": 0.1, "value_loss": 0.2, "approx_kl": 0.3, "clip_fraction": 0.4,
            "value_clip_fraction": 0.6, "ratio": 1.1, "learning_rate": 0.7, "entropy": 0.8,
            "rlhf_reward": 0.9}  # fmt: skip
    logs = dict(theirs)
    _InOurNames().on_log(SimpleNamespace(missing_eos_penalty=penalty), None, None, logs)
    assert logs == theirs | ours
