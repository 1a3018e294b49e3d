"""What an error or Ctrl-C in the middle leaves behind, where a notebook goes on with the same objects."""

import io

import pytest
import torch
from accelerate.state import GradientState
from rich.console import Console
from safetensors.torch import load_file
from transformers import TrainerCallback

from tests.tiny_models import shared_base
from tests.trainers.helpers import RESPONSES, SCORES, count_reward, rollout, same, trainer, weights
from tests.trainers.resumable import sft_policy
from toolkit import phases
from toolkit.errors import NotFiniteError, RewardError, SelfCheckError, ToolkitError
from toolkit.reports import Progress, read_jsonl
from toolkit.rewards import WeightedSum, score_with
from toolkit.trainers import self_checks


def made(folder, **changes):
    return trainer(folder, shared_base(), **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
                                             "num_ppo_epochs": 2, **changes})  # fmt: skip


def test_gradients_of_a_step_that_was_broken_off_are_no_part_of_the_next(tmp_path, monkeypatch):
    whole = made(tmp_path, use_score_scaling=True)
    torch.manual_seed(1)
    whole.step({}, rollout(RESPONSES), SCORES)
    cut = made(tmp_path, use_score_scaling=True)
    backward, calls = cut._backward_micro_batch, []

    def fails(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return backward(*arguments)

    monkeypatch.setattr(cut, "_backward_micro_batch", fails)
    before = weights(cut)
    with pytest.raises(KeyboardInterrupt):
        cut.step({}, rollout(RESPONSES), SCORES)
    assert same(before, weights(cut)) and not any(module.training for module in cut.roles.modules())
    torch.manual_seed(1)
    cut.step({}, rollout(RESPONSES), SCORES)
    assert same(weights(whole), weights(cut))
    assert cut.score_shaper.moments == whole.score_shaper.moments and cut.score_shaper.moments.seen == 4


def test_steps_are_taken_though_another_trainer_stopped_while_it_accumulated(tmp_path):
    """accelerate's switch is of the process: its optimizers do nothing, in silence, while it is off."""
    ours = made(tmp_path)
    before = weights(ours)
    try:
        GradientState()._set_sync_gradients(False)
        stats = ours.step({}, rollout(RESPONSES), SCORES)
    finally:
        GradientState()._set_sync_gradients(True)
    assert stats["optimizer_steps"] == 2 and not same(before, weights(ours))


def overflowing(ours, patch):
    """Each micro-batch gives the policy a gradient that is no number."""
    backward = ours._backward_micro_batch

    def overflows(*arguments):
        metrics = backward(*arguments)
        ours.roles.parameters_of("policy")[0].grad[0, 0] = float("nan")
        return metrics

    patch.setattr(ours, "_backward_micro_batch", overflows)


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_gradient_that_is_no_number_does_not_reach_the_weights(limit, tmp_path, monkeypatch):
    ours = made(tmp_path, max_grad_norm=limit, max_steps=4)
    ours.step({}, rollout(RESPONSES), SCORES)
    before = weights(ours)
    overflowing(ours, monkeypatch)
    stats = ours.step({}, rollout(RESPONSES), SCORES)  # its two optimizer steps are passed over
    assert same(before, weights(ours)) and stats["optimizer_steps"] == 0 and stats["skipped_steps"] == 2
    ours.step({}, rollout(RESPONSES), SCORES)  # of other rows
    wrong = r"the gradient's norm is nan at step 4, and 3 updates in a row.*Begin a new run with a lower"
    with pytest.raises(SelfCheckError, match=wrong):
        ours.step({}, rollout(RESPONSES), SCORES)
    assert same(before, weights(ours)) and ours.skipped.total == 5
    rows = read_jsonl(tmp_path / "not_finite.jsonl")
    assert [row["response_ids"] for row in rows] == RESPONSES
    assert load_file(tmp_path / "not_finite.safetensors")["scores"].tolist() == SCORES.tolist()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the first update of all has no step
@pytest.mark.parametrize("resumed", [False, True])
def test_nor_does_one_of_the_first_step_after_which_gradients_are_looked_at(resumed, tmp_path, monkeypatch):
    """Of a new run as of one that is resumed; the roles are looked at in the next step that is taken."""
    ours = made(tmp_path, max_steps=4)
    if resumed:
        ours.step({}, rollout(RESPONSES), SCORES)
        folder = ours.save_checkpoint()
        ours = made(tmp_path, max_steps=4)
        ours.load_checkpoint(folder)
    before, check, looked = weights(ours), self_checks.check_gradients, []
    monkeypatch.setattr(
        self_checks, "check_gradients", lambda base, roles: looked.append(set(roles)) or check(base, roles)
    )
    with monkeypatch.context() as patch:
        overflowing(ours, patch)
        stats = ours.step({}, rollout(RESPONSES), SCORES)
    assert same(before, weights(ours)) and stats["optimizer_steps"] == 0 and stats["skipped_steps"] == 2
    assert looked == [] and ours.step({}, rollout(RESPONSES), SCORES)["optimizer_steps"] == 2
    assert looked == [{"policy", "value"}]


def test_texts_and_numbers_that_are_kept_are_of_the_same_rows(tmp_path, monkeypatch):
    ours = trainer(tmp_path, shared_base(), count_reward(5), rollouts_per_update=2, max_steps=9)
    read = ours.rollouts.read

    def broken(*arguments, **named):
        found = read(*arguments, **named)
        found.ref_logprobs[0, 0] = float("nan")
        return found

    monkeypatch.setattr(ours.rollouts, "read", broken)
    with pytest.raises(ToolkitError, match="what is read of the responses is not finite"):
        ours.train()
    mask = load_file(tmp_path / "not_finite.safetensors")["response_mask"]
    texts = read_jsonl(tmp_path / "not_finite.jsonl")
    assert len(texts) == 8 and [len(row["response_ids"]) for row in texts] == mask.sum(1).tolist()


def once_not_finite(ours, monkeypatch):
    """The reference's log-probability of a token is no number, the first time that it is read."""
    read, broken = ours.rollouts.read, []

    def once(*arguments, **named):
        found = read(*arguments, **named)
        if not broken:
            broken.append(True)
            found.ref_logprobs[1, 0] = float("nan")
        return found

    monkeypatch.setattr(ours.rollouts, "read", once)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("penalty", ["reward", "loss"])
def test_an_update_in_which_something_read_is_no_number_is_passed_over_as_one(steps, penalty, tmp_path, monkeypatch):
    """It is in every advantage, so in every step; and in the coefficient that follows the KL."""
    ours = made(tmp_path, num_ppo_epochs=steps, max_steps=3, kl_target=1.0, kl_estimator="k2", kl_penalty_in=penalty)
    once_not_finite(ours, monkeypatch)
    ours.train()
    first, *others = (row for row in ours.state.log_history if "optimizer_steps" in row)
    assert ours.skipped.total == 1 and ours.skipped.in_a_row == 0 and first["optimizer_steps"] == 0
    assert len(others) == 2 and all(row["optimizer_steps"] == steps for row in others)
    assert 0 < ours.kl_coef < 1


def test_a_loop_of_a_user_s_own_is_told_of_it(tmp_path, monkeypatch):
    ours = made(tmp_path)
    once_not_finite(ours, monkeypatch)
    before = weights(ours)
    with pytest.raises(NotFiniteError, match=r"read of the responses is not finite \(ref_logprobs\)"):
        ours.step({}, rollout(RESPONSES), SCORES)
    assert same(before, weights(ours)) and ours.state.global_step == 0
    assert ours.step({}, rollout(RESPONSES), SCORES)["optimizer_steps"] == 2


def test_parts_of_a_rollout_whose_update_failed_are_not_those_of_the_next(tmp_path, monkeypatch):
    reward = WeightedSum({"fives": count_reward(5), "nines": count_reward(9)})
    ours = trainer(tmp_path, shared_base(), reward, max_steps=1)

    def fails(*_):
        raise RuntimeError("in the update")

    monkeypatch.setattr(ours, "_update", fails)
    with pytest.raises(RuntimeError, match="in the update"):
        ours.train()
    scores = ours.score({}, rollout(RESPONSES))
    assert torch.equal(ours._parts["fives"] + ours._parts["nines"], scores)


def test_parts_in_a_loop_of_ones_own_are_those_of_what_is_learnt_from(tmp_path):
    reward = WeightedSum({"fives": count_reward(5), "nines": count_reward(9)})
    ours = trainer(tmp_path, shared_base(), reward)
    batch = next(iter(ours.dataloader))
    responses = rollout(RESPONSES)
    scores = ours.score(batch, responses)
    expected = {f"score/{name}": float(part.mean()) for name, part in reward.last_parts.items()}
    reward(rollout([[8, 2]] * len(RESPONSES)))  # as an evaluation does
    ours.score(batch, rollout([[5, 2]] * len(RESPONSES)))  # another one, which is not learnt from
    assert not expected.keys() & ours.step(batch, responses, scores.clone()).keys()
    scores = ours.score(batch, responses)
    stats = ours.step(batch, responses, scores)
    assert {name: stats[name] for name in expected} == expected and any(expected.values())


def test_a_ratio_that_was_refused_is_looked_at_again(tmp_path, monkeypatch):
    ours = made(tmp_path)
    monkeypatch.setattr(ours, "_make_experience", lambda *a, make=ours._make_experience: _shifted(make(*a)))
    for _ in range(2):
        with pytest.raises(SelfCheckError, match="old and new log-probabilities are not of the same policy"):
            ours.step({}, rollout(RESPONSES), SCORES)


def _shifted(experience):
    return experience._replace(old_logprobs=experience.old_logprobs - 1.0)


def test_a_checkpoint_before_the_first_update_is_where_a_run_can_begin(tmp_path):
    ours = made(tmp_path / "a")
    folder = ours.save_checkpoint()
    assert folder.name == "checkpoint-0"
    ours.train()
    again = made(tmp_path / "b")
    again.load_checkpoint(folder)
    again.train()
    assert same(weights(ours), weights(again))


def test_roles_learn_though_another_trainer_of_their_base_was_made_since(tmp_path):
    """Before the optimizer is made, which takes what is trainable, and between two updates."""
    ours = made(tmp_path)
    for others in ("reward", "policy"):
        ours.roles.train_roles(others)  # as a trainer of that role does
        before = {role: [p.detach().clone() for p in ours.roles.parameters_of(role)] for role in ("policy", "value")}
        ours.step({}, rollout(RESPONSES), SCORES)
        assert [role for role in before if same(before[role], ours.roles.parameters_of(role))] == []


def test_the_value_role_may_be_left_untrained(tmp_path):
    ours = made(tmp_path, vf_coef=0.0, max_grad_norm=0.0)
    value = [p.detach().clone() for p in ours.roles.parameters_of("value")]
    ours.step({}, rollout(RESPONSES), SCORES)
    assert same(value, [p.detach() for p in ours.roles.parameters_of("value")])


def test_a_reward_computes_as_it_would_by_itself(tmp_path):
    """In its own precision, and without a graph that would be kept until the scores are."""
    layer, seen = torch.nn.Linear(8, 1), []
    inputs = torch.randn(4, 8)

    def reward(batch):
        out = layer(inputs)[:, 0]
        seen.append((out.dtype, out.requires_grad, torch.is_autocast_enabled("cpu")))
        return out

    async def waited_for(batch):
        return reward(batch)

    expected = layer(inputs)[:, 0].detach()
    for each in (reward, waited_for):
        ours = trainer(tmp_path, shared_base(), each, bf16=True)
        assert torch.equal(ours.score({}, rollout(RESPONSES)), expected)
        assert torch.equal(score_with(each, rollout(RESPONSES)), expected)
    assert seen == [(torch.float32, False, False)] * 4


class _BreaksOff(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:training begins anew")
def test_noise_of_embeddings_ends_with_the_training_that_is_broken_off(tmp_path):
    made = sft_policy(tmp_path, neftune_noise_alpha=5.0, save_strategy="no", max_steps=1)
    embeddings, breaks_off = made.model.get_input_embeddings(), _BreaksOff()
    made.add_callback(breaks_off)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert not embeddings._forward_hooks and not hasattr(embeddings, "neftune_noise_alpha")
    made.remove_callback(breaks_off)
    made.train()
    assert not embeddings._forward_hooks


def test_nothing_more_is_said_of_a_run_that_an_error_ended(tmp_path):
    """A notebook catches it and trains another: the first would go on speaking of the second as its own."""

    def broken(rollout):
        raise ValueError("no score today")

    progress = Progress("first", Console(file=io.StringIO()))
    ours = trainer(tmp_path, shared_base(), broken, max_steps=2)
    ours.add_callback(progress)
    with pytest.raises(RewardError, match="no score today"):
        ours.train()
    assert not phases._watchers and progress._open is None
