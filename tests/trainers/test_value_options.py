"""Values that are pooled, or read off a base of their own; optimizers by name."""

from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.tiny_models import lora, randomize, tiny_model
from tests.tolerances import FP32, RELATIVE
from tests.trainers.helpers import PROMPTS, RESPONSES, SCORES, config, rollout, trainer
from toolkit.errors import ConfigError, SelfCheckError
from toolkit.models import SharedBase, ValueModel, response_values


def classifier(architecture="gpt2"):
    """A random decoder with a head, that is not the policy's base."""
    settings = tiny_model(architecture).config
    settings.num_labels = 1
    torch.manual_seed(5)
    return AutoModelForSequenceClassification.from_config(settings).eval()


def base_with(model: ValueModel) -> SharedBase:
    base = SharedBase(tiny_model())
    base.add_role("policy", lora())
    base.add_role("reference")
    base.add_role("reward", lora())
    base.place_value(model)
    return randomize(base, "policy", "reward")


def value_loss_and_gradient(ours, experience):
    metrics = ours._backward_mini_batch(experience, [0, 1, 2, 3])
    return metrics["value_loss"], [p.grad.clone() for p in ours.roles.parameters_of("value")]


def assert_alike(ours, theirs):
    for one, two in zip(ours, theirs, strict=True):
        assert (one - two).abs().max() <= RELATIVE * max(two.abs().max(), 1e-6)


def rows_of(values_at):
    """Values of each response's tokens, one unpadded row at a time, by `values_at(ids)` for all positions."""
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        every = values_at(torch.tensor([prompt + response]))
        yield every[len(prompt) - 1 : len(prompt) + len(response) - 1]


@pytest.mark.parametrize("value", ["separate", "shared"])
@pytest.mark.parametrize("pooling", ["response_mean", "prefix_mean"])
def test_pooled_values_and_their_loss(pooling, value, tmp_path):
    ours = trainer(tmp_path, value=value, value_pooling=pooling, cliprange_value=None, vf_coef=0.5, kl_coef=0.0)
    ours._prepare_training()
    experience = ours._make_experience(rollout(RESPONSES), SCORES)

    def pooled(values):
        if pooling == "response_mean":
            return values.mean().expand(len(values))
        return torch.stack([values[: t + 1].mean() for t in range(len(values))])

    def literal():
        role = "policy" if value == "shared" else "value"
        with ours.roles.role(role):
            head = ours.roles.head("value")
            yield from map(pooled, rows_of(lambda ids: head(ours.roles.hidden_states(ids, None))[0, :, 0]))

    expected = list(literal())
    for row, values in enumerate(expected):
        torch.testing.assert_close(experience.old_values[row, : len(values)], values.detach(), **FP32)
        # At the last token the advantage is score − value, and so the return is the score, whatever λ.
        assert experience.returns[row, len(values) - 1].item() == pytest.approx(SCORES[row].item(), abs=1e-5)
    returns = torch.cat([experience.returns[row, : len(v)] for row, v in enumerate(expected)])
    loss = 0.5 * (torch.cat(expected) - returns).square().mean()
    found, gradient = value_loss_and_gradient(ours, experience)
    assert found == pytest.approx(loss.item(), rel=1e-4)
    ours.optimizer.zero_grad()
    own = ours.roles.parameters_of("value")  # shared, of the head alone
    assert_alike(gradient, torch.autograd.grad(0.5 * loss, own, retain_graph=True))
    if value == "shared":  # the policy's adapter learns from it, too: here from nothing else
        ours._backward_mini_batch(experience._replace(advantages=0 * experience.advantages), [0, 1, 2, 3])
        policy = ours.roles.parameters_of("policy")
        assert_alike([p.grad for p in policy], torch.autograd.grad(0.5 * loss, policy))


@pytest.mark.parametrize("adapter", [True, False], ids=["adapter", "all weights"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_value_model_is_trained_as_its_own_formula_says(adapter, checkpointing, tmp_path):
    made = ValueModel(classifier(), lora() if adapter else None)
    with torch.no_grad():
        for parameter in made.head.parameters():
            parameter.mul_(20)
    ours = trainer(tmp_path, base_with(made), vf_coef=0.5, cliprange_value=None, gradient_checkpointing=checkpointing)
    ours._prepare_training()
    ours.roles.train()  # without dropout all that changes is whether layers are recomputed
    assert made.backbone.is_gradient_checkpointing == checkpointing
    experience = ours._make_experience(rollout(RESPONSES), SCORES)

    def values_at(ids):
        return made.head(made.backbone(input_ids=ids).last_hidden_state)[0, :, 0]

    expected = list(rows_of(values_at))
    for row, values in enumerate(expected):
        torch.testing.assert_close(experience.old_values[row, : len(values)], values.detach(), **FP32)
    returns = torch.cat([experience.returns[row, : len(v)] for row, v in enumerate(expected)])
    loss = 0.5 * (torch.cat(expected) - returns).square().mean()
    found, gradient = value_loss_and_gradient(ours, experience)
    assert found == pytest.approx(loss.item(), rel=1e-4)
    assert_alike(gradient, torch.autograd.grad(0.5 * loss, ours.roles.parameters_of("value")))


def test_every_weight_of_a_value_model_learns(tmp_path):
    made = ValueModel(classifier(), None)
    before = [p.detach().clone() for p in made.parameters()]
    ours = trainer(tmp_path, base_with(made), learning_rate=1e-2, max_steps=4, vf_coef=1.0, temperature=1.0)
    frozen = [p.detach().clone() for p in ours.roles.causal_lm.get_input_embeddings().parameters()]
    ours.train()
    moved = [not torch.equal(a, b) for a, b in zip(before, made.parameters(), strict=True)]
    assert all(moved)  # every weight of the critic, embeddings and positions included
    assert torch.equal(frozen[0], ours.roles.causal_lm.get_input_embeddings().weight)
    ours.save_model(str(tmp_path / "out"))
    assert (tmp_path / "out" / "value" / "model.safetensors").is_file()


def test_weights_decay_and_biases_and_norms_do_not(tmp_path):
    made = ValueModel(classifier(), None)
    ours = trainer(tmp_path, base_with(made), value_weight_decay=0.1)
    groups = [group for group in ours.create_optimizer().param_groups if group["role"] == "value"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    decaying, others = (group["params"] for group in groups)
    assert all(p.ndim == 2 for p in decaying) and all(p.ndim == 1 for p in others)  # of GPT-2
    assert len(decaying) + len(others) == len(ours.roles.parameters_of("value"))


def test_a_cut_response_goes_on_with_the_value_model_s_value(tmp_path):
    made = ValueModel(classifier(), None)
    ours = trainer(tmp_path, base_with(made), truncated_as="bootstrap")
    found = ours.rollouts.values_after(rollout(RESPONSES))
    with torch.no_grad():
        states = made.backbone(input_ids=torch.tensor([PROMPTS[1] + RESPONSES[1]])).last_hidden_state
        expected = made.head(states)[0, -1, 0]
    torch.testing.assert_close(found, torch.tensor([0.0, expected.item(), 0.0, 0.0]), **FP32)
    with pytest.raises(ValueError, match="bootstrap needs the value after the last token"):
        config(tmp_path, truncated_as="bootstrap", value_pooling="prefix_mean")


def test_a_value_model_of_too_few_tokens_is_found(tmp_path):
    made = classifier()
    made.resize_token_embeddings(20)
    with pytest.raises(SelfCheckError, match="the value model has 20 embeddings and the tokenizer 42 tokens"):
        trainer(tmp_path, base_with(ValueModel(made, None)))


def test_a_token_that_the_base_alone_has_a_row_for_is_read_as_the_last(tmp_path):
    """Such rows, which fill a matrix up, can be drawn, however seldom."""
    ours = trainer(tmp_path, base_with(ValueModel(classifier(), None)))
    last = ours.roles.value_model.backbone.get_input_embeddings().num_embeddings - 1
    beyond, known = ([[5, token, 9, 2], *RESPONSES[1:]] for token in (last + 7, last))
    found, expected = (
        response_values(ours.roles, ours.rollouts.sequences(one, range(4))) for one in map(rollout, (beyond, known))
    )
    assert torch.equal(found, expected)


def test_what_lion_does_not_read_is_no_setting_of_the_value_role(tmp_path):
    for name, refused in (("lion_8bit", True), ("adamw_8bit", False)):
        ours = trainer(tmp_path, optim=name, value_adam_epsilon=1e-7, max_grad_norm=0.0)
        for _ in range(2):  # as where a cell is run again
            with pytest.raises(ConfigError, match="lion_8bit has no eps, which") if refused else nullcontext():
                ours._prepare_training()


@pytest.mark.parametrize(
    ("optim", "name", "states", "paged"),
    [
        ("lion_8bit", "Lion", {torch.uint8}, False),
        ("paged_lion_8bit", "Lion", {torch.uint8}, True),
        ("paged_adamw_32bit", "AdamW", {torch.float32}, True),
    ],
)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_optimizers_by_name(optim, name, states, paged, tmp_path):
    base = SharedBase(tiny_model(size=64))
    base.add_role("policy", lora(r=64))  # bitsandbytes keeps tensors of fewer than 4096 numbers in 32 bits
    base.add_role("reference")
    base.add_role("value", lora())
    base.add_role("reward", lora())
    randomize(base, "policy", "value", "reward")
    ours = trainer(tmp_path, base, optim=optim, learning_rate=1e-3, lr_scheduler_type="constant", max_grad_norm=0.0)
    ours._prepare_training()
    experience = ours._make_experience(rollout(RESPONSES), SCORES)
    ours._backward_mini_batch(experience, [0, 1, 2, 3])
    parameter = max(ours.roles.parameters_of("policy"), key=torch.numel)
    gradient, before = parameter.grad.clone(), parameter.detach().clone()
    ours.optimizer.step()
    inner = ours.optimizer.optimizer
    assert (type(inner).__module__.partition(".")[0], type(inner).__name__) == ("bitsandbytes", name)
    assert bool(getattr(inner, "is_paged", False)) == paged
    assert {inner.state[parameter]["state1"].dtype} == states
    # From nothing both take one learning rate in the direction of each gradient's sign: Lion by its formula
    # (Chen et al. 2023, arXiv 2302.06675, algorithm 2), Adam since m̂ / √v̂ is g / |g|.
    clear = gradient.abs() > 1e-5
    step = (parameter.detach() - before)[clear] / -1e-3
    assert clear.any()
    torch.testing.assert_close(step, gradient[clear].sign(), rtol=0.0, atol=0.02)


def test_optimizer_schedule_and_checkpointing_take_their_arguments(tmp_path):
    ours = trainer(
        tmp_path, optim="rmsprop", optim_args="momentum=0.5", lr_scheduler_type="linear", warmup_steps=2, max_steps=4,
        learning_rate=1e-3, logging_steps=1, gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"preserve_rng_state": False},
    )  # fmt: skip
    ours.train()
    assert {group["momentum"] for group in ours.optimizer.param_groups} == {0.5}
    rates = [row["learning_rate"] for row in ours.state.log_history if "learning_rate" in row]
    assert rates == pytest.approx([0.0, 5e-4, 1e-3, 5e-4])
    layer = ours.roles.causal_lm.model.layers[0]
    assert not layer._gradient_checkpointing_func.keywords["preserve_rng_state"]


@pytest.mark.parametrize("value", ["separate", "shared"])
def test_a_value_counts_within_its_own_range_of_the_old_one(value, tmp_path):
    ours = trainer(tmp_path, value=value, cliprange_value=0.05, vf_coef=1.0)
    ours._prepare_training()
    experience = ours._make_experience(rollout(RESPONSES), SCORES)
    head, role = ours.roles.head("value"), "policy" if value == "shared" else "value"
    with torch.no_grad():
        head.weight.mul_(1.5)  # the critic has moved since the rollout
        with ours.roles.role(role):
            values = torch.cat(list(rows_of(lambda ids: head(ours.roles.hidden_states(ids, None))[0, :, 0])))
    mask = experience.response_mask
    old, returns = experience.old_values[mask], experience.returns[mask]

    def loss(limit):
        clipped = old + (values - old).clamp(-limit, limit)
        return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square()).mean().item()

    found = ours._backward_mini_batch(experience, [0, 1, 2, 3])["value_loss"]
    assert found == pytest.approx(loss(0.05), rel=1e-4)
    for other in (0.2, 1e9):  # the policy's range; none
        assert found != pytest.approx(loss(other), rel=1e-3)
