"""Responses as a configuration asks for them, and what the roles say about them; in training and without it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from toolkit import models, processes
from toolkit.data import Rollout
from toolkit.functional import kl_k1, pool_values
from toolkit.portion import Portion
from toolkit.rewards import Reward
from toolkit.sampling import Evaluator, Sampler
from toolkit.trainers.ppo_config import PPOConfig
from toolkit.trainers.q_config import QConfig
from toolkit.trainers.share import own_rows


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

    def _sampler(self, **settings: Any) -> Sampler:
        length = self.args.response_length
        return Sampler(self.roles, self.tokenizer, response_length=length, autocast=self.autocast, **settings)

    def sequences(self, rollout: Rollout, rows: Sequence[int]) -> models.Sequences:
        """Some rows laid out for a forward pass."""
        ids = ([of_rows[i] for i in rows] for of_rows in (rollout.prompt_ids, rollout.response_ids))
        return models.Sequences.from_ids(*ids, pad_token_id=self.tokenizer.pad_token_id, device=self.roles.device)

    def _parts(self, rollout: Rollout, rows: Sequence[int], size: int) -> Iterator[tuple[list[int], models.Sequences]]:
        for part in by_length(rollout, own_rows(rollout, rows), size):
            yield part, self.sequences(rollout, part)
            models.release_memory()


class Rollouts(RoleRollouts):
    """Makes, reads and measures rollouts of the policy of PPO, with the reference, and the value role if it is read."""

    args: PPOConfig

    @cached_property
    def portion(self) -> Portion:
        """Rows of a reading at a time."""
        return Portion("local_rollout_forward_batch_size", self.args.local_rollout_forward_batch_size)

    def sampler(self, *, do_sample: bool = True) -> Sampler:
        """The policy, sampled or decoded greedily."""
        return self._sampler(max_length=self.args.max_length, temperature=self.args.temperature if do_sample else None)

    def evaluator(
        self,
        reward: Reward,
        metrics: Callable[[Rollout], dict[str, float]] | None = None,
        judge: Reward | None = None,
    ) -> Evaluator:
        """Measures by `eval_do_sample`, `per_device_eval_batch_size` prompts at a time."""
        args, sampler = self.args, self.sampler(do_sample=self.args.eval_do_sample)
        size, seed = args.per_device_eval_batch_size, args.seed
        return Evaluator(sampler, reward, self.log_ratios, size, seed, metrics, judge)

    # What follows is read in the same kind of forward pass as in the update.

    @torch.no_grad()
    def read(self, rollout: Rollout, *, values: bool = True, full_kl: bool = False) -> RolesOnRollout:
        """What policy, reference and value say about a rollout: float32 (B, T) each, on the CPU."""

        def attempt(size: int) -> RolesOnRollout:
            whole = RolesOnRollout(*(torch.zeros(len(rollout), max(rollout.lengths)) for _ in range(4)))
            with processes.agreed(), self.roles.in_eval_mode(), self.autocast():
                for part, sequences in self._parts(rollout, range(len(rollout)), size):
                    read = self._read(sequences, values=values, full_kl=full_kl)
                    for to_fill, tensor in zip(whole, read, strict=True):
                        if tensor is not None:
                            to_fill[part, : tensor.shape[1]] = tensor.cpu()
            return whole

        whole = self.portion(attempt)
        processes.sum_(whole)
        return whole

    def log_ratios(self, rollout: Rollout) -> Tensor:
        """log π − log π_ref of each response: (B,)."""
        read = self.read(rollout, values=False)
        return kl_k1(read.logprobs, read.ref_logprobs).sum(dim=1)  # both are 0 outside the mask

    @torch.no_grad()
    def values_after(self, rollout: Rollout) -> Tensor:
        """What comes after a response that was cut, by the value role: float32 (B,), 0 where it ended by itself."""
        cut = [i for i, ended in enumerate(rollout.ended) if not ended]

        def attempt(size: int) -> Tensor:
            values = torch.zeros(len(rollout))
            with processes.agreed(), self.roles.in_eval_mode(), self.autocast(), self.roles.role("value"):
                for part, sequences in self._parts(rollout, cut, size):
                    values[part] = models.value_after_response(self.roles, sequences).cpu()
            return values

        values = self.portion(attempt)
        processes.sum_([values])
        return values

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

    @cached_property
    def portion(self) -> Portion:
        """Rows of a reading at a time."""
        return Portion("per_device_eval_batch_size", self.args.per_device_eval_batch_size)

    def sampler(self, *, by_q: bool = True) -> Sampler:
        """The policy as `decoding` says; or the reference, decoded in the same way."""
        sampler = self._sampler(role="q", temperature=self.args.temperature)
        return sampler if by_q else sampler.reference

    def evaluator(
        self,
        reward: Reward,
        metrics: Callable[[Rollout], dict[str, float]] | None = None,
        judge: Reward | None = None,
        *,
        by_q: bool = True,
    ) -> Evaluator:
        """Measures the policy or the reference, `per_device_eval_batch_size` prompts at a time.

        `kl` is an estimate where responses are sampled, and the divergence of these responses where they are greedy,
        log π being 0 there.
        """
        args, sampler = self.args, self.sampler(by_q=by_q)
        log_ratios = partial(self._log_ratios, sampler)
        return Evaluator(sampler, reward, log_ratios, args.per_device_eval_batch_size, args.seed, metrics, judge)

    def _log_ratios(self, sampler: Sampler, rollout: Rollout) -> Tensor:
        """log π − log π_ref of each response: float64 (B,)."""
        temperature, size = sampler.temperature, self.args.q_chunk_size
        if sampler.role == "reference" and temperature is not None:
            return torch.zeros(len(rollout), dtype=torch.float64)  # π is the reference

        def attempt(rows: int) -> Tensor:
            log_ratios = torch.zeros(len(rollout), dtype=torch.float64)
            with processes.agreed(), self.autocast():
                for part, sequences in self._parts(rollout, range(len(rollout)), rows):
                    ratios = models.response_log_ratios(self.roles, sequences, temperature=temperature, chunk_size=size)
                    log_ratios[part] = ratios.sum(dim=1).cpu().double()
            return log_ratios

        log_ratios = self.portion(attempt)
        processes.sum_([log_ratios])
        return log_ratios


def by_length(rollout: Rollout, rows: Sequence[int], size: int) -> Iterator[list[int]]:
    """Rows in groups of `size`, those of similar length together, so that little padding is computed."""
    order = sorted(rows, key=lambda i: len(rollout.prompt_ids[i]) + len(rollout.response_ids[i]))
    return (order[start : start + size] for start in range(0, len(order), size))
