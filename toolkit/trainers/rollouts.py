"""Responses as a configuration asks for them, and what the roles say about them; in training and without it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from toolkit import models, processes
from toolkit.data import Rollout
from toolkit.functional import kl_k1, pool_values
from toolkit.portion import Portion, by_tokens
from toolkit.rewards import Reward
from toolkit.sampling import Evaluator, Metrics, Sampler, all_at_once
from toolkit.trainers.ppo_config import PPOConfig
from toolkit.trainers.q_config import QConfig
from toolkit.trainers.share import own_rows

_Read: TypeAlias = Callable[[models.Sequences], tuple[Tensor | None, ...]]


class RolesOnRollout(NamedTuple):
    """What the roles say about a rollout, float32 (B, T) each; zeros where something was not asked for."""

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    full_kl: Tensor


@dataclass(frozen=True)
class RoleRollouts:
    """Makes and measures rollouts in the roles of a shared base.

    `args` say how long responses are, how they are decoded and how much is computed at a time.
    """

    args: Any
    tokenizer: PreTrainedTokenizerBase
    roles: models.SharedBase
    autocast: Callable[[], AbstractContextManager]
    generated: Portion = field(default_factory=all_at_once)  # rows of a generation at a time

    at_a_time: ClassVar[str]  # the setting that says how many rows are read
    reads: ClassVar[frozenset[str]]  # settings by which an evaluation makes and reads responses, beside its precision

    def _sampler(self, **settings: Any) -> Sampler:
        settings |= {"response_length": self.args.response_length, "portion": self.generated}
        return Sampler(self.roles, self.tokenizer, autocast=self.autocast, **settings)

    def measured(self) -> tuple[Sampler, Callable[[Rollout], Tensor]]:
        """What is evaluated, and the log-ratios of its responses, as `Evaluator` has them."""
        raise NotImplementedError

    def evaluator(
        self, reward: Reward, metrics: Metrics | None = None, judge: Reward | None = None, **decoding: Any
    ) -> Evaluator:
        """Measures `per_device_eval_batch_size` prompts at a time; `decoding` is by the arguments of `measured`."""
        sampler, log_ratios = self.measured(**decoding)
        size, seed = self.args.per_device_eval_batch_size, self.args.seed
        return Evaluator(sampler, reward, log_ratios, size, seed, metrics, judge)

    def sequences(self, rollout: Rollout, rows: Sequence[int]) -> models.Sequences:
        """Some rows laid out for a forward pass."""
        ids = ([of_rows[i] for i in rows] for of_rows in (rollout.prompt_ids, rollout.response_ids))
        pad = self.tokenizer.pad_token_id
        return models.Sequences.from_ids(*ids, pad_token_id=pad, device=self.roles.device, pack=self.roles.packs_rows)

    def passes(self, rollout: Rollout, rows: Sequence[int], size: int) -> list[list[int]]:
        """Some rows in passes of as many tokens as `size` of the longest rows of the rollout have, at the most."""
        lengths = [
            len(prompt) + len(said) for prompt, said in zip(rollout.prompt_ids, rollout.response_ids, strict=True)
        ]
        return by_tokens(lengths, rows, size, packed=self.roles.packs_rows)

    @cached_property
    def portion(self) -> Portion:
        """Rows of a reading at a time."""
        return Portion(self.at_a_time, getattr(self.args, self.at_a_time))

    @torch.no_grad()
    def _filled(
        self, rollout: Rollout, rows: Sequence[int], read: _Read, *shape: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """What is read of some rows in eval mode, a portion at a time, as one tensor on the CPU; 0 elsewhere."""

        def attempt(size: int) -> Tensor:
            whole = torch.zeros(shape, dtype=dtype)
            with processes.agreed(), self.roles.in_eval_mode(), self.roles.weights_kept(), self.autocast():
                for part in self.passes(rollout, own_rows(rollout, rows), size):
                    for to_fill, tensor in zip(whole, read(self.sequences(rollout, part)), strict=True):
                        if tensor is not None:
                            to_fill[(part, *map(slice, tensor.shape[1:]))] = tensor.cpu().to(dtype)
            return whole

        whole = self.portion(attempt, most=len(rows))
        processes.sum_([whole])
        return whole


class Rollouts(RoleRollouts):
    """Makes, reads and measures rollouts of the policy of PPO, with the reference, and the value role if it is read."""

    args: PPOConfig
    at_a_time = "local_rollout_forward_batch_size"
    reads = frozenset((
        "response_length", "max_length", "temperature", "eval_do_sample", "per_device_eval_batch_size",
        "local_rollout_forward_batch_size", "logprob_chunk_size",
    ))  # fmt: skip

    def sampler(self, *, do_sample: bool = True, **decoding: bool) -> Sampler:
        """The policy, sampled or decoded greedily; `merged` and with `graphs` where asked for."""
        temperature = self.args.temperature if do_sample else None
        return self._sampler(max_length=self.args.max_length, temperature=temperature, **decoding)

    def measured(self) -> tuple[Sampler, Callable[[Rollout], Tensor]]:
        return self.sampler(do_sample=self.args.eval_do_sample), self.log_ratios

    # What follows is read in the same kind of forward pass as in the update.

    def read(self, rollout: Rollout, *, values: bool = True, full_kl: bool = False) -> RolesOnRollout:
        """What policy, reference and value say about a rollout: float32 (B, T) each, on the CPU."""
        rows, read = len(rollout), partial(self._read, values=values, full_kl=full_kl)
        return RolesOnRollout(*self._filled(rollout, range(rows), read, 4, rows, max(rollout.lengths)))

    def log_ratios(self, rollout: Rollout) -> Tensor:
        """log π − log π_ref of each response: (B,)."""
        read = self.read(rollout, values=False)
        return kl_k1(read.logprobs, read.ref_logprobs).sum(dim=1)  # both are 0 outside the mask

    def values_after(self, rollout: Rollout) -> Tensor:
        """What comes after a response that was cut, by the value role: float32 (B,), 0 where it ended by itself."""

        def read(sequences: models.Sequences) -> tuple[Tensor]:
            with self.roles.role("value"):
                return (models.value_after_response(self.roles, sequences),)

        cut = [i for i, ended in enumerate(rollout.ended) if not ended]
        return self._filled(rollout, cut, read, 1, len(rollout))[0]

    def _read(self, sequences: models.Sequences, *, values: bool, full_kl: bool) -> tuple[Tensor | None, ...]:
        """In the order of `RolesOnRollout`; None for what was not asked for."""
        roles = self.roles
        settings: dict[str, Any] = {"temperature": self.args.temperature, "chunk_size": self.args.logprob_chunk_size}
        with roles.role("policy"):
            policy = models.read_policy(roles, sequences, ref_kl=full_kl, **settings)
        ref_logprobs, old_values = policy.ref_logprobs, policy.values
        if ref_logprobs is None:
            with roles.role("reference"):
                ref_logprobs = models.response_logprobs(roles, sequences, **settings)
        if values and old_values is None:
            with roles.role("value"):
                old_values = models.response_values(roles, sequences)
        if old_values is not None:
            old_values = pool_values(old_values, sequences.response_mask, self.args.value_pooling)
        return policy.logprobs, ref_logprobs, old_values, policy.ref_kl


class QRollouts(RoleRollouts):
    """Makes and measures rollouts of the policy that Q defines, and of the reference."""

    args: QConfig
    at_a_time = "per_device_eval_batch_size"
    reads = frozenset((
        "response_length", "decoding", "decoding_temperature", "per_device_eval_batch_size", "q_chunk_size",
    ))  # fmt: skip

    def sampler(self, *, by_q: bool = True) -> Sampler:
        """The policy as `decoding` says; or the reference, decoded in the same way."""
        sampler = self._sampler(role="q", temperature=self.args.temperature)
        return sampler if by_q else sampler.reference

    def measured(self, *, by_q: bool = True) -> tuple[Sampler, Callable[[Rollout], Tensor]]:
        """The policy or the reference. `kl` is an estimate where responses are sampled, and the divergence of these
        responses where they are greedy, log π being 0 there."""
        sampler = self.sampler(by_q=by_q)
        return sampler, partial(self._log_ratios, sampler)

    def _log_ratios(self, sampler: Sampler, rollout: Rollout) -> Tensor:
        """log π − log π_ref of each response: float64 (B,)."""
        rows, dtype = len(rollout), torch.float64
        settings: dict[str, Any] = {"temperature": sampler.temperature, "chunk_size": self.args.q_chunk_size}
        if sampler.role == "reference" and sampler.temperature is not None:
            return torch.zeros(rows, dtype=dtype)  # π is the reference

        def read(sequences: models.Sequences) -> tuple[Tensor]:
            return (models.response_log_ratios(self.roles, sequences, **settings).sum(dim=1),)

        return self._filled(rollout, range(rows), read, 1, rows, dtype=dtype)[0]
