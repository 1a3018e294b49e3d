"""The q trainer on tiny models through the shared base."""

import itertools
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from tests.tiny_models import VOCABULARY, lora, tiny_model
from toolkit.data import Rollout, doubling
from toolkit.errors import ConfigError, DataError, ModelError, ToolkitError
from toolkit.models import QBound, Sequences, SharedBase, add_q_roles, load_role, response_q, tensors_digest
from toolkit.trainers.q_config import QConfig
from toolkit.trainers.q_learning import QTrainer, check_returns

EOS, A, B = 2, 5, 9
PROMPTS = [[1, 20, 21], [1, 30, 31, 32, 33]]
SETTINGS = {
    "per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-2, "response_length": 4, "report_to": "none",
    "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "lowest_return": -2.0,
}  # fmt: skip


def rows(copies=1):
    """Every response of up to three tokens of A, B and EOS, with a reward at some tokens, another for each prompt."""
    found = []
    for sign, prompt in zip((1.0, -1.0), PROMPTS, strict=True):
        for response in itertools.product((A, B, EOS), repeat=3):
            end = response.index(EOS) + 1 if EOS in response else 3
            if all(token == EOS for token in response[end:]):
                taken = list(response[:end])
                rewards = [None if t == 0 and end > 1 else reward(sign, taken[: t + 1]) for t in range(end)]
                found.append({"prompt_ids": prompt, "response_ids": taken, "rewards": rewards, "ended": True})
    return found * copies


def reward(sign, taken):
    """From −0.75 to 0.75; a zero for what ends at once."""
    return 0.0 if taken == [EOS] else sign * (sum((i + 1) * token for i, token in enumerate(taken)) % 7 - 3) / 4


def exact(gamma, coef=0.0, lowest=-2.0, vocabulary=VOCABULARY):
    """Q by plain recursion over the rows."""
    table = {}
    for t in (2, 1, 0):
        held, seen = {}, {}
        for row in rows():
            taken, rewards = row["response_ids"], row["rewards"]
            if t < len(taken):
                state = (tuple(row["prompt_ids"]), tuple(taken[:t]))
                rest = 0.0
                if t + 1 < len(taken):
                    following = (state[0], tuple(taken[: t + 1]))
                    rest = max(value for (s, _), value in table.items() if s == following)
                y = rest if rewards[t] is None else rewards[t] + gamma * rest
                held.setdefault((state, taken[t]), []).append(y)
                seen[state] = seen.get(state, 0) + 1
        for (state, token), ys in held.items():
            pull = coef * (seen[state] - len(ys)) / (vocabulary - 1)
            table[state, token] = (sum(ys) + pull * lowest) / (len(ys) + pull)
    return table


def q_roles(*, bound=None, dropout=0.0):
    base = SharedBase(tiny_model())
    torch.manual_seed(0)
    add_q_roles(base, lora(8, lora_dropout=dropout), bound=bound)
    base.add_role("reference")
    return base


def make(folder: Path, base=None, data=None, **changes):
    def score(rollout: Rollout):
        return [float(len(ids)) for ids in rollout.response_ids]

    base = base or q_roles()
    prompts = Dataset.from_dict({"input_ids": PROMPTS, "name": ["one", "two"]})
    data = Dataset.from_list(rows()) if data is None else data
    bounds = {"highest_return": 2.0} if changes.get("bound") == "sigmoid" else {}
    args = QConfig(output_dir=str(folder), **{**SETTINGS, **bounds, **changes})
    metrics = {"metrics": lambda rollout: {"named": float(rollout.columns["name"] == ["one", "two"])}}
    return QTrainer(args, doubling.tokenizer(), base, data, prompts, reward=score, callbacks=[], **metrics)


def test_logits_exist_of_as_many_tokens_as_the_setting_says(tmp_path):
    made, tokens = make(tmp_path, q_chunk_size=3, max_steps=1), []
    made.roles.lm_head.register_forward_pre_hook(lambda _, given: tokens.append(given[0].shape[:-1].numel()))
    made.train()
    assert tokens and max(tokens) <= 3
    rollout = made.evaluate_rollout(made.eval_dataset).rollout
    tokens.clear()
    made.rollouts.measured()[1](rollout)
    assert tokens and max(tokens) <= 3
    made.args.q_chunk_size = 500
    made.rollouts.measured()[1](rollout)
    assert max(tokens) > 3


def test_it_learns_the_fixed_point_and_its_best_answers(tmp_path):
    settings = {
        "max_steps": 200, "per_device_train_batch_size": 30, "gamma": 0.9, "target_decay": 0.9, "bound": "sigmoid",
        "monte_carlo_bound": False, "conservative_coef": 0.5, "logging_steps": 100, "lr_scheduler_type": "cosine",
        "q_chunk_size": 500,
    }  # fmt: skip
    made = make(tmp_path, q_roles(bound=QBound(lowest=-2.0, highest=2.0, bias=0.0)), **settings)
    made.train()
    expected = exact(0.9, 0.5)
    differences = []
    for row in rows():
        sequences = Sequences.from_ids([row["prompt_ids"]], [row["response_ids"]], pad_token_id=0)
        with made.roles.role("q"), torch.no_grad():
            found = response_q(made.roles, sequences).q[0]
        for t, token in enumerate(row["response_ids"]):
            state = (tuple(row["prompt_ids"]), tuple(row["response_ids"][:t]))
            differences.append(abs(float(found[t]) - expected[state, token]))
    # A network shares its weights between states: near, where a table is exact (tests/functional/test_q_learning.py).
    assert max(differences) < 0.2 and sum(differences) / len(differences) < 0.1, differences
    _, rollout, *_ = made.evaluate_rollout(made.eval_dataset)  # greedy answers are the best that the data can be put to
    for prompt, answer in zip(PROMPTS, rollout.response_ids, strict=True):
        best = []
        while (tuple(prompt), tuple(best)) in {state for state, _ in expected}:
            state = (tuple(prompt), tuple(best))
            best.append(max((A, B, EOS), key=lambda token: expected[state, token]))
            if best[-1] == EOS:
                break
        assert list(answer)[: len(best)] == best


def weights(made):
    return {name: p.detach().clone() for name, p in made.roles.named_parameters() if ".q" in name or "heads" in name}


def test_the_micro_batch_changes_nothing(tmp_path):
    """One optimizer step from all rows: the means are over the tokens of the batch, not means of means."""
    settings = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0}
    whole = make(tmp_path, per_device_train_batch_size=30, **settings)
    start = weights(whole)
    whole.train()
    parts = make(tmp_path, per_device_train_batch_size=5, gradient_accumulation_steps=6, **settings)
    parts.train()
    moved = 0.0
    for name, value in weights(whole).items():
        torch.testing.assert_close(value, weights(parts)[name], rtol=1e-3, atol=1e-5)
        moved = max(moved, float((value - start[name]).abs().max()))
    assert moved > 1e-3


def test_the_target_is_the_average_of_the_steps(tmp_path):
    made = make(tmp_path, max_steps=3, target_decay=0.75)
    online, target = [], [p.clone() for p in made.roles.parameters_of("q_target")]
    made.add_callback(_Each(lambda: online.append([p.detach().clone() for p in made.roles.parameters_of("q")])))
    made.train()
    assert len(online) == 3
    for now in online:
        target = [0.75 * t + 0.25 * p for t, p in zip(target, now, strict=True)]
    for ours, expected in zip(made.roles.parameters_of("q_target"), target, strict=True):
        torch.testing.assert_close(ours.detach(), expected.detach(), rtol=1e-4, atol=1e-6)


def test_the_frozen_rest_stays_and_checkpointing_changes_no_gradient(tmp_path):
    base = q_roles(bound=QBound(lowest=-2.0, highest=2.0))
    frozen = {name: p.clone() for name, p in base.named_parameters() if ".q." not in name and "q_target" not in name}
    assert any("embed_tokens" in name for name in frozen)
    made = make(tmp_path, base, bound="sigmoid", gradient_checkpointing=True)
    made.train()
    changed = [n for n, p in base.named_parameters() if n in frozen and not torch.equal(p, frozen[n])]
    assert changed == [] and float(base.heads["q"].bias.detach()) != -5.0 != float(base.heads["q_target"].bias)
    plain = make(tmp_path, q_roles(bound=QBound(lowest=-2.0, highest=2.0)), bound="sigmoid")
    plain.train()
    for ours, theirs in zip(base.parameters_of("q"), plain.roles.parameters_of("q"), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-3, atol=1e-5)


def test_logs_add_up_over_micro_batches(tmp_path):
    """The parts of the loss are those that were minimised, and Q and targets means over the tokens of a batch."""
    one = make(tmp_path, per_device_train_batch_size=30, max_steps=1, learning_rate=0.0, conservative_coef=0.5)
    one.train()
    many = make(
        tmp_path, per_device_train_batch_size=5, gradient_accumulation_steps=6, max_steps=1, learning_rate=0.0,
        conservative_coef=0.5,
    )  # fmt: skip
    many.train()
    first, second = one.state.log_history[0], many.state.log_history[0]
    for name in ("td_loss", "conservative_loss", "q", "q_target", "loss"):
        assert second[name] == pytest.approx(first[name], rel=1e-3), name
    assert first["td_loss"] + 0.5 * first["conservative_loss"] == pytest.approx(first["loss"], rel=1e-4)


def test_logs_are_means_over_steps_where_a_pass_does_not_divide(tmp_path):
    """30 rows are ten micro-batches: two steps of four and one of two, each a mean over its own tokens."""
    made = make(
        tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=4, max_steps=3, learning_rate=0.0,
        conservative_coef=0.5, logging_steps=3,
    )  # fmt: skip
    made.train()
    logged = made.state.log_history[0]
    assert logged["step"] == 3
    assert logged["td_loss"] + 0.5 * logged["conservative_loss"] == pytest.approx(logged["loss"], rel=1e-4)


def test_evaluation_has_ppos_keys(tmp_path):
    made = make(tmp_path, eval_strategy="steps", eval_steps=1, max_steps=1)
    made.train()
    logged = next(row for row in made.state.log_history if "eval_score" in row)
    keys = {"eval_score", "eval_score_se", "eval_kl", "eval_length", "eval_eos_share", "eval_named"}
    assert keys <= logged.keys() and logged["eval_named"] == 1.0 and logged["eval_length"] == logged["eval_score"]
    assert logged["eval_kl"] > 0
    sampled = make(tmp_path, decoding="sample", decoding_temperature=1e5)
    metrics, rollout, *_ = sampled.evaluate_rollout(sampled.eval_dataset)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-2)
    again, same, *_ = sampled.evaluate_rollout(sampled.eval_dataset)
    assert same.response_ids == rollout.response_ids and again == metrics
    before, *_ = sampled.evaluate_rollout(sampled.eval_dataset, by_q=False)
    assert before["kl"] == 0.0 and before.keys() == metrics.keys()


def test_best_of_takes_the_highest_score(tmp_path):
    made = make(tmp_path, decoding="sample", decoding_temperature=5.0)
    torch.manual_seed(0)
    found = made.best_of([{"input_ids": p, "name": "x"} for p in PROMPTS], 5)
    lengths = torch.tensor(found.candidates.lengths).view(2, 5)
    assert found.scores.tolist() == lengths.tolist() and found.best.lengths == lengths.max(dim=1).values.tolist()
    with pytest.raises(ToolkitError, match="decoding: it is greedy, so that all .* are the same. Set it to sample"):
        make(tmp_path).best_of([{"input_ids": PROMPTS[0], "name": "x"}], 2)


def test_what_is_saved_is_what_is_loaded(tmp_path):
    made = make(tmp_path, q_roles(bound=QBound(lowest=-2.0, highest=2.0)), bound="sigmoid")
    made.train()
    made.save_model(str(tmp_path / "saved"))
    base = SharedBase(tiny_model())
    for role in ("q", "q_target"):
        load_role(base, role, tmp_path / "saved" / role)
        assert tensors_digest(base.parameters_of(role)) == tensors_digest(made.roles.parameters_of(role))


def test_a_cut_response_goes_on_where_the_recipe_says_so(tmp_path):
    """One response of one token, without an end: its target is its reward, or that and γ times what the state holds."""
    row = {"prompt_ids": PROMPTS[0], "response_ids": [A], "rewards": [0.5], "ended": False}
    data = Dataset.from_list([row] * 4)
    settings = {"max_steps": 1, "learning_rate": 0.0, "conservative_coef": 0.0, "gamma": 0.5}
    settings |= {"lowest_return": 0.0}
    over = make(tmp_path, data=data, **settings)
    over.train()
    assert over.state.log_history[0]["q_target"] == pytest.approx(0.5)
    on = make(tmp_path, data=data, truncated_as="bootstrap", **settings)
    on.train()
    with on.roles.role("q_target"), torch.no_grad():
        after = on.roles.causal_lm(input_ids=torch.tensor([[*PROMPTS[0], A]])).logits[0, -1].max()
    assert on.state.log_history[0]["q_target"] == pytest.approx(0.5 + 0.5 * float(after), rel=1e-3)
    # Where less than its reward is to come, it is not lifted to what it got, as a response that is over would be.
    bounds = {"bound": "sigmoid", "lowest_return": -2.0, "highest_return": -1.0}
    base, data = q_roles(bound=QBound(lowest=-2.0, highest=-1.0)), Dataset.from_list([row | {"rewards": [-1.5]}] * 4)
    on = make(tmp_path, base, data=data, truncated_as="bootstrap", **settings | bounds)
    on.train()
    with base.role("q_target"), torch.no_grad():
        after = base.causal_lm(input_ids=torch.tensor([[*PROMPTS[0], A]])).logits[0, -1].max()
    # With what is to come it would be below what any Q can be.
    assert -1.5 + 0.5 * (-2.0 + float(torch.sigmoid(0.2 * after - 5.0))) < -2.2
    assert on.state.log_history[0]["q_target"] == pytest.approx(-2.0)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": 1.5}, "gamma — must be between 0 and 1, got 1.5."),
        ({"target_decay": -0.1}, "target_decay — must be between 0 and 1, got -0.1."),
        ({"conservative_coef": -1.0}, "conservative_coef — must be 0 or more, got -1.0."),
        ({"n_steps": 0}, "n_steps — must be at least 1, got 0."),
        ({"decoding_temperature": 0.0}, "decoding_temperature — must be at least 0.0001, got 0.0."),
        ({"bound": "tanh"}, "bound — 'none' or 'sigmoid' is needed, got 'tanh'."),
        (
            {"bound": "sigmoid", "highest_return": -2.0},
            "lowest_return — -2.0 has to be below highest_return, which is -2.0.",
        ),
        ({"conservative_coef": 0.0}, "lowest_return — would have no effect without conservative_coef, and without"),
        (
            {"neftune_noise_alpha": 5.0},
            "neftune_noise_alpha — would have no effect: states and targets have to be those",
        ),
        ({"remove_unused_columns": True}, "remove_unused_columns — would have no effect: the collator takes"),
    ],
)
def test_settings_that_cannot_be(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        QConfig(output_dir=str(tmp_path), **{**SETTINGS, **changes})


def test_the_figures_of_the_seed_are_the_defaults(tmp_path):
    args = QConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    assert (args.gamma, args.target_decay, args.lowest_return) == (0.998, 0.99, 0.0)


def test_data_that_does_not_fit(tmp_path):
    long = {"prompt_ids": [1] * 40, "response_ids": [A] * 30, "rewards": [None] * 29 + [0.0], "ended": True}
    with pytest.raises(DataError, match="row 2 of the rated responses has 70 tokens, and the base has pos.* 64"):
        make(tmp_path, data=Dataset.from_list([*rows()[:2], long]))
    fits = long | {"response_ids": [A] * 24, "rewards": [None] * 23 + [0.0]}
    make(tmp_path, data=Dataset.from_list([fits]))
    data = Dataset.from_list(rows())
    with pytest.raises(DataError, match="needs the columns prompt_ids, response_ids, rewards, ended; present: prompt"):
        make(tmp_path, data=data.remove_columns("rewards"))
    broken = Dataset.from_list([*rows(), {**rows()[0], "rewards": [1.0] * 7}])
    with pytest.raises(DataError, match=f"row {len(rows())} of the rated responses: 7 rewards for"):
        make(tmp_path, data=broken)
    with pytest.raises(DataError, match=r"lowest_return: it is 0.0, and a response in the data gets -.*Set it to -"):
        make(tmp_path, lowest_return=0.0)
    with pytest.raises(DataError, match=r"highest_return: it is 0.5, and a response in the data gets 1.*or higher"):
        make(tmp_path, q_roles(bound=QBound(lowest=-2.0, highest=0.5)), bound="sigmoid", highest_return=0.5)
    odd = Dataset.from_list([{**rows()[0], "rewards": [*rows()[0]["rewards"][:-1], -4.1234512]}])
    with pytest.raises(DataError, match="Set it to ") as refused:
        make(tmp_path, data=odd, lowest_return=0.0)
    assert f"gets {-0.5 + 0.998 * -4.1234512}." in str(refused.value)  # rewards None, -0.5, -4.1234512
    make(tmp_path, data=odd, lowest_return=float(str(refused.value).split("Set it to ")[1].split()[0]))
    make(tmp_path, lowest_return=0.0, conservative_coef=0.0)  # then nothing is drawn there


def test_a_return_below_the_bound_is_refused_without_the_conservative_term_too(tmp_path):
    bounds = {"bound": "sigmoid", "lowest_return": -0.5, "highest_return": 1.0, "conservative_coef": 0.0}
    args, data = QConfig(output_dir=str(tmp_path), **{**SETTINGS, **bounds}), Dataset.from_dict({"rewards": [[-1.0]]})
    with pytest.raises(DataError, match="^lowest_return: it is -0.5, and a response in the data gets -1.0"):
        check_returns(data, args)


@pytest.mark.filterwarnings("ignore:training begins anew")
def test_figures_of_a_trainer_that_begins_anew_are_means_over_its_own_steps(tmp_path):
    """Of three steps each, of which two are logged: what the third has left is none of the next."""
    settings = {"per_device_train_batch_size": 30, "learning_rate": 0.0, "logging_steps": 2, "max_steps": 3}
    made, logged = make(tmp_path, **settings), []
    for _ in range(2):
        made.train()
        logged += [row["td_loss"] for row in made.state.log_history if "td_loss" in row]
    assert len(logged) == 2 and logged[1] == pytest.approx(logged[0], rel=1e-4) and logged[0] > 1e-3


def test_figures_of_a_trainer_that_goes_on_count_each_step_once(tmp_path):
    settings = {"max_steps": 4, "logging_steps": 2, "save_steps": 2, "save_strategy": "steps"}
    made = [make(tmp_path / name, data=Dataset.from_list(rows(4)), **settings) for name in ("whole", "cut")]
    whole, cut = made
    whole.train()
    failing = _Each(lambda: 1 / 0 if cut.state.global_step == 3 else None)
    cut.add_callback(failing)
    with pytest.raises(ZeroDivisionError):
        cut.train()
    cut.remove_callback(failing)
    cut.train(resume_from_checkpoint=True)
    logged = [[row["td_loss"] for row in one.state.log_history if "td_loss" in row] for one in made]
    assert logged[0] == logged[1] and len(logged[0]) == 2


class _Each(TrainerCallback):
    def __init__(self, call):
        self.call = call

    def on_step_end(self, args, state, control, **kwargs):
        self.call()


@pytest.mark.parametrize(
    ("changes", "reached"),
    [({}, True), ({"monte_carlo_bound": False, "n_steps": 3}, True), ({"monte_carlo_bound": False}, False)],
)
def test_targets_follow_what_the_response_got_where_asked(changes, reached, tmp_path):
    row = {"prompt_ids": PROMPTS[0], "response_ids": [A, B, EOS], "rewards": [0.5, None, 1.0], "ended": True}
    base = q_roles(bound=QBound(lowest=-2.0, highest=2.0))  # Q begins near -2
    settings = {"bound": "sigmoid", "max_steps": 1, "learning_rate": 0.0, "conservative_coef": 0.0, "gamma": 0.5}
    made = make(tmp_path, base, data=Dataset.from_list([row] * 4), **settings, **changes)
    made.train()
    found = made.state.log_history[0]["q_target"]  # G = 0.5 + 0.5 · 1, 1, 1
    assert found == pytest.approx(1.0, abs=1e-5) if reached else found < 0.5


@pytest.mark.parametrize("on", [False, True])
def test_layers_are_computed_again_where_checkpointing_is_asked_for(on, tmp_path):
    base, passes = q_roles(), []
    counted = base.causal_lm.model.layers[0].self_attn  # with gradients, as those of q alone are
    counted.register_forward_pre_hook(lambda *_: passes.append(1) if torch.is_grad_enabled() else None)
    make(tmp_path, base, max_steps=1, gradient_checkpointing=on).train()
    assert len(passes) == 1 + on  # once more in its backward pass


def test_a_range_may_be_as_wide_as_scores_are_in_float32(tmp_path):
    """Which is how `collect` writes them; and sums of rewards round as well."""
    sigmoid = {"bound": "sigmoid", "gamma": 1.0, "conservative_coef": 0.0}
    for rewards, lowest, highest in (
        ([None, torch.tensor(-0.1).item()], -0.1, 1.0), ([None, torch.tensor(0.6).item()], 0.0, 0.6),
        ([-0.1, -0.1, -0.1], -0.3, 1.0), ([0.2, 0.1], 0.0, 0.3),
    ):  # fmt: skip
        ids = [A] * len(rewards)
        data = Dataset.from_list([{"prompt_ids": [1], "response_ids": ids, "rewards": rewards, "ended": True}])
        bounds = {**sigmoid, "lowest_return": lowest, "highest_return": highest}
        check_returns(data, QConfig(output_dir=str(tmp_path), **bounds, use_cpu=True))
        with pytest.raises(DataError, match="in the data gets"):
            narrower = {"lowest_return": lowest + 1e-4, "highest_return": highest - 1e-4}
            check_returns(data, QConfig(output_dir=str(tmp_path), **bounds | narrower, use_cpu=True))


def test_the_roles_have_the_bound_that_the_configuration_says(tmp_path):
    bounds = {"bound": "sigmoid", "lowest_return": -2.0, "highest_return": 2.0}
    make(tmp_path, q_roles(bound=QBound(lowest=-2.0, highest=2.0)), **bounds)
    wrong = "have the bound -2.0 to 1.0, and the configuration says the bound -2.0 to 2.0"
    with pytest.raises(ConfigError, match=f"^bound: the roles q and q_target {wrong}"):
        make(tmp_path, q_roles(bound=QBound(lowest=-2.0, highest=1.0)), **bounds)
    with pytest.raises(ConfigError, match="have no bound, and the configuration says the bound -2.0 to 2.0"):
        make(tmp_path, q_roles(), **bounds)
    with pytest.raises(ConfigError, match="have the bound -2.0 to 2.0, and the configuration says no bound"):
        make(tmp_path, q_roles(bound=QBound(lowest=-2.0, highest=2.0)))


def test_a_base_without_gradient_checkpointing_is_refused_before_it_trains(tmp_path, monkeypatch):
    base = q_roles()
    monkeypatch.setattr(type(base.causal_lm), "supports_gradient_checkpointing", False)
    with pytest.raises(ModelError, match="^gradient_checkpointing: a .* has no gradient checkpointing"):
        make(tmp_path, base, gradient_checkpointing=True)


def test_a_response_that_ended_is_over_beside_one_that_was_cut(tmp_path):
    row = {"prompt_ids": PROMPTS[0], "response_ids": [A], "rewards": [0.5], "ended": True}
    data = Dataset.from_list([row, row, {**row, "ended": False}, {**row, "ended": False}])
    settings = {"max_steps": 1, "learning_rate": 0.0, "conservative_coef": 0.0, "gamma": 0.5, "lowest_return": 0.0}
    made = make(tmp_path, data=data, truncated_as="bootstrap", **settings)
    made.train()
    with made.roles.role("q_target"), torch.no_grad():
        after = made.roles.causal_lm(input_ids=torch.tensor([[*PROMPTS[0], A]])).logits[0, -1].max()
    # Two at 0.5, two at 0.5 and γ times what comes after.
    assert made.state.log_history[0]["q_target"] == pytest.approx(0.5 + 0.25 * float(after), rel=1e-3)
