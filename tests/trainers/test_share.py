"""The same step by two processes as by one, which other tests hold against TRL and torch."""

import hashlib
import signal
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from tests.tolerances import RELATIVE
from tests.trainers import resumable
from tests.trainers.helpers import PROMPTS, count_reward, rollout, trainer
from tests.trainers.resumable import TIMING
from tests.trainers.test_value_options import base_with, classifier
from toolkit import processes
from toolkit.errors import RunInterrupted, ToolkitError
from toolkit.models import ValueModel
from toolkit.rewards import DenseScores, check_scores

RESPONSES = [[12, 13, 2], [9, 9, 8, 8, 7, 7], [20, 30, 21, 2], [5, 2]]
SCORES = [1.0, -1.0, 0.5, 2.0]

CASES = {
    "separate": {},
    "shared value": {"value": "shared"},
    "full KL in the loss, entropy": {"kl_estimator": "full", "kl_penalty_in": "loss", "entropy_coef": 0.1},
    "pooled values, one row a forward pass": {"value_pooling": "response_mean", "per_device_train_batch_size": 1,
                                              "gradient_accumulation_steps": 4},
    "bootstrapped": {"truncated_as": "bootstrap"},
    "dense scores": {},
    "a base of its own": {},
}  # fmt: skip


def gradients(folder, case, rows):
    """Metrics and all gradients of the first mini-batch, from rollouts that are given."""
    settings = CASES[case]
    base = base_with(ValueModel(classifier(), None)) if case == "a base of its own" else None
    ours = trainer(Path(folder) / str(processes.rank()), base, **settings)
    ours._prepare_training()
    dense = DenseScores(tokens=[[0.1 * token for token in ids] for ids in RESPONSES])
    scores = check_scores(dense if case == "dense scores" else torch.tensor(SCORES), rollout(RESPONSES))
    metrics = ours._backward_mini_batch(ours._make_experience(rollout(RESPONSES), scores), rows)
    roles = ours.roles.trained_roles
    return metrics, [p.grad.numpy() for role in roles for p in ours.roles.parameters_of(role) if p.grad is not None]


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_a_mini_batch(case, two, tmp_path):
    for rows in ([0, 1, 2, 3], [1, 0, 2], [3]):  # of one row, one process has none
        metrics, alone = gradients(tmp_path, case, rows)
        for found, divided in two(gradients, tmp_path, case, rows):
            assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6)
            for one, other in zip(alone, divided, strict=True):
                assert abs(one - other).max() <= 1e-5 * max(abs(one).max(), 1e-6)


def trained(folder, stage, changes):
    """Losses and weights of a short run without dropout, and a digest of the weights."""
    return trained_together(Path(folder) / f"{processes.count()}-{processes.rank()}", stage, changes)


def trained_together(folder, stage, changes):
    """The same, in one folder."""
    resumable.DROPOUT["lora_dropout"] = 0.0
    try:
        made = resumable.make(getattr(resumable, stage), Path(folder), **changes)
    finally:
        resumable.DROPOUT["lora_dropout"] = 0.3
    for module in made.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    made.train()
    weights = {name: tensor.numpy() for name, tensor in resumable.weights(made).items()}
    rows = [{k: v for k, v in row.items() if not any(t in k for t in TIMING)} for row in made.state.log_history]
    return rows, weights, digest_of(made)


def digest_of(made):
    weights = resumable.weights(made)
    return hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()


SGD = {"optim": "sgd", "learning_rate": 1e-2, "max_steps": 3, "save_strategy": "no", "logging_steps": 1}


def test_the_best_model_is_put_back_in_every_process(two, tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "max_steps": 3, "save_steps": 1}
    best |= {"metric_for_best_model": "eval_score", "greater_is_better": False, "learning_rate": 0.3}
    (history, weights, one), (_, others, other) = two(trained_together, tmp_path / "two", "ppo", best)
    assert one == other
    scores = [row["eval_score"] for row in history if "eval_score" in row]
    assert len(scores) == 3 and scores.index(min(scores)) < 2  # so that another one than the last is put back
    for name, value in weights.items():
        assert (value == others[name]).all(), name


@pytest.mark.parametrize(
    "stage", ["sft_policy", "sft_model", "reward_pairs", "reward_classes", "q", "ppo", "ppo_gathered"]
)
def test_three_steps_of_every_stage(stage, two, tmp_path):
    history, weights, _ = trained(tmp_path, stage, SGD)
    (one, of_one, digest), (_, _, other) = two(trained, tmp_path, stage, SGD)
    assert digest == other
    assert len(history) >= 3
    for row, divided in zip(history, one, strict=True):
        assert divided == pytest.approx(row, rel=1e-4, abs=1e-5)
    for name, value in weights.items():
        assert abs(value - of_one[name]).max() < 1e-6, name


class _Signal(TrainerCallback):
    """A signal to one of the processes in the second step."""

    def __init__(self, rank):
        self.rank = rank

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1 and processes.rank() == self.rank:
            signal.raise_signal(signal.SIGTERM)


def stopped(folder, stage, rank):
    made = resumable.make(getattr(resumable, stage), Path(folder), save_steps=100)
    made.add_callback(_Signal(rank))
    try:
        made.train()
    except RunInterrupted as stop:
        return made.state.global_step, str(stop)


def goes_on(folder, stage, resume):
    """With dropout, of a run that is whole or goes on."""
    resumable.disturb()
    made = resumable.make(getattr(resumable, stage), Path(folder))
    made.train(resume_from_checkpoint=resume)
    return made.state.global_step, digest_of(made)


@pytest.mark.parametrize("stage", ["reward_pairs", "ppo"])
def test_a_signal_to_one_stops_all_at_the_same_step_and_the_run_goes_on_to_the_same_bits(stage, two, tmp_path):
    stops = two(stopped, tmp_path / "stopped", stage, 1)
    assert stops[0] == stops[1] and stops[0][0] == 2 and "stopped by SIGTERM after step 2 of 6" in stops[0][1]
    whole = two(goes_on, tmp_path / "whole", stage, None)
    assert whole[0] == whole[1]  # each with dropout of its own
    assert two(goes_on, tmp_path / "stopped", stage, True) == whole


def scored_by(folder, rank):
    """Responses and scores of a first rollout, by a reward that counts its calls, and fails in one process."""
    calls = []

    def reward(rollout):
        calls.append(len(rollout))
        if processes.rank() == rank:
            raise ValueError("no score today")
        return count_reward(7)(rollout)

    ours = trainer(Path(folder) / str(processes.rank()), reward=reward)
    batch = ours.next_batch()
    responses = ours.generate(batch)
    try:
        return responses.response_ids, ours.score(batch, responses).tolist(), calls
    except ToolkitError as error:
        return responses.response_ids, str(error), calls


def test_a_function_scores_once_and_its_error_reaches_all(two, tmp_path):
    alone = scored_by(tmp_path, None)
    assert alone[2] == [len(PROMPTS)]
    main, other = two(scored_by, tmp_path, None)
    assert main == alone  # what is sampled does not depend on how many sample it
    assert other == (*alone[:2], [])
    (_, said, _), (_, heard, _) = two(scored_by, tmp_path, 0)
    assert said.startswith("the reward raised ValueError: no score today") and "no score today" in heard
    assert two(scored_by, tmp_path, 1) == [main, other]  # where it is not called, it cannot fail


def evaluated(folder, prompts):
    ours = trainer(Path(folder) / str(processes.rank()), per_device_eval_batch_size=2)
    prompts = ours.train_dataset.select(range(prompts))
    metrics, measured, scores = ours.evaluate_rollout(prompts)
    best = ours.best_of(prompts, 2)
    return (
        metrics,
        [*measured.response_ids, *best.candidates.response_ids],
        [*scores.tolist(), *best.scores.flatten().tolist()],
    )


@pytest.mark.parametrize("prompts", [1, 7])
def test_evaluation_and_best_of_n(prompts, two, tmp_path):
    metrics, responses, scores = evaluated(tmp_path, prompts)
    for found, divided, scored in two(evaluated, tmp_path, prompts):
        assert divided == responses
        assert found == pytest.approx(metrics, rel=RELATIVE) and scored == pytest.approx(scores, rel=RELATIVE)


def fails_late(folder):
    """A run whose reward fails in its third update, in whichever process calls it."""
    calls = []

    def reward(rollout):
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("no score today")
        return count_reward(7)(rollout)

    made = resumable.make(resumable.ppo, Path(folder), reward=reward, save_strategy="no")
    try:
        made.train()
    except ToolkitError as error:
        return made.state.global_step, type(error).__name__, str(error)


def test_a_reward_that_fails_leaves_the_run_saved(two, tmp_path):
    main, other = two(fails_late, tmp_path)
    assert main[:2] == (2, "RewardError") and other[:2] == (2, "PeerError")
    assert "All up to update 2 is saved" in main[2]
    assert two(goes_on, tmp_path, "ppo", True)[0][0] == resumable.STEPS
