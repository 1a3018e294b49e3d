import json
from contextlib import nullcontext
from pathlib import Path

import peft
import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel
from transformers import set_seed

from tests.tiny_models import lora, shared_base, tiny_model
from tests.tolerances import EXACT
from tests.trainers.helpers import PROMPTS, RESPONSES, SCORES, config, count_reward, dataset, rollout, trainer
from toolkit.data import PromptCollator, concatenate, doubling
from toolkit.errors import ConfigError, DataError, ToolkitError
from toolkit.models import FreedMemory, Sequences, SharedBase, fused_lora, sequences
from toolkit.reports import MetricsFile, read_jsonl
from toolkit.rewards import DenseScores, RewardAdapter
from toolkit.sampling import SIGNS
from toolkit.trainers.ppo import PPOTrainer
from toolkit.trainers.trainer_internals import trainers_kept


def snapshot(base):
    return {name: p.detach().clone() for name, p in base.named_parameters()}


def changed(before, base):
    return {name for name, p in base.named_parameters() if not torch.equal(p, before[name])}


@pytest.mark.parametrize("value", ["separate", "shared"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_changes_policy_and_value_and_nothing_else(value, checkpointing, tmp_path):
    ours = trainer(tmp_path, value=value, gradient_checkpointing=checkpointing, num_ppo_epochs=2)
    before = snapshot(ours.roles)
    metrics = ours.train()
    roles = {"heads.value"} if value == "shared" else {"heads.value", ".value."}
    names = changed(before, ours.roles)
    assert names
    for name in before:
        mine = ".policy." in name or any(part in name for part in roles)
        assert (name in names) == mine, name
    assert {"score", "kl", "length", "eos_share", "policy_loss", "value_loss", "grad_norm"} <= metrics.keys()
    assert all(torch.isfinite(torch.tensor(v)) for v in metrics.values())


def test_the_loop_of_a_notebook_is_what_train_does(tmp_path, monkeypatch):
    results, given_back = [], []
    monkeypatch.setattr(FreedMemory, "after_step", lambda self: given_back.append(self))
    for by_hand in (False, True):
        set_seed(0)
        ours = trainer(tmp_path, fresh_seed(), max_steps=6)  # a pass has four batches
        if by_hand:
            for batch in ours.batches():
                responses = ours.generate(batch)
                scores = ours.score(batch, responses)
                ours.step(batch, responses, scores)
        else:
            ours.train()
        assert ours.state.global_step == 6
        assert len(given_back) == 6 * (1 + by_hand)
        results.append(snapshot(ours.roles))
    assert results[0].keys() == results[1].keys()
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name]), name


def test_a_step_after_the_last_one_says_that_the_run_is_over(tmp_path):
    ours = trainer(tmp_path, max_steps=1)
    responses = rollout([[5, 2], [5, 6], [7, 2], [9, 6]])
    ours.step({}, responses, torch.arange(4.0))
    before = snapshot(ours.roles)
    with pytest.warns(
        UserWarning, match="the 1 updates of this run are done, .* a learning rate of 0.0e.00. End the loop"
    ):
        ours.step({}, responses, torch.arange(4.0))
    assert not changed(before, ours.roles)


def fresh_seed():
    torch.manual_seed(0)
    return shared_base(fresh=True)


def test_ppo_learns_a_rule_and_the_kl_penalty_holds_the_policy_back(tmp_path):
    """A reward for the share of one token raises that share: the identity environment of language models."""
    kls = {}
    for kl_coef in (0.0, 5.0):
        ours = trainer(
            tmp_path, fresh_seed(), count_reward(7), max_steps=25, per_device_train_batch_size=16, num_ppo_epochs=4,
            learning_rate=2e-2, kl_coef=kl_coef, temperature=1.0, eval_do_sample=True,
        )  # fmt: skip
        before, *_ = ours.evaluate_rollout(dataset(8))
        ours.train()
        after, *_ = ours.evaluate_rollout(dataset(8))
        kls[kl_coef] = after["kl"]
        if not kl_coef:
            assert before["score"] < 0.2 and after["score"] > 0.8
    assert kls[0.0] > 1.0 and kls[5.0] < 0.3 * kls[0.0]


def test_sampling_follows_the_log_probabilities_that_the_update_uses(tmp_path):
    # The checkpoint's own settings (a repetition penalty) must not leak into sampling.
    model = tiny_model()
    model.generation_config.repetition_penalty = 5.0
    base = SharedBase(model)
    base.add_role("policy", lora())
    base.add_role("reference")
    base.add_role("value", lora())
    ours = trainer(tmp_path, base, count_reward(7), response_length=1)
    row = {"input_ids": [1, 4, 9, 4, 4], "number": 0}
    torch.manual_seed(0)
    sampled = ours.generate(PromptCollator(0)([row] * 4000))
    counts = torch.bincount(torch.tensor([r[0] for r in sampled.response_ids]), minlength=42) / 4000
    everything = rollout([[t] for t in range(42)], [row["input_ids"]] * 42)
    logprobs = ours.rollouts.read(everything, values=False).logprobs
    assert logprobs.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    assert (counts - logprobs.squeeze(1).exp()).abs().max() < 0.03


class LeftPadded(Sequences):
    """The same rows with their padding before them."""

    @property
    def _gaps(self):
        return (self.input_ids.shape[1] - self.lengths)[:, None]

    @property
    def attention_mask(self):
        return torch.arange(self.input_ids.shape[1]) >= self._gaps

    @property
    def position_ids(self):
        return (torch.arange(self.input_ids.shape[1]) - self._gaps).clamp(min=0)

    @property
    def _response_tokens_at(self):
        rows, places = super()._response_tokens_at
        return rows, places + self._gaps[rows, 0]


def left_padded(ours, monkeypatch):
    def lay_out(self, batch, rows):
        right = Sequences.from_ids(
            [batch.prompt_ids[i] for i in rows], [batch.response_ids[i] for i in rows], pad_token_id=0
        )
        width = right.input_ids.shape[1]
        moved = [row.roll(width - int(n)) for row, n in zip(right.input_ids, right.lengths, strict=True)]
        return LeftPadded(torch.stack(moved), right.prompt_lengths, right.response_lengths)

    monkeypatch.setattr(type(ours.rollouts), "sequences", lay_out)


def gradients(ours, order):
    ours._prepare_training()
    batch = rollout([RESPONSES[i] for i in order], [PROMPTS[i] for i in order])
    experience = ours._make_experience(batch, SCORES[order])
    ours.roles.train()
    ours._backward_mini_batch(experience, [0, 1, 2, 3])
    return [p.grad for role in ("policy", "value") for p in ours.roles.parameters_of(role)]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_padding_order_and_micro_batches_change_no_gradient(architecture, tmp_path, monkeypatch):
    def made(**changes):
        return trainer(tmp_path, shared_base(architecture=architecture), **changes)

    padded = made()
    assert padded.rollouts.sequences(rollout([[5] * 8, [6]], PROMPTS[:2]), [0, 1]).packed
    recomputed = made(gradient_checkpointing=True)
    assert recomputed.rollouts.sequences(rollout([[5] * 8, [6]], PROMPTS[:2]), [0, 1]).packed
    padded.roles._packs_rows = False
    expected = gradients(padded, [0, 1, 2, 3])
    found = [gradients(made(gradient_checkpointing=checkpointing), [0, 1, 2, 3]) for checkpointing in (False, True)]
    found += [gradients(made(local_rollout_forward_batch_size=1), [3, 1, 0, 2])]
    found += [
        gradients(made(per_device_train_batch_size=size, gradient_accumulation_steps=4 // size), [2, 0, 3, 1])
        for size in (1, 2)
    ]
    with monkeypatch.context() as patch:
        left = made()
        left_padded(left, patch)
        found.append(gradients(left, [0, 1, 2, 3]))
    monkeypatch.setattr(sequences, "LENGTH_MULTIPLE", 48)  # four times as long as the longest row
    found.append(gradients(made(), [0, 1, 2, 3]))
    for other in found:
        for a, b in zip(other, expected, strict=True):
            assert (a - b).abs().max() < 1e-5 * b.abs().max()


@pytest.mark.parametrize("most", [1e-3, 0.0])
def test_gradients_are_clipped(most, tmp_path):
    ours = trainer(tmp_path, max_grad_norm=most)
    ours._prepare_training()
    seen = []
    step = ours.optimizer.step
    parameters = [p for role in ("policy", "value") for p in ours.roles.parameters_of(role)]

    def watched():
        seen.append(torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in parameters])).item())
        step()

    ours.optimizer.step = watched
    stats = ours.step({}, rollout([[5, 2]] * 4), torch.tensor([1.0, -1.0, 0.0, 2.0]))
    assert stats["grad_norm"] > 1e-2
    assert seen == pytest.approx([most or stats["grad_norm"]], rel=1e-2)


def test_one_token_responses_do_not_spoil_the_weights(tmp_path):
    ours = trainer(tmp_path)
    ours.step({}, rollout([[2], [2], [2], [2]]), torch.ones(4))
    assert all(torch.isfinite(p).all() for p in ours.roles.parameters())


def test_a_later_accelerator_of_the_process_changes_no_gradient(tmp_path):
    """accelerate keeps by how many steps to divide, and the precision, for a process and not for a trainer."""
    expected = trainer(tmp_path / "alone", max_steps=1).train()["grad_norm"]
    ours = trainer(tmp_path / "beside", max_steps=1)
    with trainers_kept():
        Accelerator(gradient_accumulation_steps=4)
        assert ours.train()["grad_norm"] == expected


def test_prompts_that_are_set_to_give_tensors_are_measured_as_their_rows(tmp_path):
    ours, rows = trainer(tmp_path), dataset(2)
    assert ours.evaluate(rows.with_format("torch")) == ours.evaluate(rows)


def test_evaluation_has_its_metrics_and_leaves_the_random_state_alone(tmp_path):
    ours = trainer(tmp_path, eval_do_sample=True)
    ours.metrics = lambda r: {"rows": float(len(r))}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = ours.evaluate()
    assert torch.equal(torch.get_rng_state(), state)
    assert ours.evaluate() == first
    assert set(first) == {f"eval_{k}" for k in ("score", "score_se", "kl", "length", "eos_share", *SIGNS, "rows")}
    assert first["eval_rows"] == 4
    for sampled, temperature in ((True, 0.8), (False, None)):
        sampler, _ = trainer(tmp_path, eval_do_sample=sampled).rollouts.measured()
        assert sampler.temperature == temperature


def test_evaluated_kl_by_hand(tmp_path):
    ours = trainer(tmp_path, kl_estimator="k3")  # of training alone
    metrics, responses, *_ = ours.evaluate_rollout(dataset(1))
    total = 0.0
    for prompt, response in zip(responses.prompt_ids, responses.response_ids, strict=True):
        ids = torch.tensor([[*prompt, *response]])
        for role, sign in (("policy", 1), ("reference", -1)):
            with torch.no_grad(), ours.roles.role(role):
                logits = ours.roles(input_ids=ids).logits[0, len(prompt) - 1 : -1] / 0.8
            chosen = logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]
            total += sign * chosen.sum().item()
    assert metrics["kl"] == pytest.approx(total / 4, rel=1e-3)


def test_the_best_checkpoint_comes_back(tmp_path):
    scores = iter([0.1, 0.9, 0.5])
    ours = trainer(
        tmp_path, max_steps=3, eval_strategy="steps", eval_steps=1, save_strategy="best",
        load_best_model_at_end=True, metric_for_best_model="score", save_total_limit=1,
    )  # fmt: skip
    kept = {}

    def evaluate():
        score = next(scores)
        if score == 0.9:
            kept.update({n: p.detach().clone() for n, p in ours.roles.named_parameters() if p.requires_grad})
        return {"eval_score": score}

    ours.evaluate = evaluate
    ours.train()
    assert ours.state.best_global_step == 2
    assert [p.name for p in sorted(Path(tmp_path).glob("checkpoint-*"))] == ["checkpoint-2"]
    for name, parameter in ours.roles.named_parameters():
        if name in kept:
            assert torch.equal(parameter, kept[name]), name


def test_what_the_policy_says_can_be_read_while_it_trains(tmp_path):
    path = tmp_path / "rollouts.jsonl"

    def read():
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    ours = trainer(tmp_path, reward=count_reward(7), max_steps=3, save_strategy="steps", save_steps=1)
    ours.add_callback(MetricsFile(tmp_path / "metrics.jsonl"))
    score, scored = ours.score, []
    ours.score = lambda batch, responses: scored.append((responses, score(batch, responses))) or scored[-1][1]
    ours.train()
    rows = read()
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 4 + [3] * 4
    responses, scores = scored[1]
    for i, row in enumerate(rows[4:8]):
        assert (row["prompt"], row["response"]) == (responses.prompts[i], responses.responses[i])
        assert row["score"] == float(scores[i]) and row["ended"] == responses.ended[i]
    with path.open("a") as file:
        file.write('{"step": 3, "pro')  # what a kill leaves
    again = trainer(tmp_path, reward=count_reward(7), max_steps=3, rollouts_shown=1)
    again.train(resume_from_checkpoint=tmp_path / "checkpoint-1")
    assert read() == [*rows[:4], rows[4], rows[8]]
    anew = trainer(tmp_path, reward=count_reward(7), max_steps=1, save_strategy="steps", save_steps=1)
    anew.add_callback(MetricsFile(tmp_path / "metrics.jsonl"))
    with pytest.warns(UserWarning, match="holds checkpoint-3 of an earlier try, and training begins anew"):
        anew.train()
    assert read() == rows[:4] and [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1]
    # What it saves is the newest there is.
    saved = sorted(path.name for path in tmp_path.glob("*checkpoint*"))
    assert saved == [*(f"abandoned-checkpoint-{step}" for step in (1, 2, 3)), "checkpoint-1"]


def test_saved_roles_load_with_plain_peft(tmp_path, caplog):
    ours = trainer(tmp_path)
    ours.base_name = "folder/of/the/base"
    ours.train()
    ours.roles.config._commit_hash = "abc"  # as of a base from the hub
    ours.save_model(str(tmp_path / "out"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("mine")
    ours.save_model(tmp_path / "mine")
    assert (tmp_path / "mine" / "README.md").read_text() == "mine"
    ours.save_model(str(tmp_path / "run" / "ppo"))
    for saved, name in (("out", "out"), ("run/ppo", "run")):
        assert f"\n# {name}\n" in (tmp_path / saved / "README.md").read_text()
    added = (tmp_path / "out" / "README.md").read_text() + "\n## My results\n"
    (tmp_path / "mine" / "README.md").write_text(added)
    ours.save_model(tmp_path / "mine")
    assert (tmp_path / "mine" / "README.md").read_text() == added
    assert "README.md is not as this version writes it, and stays as it is" in caplog.text
    plain = PeftModel.from_pretrained(tiny_model(), str(tmp_path / "out" / "policy"))
    saved = json.loads((tmp_path / "out" / "policy" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == "folder/of/the/base"
    ids = torch.tensor([[1, 4, 9]])
    with torch.no_grad(), ours.roles.role("policy"):
        torch.testing.assert_close(plain(input_ids=ids).logits, ours.roles(input_ids=ids).logits, **EXACT)
    assert (tmp_path / "out" / "value" / "adapter_model.safetensors").is_file()
    (tmp_path / "base").mkdir()
    ours.base_name = str(tmp_path / "base")
    ours.save_model(str(tmp_path / "beside"))
    assert 'from_pretrained("../base", ' in (tmp_path / "beside" / "README.md").read_text()
    card = (tmp_path / "out" / "README.md").read_text()
    assert (
        "trained with PPO" in card
        and f"- peft {peft.__version__}" in card
        and card.count('from_pretrained("folder/of/the/base", revision="abc")') == 2
        and "`value/` the critic's;" in card
    )
    trainer(tmp_path / "shared", value="shared").save_model(tmp_path / "out")  # over a card of ours
    assert "`value/` the critic's head, `value_head.safetensors`" in (tmp_path / "out" / "README.md").read_text()
    assert not (tmp_path / "out" / "value" / "adapter_model.safetensors").exists()


def test_too_few_prompts_and_missing_ids(tmp_path):
    with pytest.raises(DataError, match="16 prompts are fewer than one batch of 32"):
        trainer(tmp_path, per_device_train_batch_size=32)
    base = shared_base()
    with pytest.raises(DataError, match="need a column input_ids; present: query"):
        PPOTrainer(
            config(tmp_path),
            doubling.tokenizer(),
            base,
            count_reward(7),
            dataset().rename_columns({"input_ids": "query"}),
        )


def test_trl_methods_that_remain(tmp_path):
    ours = trainer(tmp_path)
    looked = next(iter(ours.get_train_dataloader()))
    assert looked["prompt_ids"] == ours.dataloader.next_batch()["prompt_ids"]
    assert sum(len(b["prompt_ids"]) for b in ours.get_eval_dataloader()) == 4
    with pytest.raises(ToolkitError, match=r'null_ref_context .* Take with trainer.roles.role\("reference"\)'):
        ours.null_ref_context()
    with pytest.raises(ToolkitError, match=r"generate_completions .* Take trainer.evaluate\(\)"):
        ours.generate_completions(sampling=True)
    with pytest.raises(
        ToolkitError, match=r"push_to_hub would upload .* hf upload for what it makes there: policy or value\."
    ):
        ours.push_to_hub(dataset_name="prompts")


@pytest.mark.parametrize("value", ["separate", "shared"])
def test_full_kl_is_the_penalty_and_all_else_stays(value, tmp_path):
    found = {}
    for estimator in ("k1", "full"):
        ours = trainer(tmp_path, value=value, kl_estimator=estimator, local_rollout_forward_batch_size=2)
        found[estimator] = ours._make_experience(rollout(RESPONSES), SCORES)
    for name in ("old_logprobs", "ref_logprobs", "old_values"):
        torch.testing.assert_close(getattr(found["full"], name), getattr(found["k1"], name), rtol=1e-4, atol=1e-5)
    base = ours.roles
    for row, (prompt, response) in enumerate(zip(rollout(RESPONSES).prompt_ids, RESPONSES, strict=True)):
        ids = torch.tensor([prompt + response])
        logits = {}
        for role in ("policy", "reference"):
            with torch.no_grad(), base.role(role):
                logits[role] = base(input_ids=ids).logits[0, len(prompt) - 1 : -1].double() / ours.args.temperature
        policy, reference = (torch.distributions.Categorical(logits=logits[r]) for r in ("policy", "reference"))
        expected = torch.distributions.kl_divergence(policy, reference)
        torch.testing.assert_close(
            found["full"].kl[row, : len(response)].double(), expected, rtol=1e-4, atol=1e-5, msg=str(row)
        )
        assert (found["full"].kl[row, len(response) :] == 0).all()


@pytest.mark.parametrize(("target", "direction"), [(1e-3, 1), (1e3, -1), (None, 0)])
def test_the_adaptive_controller_moves_the_coefficient(target, direction, tmp_path):
    horizon = {} if target is None else {"kl_horizon": 100}
    ours = trainer(tmp_path, kl_target=target, **horizon, max_steps=3)
    coefficients = []
    for batch in ours.batches():
        responses = concatenate([ours.generate(batch), ours.generate(batch)])  # of two rollouts
        coefficients.append(ours.step(batch, responses, [1.0] * len(responses))["kl_coef"])
    assert coefficients[0] == 0.1
    # 8 responses of a horizon of 100: the error, at most a fifth, counts for 8 %.
    assert coefficients[1:] == pytest.approx([0.1 * (1 + direction * 0.2 * 0.08) ** n for n in (1, 2)])


def test_the_order_of_prompts_has_a_seed_of_its_own(tmp_path):
    def order(**seeds):
        return [number for rows in trainer(tmp_path, **seeds).dataloader for number in rows["columns"]["number"]]

    assert order(seed=1, data_seed=5) == order(seed=2, data_seed=5) != order(seed=1, data_seed=6)
    assert order(seed=1) == order(seed=3, data_seed=1) != order(seed=3)


def test_prompts_are_drawn_with_replacement_where_asked(tmp_path):
    def numbers(**changes):
        ours = trainer(tmp_path, **changes)
        return [n for _ in range(4) for batch in ours.dataloader for n in batch["columns"]["number"]]

    assert sorted(numbers()) == sorted(list(range(16)) * 4)
    drawn = numbers(sample_with_replacement=True)
    assert len(drawn) == 64
    assert any(len(set(drawn[start : start + 16])) < 16 for start in range(0, 64, 16))


def test_the_critic_has_an_optimizer_of_its_own(tmp_path):
    settings = {
        "value_learning_rate": 0.0,
        "value_weight_decay": 0.3,
        "value_adam_beta1": 0.5,
        "value_adam_epsilon": 1e-7,
    }
    ours = trainer(tmp_path, **settings, lr_scheduler_type="constant")
    value, policy = [p.detach().clone() for p in ours.roles.parameters_of("value")], ours.roles.parameters_of("policy")
    before = [p.detach().clone() for p in policy]
    ours.train()
    groups = {group["role"]: group for group in ours.optimizer.param_groups}
    assert groups["value"]["betas"] == (0.5, 0.999) and groups["value"]["eps"] == 1e-7
    assert (groups["value"]["weight_decay"], groups["policy"]["weight_decay"]) == (0.3, 0.0)
    assert (groups["value"]["lr"], groups["policy"]["lr"]) == (0.0, 1e-3)
    assert all(torch.equal(a, b) for a, b in zip(value, ours.roles.parameters_of("value"), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(before, policy, strict=True))
    with pytest.raises(ConfigError, match=r"^optim: sgd has no betas, which the settings of the value role"):
        trainer(tmp_path, optim="sgd", value_adam_beta1=0.5).create_optimizer()


def test_a_critic_can_be_trained_before_its_policy(tmp_path):
    ours = trainer(tmp_path, learning_rate=0.0, value_learning_rate=1e-3, max_steps=1)
    before = {role: [p.detach().clone() for p in ours.roles.parameters_of(role)] for role in ("policy", "value")}
    ours.train()
    same = {role: all(map(torch.equal, was, ours.roles.parameters_of(role))) for role, was in before.items()}
    assert same == {"policy": True, "value": False}


def test_the_logged_learning_rate_is_the_policys_whichever_role_came_first(tmp_path):
    settings = {"learning_rate": 1e-3, "value_learning_rate": 1e-4, "lr_scheduler_type": "linear", "max_steps": 4}
    base = SharedBase(tiny_model())
    for role in ("value", "policy", "reward"):
        base.add_role(role, lora())
    base.add_role("reference")
    ours, again, given = (trainer(tmp_path, base, **settings) for _ in range(3))
    assert ours.step({}, rollout(RESPONSES), SCORES)["learning_rate"] == pytest.approx(1e-3)
    assert ours._without_update()["learning_rate"] == pytest.approx(7.5e-4)
    again.load_checkpoint(ours.save_checkpoint())
    assert again.step({}, rollout(RESPONSES), SCORES)["learning_rate"] == pytest.approx(5e-4)
    of_value, of_policy = map(base.parameters_of, ("value", "policy"))
    given.optimizer = torch.optim.SGD([{"params": of_value, "lr": 0.1}, {"params": of_policy, "lr": 0.2}])
    assert given.step({}, rollout(RESPONSES), SCORES)["learning_rate"] == pytest.approx(0.2)


def test_the_policys_weights_decay_as_the_setting_says(tmp_path):
    groups = trainer(tmp_path, weight_decay=0.3, value_weight_decay=0.1).create_optimizer().param_groups
    assert {g["role"]: g["weight_decay"] for g in groups if g["weight_decay"]} == {"policy": 0.3, "value": 0.1}


def test_the_controller_steers_the_kl_of_a_response(tmp_path):
    given = rollout(RESPONSES)
    read = trainer(tmp_path, kl_estimator="k3").rollouts.read(given, values=False)
    log_r = (read.ref_logprobs - read.logprobs).double()
    kl = float((log_r.exp() - 1 - log_r).sum()) / 4  # both are 0 outside of the responses
    ours = trainer(tmp_path, kl_estimator="k3", kl_target=kl / 1.1, kl_horizon=100)
    ours.step({}, given, SCORES)
    assert ours.kl_coef == pytest.approx(0.1 * (1 + 0.1 * 4 / 100))  # a tenth over it, 4 responses of 100


def test_a_second_beta_of_the_critic_alone_is_its_own(tmp_path):
    groups = trainer(tmp_path, value_adam_beta2=0.9).create_optimizer().param_groups
    assert {g["role"]: tuple(g["betas"]) for g in groups} == {"policy": (0.9, 0.999), "value": (0.9, 0.9)}


def test_a_score_of_ones_own_may_be_all_that_step_takes(tmp_path):
    class Mine(PPOTrainer):
        def score(self, batch, responses):
            return self.scores_of(responses)

    found = []
    for kind in (list, torch.tensor, lambda scores: DenseScores(tokens=[[score / 6] * 6 for score in scores])):
        ours = trainer(tmp_path, shared_base(fresh=True), max_steps=1)
        ours.__class__ = Mine
        ours.scores_of = lambda responses, kind=kind: kind([float(n) for n in range(len(responses))])
        found.append(ours.train()["score"])
    assert found == pytest.approx([1.5, 1.5, 1.5])


def test_advantages_of_ones_own_are_what_a_policy_learns_from(tmp_path):
    class Flat(PPOTrainer):
        def _make_experience(self, rollout, scores):
            made = super()._make_experience(rollout, scores)
            return made._replace(advantages=torch.zeros_like(made.advantages))

    ours = trainer(tmp_path, shared_base(fresh=True), max_steps=1)
    ours.__class__ = Flat
    before = [p.detach().clone() for p in ours.roles.parameters_of("policy")]
    ours.step({}, rollout(RESPONSES), SCORES)
    assert all(map(torch.equal, before, ours.roles.parameters_of("policy")))


def test_adapters_are_converted_once_for_each_reading_and_optimizer_step(tmp_path, monkeypatch):
    def weights():
        set_seed(0)
        rows_at_a_time = {"per_device_train_batch_size": 1, "local_rollout_forward_batch_size": 1}
        ours = trainer(tmp_path, **rows_at_a_time, gradient_accumulation_steps=4, num_ppo_epochs=2)
        ours._prepare_training()
        rows = rollout([[5, 2], [6, 2], [7, 7, 2], [8]])
        converted.clear()
        experience = ours._make_experience(rows, SCORES)
        RewardAdapter(ours.roles, pad_token_id=0, eos_token_id=2, batch_size=1)(rows)
        read = len(converted) / len(ours.roles._fused)
        converted.clear()
        ours._update(experience)
        assert all(group.kept is None for group in ours.roles._fused)
        return read, len(converted) / len(ours.roles._fused), snapshot(ours.roles)

    converted, own = [], fused_lora._Adapters.of
    monkeypatch.setattr(fused_lora._Adapters, "of", lambda *given: converted.append(given) or own(*given))
    read, times, kept = weights()
    assert read == 3 and times == 2 * 2  # policy, value and reward, and epochs
    monkeypatch.setattr(SharedBase, "weights_kept", nullcontext)
    read, times, anew = weights()
    assert read == 3 * 4 and times == 2 * 2 * 4  # rows, and micro-batches
    assert kept.keys() == anew.keys() and all(torch.equal(kept[name], anew[name]) for name in kept)
