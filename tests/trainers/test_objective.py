"""The terms of an update, each against the formula written out on whole logits."""

import warnings
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig
from torch.distributions import Categorical, kl_divergence

from tests.tiny_models import lora, randomize, shared_base, tiny_model
from tests.tolerances import RELATIVE
from tests.trainers.helpers import PROMPTS, RESPONSES, SCORES, config, count_reward, rollout, trainer
from toolkit.data import PromptCollator, doubling
from toolkit.models import SharedBase, load_base
from toolkit.rewards import DenseScores
from toolkit.trainers import ppo
from toolkit.trainers.objective import ScoreShaper, describe, policy_objective


def base_with_a_copied_reference(adapter=lora):
    """The reference is a frozen adapter with dropout of its own, which must not be active in the update."""
    base = SharedBase(tiny_model())
    base.add_role("policy", adapter())
    base.add_role("reference", adapter(lora_dropout=0.5))
    base.add_role("value", lora())
    base.add_role("reward", lora())
    return randomize(base, "policy", "reference", "value", "reward")


def prepared(folder, base=None, **changes):
    """A trainer with an experience whose policy has moved since the rollout."""
    ours = trainer(folder, base or base_with_a_copied_reference(), **{"kl_coef": 0.3, "vf_coef": 0.0, **changes})
    ours._prepare_training()
    experience = ours._make_experience(rollout(RESPONSES), SCORES)
    ours._ratio_checked = True  # it is not 1 any more
    randomize(ours.roles, "policy", seed=2)
    with torch.no_grad():
        for parameter in ours.roles.parameters_of("policy"):
            parameter.mul_(0.9)
    return ours, experience


def gradient_of(ours, experience):
    ours.roles.train()
    metrics = ours._backward_mini_batch(experience, [0, 1, 2, 3])
    ours.roles.eval()
    return metrics, [p.grad.clone() for p in ours.roles.parameters_of("policy")]


def distributions(ours, role):
    """One `Categorical` for each response token, row by row, from the plain forward pass on unpadded rows."""
    found = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        ids = torch.tensor([prompt + response])
        with ours.roles.role(role):
            logits = ours.roles(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        found.append(logits / ours.args.temperature)
    return torch.cat(found)


def literal_objective(ours, experience, terms):
    """The clipped surrogate and one more term, written out; the KL and the entropy that are in it."""
    mask = experience.response_mask
    tokens = torch.tensor([token for row in RESPONSES for token in row])
    logits = distributions(ours, "policy")
    with torch.no_grad():
        reference = distributions(ours, "reference")
    policy, ref = Categorical(logits=logits), Categorical(logits=reference)
    new, old = policy.log_prob(tokens), experience.old_logprobs[mask]
    ratio, advantages = (new - old).exp(), experience.advantages[mask]
    loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
    log_r = ref.log_prob(tokens) - new
    kl = {
        "k2": lambda: (log_r**2 / 2).mean(),
        "k3": lambda: (log_r.exp() - 1 - log_r).mean(),
        "abs": lambda: log_r.abs().mean(),
        "full": lambda: kl_divergence(policy, ref).mean(),
        "full and entropy": lambda: kl_divergence(policy, ref).mean(),
    }
    parts = {"kl_loss": kl[terms]()} if terms in kl else {}
    parts |= {"token_entropy": policy.entropy().mean()} if "entropy" in terms else {}
    loss = loss + 0.3 * parts.get("kl_loss", 0.0) - 0.7 * parts.get("token_entropy", 0.0)
    return loss + (0.4 * (ratio - 1 - ratio.log()).mean() if terms == "old" else 0.0), parts


def assert_gradient_of_the_formula(ours, experience, terms):
    metrics, found = gradient_of(ours, experience)
    for parameter in ours.roles.parameters_of("policy"):
        parameter.grad = None
    loss, parts = literal_objective(ours, experience, terms)
    loss.backward()
    for parameter, ours_grad in zip(ours.roles.parameters_of("policy"), found, strict=True):
        assert (ours_grad - parameter.grad).abs().max() < RELATIVE * parameter.grad.abs().max()
    logged = {name: metrics[name] for name in ("kl_loss", "token_entropy") if name in metrics}
    assert logged == pytest.approx({name: part.item() for name, part in parts.items()}, rel=1e-4)


SETTINGS = {
    "none": {},
    "entropy": {"entropy_coef": 0.7},
    "old": {"old_policy_kl_coef": 0.4},
    **{name: {"kl_penalty_in": "loss", "kl_estimator": name} for name in ("k2", "k3", "abs", "full")},
    "full and entropy": {"kl_penalty_in": "loss", "kl_estimator": "full", "entropy_coef": 0.7},
}


@pytest.mark.parametrize("terms", SETTINGS)
def test_each_term_has_the_gradient_of_its_formula(terms, tmp_path):
    ours, experience = prepared(tmp_path, logprob_chunk_size=4, **SETTINGS[terms])
    assert len(RESPONSES) == ours.micro_batch.rows == 4
    for rows in (4, 1):
        ours.micro_batch.rows = rows
        assert_gradient_of_the_formula(ours, experience, terms)


def test_a_reference_with_a_part_on_lm_head_draws_nothing_in_the_update(tmp_path):
    """Its logits are made in the policy's pass, which is in training mode."""

    def on_lm_head(**dropout):
        return LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "lm_head"], **dropout)

    made = prepared(tmp_path, base_with_a_copied_reference(on_lm_head), **SETTINGS["full"])
    assert_gradient_of_the_formula(*made, "full")


def test_kl_stands_in_one_place_alone(tmp_path):
    _, in_reward = prepared(tmp_path, kl_estimator="k2")
    _, in_loss = prepared(tmp_path, kl_estimator="k2", kl_penalty_in="loss")
    torch.testing.assert_close(in_reward.kl, in_loss.kl)
    last = [(i, len(row) - 1) for i, row in enumerate(RESPONSES)]
    assert [in_loss.rewards[i, t].item() for i, t in last] == SCORES.tolist()
    assert in_loss.rewards.count_nonzero() == 4 < in_reward.rewards.count_nonzero()


def test_a_positive_entropy_coefficient_raises_the_entropy(tmp_path):
    entropies = {}
    for coefficient in (0.0, 1.0):
        ours = trainer(
            tmp_path, shared_base(), count_reward(7), entropy_coef=coefficient, kl_coef=0.0, learning_rate=1e-2,
            max_steps=6, num_ppo_epochs=2,
        )  # fmt: skip
        ours.train()
        batch = PromptCollator(0)([{"input_ids": PROMPTS[0], "number": 0}] * 64)
        torch.manual_seed(0)
        sampled = ours.generate(batch)
        entropies[coefficient] = -ours.rollouts.read(sampled, values=False).logprobs.sum() / sum(sampled.lengths)
    assert entropies[1.0] > entropies[0.0] + 0.05


def test_an_update_ends_where_kl_passes_its_limit(tmp_path):
    settings = {"learning_rate": 3e-2, "num_ppo_epochs": 6, "num_mini_batches": 2, "max_steps": 1}
    free = trainer(tmp_path, **settings)
    assert free.train()["optimizer_steps"] == 12
    ours = trainer(tmp_path, update_kl_limit=1e-3, **settings)
    steps = []
    original = ours._backward_mini_batch

    def recorded(experience, rows):
        found = original(experience, rows)
        steps.append((found["approx_kl"], [p.detach().clone() for p in ours.roles.parameters_of("policy")]))
        return found

    ours._backward_mini_batch = recorded
    metrics = ours.train()
    taken = int(metrics["optimizer_steps"])
    assert 1 <= taken < 12 and len(steps) == taken + 1
    assert steps[-1][0] > 1e-3 and all(kl <= 1e-3 for kl, _ in steps[1:-1])
    for at_the_last, now in zip(steps[-1][1], ours.roles.parameters_of("policy"), strict=True):
        assert torch.equal(at_the_last, now)  # the step that found it was not taken
    assert all(p.grad is None or not p.grad.any() for p in ours.roles.parameters_of("policy"))


def test_the_first_step_of_an_update_is_taken_in_any_case(tmp_path):
    """With active dropout its KL is not 0 either."""
    ours = trainer(tmp_path, update_kl_limit=1e-3, num_ppo_epochs=3, max_steps=1)
    original = ours._backward_mini_batch
    ours._backward_mini_batch = lambda *given: {**original(*given), "approx_kl": 9.0}
    assert ours.train()["optimizer_steps"] == 1


def test_the_coefficient_that_the_controller_has_reached_is_that_of_the_loss(tmp_path, monkeypatch):
    ours, seen = trainer(tmp_path, kl_penalty_in="loss", kl_estimator="k3", kl_target=0.5, max_steps=1), []
    ours.kl_coef = 0.75
    monkeypatch.setattr(
        ppo, "policy_objective", lambda *a, **named: seen.append(named["kl_coef"]) or policy_objective(*a, **named)
    )
    ours.train()
    assert seen and set(seen) == {0.75} and ours.args.kl_coef == 0.1


def test_what_ppo_maximises_is_logged_with_the_coefficient_that_the_controller_has_reached(tmp_path):
    ours, _ = prepared(tmp_path, kl_target=0.5, vf_coef=0.1)
    ours.kl_coef = 0.75
    stats = ours.step(next(iter(ours.dataloader)), rollout(RESPONSES), SCORES)
    assert stats["kl_coef"] == 0.75 and abs(stats["kl"]) > 0.01
    assert stats["rlhf_reward"] == pytest.approx(stats["score"] - 0.75 * stats["kl"], rel=1e-4)


def test_every_pass_divides_the_rows_anew(tmp_path):
    ours = trainer(tmp_path, num_ppo_epochs=3, num_mini_batches=2)
    parts = list(ours._mini_batches(9))
    passes = [parts[i] + parts[i + 1] for i in (0, 2, 4)]
    assert all(sorted(rows) == list(range(9)) for rows in passes) and len({tuple(rows) for rows in passes}) == 3
    torch.rand(1)  # as a callback draws
    assert list(ours._mini_batches(9)) == parts
    ours.state.global_step += 1
    assert not any(rows in parts for rows in ours._mini_batches(9))


def test_advantages_are_left_alone_if_asked(tmp_path):
    _, whitened = prepared(tmp_path)
    _, plain = prepared(tmp_path, whiten_advantages=False)
    mask = plain.response_mask
    torch.testing.assert_close(plain.advantages, plain.returns - plain.old_values)
    kept = plain.advantages[mask]
    torch.testing.assert_close(whitened.advantages[mask], (kept - kept.mean()) / kept.std(), rtol=1e-4, atol=1e-4)


def test_whitened_rewards_keep_their_mean(tmp_path):
    _, whitened = prepared(tmp_path, whiten_rewards=True)
    _, plain = prepared(tmp_path)
    given, kept = plain.rewards[plain.response_mask], whitened.rewards[whitened.response_mask]
    assert float(given.var()) != pytest.approx(1.0, rel=0.02) and float(given.mean()) != pytest.approx(0.0, abs=0.01)
    torch.testing.assert_close(kept, (given - given.mean()) / given.std() + given.mean(), rtol=1e-4, atol=1e-4)


def test_scores_are_scaled_by_all_that_were_seen(tmp_path):
    args = config(tmp_path, use_score_scaling=True, use_score_norm=True, score_clip=1.0)
    shaper = ScoreShaper(args)
    first, second = torch.tensor([1.0, 3.0]), torch.tensor([5.0, 7.0])
    expected = (first - 2.0) / 2**0.5
    torch.testing.assert_close(shaper(first), expected)
    everything = torch.tensor([1.0, 3.0, 5.0, 7.0])
    torch.testing.assert_close(shaper(second), ((second - 4.0) / everything.std()).clamp(-1, 1))
    again = ScoreShaper(args)
    again.moments = shaper.moments
    torch.testing.assert_close(again(first), shaper(first))
    plain = ScoreShaper(config(tmp_path, use_score_scaling=True))
    torch.testing.assert_close(plain(first), first / 2**0.5)
    assert torch.equal(ScoreShaper(config(tmp_path))(second), second)


def test_scores_are_logged_as_they_are_and_trained_on_as_shaped(tmp_path):
    ours, experience = prepared(tmp_path, score_clip=0.5, missing_eos_penalty=3.0, kl_coef=0.0, vf_coef=0.1)
    assert experience.scores.tolist() == [1.0, -1.0, 0.5, 2.0]
    assert experience.shaped_scores.tolist() == [0.5, -3.5, 0.5, 0.5]
    last = [experience.rewards[i, len(row) - 1].item() for i, row in enumerate(RESPONSES)]
    assert last == [0.5, -3.5, 0.5, 0.5]
    batch = next(iter(ours.dataloader))
    stats = ours.step(batch, rollout(RESPONSES), SCORES)
    assert stats["score"] == pytest.approx(0.625) and stats["shaped_score"] == pytest.approx(-0.5)
    assert stats["rlhf_reward"] == pytest.approx(-0.5)
    punished, _ = prepared(tmp_path, missing_eos_penalty=3.0, vf_coef=0.1)
    stats = punished.step(batch, rollout(RESPONSES), SCORES)
    assert stats["score"] == pytest.approx(0.625) and stats["shaped_score"] == pytest.approx(-0.125)
    plain, _ = prepared(tmp_path, vf_coef=0.1)
    assert "shaped_score" not in plain.step(batch, rollout(RESPONSES), SCORES)


@pytest.mark.parametrize("value", ["separate", "shared"])
def test_cut_responses_are_bootstrapped_from_the_value_role(value, tmp_path):
    settings = {"value": value, "gamma": 0.9, "lam": 0.8, "whiten_advantages": False}
    found = {}
    for way in ("terminal", "bootstrap"):
        ours = trainer(tmp_path, shared_base(value=value), truncated_as=way, **settings)
        ours._prepare_training()
        cut = replace(rollout(RESPONSES), ended=[True, False, False, True])  # of two lengths
        found[way] = ours._make_experience(cut, SCORES).advantages
    difference = found["bootstrap"] - found["terminal"]
    assert not difference[[0, 3]].any()  # they ended by themselves
    for row in (1, 2):
        with torch.no_grad(), ours.roles.role("value"):
            hidden = ours.roles.hidden_states(torch.tensor([PROMPTS[row] + RESPONSES[row]]), None)
            after = ours.roles.head("value")(hidden[0, -1]).item()
        assert abs(after) > 0.01
        last = len(RESPONSES[row]) - 1
        expected = [0.9 * after * (0.9 * 0.8) ** (last - t) for t in range(last + 1)]
        assert difference[row, : last + 1].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_a_score_of_a_whole_response_that_was_cut_is_warned_of_once(tmp_path):
    given = rollout(RESPONSES)  # the second alone was cut
    at_tokens = [[0.1] * len(ids) for ids in RESPONSES]
    cases = (
        ("bootstrap", SCORES, 1),
        ("bootstrap", DenseScores(scores=SCORES, tokens=at_tokens), 1),
        ("bootstrap", DenseScores(tokens=at_tokens), 0),
        ("bootstrap", torch.tensor([1.0, 0.0, 0.5, 2.0]), 0),
        ("terminal", SCORES, 0),
    )
    for way, scores, told in cases:
        ours = trainer(tmp_path, truncated_as=way)
        ours._learn = lambda *given: {"optimizer_steps": 0.0}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                ours.step({}, given, scores)
        said = [str(w.message) for w in caught if "truncated_as" in str(w.message)]
        assert len(said) == told and all("counted twice" in one and "Take terminal" in one for one in said)


def test_what_the_critic_explains_of_the_returns(tmp_path):
    """1 less the variance of what it is wrong by over that of the returns, each over all tokens of responses."""
    _, experience = prepared(tmp_path)
    mask = experience.response_mask
    returns, values = (of_all[mask].double().numpy() for of_all in (experience.returns, experience.old_values))
    expected = 1 - (returns - values).var() / returns.var()
    found = describe(experience, kl_coef=0.3, cap=None)["explained_variance"]
    assert expected < 0.99 and found == pytest.approx(expected, abs=1e-4)
    equal = experience._replace(returns=torch.full_like(experience.returns, 2.0))
    assert "explained_variance" not in describe(equal, kl_coef=0.3, cap=None)


def test_scores_that_are_one_number_are_seen_behind_a_penalty(tmp_path):
    ours, _ = prepared(tmp_path, missing_eos_penalty=1.0)
    for scores, tied in ((torch.zeros(4), 1.0), (SCORES, 0.25)):
        experience = ours._make_experience(rollout(RESPONSES), scores)
        assert experience.shaped_scores.unique().numel() == (2 if tied == 1 else 4)
        assert describe(experience, kl_coef=0.3, cap=None)["tied_share"] == tied
    alone = ours._make_experience(rollout(RESPONSES[:1], PROMPTS[:1]), SCORES[:1])
    assert describe(alone, kl_coef=0.3, cap=None)["tied_share"] == 0.0


def test_short_responses_are_punished(tmp_path):
    ours, experience = prepared(
        tmp_path, short_response_penalty=4.0, min_response_length=3, missing_eos_penalty=1.0, vf_coef=0.1
    )
    assert experience.shaped_scores.tolist() == [1.0, -2.0, 0.5, -2.0]  # lengths 3, 6 (cut), 4 and 2
    stats = ours.step({}, rollout(RESPONSES), SCORES)
    assert stats["length"] == 15 / 4 and "dropped_responses" not in stats  # punished, and learnt from
    alone, experience = prepared(tmp_path / "alone", short_response_penalty=4.0, min_response_length=3)
    assert experience.shaped_scores.tolist() == [1.0, -1.0, 0.5, -2.0]
    assert alone.step({}, rollout(RESPONSES), SCORES)["shaped_score"] == pytest.approx(-0.375)


def test_any_of_the_base_s_stop_tokens_ends_a_response(tmp_path):
    base = shared_base()
    base.checkpoint_stops = (3, 2)
    ours = trainer(tmp_path, base, count_reward(7))
    assert ours.roles.stop_token_ids(ours.processing_class) == [2, 3]
    asked = []

    def generated(ids, mask, generation, **_):
        asked.append(generation.eos_token_id)
        return torch.tensor([[5, 3, 2, 2], [5, 6, 7, 8], [2, 3, 0, 0], [9, 9, 9, 3]])

    base.generate = generated
    responses = ours.generate(PromptCollator(0)([{"input_ids": ids, "number": 0} for ids in PROMPTS]))
    assert asked == [[2, 3]]
    assert responses.response_ids == [[5, 3], [5, 6, 7, 8], [2], [9, 9, 9, 3]]
    five, six, seven, eight, nine = ours.processing_class.batch_decode([[5], [6], [7], [8], [9]])
    assert responses.responses == [five, five + six + seven + eight, "", 3 * nine]  # 3 is no special token
    assert responses.ended == [True, False, True, True]
    base.checkpoint_stops = ()
    assert base.stop_token_ids(ours.processing_class) == [2]


def test_tokens_that_end_a_response_by_the_settings_of_generation_alone(tmp_path):
    """As in chat models whose config.json knows the end of a text and generation_config.json the end of a turn."""
    model = tiny_model()
    model.config.eos_token_id, model.generation_config.eos_token_id = 7, [7, 9]
    model.save_pretrained(tmp_path)
    base = SharedBase(load_base(str(tmp_path), dtype="float32"))
    assert base.checkpoint_stops == (7, 9)
    assert base.stop_token_ids(doubling.tokenizer()) == [2, 7, 9]
    assert base.causal_lm.generation_config.eos_token_id == 7  # nothing else of the checkpoint's settings is left


@pytest.mark.parametrize("high", [None, 0.02])
def test_the_ratio_has_a_range_of_its_own(high, tmp_path):
    """Not that of the values, which is another in most recipes."""
    ours, experience = prepared(tmp_path, cliprange=0.05, cliprange_high=high, cliprange_value=9.0)
    tokens = torch.tensor([token for row in RESPONSES for token in row])
    with torch.no_grad():
        new = Categorical(logits=distributions(ours, "policy")).log_prob(tokens)
    mask = experience.response_mask
    ratio, gain = (new - experience.old_logprobs[mask]).exp(), experience.advantages[mask]
    expected = float(torch.max(-gain * ratio, -gain * ratio.clamp(0.95, 1 + (high or 0.05))).mean())
    found, _ = gradient_of(ours, experience)
    assert found["policy_loss"] == pytest.approx(expected, rel=1e-4) and found["clip_fraction"] > 0
    assert found["ratio"] == pytest.approx(float(ratio.mean()), rel=1e-4)
    assert float((-gain * ratio).mean()) != pytest.approx(expected, rel=1e-2)


def test_logits_exist_of_as_many_tokens_as_the_setting_says(tmp_path):
    ours, experience = prepared(tmp_path, logprob_chunk_size=2)
    tokens = []
    ours.roles.lm_head.register_forward_pre_hook(lambda _, given: tokens.append(given[0].shape[:-1].numel()))
    ours.rollouts.read(rollout(RESPONSES))
    read = len(tokens)
    gradient_of(ours, experience)
    assert 0 < read < len(tokens) and max(tokens) == 2


def test_figures_of_a_rollout_by_hand(tmp_path):
    _, experience = prepared(tmp_path, missing_eos_penalty=3.0)
    found, mask = describe(experience, kl_coef=0.3, cap=None), experience.response_mask
    kl = float((experience.old_logprobs - experience.ref_logprobs)[mask].double().sum()) / 4
    assert abs(kl) > 0.01 and found["kl"] == pytest.approx(kl, rel=1e-4)
    assert found["rlhf_reward"] == pytest.approx((1.0 - 4.0 + 0.5 + 2.0) / 4 - 0.3 * kl, rel=1e-4)  # the second is cut
    assert (found["eos_share"], found["length"], found["tied_share"]) == (0.75, 15 / 4, 0.25)
    assert found["score_se"] == pytest.approx(float(SCORES.std()) / 2)


def test_a_part_of_the_policy_on_lm_head_learns(tmp_path):
    def on_lm_head(**dropout):
        return LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "lm_head"], **dropout)

    assert_gradient_of_the_formula(*prepared(tmp_path, base_with_a_copied_reference(on_lm_head)), "none")
