"""Each check fails on the mistake that it is for."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.recorded import graphs_without_a_card
from tests.tiny_models import lora, shared_base, tiny_model
from tests.trainers.helpers import PROMPTS, rollout, trainer
from toolkit.data import doubling
from toolkit.errors import ConfigError, SelfCheckError
from toolkit.models import SharedBase, decoding, in_tf32
from toolkit.models.graphs import RecordedPass
from toolkit.trainers import ppo, self_checks


def test_rollouts_from_the_bare_base_are_noticed(monkeypatch):
    base = shared_base()
    self_checks.check_rollout_uses_policy(base, [1, 4, 9], pad_token_id=0)
    before = [p.clone() for p in base.parameters_of("policy")]
    generate = base.causal_lm.generate

    def bare(*args, **kwargs):
        with base.role("reference"):
            return generate(*args, **kwargs)

    monkeypatch.setattr(base.causal_lm, "generate", bare)
    with pytest.raises(SelfCheckError, match="do not come from the policy's adapter"):
        self_checks.check_rollout_uses_policy(base, [1, 4, 9], pad_token_id=0)
    assert all(torch.equal(a, b) for a, b in zip(before, base.parameters_of("policy"), strict=True))


def test_graphs_that_play_back_another_pass_are_noticed(monkeypatch):
    base = shared_base()
    with graphs_without_a_card() as graphs:
        self_checks.check_rollout_uses_policy(base, [1, 4, 9], pad_token_id=0, graphs=True)
        assert [graph.played for graph in graphs] == [2, 2]  # before the change and after it
        # As a model does that takes positions from elsewhere: played back, a pass has those of the first one.
        own = RecordedPass.__call__

        def of_the_first(recorded, **inputs):
            if recorded._given:
                inputs["position_ids"] = recorded._given["position_ids"]
            return own(recorded, **inputs)

        monkeypatch.setattr(RecordedPass, "__call__", of_the_first)
        with pytest.raises(ConfigError, match="generation: a CUDA graph of this base samples"):
            self_checks.check_rollout_uses_policy(base, [1, 4, 9], pad_token_id=0, graphs=True)


def test_graphs_are_tried_with_as_many_rows_as_change_kernels():
    """On a card a mixture has one for few rows that can be recorded, and on most cards none for more."""
    base, rows = shared_base(), []

    def token(_, given, named):
        if named["input_ids"].shape[1] == 1:
            rows.append(len(named["input_ids"]))

    base.causal_lm.register_forward_pre_hook(token, with_kwargs=True)
    with graphs_without_a_card():
        self_checks.check_rollout_uses_policy(base, [1, 4, 9], pad_token_id=0, graphs=True)
    assert len(rows) == 4 and min(rows) > decoding._FEW


@pytest.mark.parametrize("generation", ["graphs", "merged_graphs"])
def test_graphs_without_a_card_are_refused(generation, tmp_path):
    with pytest.raises(ConfigError, match="generation: graphs are of CUDA devices, and the base is on the CPU"):
        trainer(tmp_path, generation=generation)


def test_rollouts_that_do_not_follow_the_first_update_are_noticed(tmp_path):
    ours = trainer(tmp_path)
    batch = next(iter(ours.dataloader))
    responses = ours.generate(batch)
    scores = ours.score(batch, responses)
    update, generate = ours._update, ours.roles.generate
    parameters = ours.roles.parameters_of("policy")
    old = [p.clone() for p in parameters]

    def put(weights):
        with torch.no_grad():
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.copy_(weight)

    def by_the_weights_that_were(*given, **named):  # as an engine of its own beside the trainer might
        new = [p.clone() for p in parameters]
        put(old)
        try:
            return generate(*given, **named)
        finally:
            put(new)

    def updated(experience):
        found = update(experience)
        ours.roles.generate = by_the_weights_that_were
        return found

    ours._update = updated
    with pytest.raises(SelfCheckError, match="do not come from the policy's adapter"):
        ours.step(batch, responses, scores)


def test_a_check_that_is_broken_off_leaves_the_policy_as_it_was(monkeypatch):
    base = shared_base()
    before = [p.clone() for p in base.parameters_of("policy")]
    generate, calls = base.causal_lm.generate, []

    def breaks_off(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(*args, **kwargs)

    monkeypatch.setattr(base.causal_lm, "generate", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        self_checks.check_rollout_uses_policy(base, [1, 4, 9], pad_token_id=0)
    assert all(torch.equal(a, b) for a, b in zip(before, base.parameters_of("policy"), strict=True))


def test_logits_that_are_not_numbers_do_not_pass(monkeypatch):
    base = shared_base()
    monkeypatch.setattr(base, "hidden_states", lambda ids, mask: torch.full((*ids.shape, 32), float("nan")))
    with pytest.raises(SelfCheckError, match="do not come from the policy's adapter"):
        self_checks.check_rollout_uses_policy(base, [1, 4, 9], pad_token_id=0)


def test_an_adapter_that_is_not_in_the_optimizer_is_noticed(tmp_path):
    ours = trainer(tmp_path)
    ours.optimizer = torch.optim.AdamW(ours.roles.parameters_of("policy"))
    with pytest.raises(SelfCheckError, match='tensors of the trained role "value" are not in the optimizer'):
        ours._prepare_training()
    every = torch.optim.AdamW([p for r in ("policy", "value", "reward") for p in ours.roles.parameters_of(r)])
    with pytest.raises(SelfCheckError, match="of no trained role"):
        self_checks.check_in_optimizer(ours.roles, every)


def test_a_role_without_gradient_is_noticed(tmp_path, monkeypatch):
    ours, read = trainer(tmp_path), ppo.response_values
    # The head alone gets a gradient, as where the value adapter is frozen by a switch of PEFT's.
    monkeypatch.setattr(
        ppo, "response_values", lambda base, seqs: read(base, seqs).detach() + 0.1 * base.heads["value"].weight.sum()
    )
    with pytest.raises(SelfCheckError, match='28 of 29 tensors of the trained role "value" got no gradient'):
        ours.step({}, rollout([[5, 2]] * 4), torch.tensor([1.0, 0.0, 2.0, 3.0]))


def test_gradients_that_are_zero_or_missing_are_noticed():
    base = shared_base()
    for p in base.parameters_of("policy"):
        p.grad = torch.zeros_like(p)
    with pytest.raises(SelfCheckError, match="zero everywhere"):
        self_checks.check_gradients(base, ["policy"])
    base.parameters_of("policy")[0].grad = None
    with pytest.raises(SelfCheckError, match="got no gradient"):
        self_checks.check_gradients(base, ["policy"])


@pytest.mark.parametrize(
    ("prompts", "responses"),
    [(PROMPTS[:1], [[5]]), (PROMPTS[:1] * 4, [[2]] * 4)],
    ids=["one token", "equal ends"],
)
def test_an_update_that_has_nothing_to_teach_stops_no_run(prompts, responses, tmp_path, monkeypatch):
    """Its whitened advantages are 0. What the check is for is found at the next update."""
    ours = trainer(tmp_path, max_steps=4)
    ours.step({}, rollout(responses, prompts), torch.ones(len(responses)))
    plain = ppo.policy_objective

    def without_gradient(*given, **named):
        loss, metrics = plain(*given, **named)
        return 0.0 * loss, metrics

    monkeypatch.setattr(ppo, "policy_objective", without_gradient)
    with pytest.raises(SelfCheckError, match='the first gradient of the role "policy" is zero everywhere'):
        ours.step({}, rollout([[5, 9, 2]] * 4), torch.tensor([1.0, 0.0, 2.0, 3.0]))


@pytest.mark.parametrize("role, share", [("policy", "clip_fraction"), ("value", "value_clip_fraction")])
@pytest.mark.parametrize("clipped", [True, False])
def test_a_mini_batch_that_is_clipped_whole_has_no_gradient_and_stops_no_run(role, share, clipped, tmp_path):
    ours = trainer(tmp_path)
    backward = ours._backward_mini_batch

    def without_gradient(*given):
        totals = backward(*given)
        for parameter in ours.roles.parameters_of(role):
            parameter.grad.zero_()
        return {**totals, share: float(clipped)}

    ours._backward_mini_batch = without_gradient
    with nullcontext() if clipped else pytest.raises(SelfCheckError, match=f'role "{role}" is zero everywhere'):
        ours.step({}, rollout([[5, 9, 2]] * 4), torch.tensor([1.0, 0.0, 2.0, 3.0]))


def test_active_dropout_is_no_wrong_ratio(tmp_path):
    base = SharedBase(tiny_model())
    base.add_role("policy", lora(lora_dropout=0.5))
    base.add_role("reference")
    base.add_role("value", lora())
    with torch.no_grad():
        for p in base.parameters_of("policy"):
            p.add_(0.3 * torch.randn_like(p))
    ours = trainer(tmp_path, base, reward=lambda r: [0.0] * len(r))
    stats = ours.step({}, rollout([[5, 9, 2]] * 4), torch.tensor([1.0, 0.0, 2.0, 3.0]))
    assert stats["approx_kl"] > 0  # the dropout is really active in the update


def test_a_base_that_draws_random_numbers_is_noticed_beside_an_adapter_with_dropout(tmp_path, monkeypatch):
    base = shared_base(fresh=True)
    base.remove_role("policy")
    base.add_role("policy", lora(lora_dropout=0.1))
    base.train_roles("policy", "value")
    ours = trainer(tmp_path, base)
    layer = base.causal_lm.model.layers[1].mlp
    plain = layer.forward
    # After the base was tried at its loading.
    monkeypatch.setattr(layer, "forward", lambda x: plain(x) * (1 + 0.3 * torch.randn(1) * layer.training))
    with pytest.raises(SelfCheckError, match=r"before the first update log\(ratio\)"):
        ours.step({}, rollout([[5, 9, 2]] * 4), torch.tensor([1.0, 0.0, 2.0, 3.0]))


def test_a_tokenizer_of_another_checkpoint_is_noticed():
    base, tokenizer = shared_base(), doubling.tokenizer()
    self_checks.check_tokenizer(tokenizer, base)
    base.checkpoint_stops = (7, 8)
    with pytest.raises(SelfCheckError, match=r"ends a response with id 2 and the base with \[7, 8\]"):
        self_checks.check_tokenizer(tokenizer, base)
    base.checkpoint_stops = (2, 8)
    self_checks.check_tokenizer(tokenizer, base)
    with_one_more = doubling.tokenizer()
    with_one_more.add_tokens(["新"])
    with pytest.raises(SelfCheckError, match="43 tokens and the base 42 embeddings"):
        self_checks.check_tokenizer(with_one_more, base)
    tokenizer.pad_token = None
    with pytest.raises(SelfCheckError, match="pad_token_id is None"):
        self_checks.check_tokenizer(tokenizer, base)


def test_a_special_token_that_no_text_becomes_needs_no_embedding():
    """As that for images of text-only Gemma 3, which is one id beyond its embeddings."""
    base, tokenizer = shared_base(), doubling.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    self_checks.check_tokenizer(tokenizer, base)
    tokenizer.chat_template = "{{ '<image_soft_token>' }}"
    with pytest.raises(SelfCheckError, match="43 tokens and the base 42 embeddings"):
        self_checks.check_tokenizer(tokenizer, base)
    tokenizer.chat_template, tokenizer.eos_token = None, "<image_soft_token>"
    with pytest.raises(SelfCheckError, match="eos_token_id is 42; the base has embeddings for 0 to 41"):
        self_checks.check_tokenizer(tokenizer, base)


def test_products_in_tf32_are_those_of_a_card_that_makes_them(monkeypatch):
    cpu, card = torch.device("cpu"), torch.device("cuda")
    assert not in_tf32(card)
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")
    assert in_tf32(card) and not in_tf32(cpu)


@pytest.mark.parametrize(
    ("flags", "dtype", "computes", "limit"),
    [
        ({"bf16": True}, torch.float32, None, 5e-2), ({"fp16": True}, torch.float32, None, 1e-2),
        ({}, torch.float32, None, 1e-4), ({}, torch.bfloat16, None, 5e-2),
        ({}, torch.float32, torch.bfloat16, 5e-2), ({}, torch.float32, torch.float32, 1e-4),  # layers in 4 bits
    ],
)  # fmt: skip
def test_how_far_from_1_the_ratio_may_be_is_a_matter_of_precision(flags, dtype, computes, limit):
    args = SimpleNamespace(**{"bf16": False, "fp16": False, **flags})
    layers = [SimpleNamespace(), SimpleNamespace(compute_dtype=computes)]
    base = SimpleNamespace(causal_lm=SimpleNamespace(dtype=dtype, modules=lambda: iter(layers)))
    mask = torch.tensor([[True, True, False]])
    off = limit * torch.tensor([[1.0, -1.0, 100.0]])  # of both signs, and padding counts nothing
    self_checks.check_ratio(base, args, 0.9 * off, mask)
    for wrong in (1.1 * off, torch.full((1, 3), float("nan"))):
        with pytest.raises(SelfCheckError, match=r"before the first update log\(ratio\)"):
            self_checks.check_ratio(base, args, wrong, mask)
