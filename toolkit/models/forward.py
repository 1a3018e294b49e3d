"""What a role says about a batch of sequences."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from toolkit.functional import full_kl, token_logprobs, token_logprobs_and_entropy
from toolkit.models.heads import score_positions
from toolkit.models.roles import SharedBase
from toolkit.models.sequences import Sequences
from toolkit.models.value_model import ValueModel


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """(N,) values of the True entries of `mask` (B, T) to (B, T), 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def _reads_values(base: SharedBase) -> SharedBase | ValueModel:
    """What the value head stands on."""
    return base if base.value_model is None else base.value_model


def hidden_states_of(base: SharedBase | ValueModel, sequences: Sequences) -> Tensor:
    """(B, L, H); where there is padding they mean nothing."""
    return base.hidden_states(sequences.input_ids, sequences.attention_mask, position_ids=sequences.position_ids)


def _states_before_response_tokens(base: SharedBase | ValueModel, sequences: Sequences) -> Tensor:
    """(N, H): the state from which each real response token is predicted, padding left out."""
    hidden, mask = hidden_states_of(base, sequences), sequences.response_mask
    rows = torch.arange(mask.shape[0], device=mask.device).unsqueeze(1).expand_as(mask)[mask]
    return hidden[rows, sequences.response_positions[mask] - 1]


def response_logprobs(
    base: SharedBase, sequences: Sequences, *, temperature: float = 1.0, chunk_size: int = 128
) -> Tensor:
    """Log-probability of each response token in the active role: float32 (B, T), 0 outside the mask."""
    return _logprobs(base, sequences, _states_before_response_tokens(base, sequences), temperature, chunk_size)


def _response_tokens(sequences: Sequences) -> Tensor:
    """(N,): the real response tokens."""
    return sequences.input_ids.gather(1, sequences.response_positions)[sequences.response_mask]


def _logprobs(base: SharedBase, sequences: Sequences, states: Tensor, temperature: float, chunk_size: int) -> Tensor:
    mask, tokens = sequences.response_mask, _response_tokens(sequences)
    return _scatter(token_logprobs(states, base.lm_head, tokens, temperature=temperature, chunk_size=chunk_size), mask)


def response_values(base: SharedBase, sequences: Sequences) -> Tensor:
    """The value head's estimate before each response token: float32 (B, T), 0 outside the mask.

    Call it in the role "value".
    """
    states = _states_before_response_tokens(_reads_values(base), sequences)
    return _scatter(base.head("value")(states).squeeze(-1), sequences.response_mask)


def value_after_response(base: SharedBase, sequences: Sequences) -> Tensor:
    """The value head's estimate after the last response token of each row: float32 (B,).

    What a response that was only cut off would still have been worth. Call it in the role "value".
    """
    hidden = hidden_states_of(_reads_values(base), sequences)
    last = torch.where(sequences.response_mask, sequences.response_positions, -1).amax(dim=1)  # (B,)
    rows = torch.arange(last.shape[0], device=last.device)
    return base.head("value")(hidden[rows, last]).squeeze(-1)


def response_logprobs_and_values(
    base: SharedBase, sequences: Sequences, *, temperature: float = 1.0, chunk_size: int = 128
) -> tuple[Tensor, Tensor]:
    """Both from one forward pass, for a value role that shares the policy's adapter: float32 (B, T) each."""
    states = _states_before_response_tokens(base, sequences)
    values = _scatter(base.head("value")(states).squeeze(-1), sequences.response_mask)
    return _logprobs(base, sequences, states, temperature, chunk_size), values


class ResponseKL(NamedTuple):
    """What `response_full_kl` gives: float32 (B, T) each, 0 outside the mask; `values` only where they are shared."""

    kl: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor | None


@torch.no_grad()
def response_full_kl(
    base: SharedBase, sequences: Sequences, *, temperature: float = 1.0, chunk_size: int = 128
) -> ResponseKL:
    """KL(policy, reference) over the whole vocabulary before each response token, without gradient.

    Switches to the two roles by itself; one forward pass each. Log-probabilities, and the values where the value
    role shares the policy's adapter, fall out of the same passes.
    """
    mask = sequences.response_mask
    with base.role("policy"):
        states = _states_before_response_tokens(base, sequences)
        values = _scatter(base.head("value")(states).squeeze(-1), mask) if base.shares_value else None
    with base.role("reference"):
        ref_states = _states_before_response_tokens(base, sequences)
    found = full_kl(
        states,
        ref_states,
        partial(_head_of, base, "policy"),
        partial(_head_of, base, "reference"),
        _response_tokens(sequences),
        temperature=temperature,
        chunk_size=chunk_size,
    )
    kl, logprobs, ref_logprobs = (_scatter(x, mask) for x in found)
    return ResponseKL(kl, logprobs, ref_logprobs, values)


def _head_of(base: SharedBase, role: str, hidden: Tensor) -> Tensor:
    if not base.adapts_lm_head:
        return base.lm_head(hidden)
    with base.role(role):
        return base.lm_head(hidden)


def _frozen_reference(base: SharedBase, hidden: Tensor) -> Tensor:
    if not base.adapts_lm_head:
        return base.lm_head(hidden)
    with base.in_eval_mode():  # a frozen copy of an adapter has its dropout
        return _head_of(base, "reference", hidden)


class PolicyReading(NamedTuple):
    """What the policy says of its responses while it is trained: float32 (B, T) each, 0 outside the mask.

    `values` only where the value role shares its adapter; `entropy` and `ref_kl` only where they are asked for.
    """

    logprobs: Tensor
    values: Tensor | None = None
    entropy: Tensor | None = None
    ref_kl: Tensor | None = None


def read_policy(
    base: SharedBase,
    sequences: Sequences,
    *,
    temperature: float = 1.0,
    chunk_size: int = 128,
    entropy: bool = False,
    ref_kl: bool = False,
) -> PolicyReading:
    """One forward pass of the policy with gradient, and of the reference without where `ref_kl` needs it.

    Call it in the role "policy", and `backward` too.

    Args:
        base: carries policy and reference.
        sequences: prompts and responses.
        temperature: that the responses were sampled with.
        chunk_size: response tokens for which logits exist at a time.
        entropy: whether to give the entropy before each response token.
        ref_kl: whether to give KL(policy, reference) over the vocabulary before each response token.
    """
    states, mask = _states_before_response_tokens(base, sequences), sequences.response_mask
    tokens = _response_tokens(sequences)
    settings: dict[str, Any] = {"temperature": temperature, "chunk_size": chunk_size}
    values = _scatter(base.head("value")(states).squeeze(-1), mask) if base.shares_value else None
    kl = entropies = None
    if ref_kl:
        with torch.no_grad(), base.role("reference"), base.in_eval_mode():
            ref_states = _states_before_response_tokens(base, sequences)
        heads = partial(_head_of, base, "policy"), partial(_frozen_reference, base)
        kl, logprobs, _ = full_kl(states, ref_states, *heads, tokens, **settings)
    if entropy:
        logprobs, entropies = token_logprobs_and_entropy(states, base.lm_head, tokens, **settings)
    elif not ref_kl:
        logprobs = token_logprobs(states, base.lm_head, tokens, **settings)
    optional = (None if x is None else _scatter(x, mask) for x in (entropies, kl))
    return PolicyReading(_scatter(logprobs, mask), values, *optional)


def sequence_logits(
    base: SharedBase, input_ids: Tensor, attention_mask: Tensor, *, pad_token_id: int, role: str = "reward"
) -> Tensor:
    """The role's head at the position where a sequence's score is read: float32 (B, num_labels).

    Switches to the role by itself.

    Args:
        base: carries the role.
        input_ids: int64 (B, L), padded on either side.
        attention_mask: (B, L), 1 at real tokens.
        pad_token_id: the one that the head was trained with: see `score_positions`.
        role: the role whose adapter and head are read.
    """
    hidden = _hidden_states_of(base, input_ids, attention_mask, role)
    positions = score_positions(input_ids, attention_mask, pad_token_id)
    rows = torch.arange(input_ids.shape[0], device=input_ids.device)
    return base.head(role)(hidden[rows, positions])


def token_logits(base: SharedBase, input_ids: Tensor, attention_mask: Tensor, *, role: str = "reward") -> Tensor:
    """The role's head at every token: float32 (B, L, num_labels). For the arguments see `sequence_logits`."""
    return base.head(role)(_hidden_states_of(base, input_ids, attention_mask, role))


def _hidden_states_of(base: SharedBase, input_ids: Tensor, attention_mask: Tensor, role: str) -> Tensor:
    # Both padding sides get the positions that an unpadded row has.
    position_ids = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
    with base.role(role):
        return base.hidden_states(input_ids, attention_mask, position_ids=position_ids)
