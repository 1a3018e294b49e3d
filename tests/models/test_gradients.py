"""Gradients on the shared base are those of each role's model loaded alone, with a straightforward loss."""

import pytest
import torch
from peft import PeftModel
from torch import nn

from tests.tiny_models import shared_base, tiny_model
from tests.tolerances import RELATIVE
from toolkit.models import (
    Sequences,
    read_policy,
    response_logprobs,
    response_values,
    save_role,
)

PROMPTS = [[1, 4, 9], [1, 30, 31, 32, 33]]
RESPONSES = [[12, 13, 2], [20, 21, 22, 23]]


def alone(folder, role):
    """The role's model without our code: PEFT's loader on a base of its own."""
    if role == "value":
        from transformers import AutoModelForSequenceClassification

        model = tiny_model()
        model.save_pretrained(folder / "base")
        classifier = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
        return PeftModel.from_pretrained(classifier, str(folder / "value"), is_trainable=True)
    return PeftModel.from_pretrained(tiny_model(), str(folder / role), is_trainable=True)


def row_losses(model, head, weights):
    """Σ over response tokens of w·log p, and of w·V², row by row without padding, from full logits."""
    policy, value = 0.0, 0.0
    for prompt, response, w in zip(PROMPTS, RESPONSES, weights, strict=True):
        ids = torch.tensor([prompt + response])
        hidden = model.get_base_model().base_model(input_ids=ids).last_hidden_state[0]
        states = hidden[len(prompt) - 1 : -1]
        if head is not None:
            value = value + (w * head(states).squeeze(-1) ** 2).sum()
        if hasattr(model.get_base_model(), "lm_head"):
            logprobs = model.get_base_model().lm_head(states).log_softmax(-1)
            policy = policy + (w * logprobs[torch.arange(len(response)), torch.tensor(response)]).sum()
    return policy, value


def lora_gradients(model, adapter):
    gradients = {}
    for name, p in model.named_parameters():
        if f".{adapter}." in name and "lora_" in name:
            gradients[name.split("layers.")[1].replace(f".{adapter}.", ".")] = p.grad
    return gradients


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys() and ours
    for name, gradient in theirs.items():
        error = (ours[name] - gradient).abs().max() / gradient.abs().max()
        assert error < RELATIVE, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize(
    ("value", "checkpointing", "backward"),
    [
        ("separate", False, "a role at a time"),
        ("separate", False, "joint"),
        ("separate", True, "a role at a time"),
        ("separate", True, "joint"),
        ("separate", True, "joint, after off and on"),
        ("shared", False, "joint"),
        ("shared", True, "joint"),
        ("shared", True, "joint, after off and on"),
    ],
)
def test_gradients_equal_those_of_separate_models(value, checkpointing, backward, tmp_path):
    base = shared_base(value=value)
    weights = [torch.tensor([0.5, -1.0, 2.0]), torch.tensor([1.5, 0.3, -0.7, 1.0])]
    padded = torch.zeros(2, 4)
    padded[0, :3], padded[1, :4] = weights
    for role in ("policy", "value"):
        save_role(base, role, tmp_path / role, pad_token_id=0, base_name="tiny")
    if checkpointing:
        base.gradient_checkpointing_enable()
        if backward.endswith("on"):  # as TRL does around generation, with default arguments
            base.gradient_checkpointing_disable()
            base.gradient_checkpointing_enable()
    base.train()
    sequences = Sequences.from_ids(PROMPTS, RESPONSES, pad_token_id=0)
    if value == "shared":
        with base.role("policy"):
            logprobs, values, *_ = read_policy(base, sequences, chunk_size=2)
            ((padded * logprobs).sum() + (padded * values**2).sum()).backward()
    else:
        losses = []
        for role, read in (("policy", response_logprobs), ("value", response_values)):
            with base.role(role):
                out = read(base, sequences)
                losses.append((padded * (out if role == "policy" else out**2)).sum())
                if backward == "a role at a time":
                    losses[-1].backward()
        if backward.startswith("joint"):
            sum(losses).backward()

    policy = alone(tmp_path, "policy")
    if value == "shared":
        head = nn.Linear(32, 1, bias=False)
        head.weight.data.copy_(base.heads["value"].weight.detach())
        sum(row_losses(policy, head, weights)).backward()
        assert_equal({"head": base.heads["value"].weight.grad}, {"head": head.weight.grad})
    else:
        row_losses(policy, None, weights)[0].backward()
        critic = alone(tmp_path, "value")
        head = critic.get_base_model().score
        row_losses(critic, head, weights)[1].backward()
        assert_equal(lora_gradients(base, "value"), lora_gradients(critic, "default"))
        (score,) = (p.grad for n, p in critic.named_parameters() if "score.modules_to_save" in n)
        assert_equal({"head": base.heads["value"].weight.grad}, {"head": score})
    assert_equal(lora_gradients(base, "policy"), lora_gradients(policy, "default"))
