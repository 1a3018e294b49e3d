"""Log-probabilities of given tokens without a vocabulary-sized tensor for all of them at once."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def _chunk_logprobs(hidden: Tensor, lm_head: Callable[[Tensor], Tensor], tokens: Tensor, temperature: float) -> Tensor:
    logits = lm_head(hidden).float() / temperature  # (chunk, V)
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)


def token_logprobs(
    hidden: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 128,
) -> Tensor:
    """log softmax(lm_head(hidden) / temperature) at `tokens`, in float32.

    The head runs on `chunk_size` positions at a time and its logits are recomputed in the backward
    pass, so that the peak is chunk_size·V numbers however long the response is. (One 512-token
    response of Llama 3 has 263 MB of float32 logits.)

    Args:
        hidden: (..., H), the state from which each token is predicted.
        lm_head: maps (N, H) to logits (N, V). Whatever it depends on must be the same in the backward pass.
        tokens: int64 (...), the leading dimensions of `hidden`.
        temperature: positive; the one that the tokens were sampled with.
        chunk_size: positions for which logits exist at a time.

    Returns:
        float32 (...).

    Raises:
        ValueError: the shapes do not fit, or the temperature or chunk size is not positive.
    """
    if hidden.shape[:-1] != tokens.shape:
        raise ValueError(f"hidden {tuple(hidden.shape)} and tokens {tuple(tokens.shape)} do not fit")
    if temperature <= 0 or chunk_size < 1:
        raise ValueError(f"temperature ({temperature}) and chunk_size ({chunk_size}) must be positive")
    flat_hidden, flat_tokens = hidden.reshape(-1, hidden.shape[-1]), tokens.reshape(-1)
    chunks = []
    for start in range(0, flat_tokens.numel(), chunk_size):
        part = flat_hidden[start : start + chunk_size], lm_head, flat_tokens[start : start + chunk_size], temperature
        if torch.is_grad_enabled() and hidden.requires_grad:
            chunks.append(checkpoint(_chunk_logprobs, *part, use_reentrant=False))
        else:
            chunks.append(_chunk_logprobs(*part))
    if not chunks:
        return flat_hidden.new_zeros(tokens.shape, dtype=torch.float32)
    return torch.cat(chunks).view(tokens.shape)
