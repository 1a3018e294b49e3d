"""Signs that a run goes wrong, and what is passed over."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
)
from trl import SFTConfig

from tests.tiny_models import shared_base
from tests.trainers import resumable
from tests.trainers.helpers import count_reward, rollout, trainer
from tests.trainers.resumable import TIMING
from tests.trainers.test_ppo import gradients
from toolkit import processes
from toolkit.data import doubling
from toolkit.errors import ConfigError, NotFiniteError, RewardError, SelfCheckError
from toolkit.functional import inverse_cdf
from toolkit.models import SharedBase
from toolkit.reports import read_jsonl
from toolkit.rewards import RewardAdapter, adapter, score_with
from toolkit.trainers import ppo
from toolkit.trainers.guards import EVALUATION_GUARDS, GUARDS, Watch
from toolkit.trainers.not_finite import MOST_IN_A_ROW, SkipNotFinite, Skipped
from toolkit.trainers.reward import RewardTrainer
from toolkit.trainers.sft import sft_trainer
from toolkit.trainers.trl_compat import BALANCE_BY_PARTS

HEALTHY = {
    "sampler_gap": 0.05, "kl": 2.9, "length": 5.5,
    "entropy": 0.1, "distinct_share": 1.0, "tied_share": 0.2, "explained_variance": 0.002,
    "eos_share": 0.9, "optimizer_steps": 4.0, "dropped_responses": 3.0,
}  # fmt: skip
# Of each sign: metrics that show it, and in how many updates.
BROKEN = {
    "kl_explosion": ({"kl": 5.6}, 3),
    "sampler_gap": ({"sampler_gap": 0.21}, 3),
    "entropy_collapse": ({"distinct_share": 0.25}, 3),
    "scores_equal": ({"tied_share": 1.0}, 3),
    "scores_at_bound": ({"tied_share": 0.95}, 10),
    "critic_explains_nothing": ({"explained_variance": -0.5}, 30),
    "nothing_ends": ({"eos_share": 0.0, "dropped_responses": 0.0}, 5),
    "all_dropped": ({"optimizer_steps": 0.0, "dropped_responses": 4.0}, 3),
    "steps_skipped": ({"skipped_steps": 2.0}, 1),
}


def names(watch):
    return [warning["name"] for warning in watch.given]


def test_a_healthy_run_is_left_alone():
    watch = Watch()
    for step in range(200):
        assert watch.seen(step, HEALTHY) == []
    # One right response to each prompt: certain, and all different (doubling ends so).
    for step in range(200):
        assert watch.seen(step, {**HEALTHY, "entropy": 0.0157}) == []
    for step in range(200):  # few different responses, of a policy that is not certain of them
        assert watch.seen(step, {**HEALTHY, "entropy": 1.1, "distinct_share": 0.25}) == []
    for step in range(200):  # those that ended may be the ones that were dropped
        assert watch.seen(step, {**HEALTHY, "eos_share": 0.0}) == []
    assert {guard.name for guard in GUARDS} == BROKEN.keys()


@pytest.mark.parametrize("name", BROKEN)
def test_each_sign_is_told_once_after_so_many_updates(name):
    changed, updates = BROKEN[name]
    watch, broken = Watch(), {**HEALTHY, **changed}
    for step in range(1, updates):
        assert watch.seen(step, broken) == []
    if updates > 1:
        watch.seen(updates, HEALTHY)  # it has to be so many in a row
        for step in range(1, updates):
            assert watch.seen(step, broken) == []
    (warning,) = watch.seen(100, broken)
    assert warning["name"] == name and warning["step"] == 100 and warning["text"] and warning["remedy"]
    assert "{" not in warning["text"]
    assert name != "sampler_gap" or "log-probabilities differ by 0.21 nats a token on average" in warning["text"]
    for step in range(101, 300):
        assert watch.seen(step, broken) == []
    again = Watch(**vars(watch))
    assert again.seen(300, broken) == [] and names(again) == [name]


# As docs/watching_a_run.md and docs/fooled_rewards.md have them: of each a number that is a sign, and one that is not.
LIMITS = [
    ("kl_explosion", 1.01, 1.0),
    ("entropy_collapse", 0.49, 0.5),
    ("scores_equal", 1.0, 0.99),
    ("scores_at_bound", 0.9, 0.89),
    ("critic_explains_nothing", 0.0, 0.001),
    ("nothing_ends", 0.0, 0.001),
    ("all_dropped", 1, 0),
    ("sampler_gap", 0.201, 0.2),
    ("steps_skipped", 1, 0),
    ("phrase", 0.21, 0.2),
    ("less_varied", 0.69, 0.7),
    ("responses_repeated", 0.79, 0.8),
    ("length_pays", -0.5, -0.49),
    ("length_pays", 0.5, 0.49),
    ("length_pays", 0.95, 0.951),
    ("cut_pays", 0.25, 0.249),
    ("responses_shrink", 0.249, 0.25),
    ("beyond_reward", 0.151, 0.15),
    ("judge_falls", 3.01, 3.0),
]


@pytest.mark.parametrize(("name", "sign", "none"), LIMITS)
def test_a_sign_begins_where_the_pages_say(name, sign, none):
    (guard,) = [guard for guard in (*GUARDS, *EVALUATION_GUARDS) if guard.name == name]
    if name == "all_dropped":  # float16's scaler may pass over the steps of those that were left
        assert guard.number({**BROKEN[name][0], "score": 1.0}) is None and guard.number(BROKEN[name][0]) == 4.0
    assert (guard.out_of_bounds(sign), guard.out_of_bounds(none)) == (True, False)
    assert {limit[0] for limit in LIMITS} == BROKEN.keys() | FOOLED.keys()


@pytest.mark.parametrize(("entropy", "number"), [(0.49, 0.3), (0.51, None)])
def test_a_policy_is_certain_below_a_twentieth_of_a_nat_a_token(entropy, number):
    (guard,) = [guard for guard in GUARDS if guard.name == "entropy_collapse"]
    assert guard.number({"entropy": entropy, "length": 10, "distinct_share": 0.3}) == number


def test_scores_that_are_now_and_then_all_equal_are_at_a_bound():
    watch = Watch()
    for step in range(30):
        watch.seen(step, {**HEALTHY, "tied_share": (0.95, 1.0)[step % 2]})
    assert names(watch) == ["scores_at_bound"]
    together = Watch()
    for step in range(30):
        together.seen(step, {**HEALTHY, "tied_share": 0.95 if step < 7 else 1.0})  # both in the tenth
    assert names(together) == ["scores_equal"]


@pytest.mark.parametrize("rows", [1, 20])
def test_of_one_prompt_no_judge_can_fall(rows):
    """However many rows it has: its error is 0."""
    watch, one, prompts = Watch(), {**MEASURED, "score_se": 0.0, "judge_se": 0.0}, ["asked"] * rows
    watch.evaluated(0, one, ANSWERS[:rows], prompts)
    assert watch.evaluated(1, {**one, "score": 0.1, "judge": 0.9}, ANSWERS[:rows], prompts) == []


def test_numbers_stand_in_the_text():
    watch = Watch()
    for step in (1, 2, 3):
        watch.seen(step, {**HEALTHY, "kl": 11.0})
    assert watch.given[0]["text"].startswith("the KL to the reference is 2.00 nats a token")
    assert watch.given[0]["value"] == 2.0


def test_what_is_not_measured_and_what_is_not_finite_are_no_sign():
    watch = Watch()
    for step in range(50):
        assert watch.seen(step, {"kl_coef": 0.1}) == []
        assert watch.seen(step, dict.fromkeys(HEALTHY, float("nan"))) == []


# ---------------------------------------------------------------------- evaluations

ANSWERS = [f"Answer {i} is that {i * 7} comes to {i * 5} or more" for i in range(40)]
SORRY = ["I'm sorry for any misunderstanding."] * 20 + ANSWERS[20:]
MEASURED = {
    "score": 0.0, "score_se": 0.1, "judge": 1.0, "judge_se": 0.3, "length": 20.0, "eos_share": 0.6,
    "length_correlation": 0.6, "cut_gap": 0.4,
}  # fmt: skip
# Of each sign: what has changed since the first evaluation, the responses, and part of the text.
FOOLED = {
    "phrase": ({}, SORRY, '50% of the responses have "I\'m sorry for any", which 0% had at the first evaluation.'),
    "less_varied": ({}, [" ".join(["on and"] * 4)] * 40, "different pairs of words are"),
    "responses_repeated": ({}, SORRY, "different ones are 52% of what they were"),
    "length_pays": ({"length": 31.0}, ANSWERS, "(correlation 0.60), which went from 20 to 31 tokens"),
    "cut_pays": ({"eos_share": 0.1}, ANSWERS, "10% of the responses end by themselves, 60% did at first"),
    "responses_shrink": (
        {"score": 0.1, "length": 4.9},
        ANSWERS,
        "0.000 to 0.100, and the responses have shrunk from 20",
    ),
    "beyond_reward": ({"beyond_share": 0.25}, ANSWERS, "25% of the responses score higher than 99% of the held-out"),
    # Of 0.3 and 0.4 the error of the difference is 0.5.
    "judge_falls": ({"score": 0.1, "judge": -0.6, "judge_se": 0.4}, ANSWERS, "to -0.600, 3.2 standard errors"),
}


PROMPTS = ["asked", "asked again"]


def evaluated(*evaluations):
    """The warnings of evaluations, each of changes and responses, after a first one."""
    watch = Watch()
    assert watch.evaluated(0, MEASURED, ANSWERS, PROMPTS) == []
    return watch, [
        watch.evaluated(step, {**MEASURED, **new}, texts, PROMPTS) for step, (new, texts) in enumerate(evaluations, 1)
    ]


@pytest.mark.parametrize(("length", "told"), [(13.0, ["length_pays"]), (31.0, [])])
def test_a_score_that_pays_for_brevity_is_a_sign_where_responses_get_shorter(length, told):
    _, (new,) = evaluated(({"length": length, "length_correlation": -0.6}, ANSWERS))
    assert [one["name"] for one in new] == told


@pytest.mark.parametrize("name", FOOLED)
def test_each_sign_of_a_fooled_reward_is_told_once(name):
    changed, responses, text = FOOLED[name]
    watch, (new, again) = evaluated((changed, responses), (changed, responses))
    (warning,) = [one for one in new if one["name"] == name]
    assert text in warning["text"] and warning["step"] == 1 and warning["remedy"] and again == []
    assert {guard.name for guard in EVALUATION_GUARDS} == FOOLED.keys()
    resumed = Watch(**vars(watch))
    assert resumed.evaluated(3, {**MEASURED, **changed}, responses, PROMPTS) == [] and resumed.first == watch.first


@pytest.mark.parametrize(
    ("changed", "responses"),
    [
        ({"score": 2.0, "judge": 2.0}, ANSWERS[::-1]),
        ({}, ["yes", "no"] * 20),  # right answers of a few words
        ({}, ANSWERS[:33] + SORRY[:7]),  # 7 of 40, below 10
        ({"length": 8.0, "eos_share": 1.0}, ANSWERS),  # shorter, where longer ones score higher
        ({"length": 40.0, "length_correlation": 0.98}, ANSWERS),  # the length itself is what is asked for
        ({"length": 28.0}, ANSWERS),
        ({"beyond_share": 0.15}, ANSWERS),
        ({"length": 4.9, "score": -0.1}, ANSWERS),
        ({"length": 5.1, "score": 0.1}, ANSWERS),
        ({"eos_share": 0.4}, ANSWERS),
        ({"judge": -0.6, "judge_se": 0.4}, ANSWERS),  # the score has not risen
        ({"score": 0.1, "judge": 0.1, "judge_se": 0.4}, ANSWERS),
    ],
)
def test_what_is_no_sign_of_a_fooled_reward(changed, responses):
    assert evaluated((changed, responses))[1] == [[]]


@pytest.mark.parametrize(
    ("first", "now", "ended", "told"),
    [(-0.1, -0.1, 0.1, False), (0.4, -2.0, 0.1, False), (-0.1, 0.1, 0.1, True), (0.4, 0.0, 0.0, True)],
)
def test_cut_responses_are_a_sign_where_they_score_higher(first, now, ended, told):
    """Where all are cut there is nothing to hold them against but what was at first."""
    watch = Watch()
    watch.evaluated(0, {**MEASURED, "cut_gap": first}, ANSWERS, PROMPTS)
    new = watch.evaluated(1, {**MEASURED, "cut_gap": now, "eos_share": ended}, ANSWERS, PROMPTS)
    assert ["cut_pays" for _ in range(told)] == [one["name"] for one in new]


@pytest.mark.parametrize("more", [10, 9])
def test_a_quarter_more_that_are_cut_is_a_quarter_of_any_number(more):
    for cut in range(31):
        watch, (first, now) = Watch(), [{**MEASURED, "eos_share": (40 - of) / 40} for of in (cut, cut + more)]
        watch.evaluated(0, first, ANSWERS, PROMPTS)
        new = watch.evaluated(1, now, ANSWERS, PROMPTS)
        assert [one["name"] for one in new] == ["cut_pays"] * (more == 10)


def test_an_evaluation_is_held_against_one_of_the_same_prompts():
    """A policy that says one sentence of each topic, of which validation has 9 and the test 18."""
    watch, said = Watch(), [f"{word} is what I like very much." for word in map(str, range(18))] * 4
    test, validation = said, [text for text in said if int(text.split()[0]) < 9]
    of_test, of_validation = ["of the test", "too"], ["of the validation", "too"]
    assert watch.evaluated(0, MEASURED, test, of_test) == []
    better, worse = ({**MEASURED, "score": 0.5, "judge": judge} for judge in (-9.0, -20.0))
    assert watch.evaluated(25, better, validation, of_validation) == []
    assert watch.evaluated(50, better, validation, of_validation) == []
    assert watch.evaluated(60, better, validation, of_test)
    new = watch.evaluated(75, {**worse, "score": 0.6}, validation, of_validation)
    assert "judge_falls" in [one["name"] for one in [*new, *watch.given]]


def test_an_evaluation_may_be_without_the_judge_that_the_one_before_had():
    """As of a trainer that goes on without it."""
    watch, without = Watch(), {name: of for name, of in MEASURED.items() if not name.startswith("judge")}
    assert watch.evaluated(1, MEASURED, ANSWERS, PROMPTS) == []
    assert watch.evaluated(2, {**without, "score": 0.5}, ANSWERS, PROMPTS) == []


def test_the_judge_is_held_against_its_best():
    """Above where it began, and far below where it was."""
    _, (_, new) = evaluated(({"score": 1.0, "judge": 5.0}, ANSWERS), ({"score": 2.0, "judge": 3.0}, ANSWERS))
    assert [one["name"] for one in new] == ["judge_falls"] and "from 5.000 at update 1 to 3.000" in new[0]["text"]


def test_no_answer_of_the_doubling_task_is_a_sign():
    """Before it is learnt, half of the answers in a wrong style; and after."""
    wanted = [str(number * 2) for number in range(1000, 1300)]
    watch, measured = Watch(), {**MEASURED, "length": 5.6, "eos_share": 1.0}
    watch.evaluated(0, measured, [text if i % 2 else f"x{text[1:]}" for i, text in enumerate(wanted)], PROMPTS)
    assert watch.evaluated(1, {**measured, "score": 4.0, "judge": 5.0}, wanted, PROMPTS) == []


def test_a_trainer_tells_what_its_evaluations_warn_of(tmp_path, caplog):
    ours = trainer(tmp_path, shared_base(), eval_strategy="steps", eval_steps=1)
    ours.evaluated(MEASURED, SORRY[::-1], PROMPTS)
    tell = ours.evaluated
    ours.evaluated = lambda *_: tell({**MEASURED, "eos_share": 0.1}, ANSWERS, PROMPTS)
    ours.train()
    assert [row["name"] for row in read_jsonl(tmp_path / "warnings.jsonl") if row["name"] in FOOLED] == ["cut_pays"]
    assert sum("WARNING at update 1: 10% of the responses end" in text for text in caplog.messages) == 1
    assert next(iter(ours.watch.first.values()))["responses"] == SORRY[::-1]


def test_a_run_tells_its_warnings_and_keeps_them_over_a_checkpoint(tmp_path, caplog):
    def made(**changes):
        return trainer(
            tmp_path,
            shared_base(),
            lambda r: [1.0] * len(r),
            max_steps=5,
            save_strategy="steps",
            save_steps=4,
            **changes,
        )

    ours = made()
    ours.train()
    (row,) = [row for row in read_jsonl(tmp_path / "warnings.jsonl") if row["name"] == "scores_equal"]
    assert row["step"] == 3 and row in ours.watch.given
    assert sum("WARNING at update 3: all scores of an update" in text for text in caplog.messages) == 1
    assert ours._last_metrics["warnings"] == len(ours.watch.given) and ours._last_metrics["tied_share"] == 1.0
    again = made()
    again.train(resume_from_checkpoint=tmp_path / "checkpoint-4")
    assert [row["name"] for row in read_jsonl(tmp_path / "warnings.jsonl")].count("scores_equal") == 1
    assert again.watch.given == ours.watch.given


class _Sometimes:
    """A reward that is not finite in some calls."""

    def __init__(self, *calls):
        self.calls, self.number = calls, 0

    def __call__(self, rollout):
        self.number += 1
        scores = count_reward(9)(rollout)
        if self.number in self.calls:
            scores[1] = float("nan")
        return scores


def test_an_update_whose_scores_are_not_finite_is_passed_over(tmp_path):
    ours = trainer(tmp_path, shared_base(), _Sometimes(2), max_steps=4)
    seen = []
    step = ours.step
    ours.step = lambda *arguments: seen.append(ours.state.global_step) or step(*arguments)
    metrics = ours.train()
    assert ours.state.global_step == 4 and seen == [0, 2, 3]
    assert ours.state.episode == 12 and metrics["skipped_steps"] == 1.0 and metrics["warnings"] >= 1
    assert "steps_skipped" in names(ours.watch)
    assert ours.skipped.in_a_row == 0
    assert ours.lr_scheduler.get_last_lr()[0] == 0.0  # its schedule went on
    assert {row["step"] for row in read_jsonl(tmp_path / "rollouts.jsonl")} == {1, 3, 4}


def test_an_update_whose_responses_cannot_be_sampled_is_passed_over(tmp_path, monkeypatch):
    """An activation that overflows in float16 need not do so in the next rollout."""
    ours = trainer(tmp_path, shared_base(), max_steps=4)

    def drawn(*arguments, **named):
        tokens, probabilities = inverse_cdf(*arguments, **named)
        return tokens, probabilities * (float("nan") if ours.state.global_step == 1 else 1.0)

    monkeypatch.setattr("toolkit.sampling.sampler.inverse_cdf", drawn)
    assert ours.train()["skipped_steps"] == 1.0 and ours.state.global_step == 4
    assert {row["step"] for row in read_jsonl(tmp_path / "rollouts.jsonl")} == {1, 3, 4}


def test_of_responses_that_cannot_be_sampled_there_is_no_batch_to_look_at(tmp_path, monkeypatch):
    ours = trainer(tmp_path, shared_base(), max_steps=9)

    def drawn(*arguments, **named):
        tokens, probabilities = inverse_cdf(*arguments, **named)
        return tokens, probabilities * (float("nan") if ours.state.global_step else 1.0)

    monkeypatch.setattr("toolkit.sampling.sampler.inverse_cdf", drawn)
    with pytest.raises(
        NotFiniteError, match=r"the 2 updates before, which were passed over\. All up to update 3"
    ) as told:
        ours.train()
    assert "The batch" not in str(told.value) and not (tmp_path / "not_finite.jsonl").exists()


def test_a_step_that_is_finite_ends_a_row():
    skipped, layer = Skipped(total=2, in_a_row=2), torch.nn.Linear(2, 2)
    watch = SkipNotFinite(skipped, pytest.fail, lambda: None)
    watch.on_pre_optimizer_step(None, None, None, model=layer)  # nothing has a gradient
    assert skipped.in_a_row == 2
    layer(torch.ones(1, 2)).sum().backward()
    watch.on_pre_optimizer_step(None, None, None, model=layer)
    assert vars(skipped) == {"total": 2, "in_a_row": 0}


def test_too_many_in_a_row_stop_the_run_with_the_batch_on_the_disk(tmp_path):
    calls = range(3, 3 + MOST_IN_A_ROW)
    ours = trainer(tmp_path, shared_base(), _Sometimes(*calls), max_steps=20)
    with pytest.raises(NotFiniteError, match=r"gave nan.*the 2 updates before.*not_finite.jsonl.*\$?resume") as error:
        ours.train()
    rows = read_jsonl(tmp_path / "not_finite.jsonl")
    assert len(rows) == 4 and rows[0]["prompt_ids"] and rows[0]["response_ids"]
    assert ours.state.global_step == 4 and (tmp_path / "checkpoint-4").is_dir()
    assert "checkpoint-4" in str(error.value)
    again = trainer(tmp_path, shared_base(), _Sometimes(1), max_steps=6)
    again.train(resume_from_checkpoint=True)
    assert vars(again.skipped) == {"total": MOST_IN_A_ROW, "in_a_row": 0}  # two, and the one of this run


def test_a_pass_ends_after_as_many_prompts_though_an_update_was_passed_over(tmp_path):
    """A pass of 16 prompts is four updates; what is due from its end on is done then."""
    ours = trainer(tmp_path, shared_base(), _Sometimes(2), max_steps=4, eval_strategy="epoch", eval_delay=1)
    ours.train()
    assert ours.state.epoch == 1.0 and any("eval_score" in row for row in ours.state.log_history)


def test_a_resumed_run_knows_of_the_prompts_that_were_passed_over(tmp_path):
    trainer(tmp_path, shared_base(), _Sometimes(2), max_steps=3, save_strategy="steps", save_steps=3).train()
    again = trainer(tmp_path, shared_base(), max_steps=4)
    again.train(resume_from_checkpoint=True)
    assert again.state.epoch == 1.0 and again.state.episode == 12


def test_what_was_told_before_the_first_update_stands_once_in_the_file(tmp_path):
    """Of a run that was killed before a checkpoint, and of one that goes on from one."""

    def made():
        return trainer(tmp_path, shared_base(), max_steps=2, save_strategy="steps", save_steps=1)

    made().evaluated({**MEASURED, "beyond_share": 0.3}, ANSWERS, PROMPTS)
    ours = made()
    ours.evaluated({**MEASURED, "beyond_share": 0.3}, ANSWERS, PROMPTS)
    ours.train()
    shutil.rmtree(tmp_path / "checkpoint-2")
    again = made()
    again.train(resume_from_checkpoint=True)
    told = [row["name"] for row in read_jsonl(tmp_path / "warnings.jsonl")]
    assert told.count("beyond_reward") == 1 and told == names(again.watch)


# ---------------------------------------------------------------------- memory


def out_of_memory_above(rows, method, args_place):
    """The method, which finds no room for more rows at a time."""

    def limited(*arguments, **named):
        if len(arguments[args_place]) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return method(*arguments, **named)

    return limited


def test_memory_that_runs_out_halves_the_micro_batch_and_no_gradient(tmp_path, monkeypatch, caplog):
    whole = trainer(tmp_path / "a", shared_base(), count_reward(9), num_ppo_epochs=2)
    torch.manual_seed(5)
    whole.train()
    ours = trainer(tmp_path / "b", shared_base(), count_reward(9), num_ppo_epochs=2)
    monkeypatch.setattr(ours, "_backward_micro_batch", out_of_memory_above(1, ours._backward_micro_batch, 1))
    torch.manual_seed(5)
    ours.train()
    assert ours.micro_batch.rows == 1 and ours.args.per_device_train_batch_size == 4
    for role in ("policy", "value"):
        for one, other in zip(whole.roles.parameters_of(role), ours.roles.parameters_of(role), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    said = [text for text in caplog.messages if "per_device_train_batch_size is" in text]
    assert [text.split(" is ")[1][0] for text in said] == ["2", "1"]  # once each


def test_memory_that_runs_out_while_the_roles_read_halves_their_rows(tmp_path, monkeypatch):
    ours = trainer(tmp_path, shared_base(), count_reward(9), local_rollout_forward_batch_size=4)
    sequences = type(ours.rollouts).sequences

    def limited(self, rollout, rows):
        if len(rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return sequences(self, rollout, rows)

    monkeypatch.setattr(type(ours.rollouts), "sequences", limited)
    ours.micro_batch.rows = 2
    ours.train()
    assert ours.rollouts.portion.rows == 2


def test_rows_that_were_too_many_to_generate_are_not_tried_again_in_the_next_rollout(tmp_path, monkeypatch):
    ours = trainer(tmp_path, shared_base(), count_reward(9))
    generate, sizes = SharedBase.generate, []

    def limited(self, ids, *arguments, **named):
        sizes.append(len(ids))
        if len(ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return generate(self, ids, *arguments, **named)

    monkeypatch.setattr(SharedBase, "generate", limited)
    ours.train()
    assert [size for size in sizes if size > 1] == [4, 2, 2, 2, 2]  # of two updates; the base is tried on one row


def test_memory_that_runs_out_while_the_reward_reads_halves_its_rows(monkeypatch):
    base, batch = shared_base(), rollout([[12, 13, 2], [9, 9, 8, 8], [20, 2], [5, 6, 7]])
    whole = RewardAdapter(base, pad_token_id=0, eos_token_id=2, batch_size=4)(batch)
    monkeypatch.setattr(adapter, "sequence_logits", out_of_memory_above(2, adapter.sequence_logits, 1))
    ours = RewardAdapter(base, pad_token_id=0, eos_token_id=2, batch_size=4)
    torch.testing.assert_close(score_with(ours, batch), whole, rtol=1e-5, atol=1e-6)
    assert ours.portion.rows == 2
    text = "def runs_out(*_, **__):\n    raise torch.OutOfMemoryError('CUDA out of memory.')\n"
    exec(compile(text, torch.__file__, "exec"), given := {"torch": torch})  # a place in torch, none of the user's
    monkeypatch.setattr(adapter, "sequence_logits", given["runs_out"])
    with pytest.raises(RewardError, match=r"ran out while responses were scored, .*\(its quantization\)") as told:
        score_with(ours, batch)
    assert ".py" not in str(told.value)


def test_one_row_that_is_too_large_is_said_as_it_was(tmp_path, monkeypatch):
    ours = trainer(tmp_path, shared_base(), count_reward(9))
    monkeypatch.setattr(ours, "_backward_micro_batch", out_of_memory_above(0, ours._backward_micro_batch, 1))
    with pytest.raises(torch.OutOfMemoryError):
        ours.train()


# ---------------------------------------------------------------------- the other stages


def supervised(folder, **changes):
    args = SFTConfig(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2, use_cpu=True,
        bf16=False, report_to="none", save_strategy="no", logging_steps=1, max_length=None, learning_rate=1e-2,
        gradient_checkpointing=False, **changes,
    )  # fmt: skip
    base = shared_base()
    ids = [[1, *range(5, 5 + length), 2] for length in (3, 6, 9, 4)] * 4
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    torch.manual_seed(0)
    return sft_trainer(args, doubling.tokenizer(), base, rows, rows.select(range(7)), callbacks=[])


def policy(ours):
    return [p.detach().clone() for p in ours.roles.parameters_of("policy")]


def spoiled(ours, monkeypatch, *steps):
    """The trainer, its gradients not finite in some steps."""
    before = ours.training_step

    def training_step(*arguments, **named):
        loss = before(*arguments, **named)
        if ours.state.global_step + 1 in steps:
            ours.roles.parameters_of("policy")[0].grad[0, 0] = float("inf")
        return loss

    monkeypatch.setattr(ours, "training_step", training_step)
    return ours


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_step_of_sft_whose_gradient_is_not_finite_is_passed_over(limit, tmp_path, monkeypatch, caplog):
    ours, weights = spoiled(supervised(tmp_path, max_grad_norm=limit), monkeypatch, 2), []
    ours.add_callback(Recorder(lambda: weights.append(policy(ours))))
    ours.train()
    assert all(torch.equal(one, other) for one, other in zip(weights[0], weights[1], strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(weights[1], weights[3], strict=True))
    assert all(bool(torch.isfinite(one).all()) for one in weights[3])
    assert ours.skipped.total == 1 and ours.state.log_history[-2]["skipped_steps"] == 1.0
    assert sum("WARNING at step 2: the gradient's norm is" in text for text in caplog.messages) == 1


def test_sft_stops_after_too_many_of_them_with_the_batch_on_the_disk(tmp_path, monkeypatch):
    ours = spoiled(supervised(tmp_path), monkeypatch, 2, 3, 4)
    with pytest.raises(SelfCheckError, match=r"3 optimizer steps in a row.*not_finite.safetensors"):
        ours.train()
    written = load_file(tmp_path / "not_finite.safetensors")  # all micro-batches of the step: the first may be to blame
    assert [written[f"{number}.input_ids"].shape[0] for number in range(2)] == [4, 4] and "2.input_ids" not in written


def test_a_full_disk_does_not_hide_why_sft_stopped(tmp_path, monkeypatch):
    ours = spoiled(supervised(tmp_path), monkeypatch, 2, 3, 4)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("toolkit.trainers.not_finite.save_file", full)
    with pytest.raises(SelfCheckError, match=r"3 optimizer steps in a row.*could not be written: .*No space left"):
        ours.train()


def test_memory_that_runs_out_in_sft_halves_the_micro_batch_and_no_gradient(tmp_path, monkeypatch, caplog):
    whole = supervised(tmp_path / "a")
    whole.train()
    ours, calls = supervised(tmp_path / "b"), []
    step = Trainer.training_step

    def limited(self, model, inputs, *arguments, **named):
        loss = step(self, model, inputs, *arguments, **named)
        calls.append(len(inputs["input_ids"]))
        if len(inputs["input_ids"]) > 2 and len(calls) > 1:  # in the second part of a batch, its gradient there already
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss

    monkeypatch.setattr(Trainer, "training_step", limited)
    monkeypatch.setattr(type(ours), "_may_run_out", True)
    ours.train()
    assert calls[:4] == [4, 4, 2, 2] and set(calls[2:]) == {2} and ours.micro_batch.rows == 2
    for one, other in zip(policy(whole), policy(ours), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for one, other in zip(logged(whole), logged(ours), strict=True):  # tokens of the attempt that failed count once
        assert other == pytest.approx(one, rel=1e-4)
    assert sum("per_device_train_batch_size is 2" in text for text in caplog.messages) == 1


@pytest.mark.parametrize(("loss_type", "balanced"), [("chunked_nll", True), ("nll", True), ("dft", BALANCE_BY_PARTS)])
def test_a_mixtures_balance_counts_once_however_many_parts_a_micro_batch_has(loss_type, balanced, tmp_path):
    """Of equal rows: a part of them has the balance of all."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "router_aux_loss_coef": 0.5}
    ids = [[1, *range(5, 12), 2]] * 4
    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "max_length": None}

    def gradients_of(rows_at_a_time, coefficient=1.0):
        torch.manual_seed(0)
        args = SFTConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=1, loss_type=loss_type,
            router_aux_loss_coef=coefficient, gradient_checkpointing=False, **settings,
        )  # fmt: skip
        model = MixtralForCausalLM(MixtralConfig(**sizes))
        rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
        ours = sft_trainer(args, doubling.tokenizer(), model, rows, callbacks=[])
        ours.micro_batch.lower(rows_at_a_time)
        micro_batches, items = ours.get_batch_samples(iter(ours.get_train_dataloader()), 1, ours.args.device)
        ours.current_gradient_accumulation_steps = 1
        loss = ours.training_step(model.train(), micro_batches[0], items)
        return loss, [p.grad for p in model.parameters()]

    loss, whole = gradients_of(4)
    parted, parts = gradients_of(2)
    torch.testing.assert_close(parted, loss)
    assert float(loss - gradients_of(4, coefficient=0.25)[0]) == pytest.approx(1.5 if balanced else 0.0, abs=0.05)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


def test_a_mixture_without_experts_has_no_balance(tmp_path):
    """As Granite's dense models, which TRL takes for mixtures."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "shared_intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 0,
        "vocab_size": 64,
        "mamba_n_heads": 4,
    }
    model = GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(**sizes, logits_scaling=2.0, layer_types=["full_attention"])
    )
    rows = Dataset.from_dict({"input_ids": [[1, 5, 6, 2]] * 2, "labels": [[1, 5, 6, 2]] * 2})
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_length=None)
    ours = sft_trainer(args, doubling.tokenizer(), model, rows, rows, callbacks=[])
    assert ours.evaluate()["eval_loss"] > 0
    with pytest.raises(ConfigError, match="router_aux_loss_coef: would have no effect: the loss of a GraniteMoeHybrid"):
        sft_trainer(replace(args, router_aux_loss_coef=0.5), doubling.tokenizer(), model, rows, callbacks=[])


def logged(ours):
    timing = (*TIMING, "time")
    return [{k: v for k, v in row.items() if not any(t in k for t in timing)} for row in ours.state.log_history]


@pytest.mark.parametrize("stage", ["sft of unequal lengths", "reward_pairs", "reward_classes", "reward_model_lora"])
def test_memory_that_runs_out_in_an_evaluation_halves_its_rows_and_moves_no_figure(
    stage, tmp_path, monkeypatch, caplog
):
    """7 rows of 3 to 9 tokens, 11 pairs or 8 rows of classes, 4 at a time or 2: the last batch is no whole one."""

    def made(folder):
        if stage == "sft of unequal lengths":
            return supervised(folder, per_device_eval_batch_size=4)
        return resumable.make(getattr(resumable, stage), folder, per_device_eval_batch_size=4)

    whole, ours = made(tmp_path / "a"), made(tmp_path / "b")
    whole.evaluate()
    theirs = (kind for kind in type(ours).__mro__ if not kind.__module__.startswith("toolkit."))
    owner = next(kind for kind in theirs if "prediction_step" in vars(kind))  # TRL's own, or that of transformers
    step, sizes = owner.prediction_step, []

    def limited(self, model, inputs, *arguments, **named):
        sizes.append(len(inputs["input_ids"]) // (2 if isinstance(self, RewardTrainer) else 1))
        given = step(self, model, inputs, *arguments, **named)  # TRL's metrics are there already
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return given

    monkeypatch.setattr(owner, "prediction_step", limited)
    ours.evaluate()
    assert sizes[:3] == [4, 2, 2] and set(sizes[3:]) <= {1, 2}
    assert len(logged(whole)[-1]) >= 2 and logged(ours)[-1] == pytest.approx(logged(whole)[-1], rel=1e-4)
    assert sum("per_device_eval_batch_size is 2" in text for text in caplog.messages) == 1


class Recorder(TrainerCallback):
    def __init__(self, call):
        self.call = call

    def on_step_end(self, *arguments, **kwargs):
        self.call()


# ---------------------------------------------------------------------- two processes


def together(folder, what):
    """A run of two processes in which something happens to one of them."""
    ours = trainer(Path(folder) / str(processes.rank()), shared_base(), _Sometimes(2), max_steps=3)
    if what == "memory" and processes.rank() == 1:
        ours._backward_micro_batch = out_of_memory_above(1, ours._backward_micro_batch, 1)
    ours.train()
    weights = [p.detach().numpy() for role in ("policy", "value") for p in ours.roles.parameters_of(role)]
    return ours.skipped.total, ours.micro_batch.rows, ours.watch.given, weights


@pytest.mark.parametrize("what", ["scores", "memory"])
def test_all_processes_decide_the_same(what, two, tmp_path):
    one, other = two(together, tmp_path, what)
    assert one[:3] == other[:3] and one[0] == 1 and one[1] == (1 if what == "memory" else 4)
    assert all((a == b).all() for a, b in zip(one[3], other[3], strict=True))


def test_gradients_of_an_attempt_that_ran_out_of_memory_are_no_part_of_the_next(tmp_path, monkeypatch):
    expected = gradients(trainer(tmp_path / "a"), [0, 1, 2, 3])
    ours, read = trainer(tmp_path / "b"), ppo.response_values

    def limited(base, sequences):  # the policy has its gradient already
        if len(sequences.lengths) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return read(base, sequences)

    monkeypatch.setattr(ppo, "response_values", limited)
    found = gradients(ours, [0, 1, 2, 3])
    assert ours.micro_batch.rows == 2
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-5 * other.abs().max()


def test_a_judge_without_noise_may_fall():
    watch, even = Watch(), {**MEASURED, "judge_se": 0.0}
    watch.evaluated(0, even, ANSWERS, PROMPTS)
    (new,) = watch.evaluated(1, {**even, "score": 0.1, "judge": 0.5}, ANSWERS, PROMPTS)
    assert new["name"] == "judge_falls" and new["value"] == pytest.approx(1000)
