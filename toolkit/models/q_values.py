"""Q-values of response tokens: the role "q", which is trained, and "q_target", a moving average of it.

Both are adapters on the one base whose logits are read as Q. The target costs another adapter, no second base.
"""

import copy
import inspect
from functools import partial
from typing import NamedTuple

import torch
from peft import LoraConfig
from torch import Tensor
from transformers import DynamicCache

from toolkit.functional import best_q_values, q_policy_logprobs, token_q_values
from toolkit.functional.logprobs import in_chunks
from toolkit.models.caches import CACHE
from toolkit.models.decoding import RowProcessor, positions_of
from toolkit.models.forward import after_responses, hidden_states_of, response_logprobs, states_before_tokens
from toolkit.models.heads import QBound
from toolkit.models.roles import SharedBase
from toolkit.models.sequences import Sequences


def add_q_roles(base: SharedBase, config: LoraConfig, *, bound: QBound | None = None) -> None:
    """Add the role "q" with a fresh adapter, and "q_target" as its copy; without a bound Q-values are the logits."""
    base.add_role("q", copy.deepcopy(config), head=bound)
    base.add_role("q_target", copy.deepcopy(config), head=copy.deepcopy(bound))
    base.copy_adapter("q", "q_target")


@torch.no_grad()
def update_q_target(base: SharedBase, *, decay: float) -> None:
    """θ̄ ← decay · θ̄ + (1 − decay) · θ, for the adapter and the bound's scale and bias.

    The factors of a low-rank adapter are averaged one by one: their product follows the average of the products.
    """
    for target, online in zip(base.parameters_of("q_target"), base.parameters_of("q"), strict=True):
        target.lerp_(online.to(target.dtype), 1.0 - decay)


def _q_of_states(base: SharedBase, role: str, states: Tensor) -> Tensor:
    """Q of every token at each state: (N, H) to float32 (N, V). Switches to the role by itself."""
    with base.role(role):  # an adapter may have a part on lm_head
        logits = base.logits(states).float()
    return base.heads[role](logits) if role in base.heads else logits


class ResponseQ(NamedTuple):
    """What the role "q" says of the tokens of responses: float32 (B, T) each, 0 outside the mask."""

    q: Tensor
    excess: Tensor  # see `toolkit.functional.token_q_values`


def response_q(base: SharedBase, sequences: Sequences, *, lowest: float = 0.0, chunk_size: int = 128) -> ResponseQ:
    """What `toolkit.functional.token_q_values` gives of responses, with gradient. Call it and `backward` in "q"."""
    tokens, q_of = sequences.response_tokens, partial(_q_of_states, base, "q")
    states = states_before_tokens(base, sequences)
    read = token_q_values(states, q_of, tokens, lowest=lowest, chunk_size=chunk_size)
    return ResponseQ(*map(sequences.of_responses, read))


class StateValues(NamedTuple):
    """The largest Q of the states of responses, float32."""

    before: Tensor  # (B, T), of the state before each token, 0 outside the mask
    after: Tensor  # (B,), of the state after the last one


@torch.no_grad()
def response_state_values(base: SharedBase, sequences: Sequences, *, chunk_size: int = 128) -> StateValues:
    """max_v Q(s, v) of "q_target", to which it switches by itself, before each response token and after the last."""
    with base.role("q_target"), base.in_eval_mode():
        places, hidden = sequences.predicting, hidden_states_of(base, sequences)
        before = hidden[places]
        states = torch.cat([before, after_responses(hidden, sequences)])
        best = best_q_values(states, partial(_q_of_states, base, "q_target"), chunk_size=chunk_size)
    return StateValues(sequences.of_responses(best[: len(before)]), best[len(before) :])


@torch.no_grad()
def response_log_ratios(
    base: SharedBase, sequences: Sequences, *, temperature: float | None, chunk_size: int = 128
) -> Tensor:
    """log π(a | s) − log π_ref(a | s) under the policy that Q defines: float32 (B, T), 0 outside the mask.

    Switches to "q" and "reference" by itself.

    Args:
        temperature: τ of π ∝ π_ref · exp(Q/τ); None for the deterministic π that takes the largest Q, whose
            log-probability is 0.
    """
    tokens = sequences.response_tokens
    with base.in_eval_mode():
        if temperature is None:
            with base.role("reference"):
                return -response_logprobs(base, sequences, chunk_size=chunk_size)
        states = {}
        for role in ("q", "reference"):
            with base.role(role):
                states[role] = states_before_tokens(base, sequences)

        def of_chunk(q_states: Tensor, ref_states: Tensor, tokens: Tensor) -> Tensor:
            with base.role("reference"):
                ref = base.logits(ref_states).float().log_softmax(dim=-1)
            logprobs = q_policy_logprobs(_q_of_states(base, "q", q_states), ref, temperature=temperature)
            return (logprobs - ref).gather(1, tokens.unsqueeze(1)).squeeze(1)

        read = in_chunks(of_chunk, states["q"], states["reference"], tokens, chunk_size=chunk_size)
        return sequences.of_responses(read)


class LargestQ(RowProcessor):
    """Q of every token, from the logits of the role "q"; decoded greedily, the token with the largest."""

    def __init__(self, base: SharedBase):
        self.base = base

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.base.heads["q"](scores) if "q" in self.base.heads else scores


class WeightedByQ(RowProcessor):
    """log π with π ∝ π_ref · exp(Q/τ), from the logits of the reference: see `toolkit.functional.q_policy_logprobs`.

    Each token costs a second forward pass, in the role "q", with a cache of its own; of whole rows for a base without
    attention (Mamba), whose cache is of another kind. `attention_mask` is (B, P) of the left-padded prompts, 1 at real
    tokens; `temperature` is τ.
    """

    def __init__(self, base: SharedBase, attention_mask: Tensor, *, temperature: float):
        self.base, self.mask, self.temperature = base, attention_mask.long(), temperature
        cache, takes = DynamicCache(config=base.config), inspect.signature(base.causal_lm.base_model.forward).parameters
        self.cache = cache if CACHE in takes and not all(cache.is_linear) else None

    def keep(self, rows: Tensor) -> None:
        self.mask = self.mask[rows]
        if self.cache is not None:
            self.cache.reorder_cache(rows)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        unread = input_ids if self.cache is None else input_ids[:, self.cache.get_seq_length() :]
        self.mask = torch.nn.functional.pad(self.mask, (0, input_ids.shape[1] - self.mask.shape[1]), value=1)
        # Both a padded and an unpadded row get the positions that an unpadded one has.
        positions = (self.mask.cumsum(dim=1) - 1).clamp(min=0)[:, -unread.shape[1] :]
        if (learnt := positions_of(self.base.config)) is not None:  # of rows that have ended, and wait for others
            positions = positions.clamp(max=learnt - 1)
        cache = {} if self.cache is None else {CACHE: self.cache}
        with self.base.role("q"):
            states = self.base.hidden_states(unread, self.mask, position_ids=positions, **cache)
        q = _q_of_states(self.base, "q", states[:, -1])
        return q_policy_logprobs(q, scores.log_softmax(dim=-1), temperature=self.temperature)
