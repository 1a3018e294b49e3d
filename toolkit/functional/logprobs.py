"""Log-probabilities of given tokens, and entropies, without a vocabulary-sized tensor for all of them at once."""

from collections.abc import Callable

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
) -> Tensor:
    """log softmax(lm_head(hidden) / temperature) at `tokens`: float32 (...).

    The head runs on `chunk_size` positions at a time and its logits are recomputed in the backward
    pass, so that the peak is chunk_size·V numbers however long the response is. (One 512-token
    response of Llama 3 has 263 MB of float32 logits.)

    Args:
        hidden: (..., H), the state from which each token is predicted.
        lm_head: maps (N, H) to logits (N, V). Whatever it depends on must be the same in the backward pass.
        tokens: int64 (...), the leading dimensions of `hidden`.
        temperature: positive; the one that the tokens were sampled with.
        chunk_size: positions for which logits exist at a time.
    """

    def of_chunk(hidden: Tensor, tokens: Tensor) -> Tensor:
        logits = lm_head(hidden).float() / temperature  # (chunk, V)
        return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)

    flat = _flat(hidden, tokens, temperature)
    return in_chunks(of_chunk, *flat, chunk_size=chunk_size).view(tokens.shape)


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
        log_p = (lm_head(hidden).float() / temperature).log_softmax(dim=-1)  # (chunk, V)
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
