"""float16 training, as on a card without bfloat16: autocast and a loss scaler, both torch's own.

On a GPU where there is one; else on the CPU, to which accelerate gives neither, so that the trainers are handed them
here. What is then left for a card to show are its kernels.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig

from tests.tiny_models import in_nf4, lora, randomize, tiny_model
from tests.trainers.helpers import PROMPTS, count_reward, rollout, same, trainer, weights
from toolkit.data import doubling
from toolkit.errors import SelfCheckError
from toolkit.models import SharedBase, add_q_roles
from toolkit.models.load import default_device
from toolkit.trainers import self_checks
from toolkit.trainers.ppo import PPOTrainer
from toolkit.trainers.q_config import QConfig
from toolkit.trainers.q_learning import QTrainer
from toolkit.trainers.reward import RewardConfig, reward_trainer
from toolkit.trainers.sft import sft_trainer

pytestmark = pytest.mark.card

HUGE = 2.0**120  # no float16 gradient survives this
DEVICE = default_device().type
ON_CPU = {"use_cpu": DEVICE == "cpu"}


def with_scaler(made: Any, scale: float = 2.0**10) -> Any:
    made.accelerator.native_amp = True
    made.accelerator.scaler = torch.amp.GradScaler(DEVICE, init_scale=scale)
    return made


# ---------------------------------------------------------------------- PPO


def base(dtype: torch.dtype, value: str, nf4: Path | None = None) -> SharedBase:
    """In 4 bits where there is a folder for it."""
    made = SharedBase(in_nf4(nf4, str(dtype).removeprefix("torch.")) if nf4 else tiny_model().to(DEVICE, dtype))
    made.add_role("policy", lora())
    made.add_role("reference")
    made.add_role("value", lora() if value == "separate" else None)
    return randomize(made, "policy", "value")


def in_float16(
    folder: Path, roles: SharedBase | None = None, *, value: str = "separate", scale: float = 2.0**10, **changes: Any
) -> PPOTrainer:
    roles = roles or base(torch.float16, value)
    return with_scaler(trainer(folder, roles, count_reward(5), value=value, fp16=True, **ON_CPU, **changes), scale)


def gradients(made: PPOTrainer) -> dict[str, torch.Tensor]:
    """Of each role at the first optimizer step, as the optimizer gets them, as one vector."""
    found: dict[str, torch.Tensor] = {}
    made._prepare_training()
    step = made.optimizer.step

    def keeping() -> None:
        if not found:
            for role in ("policy", "value"):
                found[role] = torch.cat([p.grad.flatten() for p in made.roles.parameters_of(role)])
        step()

    made.optimizer.step = keeping
    batch = next(iter(made.dataloader))
    torch.manual_seed(3)
    responses = rollout([[5, 9, 2], [8, 8, 5, 2], [4, 2], [5, 5, 6, 7, 2]])
    made.step(batch, responses, torch.tensor([1.0, 0.2, -1.0, 0.5]))
    return found


@pytest.mark.parametrize(("value", "quantised"), [("separate", False), ("shared", False), ("separate", True)])
def test_gradients_are_those_of_float32(tmp_path, value, quantised):
    nf4 = tmp_path / "checkpoint" if quantised else None
    half = gradients(in_float16(tmp_path / "half", base(torch.float16, value, nf4), value=value))
    full = gradients(
        trainer(tmp_path / "full", base(torch.float32, value, nf4), count_reward(5), value=value, **ON_CPU)
    )
    for role, expected in full.items():
        assert half[role].dtype is torch.float32  # what is trained is in float32 whatever the base is in
        assert float((half[role] - expected).norm()) < 0.05 * float(expected.norm())


def test_gradients_are_scaled_back_though_a_later_trainer_has_another_precision(tmp_path):
    """accelerate asks the state of the process, which is the last trainer's."""
    expected = gradients(in_float16(tmp_path / "alone"))
    made = in_float16(tmp_path / "before")
    trainer(tmp_path / "later", base(torch.float32, "separate"), count_reward(5), **ON_CPU)
    assert all(torch.equal(found, expected[role]) for role, found in gradients(made).items())


def test_a_card_that_answers_nothing_any_more_ends_a_step_with_its_first_error(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise torch.AcceleratorError(f"CUDA error: {next(errors)}")

    errors = iter(("the first", "the scaler's", "the scaler's again"))
    made = in_float16(tmp_path)
    monkeypatch.setattr(made, "_backward_micro_batch", fails)
    monkeypatch.setattr(made.accelerator.scaler, "_scale", torch.ones(()))  # as after a pass
    monkeypatch.setattr(made.accelerator.scaler, "update", fails)
    with pytest.raises(RuntimeError, match="the first"):
        made.train()
    assert next(errors, None) is None  # both places have asked the scaler


def test_the_base_computes_in_float16(tmp_path, monkeypatch):
    seen = set()
    made = in_float16(tmp_path)
    hook = made.roles.causal_lm.model.layers[0].mlp.up_proj.base_layer.register_forward_hook(
        lambda module, args, output: seen.add(output.dtype)
    )
    made.train()
    hook.remove()
    assert seen == {torch.float16}


def _overflowing(made, backward):
    def overflows(*arguments):
        metrics = backward(*arguments)
        made.roles.parameters_of("policy")[0].grad[0, 0] = float("inf")
        return metrics

    return overflows


def test_a_step_that_overflows_is_skipped_and_the_scale_falls_until_one_does_not(tmp_path):
    made = in_float16(tmp_path, scale=HUGE, max_steps=3, num_ppo_epochs=1)
    before = weights(made)
    made.train()
    assert same(before, weights(made))
    assert made.accelerator.scaler.get_scale() == HUGE / 2**3
    assert made.state.global_step == 3

    # Three that overflow in a row at a scale of 1 are not for want of a smaller one.
    made = in_float16(tmp_path / "never", scale=HUGE, max_steps=200, num_ppo_epochs=1)
    made.accelerator.scaler.set_backoff_factor(HUGE**-0.5)
    made._backward_micro_batch = _overflowing(made, made._backward_micro_batch)
    with pytest.raises(SelfCheckError, match=r"the gradient's norm is (inf|nan) at step 5, and 3 updates in a row"):
        made.train()

    made = in_float16(tmp_path / "fits", max_steps=3)
    before = weights(made)
    made.train()
    after = weights(made)
    assert not same(before, after)
    assert all(bool(torch.isfinite(w).all()) for w in after)


def test_a_resumed_run_has_the_same_weights_and_the_same_scale(tmp_path):
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "scale": HUGE / 2**100}
    whole = in_float16(tmp_path / "whole", **settings)
    whole.train()
    again = in_float16(tmp_path / "whole", **{**settings, "scale": 1.0})
    again.train(resume_from_checkpoint=tmp_path / "whole" / "checkpoint-2")
    assert same(weights(whole), weights(again))
    assert whole.accelerator.scaler.state_dict() == again.accelerator.scaler.state_dict()


# ---------------------------------------------------------------------- the stages whose loop is transformers'

STAGE = {
    **ON_CPU, "report_to": "none", "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-2,
    "per_device_train_batch_size": 4, "disable_tqdm": True, "max_steps": 4,
}  # fmt: skip


def sft(folder: Path, dtype: torch.dtype, settings: dict[str, Any]) -> tuple[Any, SharedBase]:
    roles = SharedBase(tiny_model().to(DEVICE, dtype))
    roles.add_role("policy", lora())
    rows = Dataset.from_dict({"input_ids": [[*ids, 8, 9, 2] for ids in PROMPTS]})
    args = SFTConfig(output_dir=str(folder), gradient_checkpointing=False, **settings)
    return sft_trainer(args, doubling.tokenizer(), roles, rows, callbacks=[]), roles


def reward(folder: Path, dtype: torch.dtype, settings: dict[str, Any]) -> tuple[Any, SharedBase]:
    roles = SharedBase(tiny_model().to(DEVICE, dtype))
    roles.add_role("reward", lora(), num_labels=1)
    rows = {"chosen_ids": [[*ids, 5, 2] for ids in PROMPTS], "rejected_ids": [[*ids, 6, 2] for ids in PROMPTS]}
    args = RewardConfig(output_dir=str(folder), gradient_checkpointing=False, max_length=None, **settings)
    return reward_trainer(args, doubling.tokenizer(), roles, Dataset.from_dict(rows), callbacks=[]), roles


def q(folder: Path, dtype: torch.dtype, settings: dict[str, Any]) -> tuple[Any, SharedBase]:
    roles = SharedBase(tiny_model().to(DEVICE, dtype))
    add_q_roles(roles, lora())
    rows = {
        "prompt_ids": PROMPTS,
        "response_ids": [[5, 2]] * len(PROMPTS),
        "rewards": [[None, 1.0]] * len(PROMPTS),
        "ended": [True] * len(PROMPTS),
    }
    args = QConfig(output_dir=str(folder), **settings)
    return QTrainer(args, doubling.tokenizer(), roles, Dataset.from_dict(rows), callbacks=[]), roles


@pytest.mark.parametrize("stage", [sft, reward, q])
def test_the_other_stages_learn_in_float16_and_skip_what_overflows(stage, tmp_path):
    def run(name: str, dtype: torch.dtype, scale: float | None) -> tuple[list[float], bool]:
        torch.manual_seed(0)
        settings = {**STAGE, "bf16": False, "fp16": scale is not None}
        made, roles = stage(tmp_path / name, dtype, settings)
        made = made if scale is None else with_scaler(made, scale)
        before = [p.detach().clone() for p in roles.parameters() if p.requires_grad]
        made.train()
        after = [p for p in roles.parameters() if p.requires_grad]
        assert all(p.dtype is torch.float32 and bool(torch.isfinite(p).all()) for p in after)
        moved = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return [line["loss"] for line in made.state.log_history if "loss" in line], moved

    exact, _ = run("full", torch.float32, None)
    losses, moved = run("half", torch.float16, 2.0**10)
    assert moved and losses[-1] < losses[0]
    assert losses == pytest.approx(exact, rel=0.05)
    losses, moved = run("skipped", torch.float16, HUGE)
    assert not moved and len(losses) == STAGE["max_steps"]


def test_a_stage_whose_steps_overflow_at_any_scale_ends(tmp_path):
    made, roles = sft(tmp_path, torch.float16, {**STAGE, "max_steps": 50, "bf16": False, "fp16": True})
    with_scaler(made, 4.0)
    before = made.training_step

    def training_step(*arguments, **named):
        loss = before(*arguments, **named)
        roles.parameters_of("policy")[0].grad[0, 0] = float("inf")
        return loss

    made.training_step = training_step
    with pytest.raises(SelfCheckError, match="at step 5, and 3 optimizer steps in a row"):
        made.train()


def test_a_stage_that_was_broken_off_in_a_step_can_be_trained_again(tmp_path):
    made, roles = sft(tmp_path, torch.float16, {**STAGE, "bf16": False, "fp16": True})
    with_scaler(made)

    class Once(TrainerCallback):
        broken = False

        def on_pre_optimizer_step(self, *_, **__):
            if not self.broken:
                self.broken = True
                raise RuntimeError("not enough memory")

    made.add_callback(Once())
    with pytest.raises(RuntimeError, match="not enough memory"):
        made.train()
    before = [p.detach().clone() for p in roles.parameters_of("policy")]
    made.train()
    assert not all(map(torch.equal, before, roles.parameters_of("policy")))


def test_the_step_after_one_that_overflows_is_the_first_of_its_update(tmp_path, monkeypatch):
    """Whose gradients are looked at, and which no limit of the KL keeps from being taken."""
    made, looked_at = in_float16(tmp_path, scale=HUGE, num_mini_batches=2), []
    unscale = made.accelerator.scaler.unscale_
    monkeypatch.setattr(made.accelerator.scaler, "unscale_", lambda *given: looked_at.append("step") or unscale(*given))
    monkeypatch.setattr(self_checks, "check_gradients", lambda *_: looked_at.append("gradients"))
    grown = made.accelerator.scaler.update
    monkeypatch.setattr(made.accelerator.scaler, "update", lambda: grown(2.0**10))
    made._prepare_training()
    batch = next(iter(made.batches()))
    made.step(batch, made.generate(batch), torch.tensor([1.0, 0.2, -1.0, 0.5]))
    assert looked_at[:3] == ["step", "step", "gradients"]


def test_a_step_that_was_broken_off_is_taken_again(tmp_path, monkeypatch):
    """The scaler would take its gradients for unscaled, and refuse every later step."""
    made = in_float16(tmp_path)
    batch = next(iter(made.batches()))
    responses = made.generate(batch)
    step = torch.tensor([1.0, 0.2, -1.0, 0.5])
    made._prepare_training()
    with monkeypatch.context() as patched:
        patched.setattr("torch.nn.utils.clip_grad_norm_", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            made.step(batch, responses, step)
    before, scale = weights(made), made.accelerator.scaler.get_scale()
    assert made.step(batch, responses, step)["optimizer_steps"] == 1 and made.accelerator.scaler.get_scale() == scale
    assert not same(before, weights(made))
