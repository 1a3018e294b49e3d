"""Log-probabilities of given tokens, and entropies, without a vocabulary-sized tensor for all of them at once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def in_chunks(function: Callable[..., Tensor], *tensors: Tensor, chunk_size: int) -> Tensor:
    """The results (..., N) of `function` for all positions, computed for `chunk_size` of them at a time.

    Where the first tensor needs a gradient each chunk is computed again in the backward pass, so that what the function
    makes on the way exists for one chunk only, in either pass.

    Args:
        function: maps a chunk of each tensor, (chunk, ...), to (..., chunk). Whatever else it depends on must be the
            same in the backward pass.
        tensors: (N, ...) each. The function is called once where N is 0, so that the result has its shape.
        chunk_size: positions a call.

    Example:
        >>> in_chunks(lambda x: x.sum(dim=1), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), chunk_size=2)
        tensor([ 3.,  7., 11.])
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be positive, got {chunk_size}")
    recompute = torch.is_grad_enabled() and tensors[0].requires_grad
    results = []
    for start in range(0, max(len(tensors[0]), 1), chunk_size):
        chunk = [tensor[start : start + chunk_size] for tensor in tensors]
        results.append(checkpoint(function, *chunk, use_reentrant=False) if recompute else function(*chunk))
    return torch.cat(results, dim=-1)


def check_temperature(temperature: float) -> None:
    """Raises a ValueError unless it is positive."""
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


def token_logprobs(
    hidden: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 128,
    frozen_head: bool = False,
) -> Tensor:
    """log softmax(lm_head(hidden) / temperature) at `tokens`: float32 (...).

    The head runs on `chunk_size` positions at a time, and its logits are recomputed in the backward pass, so that the
    peak is some chunk_size·V numbers however long the response is. (One 512-token response of Llama 3 has 263 MB of
    float32 logits.) A frozen head's are not: the gradient of each state, Wᵀ (1[v = token] − p(v)) / temperature up to
    the factor that the backward pass brings, is made while they are there.

    Args:
        hidden: (..., H), the state from which each token is predicted.
        lm_head: maps (N, H) to logits (N, V). Whatever it depends on must be the same in the backward pass.
        tokens: int64 (...), the leading dimensions of `hidden`.
        temperature: positive; the one that the tokens were sampled with.
        chunk_size: positions for which logits exist at a time.
        frozen_head: nothing that `lm_head` depends on trains; each of its rows depends on that row of `hidden` alone.
    """

    def of_chunk(hidden: Tensor, tokens: Tensor) -> Tensor:
        log_p = log_softmax_at(lm_head(hidden), temperature)  # (chunk, V)
        return log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    flat = _flat(hidden, tokens, temperature)
    if frozen_head and torch.is_grad_enabled() and hidden.requires_grad:
        return _OfFrozenHead.apply(*flat, lm_head, temperature, chunk_size).view(tokens.shape)
    return in_chunks(of_chunk, *flat, chunk_size=chunk_size).view(tokens.shape)


_FLOAT16_SCALE = 256.0
"""Of what is kept in float16. Where a token is likely, the p(v) of all others are below the smallest number of float16,
and no factor of the backward pass, such as a loss scaler's, brings back what is 0 before it."""


class _OfFrozenHead(torch.autograd.Function):
    """`token_logprobs` of states (N, H) and tokens (N,), which keeps the gradient of each state: (N, H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, tokens: Tensor, lm_head: Callable[[Tensor], Tensor], temperature: float, size: int
    ) -> Tensor:
        gradients: list[Tensor] = []

        def of_chunk(states: Tensor, tokens: Tensor) -> Tensor:
            with torch.enable_grad():
                states = states.detach().requires_grad_()
                logits = lm_head(states)
            log_p = log_softmax_at(logits.detach(), temperature)
            token = tokens.unsqueeze(1)
            sampled = log_p.gather(1, token)
            of_logits = log_p.exp_().neg_().scatter_add_(1, token, torch.ones_like(sampled))
            of_logits = of_logits if temperature == 1.0 else of_logits.div_(temperature)
            if logits.dtype is torch.float16:
                ctx.scale = _FLOAT16_SCALE * min(
                    temperature, 1.0
                )  # they were divided by it, and float16 ends at 65,504
                of_logits = of_logits.mul_(ctx.scale)
            gradients.extend(torch.autograd.grad(logits, states, of_logits.to(logits.dtype)))
            return sampled.squeeze(1)

        ctx.scale = 1.0
        logprobs = in_chunks(of_chunk, hidden, tokens, chunk_size=size)
        ctx.save_for_backward(torch.cat(gradients))
        return logprobs

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor) -> tuple[Tensor | None, ...]:
        (of_states,) = ctx.saved_tensors
        return (of_logprobs.unsqueeze(1) / ctx.scale * of_states).to(of_states.dtype), None, None, None, None


def log_softmax_at(logits: Tensor, temperature: float) -> Tensor:
    """The log-softmax of logits (..., V) in any precision, in float32; of float16 on a GPU without a copy in it."""
    if temperature != 1.0:
        logits = logits.float() / temperature
    return logits.log_softmax(dim=-1, dtype=torch.float32)


def token_logprobs_and_entropy(
    hidden: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 128,
) -> tuple[Tensor, Tensor]:
    """What `token_logprobs` gives, and the entropy −Σ_v p(v) log p(v) of the distribution before each token.

    In natural units; of the tempered distribution, which is the one sampled from. Arguments as for `token_logprobs`.
    """

    def of_chunk(hidden: Tensor, tokens: Tensor) -> Tensor:
        log_p = log_softmax_at(lm_head(hidden), temperature)  # (chunk, V)
        # A token of probability 0 adds nothing, where 0·∞ would be nan.
        entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(dim=-1)
        return torch.stack([log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropy])

    flat = _flat(hidden, tokens, temperature)
    logprobs, entropy = in_chunks(of_chunk, *flat, chunk_size=chunk_size).view(2, *tokens.shape)
    return logprobs, entropy


def _flat(hidden: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """States (N, H) and tokens (N,) of all positions."""
    if hidden.shape[:-1] != tokens.shape:
        raise ValueError(f"hidden {tuple(hidden.shape)} and tokens {tuple(tokens.shape)} do not fit")
    check_temperature(temperature)
    return hidden.reshape(-1, hidden.shape[-1]), tokens.reshape(-1)
