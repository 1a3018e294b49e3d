"""Answers by Q: the token with the largest Q, or a sample of the reference weighted by exp(Q/τ)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from toolkit.functional import q_policy_logprobs
from toolkit.models.q_values import q_of_states
from toolkit.models.roles import SharedBase


class _Reader:
    """One role with the keys and values of what it has read."""

    def __init__(self, base: SharedBase, role: str):
        self.base, self.role = base, role
        self.cache = DynamicCache(config=base.config)

    def read(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The last hidden state (B, H) after more tokens (B, L) of left-padded rows; the mask is of all so far."""
        # Both a padded and an unpadded row get the positions that an unpadded one has.
        positions = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        with self.base.role(self.role):
            decoder = self.base.causal_lm.base_model
            output = decoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
            )
        return output.last_hidden_state[:, -1]


def _next_tokens(base: SharedBase, states: dict[str, Tensor], temperature: float | None) -> Tensor:
    if "reference" not in states:
        return q_of_states(base, "q", states["q"]).argmax(dim=-1)
    with base.role("reference"):
        logprobs = base.lm_head(states["reference"]).float().log_softmax(dim=-1)
    if "q" in states:
        assert temperature is not None
        logprobs = q_policy_logprobs(q_of_states(base, "q", states["q"]), logprobs, temperature=temperature)
    elif temperature is None:
        return logprobs.argmax(dim=-1)
    return torch.multinomial(logprobs.exp(), 1).squeeze(1)


@torch.no_grad()
def generate_by_q(
    base: SharedBase,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    pad_token_id: int,
    temperature: float | None,
    by_q: bool = True,
    streamer: Any = None,
) -> Tensor:
    """Continue left-padded prompts token by token.

    With a temperature each token is drawn from π ∝ π_ref · exp(Q/τ), at the cost of two forward passes, one in each of
    the roles "q" and "reference", each with a cache of its own. Without one it is that of the largest Q, at the cost of
    one pass. See `toolkit.functional.q_policy_logprobs`.

    Args:
        base: carries the roles. Inside no dropout is active.
        input_ids: int64 (B, P), left-padded.
        attention_mask: (B, P), 1 at real tokens.
        max_new_tokens: of a response, its stop token included.
        stop_token_ids: a response ends with the first of any of these.
        pad_token_id: stands after the end of a response.
        temperature: τ, None for greedy.
        by_q: False leaves Q out, and answers as the reference does: sampled at temperature 1, or greedily. What there
            is to compare with.
        streamer: as in transformers: shown the prompt, then each token of a single row as it comes.

    Returns:
        int64 (B, T), T the longest response.
    """
    roles = ["q"] * by_q + ["reference"] * (not by_q or temperature is not None)
    stops = torch.tensor(list(stop_token_ids), device=input_ids.device)
    tokens, mask = input_ids, attention_mask
    done = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    responses = []
    if streamer is not None:
        streamer.put(input_ids.cpu())
    with base.in_eval_mode():
        readers = [_Reader(base, role) for role in roles]
        for _ in range(max_new_tokens):
            states = {reader.role: reader.read(tokens, mask) for reader in readers}
            following = _next_tokens(base, states, temperature).masked_fill(done, pad_token_id)
            responses.append(following)
            if streamer is not None:
                streamer.put(following.cpu())
            done = done | torch.isin(following, stops)
            if bool(done.all()):
                break
            tokens = following.unsqueeze(1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    if streamer is not None:
        streamer.end()
    return torch.stack(responses, dim=1)
