"""Log-probabilities of given tokens, and entropies, without a vocabulary-sized tensor for all of them at once."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def _chunk_logprobs(hidden: Tensor, lm_head: Callable[[Tensor], Tensor], tokens: Tensor, temperature: float) -> Tensor:
    logits = lm_head(hidden).float() / temperature  # (chunk, V)
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)


def _chunk_logprobs_and_entropy(
    hidden: Tensor, lm_head: Callable[[Tensor], Tensor], tokens: Tensor, temperature: float
) -> Tensor:
    log_p = (lm_head(hidden).float() / temperature).log_softmax(dim=-1)  # (chunk, V)
    # A token of probability 0 adds nothing, where 0·∞ would be nan.
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(dim=-1)
    return torch.stack([log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropy])


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
    return _in_chunks(_chunk_logprobs, hidden, lm_head, tokens, temperature, chunk_size).view(tokens.shape)


def token_logprobs_and_entropy(
    hidden: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 128,
) -> tuple[Tensor, Tensor]:
    """What `token_logprobs` gives, and the entropy −Σ_v p(v) log p(v) of the distribution before each token.

    Arguments as for `token_logprobs`. In natural units; of the tempered distribution, which is the one sampled from.

    Returns:
        float32 (...) each.

    Raises:
        ValueError: as for `token_logprobs`.
    """
    found = _in_chunks(_chunk_logprobs_and_entropy, hidden, lm_head, tokens, temperature, chunk_size)
    logprobs, entropy = found.view(2, *tokens.shape)
    return logprobs, entropy


def _in_chunks(
    function: Callable[..., Tensor],
    hidden: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    tokens: Tensor,
    temperature: float,
    chunk_size: int,
) -> Tensor:
    """The function's results (…, chunk) for all positions, joined on the last dimension; recomputed in backward."""
    if hidden.shape[:-1] != tokens.shape:
        raise ValueError(f"hidden {tuple(hidden.shape)} and tokens {tuple(tokens.shape)} do not fit")
    if temperature <= 0 or chunk_size < 1:
        raise ValueError(f"temperature ({temperature}) and chunk_size ({chunk_size}) must be positive")
    flat_hidden, flat_tokens = hidden.reshape(-1, hidden.shape[-1]), tokens.reshape(-1)
    recompute = torch.is_grad_enabled() and hidden.requires_grad
    chunks = []
    for start in range(0, max(flat_tokens.numel(), 1), chunk_size):  # at least one, so that the result has its shape
        part = flat_hidden[start : start + chunk_size], lm_head, flat_tokens[start : start + chunk_size], temperature
        chunks.append(checkpoint(function, *part, use_reentrant=False) if recompute else function(*part))
    return torch.cat(chunks, dim=-1)
