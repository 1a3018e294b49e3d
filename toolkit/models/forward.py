"""What a role says about a batch of sequences."""

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from toolkit.functional import full_kl, token_logprobs, token_logprobs_and_entropy
from toolkit.models.fused_lora import computed_in
from toolkit.models.heads import score_positions
from toolkit.models.roles import SharedBase
from toolkit.models.sequences import Sequences


def hidden_states_of(base: SharedBase, sequences: Sequences, *, of_value: bool = False) -> Tensor:
    """(B, L, H), or (1, L, H) of packed rows, of the base or of what the value head stands on; where there is padding
    they mean nothing."""
    model = base.value_model if of_value and base.value_model is not None else base
    rows: dict[str, Any] = {}
    if sequences.packed:
        rows = {"row_lengths": sequences.row_lengths, "common_length": sequences.common_length}
    positions = sequences.position_ids
    return model.hidden_states(sequences.input_ids, sequences.attention_mask, position_ids=positions, **rows)


def states_before_tokens(base: SharedBase, sequences: Sequences, *, of_value: bool = False) -> Tensor:
    """(N, H): those of `hidden_states_of` from which each real response token is predicted, padding left out."""
    places = sequences.predicting  # asked for behind the pass, a card would answer at its end, and then stand idle
    return hidden_states_of(base, sequences, of_value=of_value)[places]


def after_responses(hidden: Tensor, sequences: Sequences) -> Tensor:
    """(B, H): the state after the last response token of each row."""
    return hidden[sequences.lines, sequences.starts + sequences.lengths - 1]


def response_logprobs(
    base: SharedBase, sequences: Sequences, *, temperature: float = 1.0, chunk_size: int = 128
) -> Tensor:
    """Log-probability of each response token in the active role: float32 (B, T), 0 outside the mask."""
    tokens, states = sequences.response_tokens, states_before_tokens(base, sequences)
    settings: dict[str, Any] = {"temperature": temperature, "chunk_size": chunk_size}
    logprobs = token_logprobs(states, base.logits, tokens, frozen_head=_keeps_gradient(base, states), **settings)
    return sequences.of_responses(logprobs)


def response_values(base: SharedBase, sequences: Sequences) -> Tensor:
    """The value head's estimate before each response token, in the role "value": float32 (B, T), 0 outside the mask."""
    states = states_before_tokens(base, sequences, of_value=True)
    return sequences.of_responses(base.head("value")(states).squeeze(-1))


def value_after_response(base: SharedBase, sequences: Sequences) -> Tensor:
    """The value head's estimate after the last response token of each row, in the role "value": float32 (B,)."""
    states = after_responses(hidden_states_of(base, sequences, of_value=True), sequences)
    return base.head("value")(states).squeeze(-1)


def _has_frozen_head(base: SharedBase) -> bool:
    return not isinstance(base.lm_head, LoraLayer)


def _keeps_gradient(base: SharedBase, states: Tensor) -> bool:
    """Whether the gradient of states can be made with their log-probabilities: in float16 not where logits are scaled
    or capped in float32 after `lm_head`, in which what is small would be lost before a loss scaler comes to it."""
    half = torch.float16 in (computed_in(states), base.lm_head.weight.dtype)
    return _has_frozen_head(base) and not (half and base.changes_logits)


def _logits_in(base: SharedBase, role: str, hidden: Tensor, *, dropout: bool = True) -> Tensor:
    """Logits of a role: its adapter may have a part on lm_head, with dropout of its own."""
    if _has_frozen_head(base):
        return base.logits(hidden)
    with base.role(role), nullcontext() if dropout else base.in_eval_mode():
        return base.logits(hidden)


class PolicyReading(NamedTuple):
    """What the policy says of its responses: float32 (B, T) each, 0 outside the mask.

    `values` only where the value role shares its adapter. Where they are asked for, `entropy` before each token, and
    `ref_kl`, KL(policy, reference) over the vocabulary there, with the reference's `ref_logprobs`.
    """

    logprobs: Tensor
    values: Tensor | None = None
    entropy: Tensor | None = None
    ref_kl: Tensor | None = None
    ref_logprobs: Tensor | None = None


def read_policy(
    base: SharedBase,
    sequences: Sequences,
    *,
    temperature: float = 1.0,
    chunk_size: int = 128,
    entropy: bool = False,
    ref_kl: bool = False,
) -> PolicyReading:
    """One forward pass of the policy, and of the reference without gradient where `ref_kl` needs it.

    Call it in the role "policy", and `backward` too.

    Args:
        temperature: that the responses were sampled with.
        chunk_size: response tokens for which logits exist at a time.
    """
    tokens, states = sequences.response_tokens, states_before_tokens(base, sequences)
    settings: dict[str, Any] = {"temperature": temperature, "chunk_size": chunk_size}
    values = base.head("value")(states).squeeze(-1) if base.shares_value else None
    kl = ref_logprobs = entropies = None
    if ref_kl:
        with torch.no_grad(), base.role("reference"), base.in_eval_mode():
            ref_states = states_before_tokens(base, sequences)
        heads = partial(_logits_in, base, "policy"), partial(_logits_in, base, "reference", dropout=False)
        kl, logprobs, ref_logprobs = full_kl(states, ref_states, *heads, tokens, **settings)
    if entropy:
        logprobs, entropies = token_logprobs_and_entropy(states, base.logits, tokens, **settings)
    elif not ref_kl:
        logprobs = token_logprobs(states, base.logits, tokens, frozen_head=_keeps_gradient(base, states), **settings)
    optional = (None if x is None else sequences.of_responses(x) for x in (values, entropies, kl, ref_logprobs))
    return PolicyReading(sequences.of_responses(logprobs), *optional)


def sequence_logits(
    base: SharedBase, input_ids: Tensor, attention_mask: Tensor, *, pad_token_id: int, role: str = "reward"
) -> Tensor:
    """The head of reward or judge where a sequence's score is read: see `score_positions`. Float32 (B, num_labels).

    Switches to the role by itself. The rows may be padded on either side.
    """
    rows = torch.arange(input_ids.shape[0], device=input_ids.device)
    positions = score_positions(input_ids, attention_mask, pad_token_id)
    return base.head(role)(reward_states(base, input_ids, attention_mask, role=role)[rows, positions])


def reward_states(base: SharedBase, input_ids: Tensor, attention_mask: Tensor, *, role: str = "reward") -> Tensor:
    """(B, L, H) in the role, of rows padded on either side, where it means nothing."""
    with base.role(role):
        positions = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)  # of padding, the token before it
        if not base.packs_rows:
            if attention_mask[:, 0].all():  # padding comes last: see `Sequences.attention_mask`
                attention_mask = torch.ones_like(attention_mask)
            return base.hidden_states(input_ids, attention_mask, position_ids=positions)
        sequences = Sequences.from_padded(input_ids, attention_mask)
        places = sequences.places(positions)
        return hidden_states_of(base, sequences)[0].index_select(0, places.flatten()).view(*places.shape, -1)
