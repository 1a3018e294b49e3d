"""What limits a response, and what becomes of the responses before the update."""

import itertools
import math
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from peft import LoraConfig
from transformers import set_seed

from tests.tiny_models import lora, randomize, saved_base, shared_base, tiny_model
from tests.trainers.helpers import PROMPTS, config, count_reward, dataset, rollout, same, trainer, weights
from toolkit import processes
from toolkit.data import PromptCollator, concatenate, doubling
from toolkit.errors import ConfigError, DataError
from toolkit.models import SharedBase
from toolkit.rewards import WeightedSum
from toolkit.trainers import self_checks
from toolkit.trainers.ppo import PPOTrainer
from toolkit.trainers.ppo_config import GREEDY_ROLLOUTS

BATCH = [{"input_ids": ids, "number": i} for i, ids in enumerate(PROMPTS)]  # of 4, 6, 3 and 5 tokens


def test_prompt_and_response_together_have_a_limit(tmp_path):
    ours = trainer(tmp_path, reward=count_reward(7), max_length=8, response_length=4)
    asked = []

    def generated(ids, mask, generation, **_):
        asked.append(generation.max_new_tokens)
        return torch.tensor([[5, 6, 7, 8], [9, 9, 2, 0], [9, 9, 9, 2], [5, 5, 2, 0]])

    ours.roles.generate = generated
    found = ours.generate(PromptCollator(0)(BATCH))
    assert asked == [4]
    # Room for 4, 2, 5 (but no more than response_length) and 3: the second row's end comes one token too late.
    assert found.response_ids == [[5, 6, 7, 8], [9, 9], [9, 9, 9, 2], [5, 5, 2]]
    assert found.ended == [False, False, True, True]
    assert found.responses[1] == doubling.tokenizer().decode([9, 9])


def test_no_more_is_generated_than_the_longest_limit(tmp_path):
    ours = trainer(tmp_path, reward=count_reward(7), max_length=8, response_length=100)
    lengths = []
    original = ours.roles.generate

    def generate(*args, **named):
        output = original(*args, **named)
        lengths.append(output.shape[1])
        return output

    ours.roles.generate = generate
    ours.roles.stop_token_ids = lambda tokenizer: [41]  # hardly ever
    found = ours.generate(PromptCollator(0)(BATCH))
    assert lengths == [5] and [len(p) + len(r) for p, r in zip(PROMPTS, found.response_ids, strict=True)] == [8] * 4
    assert ours.train()["length"] <= 5


def test_a_prompt_that_no_response_could_follow_is_refused_before_anything_is_trained(tmp_path):
    """Met when it is drawn, it would end a run that could not go on with other prompts."""
    base = shared_base()
    positions, _ = base.positions
    long = Dataset.from_dict({"input_ids": [[1] * positions]})
    for asked, held_out in ((concatenate_datasets([dataset(1), long]), None), (dataset(1), long)):
        with pytest.raises(
            DataError, match=f"a prompt has {positions} tokens, and the base has positions for {positions}"
        ):
            PPOTrainer(config(tmp_path), doubling.tokenizer(), base, count_reward(7), asked, held_out, callbacks=[])
    nearly = Dataset.from_dict({"input_ids": [*PROMPTS[:3], [1] * (positions - 2)]})
    args = config(tmp_path, min_response_length=4, drop_short_responses=True)
    said = "min_response_length: 4 is more than the 2 tokens that the base's positions leave .* the prompts by 2 tokens"
    with pytest.raises(DataError, match=said):
        PPOTrainer(args, doubling.tokenizer(), base, count_reward(7), nearly, callbacks=[])


def test_a_prompt_without_room_is_refused(tmp_path):
    said = "max_length: a prompt has 6 tokens, and 6 leaves no room for a response. Shorten the prompts to 5 tokens"
    with pytest.raises(DataError, match=said):
        trainer(tmp_path, max_length=6)
    short = dataset().filter(lambda ids: len(ids) < 6, input_columns="input_ids")
    arguments = config(tmp_path, max_length=6), doubling.tokenizer(), shared_base(), count_reward(7), short
    with pytest.raises(DataError, match=said):
        PPOTrainer(*arguments, dataset(1), callbacks=[])  # held-out prompts are answered, too
    with pytest.raises(DataError, match=said):
        PPOTrainer(*arguments, callbacks=[]).best_of(dataset(1), 2)


def test_greedy_rollouts_are_allowed_and_warned_about_once(tmp_path):
    ours = trainer(tmp_path, reward=count_reward(7), rollout_do_sample=False, max_steps=3)
    batch = PromptCollator(0)(BATCH)
    first = ours.generate(batch)
    assert first.response_ids == ours.generate(batch).response_ids == ours.generate(batch, do_sample=False).response_ids
    with torch.no_grad(), ours.roles.role("policy"):
        for prompt, response in zip(PROMPTS, first.response_ids, strict=True):
            logits = ours.roles(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(dim=-1).tolist() == response
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours.train()
        ours.train()
    said = [str(w.message) for w in caught if "rollout_do_sample" in str(w.message)]
    assert said == [GREEDY_ROLLOUTS.text()] and "nothing is explored" in said[0]
    many = ours.best_of(dataset(1), 8).candidates.response_ids  # samples, as its name says
    assert any(len({tuple(ids) for ids in many[8 * i : 8 * i + 8]}) > 1 for i in range(4))


def test_sampled_rollouts_warn_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*rollout_do_sample")
        trainer(tmp_path, reward=count_reward(7), max_steps=1).train()


RESPONSES = [[12, 13, 2], [2], [20, 30, 21, 2], [2]]
SCORES = torch.tensor([1.0, 50.0, 0.5, -50.0])
DROP = {"drop_short_responses": True, "min_response_length": 2}


def test_short_responses_are_dropped_as_if_they_had_never_been(tmp_path):
    dropped, alone = (trainer(tmp_path, shared_base(), use_score_scaling=True, **settings) for settings in (DROP, {}))
    for ours, rows in ((dropped, [0, 1, 2, 3]), (alone, [0, 2])):
        torch.manual_seed(0)
        answers = rollout([RESPONSES[i] for i in rows], [PROMPTS[i] for i in rows])
        ours.stats = ours.step({}, answers, SCORES[rows])
    expected = {**alone.stats, "dropped_responses": 2.0}
    assert dropped.stats == pytest.approx(expected)
    assert dropped.stats["score"] == 0.75 and dropped.stats["length"] == 3.5
    assert same(weights(alone), weights(dropped))
    assert dropped.state.episode == 4  # all of them were answered and scored


def test_parts_of_a_sum_are_logged_of_the_rows_that_are_learnt_from(tmp_path):
    both = WeightedSum({"length": lambda r: r.lengths, "one": lambda r: [1.0] * len(r)})
    ours, answers = trainer(tmp_path, shared_base(), both, **DROP), rollout(RESPONSES)
    stats = ours.step({}, answers, ours.score({}, answers))
    assert (stats["score/length"], stats["score/one"], stats["score"]) == (3.5, 1.0, 4.5)


def test_what_is_left_is_divided_into_mini_batches(tmp_path):
    ours = trainer(tmp_path, shared_base(), num_mini_batches=4, num_ppo_epochs=2, **DROP)
    seen = []
    original = ours._backward_mini_batch
    ours._backward_mini_batch = lambda experience, rows: seen.append(sorted(rows)) or original(experience, rows)
    assert ours.step({}, rollout(RESPONSES), SCORES)["optimizer_steps"] == 4
    assert [sorted(seen[:2]), sorted(seen[2:])] == [[[0], [1]]] * 2
    sizes = [len(part) for part in ours._mini_batches(7)]
    assert sorted(sizes[:4]) == [1, 2, 2, 2] and sum(sizes) == 14


def test_an_update_with_nothing_left_changes_nothing_and_says_so(tmp_path):
    ours = trainer(tmp_path, shared_base(), kl_target=6.0, **DROP)
    ours._prepare_training()
    before = weights(ours)
    with pytest.warns(UserWarning) as told:
        stats = ours.step({}, rollout([[2]] * 4), torch.ones(4))
    (one,) = told  # and nothing of torch's, of an optimizer that has taken no step
    assert str(one.message).startswith("all responses of an update were shorter than min_response_length")
    assert stats == {"kl_coef": 0.1, "optimizer_steps": 0.0, "dropped_responses": 4.0, "learning_rate": 1e-3}
    assert same(before, weights(ours))
    assert ours.state.global_step == 1 and ours.state.episode == 4
    assert ours.step({}, rollout(RESPONSES), SCORES)["optimizer_steps"] == 1


def test_an_update_is_from_all_rollouts_that_were_gathered(tmp_path):
    """Three batches of four an update, from passes of four batches: the second update takes two of the next pass."""
    settings = {"rollouts_per_update": 3, "num_mini_batches": 2, "num_ppo_epochs": 2, "max_steps": 3}
    found, metrics, numbers = [], [], []
    for by_hand in (False, True):
        set_seed(0)
        torch.manual_seed(0)
        ours = trainer(tmp_path, shared_base(fresh=True), **settings)
        if by_hand:
            batches = itertools.chain.from_iterable(ours.dataloader for _ in itertools.count())
            for _ in range(3):
                gathered = [next(batches) for _ in range(3)]
                responses = [ours.generate(batch) for batch in gathered]
                scores = torch.cat([ours.score(*both) for both in zip(gathered, responses, strict=True)])
                metrics.append(ours.step({}, concatenate(responses), scores))
                numbers += [n for batch in gathered for n in batch["columns"]["number"]]
        else:
            metrics.append(ours.train())
        assert ours.state.episode == 36 and ours.state.epoch == 36 / 16
        found.append(weights(ours))
    assert sorted(numbers[:16]) == sorted(numbers[16:32]) == list(range(16))
    assert metrics[0].items() >= metrics[-1].items() and metrics[0]["optimizer_steps"] == 4
    assert same(*found)


def test_a_loop_that_gives_one_rollout_of_several_is_told(tmp_path):
    ours = trainer(tmp_path, shared_base(), rollouts_per_update=3)
    batch = next(iter(ours.batches()))
    responses = ours.generate(batch)
    with pytest.warns(UserWarning, match="an update of 4 responses, where rollouts_per_update makes it 12: .* Join"):
        ours.step(batch, responses, ours.score(batch, responses))


def test_an_update_may_take_more_than_a_pass_and_logs_parts_over_all(tmp_path):
    lengths = []

    def length(r):
        lengths.extend(r.lengths)
        return r.lengths

    both = WeightedSum({"length": length, "one": lambda r: [1.0] * len(r)}, {"one": 0.0})
    ours = trainer(tmp_path, shared_base(), both, rollouts_per_update=5, sample_with_replacement=True, max_steps=1)
    metrics = ours.train()
    assert len(lengths) == 20 and ours.state.global_step == 1
    assert metrics["score/length"] == metrics["score"] == pytest.approx(sum(lengths) / 20)


def test_the_number_of_updates_counts_all_prompts_of_one(tmp_path):
    args = config(tmp_path, rollouts_per_update=3, max_steps=-1, total_episodes=50)
    assert (args.rollout_batch_size, args.update_batch_size, args.number_of_updates(100)) == (4, 12, 5)  # as TRL rounds
    assert config(tmp_path, rollouts_per_update=3, num_mini_batches=6).num_mini_batches == 6
    with pytest.raises(ValueError, match=r"a batch of 12 .* × rollouts_per_update\) cannot be divided into 5"):
        config(tmp_path, rollouts_per_update=3, num_mini_batches=5)
    with pytest.raises(ValueError, match="rollouts_per_update — must be at least 1, got 0"):
        config(tmp_path, rollouts_per_update=0)


def test_tokens_weigh_what_the_update_finds_likelier_than_the_sampler_did(tmp_path):
    """By hand: a rollout that says that its tokens were drawn with half, the same and three times the probability."""
    plain = trainer(tmp_path / "plain", reward=count_reward(7))
    ours = trainer(tmp_path / "ours", reward=count_reward(7), importance_sampling_cap=1.5)
    batch = next(iter(ours.dataloader))
    made = ours.generate(batch)
    scores = ours.score(batch, made)
    without = plain._make_experience(made, scores)
    factors = [[(0.5, 1.0, 3.0)[i % 3] for i in range(length)] for length in made.lengths]
    drawn = [
        [old + math.log(factor) for old, factor in zip(of_row.tolist(), row, strict=False)]
        for of_row, row in zip(without.old_logprobs, factors, strict=True)
    ]
    experience = ours._make_experience(replace(made, sampler_logprobs=drawn), scores)
    for row, given in enumerate(factors):
        weights = torch.tensor([min(1 / factor, 1.5) for factor in given])
        expected = without.advantages[row, : len(given)] * weights
        torch.testing.assert_close(experience.advantages[row, : len(given)], expected)
    assert torch.equal(experience.returns, without.returns)
    metrics = ours.step(batch, replace(made, sampler_logprobs=drawn), scores)
    flat = [factor for row in factors for factor in row]
    assert metrics["capped_share"] == pytest.approx(sum(factor == 0.5 for factor in flat) / len(flat))
    assert metrics["sampler_gap"] == pytest.approx(sum(abs(math.log(x)) for x in flat) / len(flat), rel=1e-4)
    of_numpy = ours._make_experience(replace(made, sampler_logprobs=[np.array(row) for row in drawn]), scores)
    assert of_numpy.sampler_logprobs.dtype == torch.float32  # numpy's are float64
    shorter = [row[:1] for row in drawn]  # of other tokens than it has
    for unknown in ((), shorter):
        with pytest.raises(DataError, match="does not say with which probabilities"):
            ours.step(batch, replace(made, sampler_logprobs=unknown), scores)
    metrics = plain.step(batch, replace(made, sampler_logprobs=()), scores)
    assert "sampler_gap" not in metrics and "capped_share" not in metrics


def test_merged_rollouts_in_16_bits_train_and_say_how_far_they_are_from_the_update(tmp_path, monkeypatch):
    def run(generation):
        base = saved_base(tmp_path / "model", "bfloat16", kind=False)
        for role, adapter in (("policy", lora()), ("reference", None), ("value", lora())):
            base.add_role(role, adapter)
        randomize(base, "policy", "value")
        base.train_roles("policy", "value")
        ours = trainer(
            tmp_path / generation, base, count_reward(7), bf16=True, generation=generation, eval_do_sample=True
        )
        batch = next(iter(ours.dataloader))
        torch.manual_seed(0)
        made = ours.generate(batch)
        return ours, ours.step(batch, made, ours.score(batch, made)), made

    _, eager, by_eager = run("eager")
    ours, merged, by_merged = run("merged")
    assert merged["sampler_gap"] != eager["sampler_gap"] and 0 < merged["sampler_gap"] < 0.5
    assert by_merged.sampler_logprobs != by_eager.sampler_logprobs
    evaluated = ours.evaluate_rollout(ours.train_dataset).rollout.sampler_logprobs
    monkeypatch.setattr(ours.args, "generation", "eager")
    assert evaluated and ours.evaluate_rollout(ours.train_dataset).rollout.sampler_logprobs == evaluated
    unpacked = ours.roles.unpacked
    monkeypatch.setattr(ours.roles, "unpacked", lambda *, merged: unpacked(merged=True))
    assert ours.evaluate_rollout(ours.train_dataset).rollout.sampler_logprobs != evaluated


def test_merged_generation_needs_layers_and_memory(tmp_path, monkeypatch):
    on_embeddings = SharedBase(tiny_model())
    for role, adapter in (("policy", LoraConfig(r=2, target_modules=["embed_tokens"])), ("reference", None)):
        on_embeddings.add_role(role, adapter)
    on_embeddings.add_role("value", lora())
    on_embeddings.add_role("reward", lora())
    on_embeddings.train_roles("policy", "value")
    with pytest.raises(ConfigError, match="generation: merged finds no layer .* Take eager"):
        trainer(tmp_path, on_embeddings, generation="merged")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000, total=2**40))
    too_little = r"generation: merged needs .* GB for a copy .* 1e-06 GB are free\. Take eager"
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=too_little):
        patch.setattr("toolkit.models.roles.merged_forward", lambda *given: pytest.fail("copied before it was asked"))
        trainer(tmp_path, generation="merged")
    base = shared_base()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1.5 * base.merged_bytes, total=0))
    self_checks.check_room_to_merge(base)
    monkeypatch.setattr(processes.exchange, "count", lambda: 4)
    with pytest.raises(ConfigError, match=r"for a copy of the weights in each of 4 processes, and"):
        self_checks.check_room_to_merge(base)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # of four machines
    self_checks.check_room_to_merge(base)


def test_draws_cannot_be_weighed_where_nothing_is_drawn(tmp_path):
    with pytest.raises(ConfigError, match="importance_sampling_cap — needs sampled rollouts"):
        config(tmp_path, importance_sampling_cap=2.0, rollout_do_sample=False)


def test_a_response_of_just_the_minimum_is_learnt_from(tmp_path):
    ours = trainer(tmp_path, shared_base(), **DROP)
    stats = ours.step({}, rollout([[12, 2], [2], [20, 21, 2], [5, 2]]), SCORES)
    assert stats["dropped_responses"] == 1.0 and stats["length"] == pytest.approx(7 / 3)
