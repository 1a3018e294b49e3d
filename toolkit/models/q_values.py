"""Q-values of response tokens: the role "q", which is trained, and "q_target", a moving average of it.

Both are adapters on the one base whose `lm_head` is read as Q. The target costs another adapter, no second base.
"""

import copy
from typing import NamedTuple

import torch
from peft import LoraConfig
from torch import Tensor

from toolkit.functional import best_q_values, q_policy_logprobs, token_q_values
from toolkit.models.forward import (
    _response_tokens,
    _scatter,
    _states_before_response_tokens,
    hidden_states_of,
    response_logprobs,
)
from toolkit.models.q_head import QBound
from toolkit.models.roles import SharedBase
from toolkit.models.sequences import Sequences


def add_q_roles(base: SharedBase, config: LoraConfig, *, bound: QBound | None = None) -> None:
    """Add the role "q" with a fresh adapter, and "q_target" as a copy of it.

    Args:
        base: carries neither.
        config: of both adapters. Their dropout counts for "q" alone.
        bound: keeps Q-values between two bounds; None reads the logits as they are.
    """
    base.add_role("q", copy.deepcopy(config), head=bound)
    base.add_role("q_target", copy.deepcopy(config), head=copy.deepcopy(bound))
    base.copy_adapter("q", "q_target")


@torch.no_grad()
def update_q_target(base: SharedBase, *, decay: float) -> None:
    """θ̄ ← decay · θ̄ + (1 − decay) · θ, for the adapter and the bound's scale and bias.

    The factors of a low-rank adapter are averaged one by one, as any parameters are; the product of two averages is
    not the average of the products, and follows it as closely as the factors move.
    """
    for target, online in zip(base.parameters_of("q_target"), base.parameters_of("q"), strict=True):
        target.lerp_(online.to(target.dtype), 1.0 - decay)


def q_of_states(base: SharedBase, role: str, states: Tensor) -> Tensor:
    """Q of every token at each state: (N, H) to float32 (N, V). Switches to the role by itself."""
    with base.role(role):  # an adapter may have a part on lm_head
        logits = base.lm_head(states).float()
    return base.heads[role](logits) if role in base.heads else logits


class ResponseQ(NamedTuple):
    """What the role "q" says of the tokens of responses: float32 (B, T) each, 0 outside the mask."""

    q: Tensor
    excess: Tensor  # see `toolkit.functional.token_q_values`


def response_q(base: SharedBase, sequences: Sequences, *, lowest: float = 0.0, chunk_size: int = 128) -> ResponseQ:
    """Q of each response token, with gradient. Call it in the role "q", and `backward` too."""
    states, mask = _states_before_response_tokens(base, sequences), sequences.response_mask
    found = token_q_values(
        states,
        lambda part: q_of_states(base, "q", part),
        _response_tokens(sequences),
        lowest=lowest,
        chunk_size=chunk_size,
    )
    return ResponseQ(*(_scatter(x, mask) for x in found))


class StateValues(NamedTuple):
    """The largest Q of the states of responses, float32."""

    before: Tensor  # (B, T), of the state before each token, 0 outside the mask
    after: Tensor  # (B,), of the state after the last one


@torch.no_grad()
def response_state_values(
    base: SharedBase, sequences: Sequences, *, role: str = "q_target", chunk_size: int = 128
) -> StateValues:
    """max_v Q(s, v) before each response token and after the last, without gradient and without dropout.

    Switches to the role by itself.
    """
    mask = sequences.response_mask
    with base.role(role), base.in_eval_mode():
        hidden = hidden_states_of(base, sequences)
        rows = torch.arange(mask.shape[0], device=mask.device)
        states = hidden[rows.unsqueeze(1).expand_as(mask)[mask], sequences.response_positions[mask] - 1]
        found = best_q_values(
            torch.cat([states, hidden[rows, sequences.lengths - 1]]),
            lambda part: q_of_states(base, role, part),
            chunk_size=chunk_size,
        )
    return StateValues(_scatter(found[: len(states)], mask), found[len(states) :])


@torch.no_grad()
def response_log_ratios(
    base: SharedBase, sequences: Sequences, *, temperature: float | None, chunk_size: int = 128
) -> Tensor:
    """log π(a | s) − log π_ref(a | s) of each response token under the policy that Q defines.

    Switches to "q" and "reference" by itself.

    Args:
        base: carries both.
        sequences: prompts and responses that π gave.
        temperature: τ of π ∝ π_ref · exp(Q/τ); None for the deterministic π that takes the largest Q, whose
            log-probability is 0.
        chunk_size: response tokens for which the whole vocabulary exists at a time.

    Returns:
        float32 (B, T), 0 outside the mask.
    """
    mask, tokens = sequences.response_mask, _response_tokens(sequences)
    with base.in_eval_mode():
        if temperature is None:
            with base.role("reference"):
                return -response_logprobs(base, sequences, chunk_size=chunk_size)
        states = {}
        for role in ("q", "reference"):
            with base.role(role):
                states[role] = _states_before_response_tokens(base, sequences)
        parts = [torch.empty(0, device=mask.device)]
        for start in range(0, tokens.numel(), chunk_size):
            part = slice(start, start + chunk_size)
            ref = _ref_logprobs(base, states["reference"][part])
            logprobs = q_policy_logprobs(q_of_states(base, "q", states["q"][part]), ref, temperature=temperature)
            parts.append((logprobs - ref).gather(1, tokens[part].unsqueeze(1)).squeeze(1))
    return _scatter(torch.cat(parts), mask)


def _ref_logprobs(base: SharedBase, states: Tensor) -> Tensor:
    with base.role("reference"):
        return base.lm_head(states).float().log_softmax(dim=-1)
