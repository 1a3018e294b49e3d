"""PPO on a shared base: TRL's PPOTrainer with a loop of our own.

The loop, as the PPO paper has it (Schulman et al. 2017, arXiv 1707.06347, algorithm 1; for language
models Ziegler et al. 2019, arXiv 1909.08593):

    rollout      the policy answers a batch of prompts                         `generate`
    score        a reward callback gives each response one number              `score`
    shape        scores and the KL to the reference become token rewards  )
    advantages   generalised advantage estimation, whitened               )    `step`
    update       clipped losses, several passes over the batch            )

Details that decide whether it learns, and where they are:
 1. Old, new and reference log-probabilities come from the same kind of forward pass (`models/forward.py`),
    none from generation, so that the ratio is 1 before the first update.
 2. Masks come from lengths. The end-of-sequence token is an action and is trained.
 3. The score stands at the last response token, not after it.
 4. Means are over the tokens of the whole mini-batch: the micro-batch size changes nothing.
 5. Each role's backward pass runs inside its role, policy first, so that one role's activations are freed
    before the next one's exist.
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from toolkit.data import Rollout, select
from toolkit.errors import SelfCheckError
from toolkit.functional import (
    KL_ESTIMATORS,
    ClippedLoss,
    adapt_kl_coef,
    clipped_value_loss,
    generalized_advantage_estimation,
    penalize_missing_eos,
    penalize_short,
    pool_values,
    scale_to_unit_variance,
    shape_rewards,
    whiten,
)
from toolkit.models import (
    Sequences,
    read_policy,
    release_memory,
    response_full_kl,
    response_logprobs,
    response_logprobs_and_values,
    response_values,
    value_after_response,
)
from toolkit.rewards import DenseScores, Scores, check_scores, score_with, select_scores, total_scores
from toolkit.rewards.base import Answer
from toolkit.trainers import self_checks
from toolkit.trainers.best_of import BestOf, best_of
from toolkit.trainers.evaluation import evaluate_rollout
from toolkit.trainers.experience import Experience, RolesOnRollout, describe
from toolkit.trainers.objective import PolicyTargets, policy_objective
from toolkit.trainers.ppo_base import SharedBaseTrainer
from toolkit.trainers.rollouts import NOTHING_LEFT, answer, kept_rows


class PPOTrainer(SharedBaseTrainer):
    """PPO with the roles of one shared base.

    It is a `trl.experimental.ppo.PPOTrainer`, set up as transformers' `Trainer` (precision, seeds,
    callbacks, strategies), with a loop of its own. From a notebook:

        for batch in trainer.dataloader:
            responses = trainer.generate(batch)
            scores = trainer.score(batch, responses)
            stats = trainer.step(batch, responses, scores)

    `train()` is this loop plus logging, evaluation and checkpoints. An update may be of several rollouts: `train()`
    gathers `ppo.rollouts_per_update` of them, a loop of your own gives `step` those that it has joined.

    Args:
        args: the configuration.
        processing_class: tokenizer of the base.
        roles: the shared base, carrying policy, value and reference. Policy and value are made trainable.
        reward: scores a rollout: `RewardAdapter`, or any callable of that form.
        train_dataset: prompts: a column `input_ids`; other columns go to the reward and the metrics.
        eval_dataset: held-out prompts.
        metrics: further metrics of a rollout, for evaluation.
        base_name: name of the base to write into saved adapters.
        callbacks: as in `Trainer`; the default progress bar is not added if there are any.
        optimizers: as in `Trainer`.

    Raises:
        DataError: too few prompts, or no `input_ids`.
        SelfCheckError: tokenizer and base do not agree.
    """

    # ------------------------------------------------------------------ rollout and score

    def generate(self, batch: dict[str, Any], *, do_sample: bool | None = None) -> Rollout:
        """One response to each prompt of a batch.

        Args:
            batch: from `dataloader`, or made by `PromptCollator`.
            do_sample: whether it is sampled or decoded greedily; None for `ppo.rollout_do_sample`.

        Raises:
            DataError: `ppo.max_length` leaves a prompt no room for a response.
        """
        return answer(self, batch, do_sample=self.args.rollout_do_sample if do_sample is None else do_sample)

    def score(self, batch: dict[str, Any], responses: Rollout) -> Scores:
        """One score for each response: float32 (B,); `DenseScores` from a reward that gives them.

        Raises:
            RewardError: the reward callback raised, or did not return one finite number each.
        """
        return score_with(self.reward, responses)

    def score_parts(self) -> dict[str, Tensor]:
        """What each part of a weighted sum gave the rollout that was scored last, (B,) each."""
        return getattr(self.reward, "last_parts", {}) if self._gathered_parts is None else self._gathered_parts

    def best_of(self, prompts: Dataset | list[dict[str, Any]], n: int) -> BestOf:
        """Sample n responses to each prompt and keep the one that the reward scores highest; of equals the first.

        Args:
            prompts: rows with `input_ids`, and the columns that the reward needs.
            n: at least 1.
        """

        def sample(rows: list[dict[str, Any]]) -> tuple[Rollout, Tensor]:
            batch = self.data_collator(rows)
            rollout = self.generate(batch, do_sample=True)
            return rollout, total_scores(self.score(batch, rollout))

        return best_of(prompts, n, sample=sample, batch_size=self.args.per_device_eval_batch_size)

    # ------------------------------------------------------------------ one update

    def step(self, batch: dict[str, Any], responses: Rollout, scores: Answer) -> dict[str, float]:
        """One PPO update from a scored rollout.

        Args:
            batch: the prompts.
            responses: from `generate`.
            scores: (B,) or dense, from `score` or anywhere else.

        Returns:
            The metrics of the update.
        """
        self._prepare_training()
        scores = check_scores(scores, responses)
        parts = {name: part for name, part in self.score_parts().items() if len(part) == len(responses)}
        learning_rate = self.lr_scheduler.get_last_lr()[0]
        kept = kept_rows(self.args, responses)
        dropped = len(responses) - len(kept)
        if kept:
            parts = {name: part[kept] for name, part in parts.items()}
            stats = self._learn(select(responses, kept), select_scores(scores, kept), parts)
        else:
            warnings.warn(NOTHING_LEFT, stacklevel=2)
            stats = {"kl_coef": self.kl_coef, "optimizer_steps": 0.0}
        if self.args.drop_short_responses:
            stats["dropped_responses"] = float(dropped)
        self.lr_scheduler.step()
        self.state.global_step += 1
        self.state.episode += len(responses)
        self.state.epoch = self.state.episode / self.prompts_of_a_pass
        return {**stats, "learning_rate": learning_rate}

    def _learn(self, rollout: Rollout, scores: Scores, parts: dict[str, Tensor]) -> dict[str, float]:
        """Optimizer steps from a scored rollout, and their metrics; `parts` are those of the scores, for the log."""
        experience = self._make_experience(rollout, scores)
        stats = self._update(experience)
        described = describe(experience, kl_coef=self.kl_coef)
        if self.score_shaper.active or self.args.punishes:
            described["shaped_score"] = float(experience.shaped_scores.mean())
        means = {f"score/{name}": float(part.mean()) for name, part in parts.items()}
        stats = {**described, **means, "kl_coef": self.kl_coef, **stats}
        if self.args.kl_target is not None:
            self.kl_coef = adapt_kl_coef(
                self.kl_coef,
                described["kl"],
                target=self.args.kl_target,
                episodes=len(rollout),
                horizon=self.args.kl_horizon,
            )
        return stats

    def _sequences(self, rollout: Rollout, rows: Sequence[int]) -> Sequences:
        return Sequences.from_ids(
            [rollout.prompt_ids[i] for i in rows],
            [rollout.response_ids[i] for i in rows],
            pad_token_id=self.processing_class.pad_token_id,
            device=self.roles.device,
        )

    def _by_length(self, rollout: Rollout, rows: Sequence[int], size: int) -> Iterator[list[int]]:
        """Rows in groups of `size`, those of similar length together, so that little padding is computed."""
        order = sorted(rows, key=lambda i: len(rollout.prompt_ids[i]) + len(rollout.response_ids[i]))
        for start in range(0, len(order), size):
            yield order[start : start + size]

    def _logprobs(self, sequences: Sequences) -> Tensor:
        return response_logprobs(
            self.roles,
            sequences,
            temperature=self.args.temperature,
            chunk_size=self.args.logprob_chunk_size,
        )

    def _logprobs_and_values(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        return response_logprobs_and_values(
            self.roles,
            sequences,
            temperature=self.args.temperature,
            chunk_size=self.args.logprob_chunk_size,
        )

    @torch.no_grad()
    def read_roles(self, rollout: Rollout, *, values: bool = True, full_kl: bool = False) -> RolesOnRollout:
        """What policy, reference and value say about a rollout: float32 (B, T) each, on the CPU."""
        read = RolesOnRollout(*(torch.zeros(len(rollout), max(rollout.lengths)) for _ in range(4)))
        rows = range(len(rollout))
        with self.roles.in_eval_mode(), self.compute_loss_context_manager():
            for part in self._by_length(rollout, rows, self.args.local_rollout_forward_batch_size):
                found = self._read_part(self._sequences(rollout, part), values=values, full_kl=full_kl)
                for whole, tensor in zip(read, found, strict=True):
                    if tensor is not None:
                        whole[part, : tensor.shape[1]] = tensor.cpu()
                release_memory()
        return read

    def _read_part(self, sequences: Sequences, *, values: bool, full_kl: bool) -> tuple[Tensor | None, ...]:
        """In the order of `RolesOnRollout`; None for what was not asked for."""
        old_values: Tensor | None = None
        kl: Tensor | None = None
        if full_kl:
            kl, logprobs, ref_logprobs, old_values = response_full_kl(
                self.roles,
                sequences,
                temperature=self.args.temperature,
                chunk_size=self.args.logprob_chunk_size,
            )
        else:
            with self.roles.role("policy"):
                if values and self.roles.shares_value:
                    logprobs, old_values = self._logprobs_and_values(sequences)
                else:
                    logprobs = self._logprobs(sequences)
            with self.roles.role("reference"):
                ref_logprobs = self._logprobs(sequences)
        if values and not self.roles.shares_value:
            with self.roles.role("value"):
                old_values = response_values(self.roles, sequences)
        if old_values is not None:
            old_values = pool_values(old_values, sequences.response_mask, self.args.value_pooling)
        return logprobs, ref_logprobs, old_values, kl

    @torch.no_grad()
    def _values_after(self, rollout: Rollout) -> Tensor:
        """What comes after a response that was cut, by the value role: float32 (B,), 0 where it ended by itself."""
        found = torch.zeros(len(rollout))
        cut = [i for i, ended in enumerate(rollout.ended) if not ended]
        with self.roles.in_eval_mode(), self.compute_loss_context_manager(), self.roles.role("value"):
            for part in self._by_length(rollout, cut, self.args.local_rollout_forward_batch_size):
                found[part] = value_after_response(self.roles, self._sequences(rollout, part)).cpu()
                release_memory()
        return found

    def _make_experience(self, rollout: Rollout, scores: Scores) -> Experience:
        args = self.args
        mask = torch.arange(max(rollout.lengths)) < torch.tensor(rollout.lengths).unsqueeze(1)
        full = args.kl_estimator == "full"
        logprobs, ref_logprobs, values, kl = self.read_roles(rollout, full_kl=full)
        placed = self.score_shaper.place(scores, lambda values: self._penalized(values, rollout))
        dense = scores.at_tokens(rollout, self.processing_class) if isinstance(scores, DenseScores) else None
        if not full:
            kl = KL_ESTIMATORS[args.kl_estimator](logprobs, ref_logprobs)
        kl_coef = self.kl_coef if args.kl_penalty_in == "reward" else 0.0
        rewards = shape_rewards(placed.at_end, kl, mask, kl_coef=kl_coef, token_scores=dense)
        if args.whiten_rewards:
            rewards = scale_to_unit_variance(rewards, mask)
        final_values = self._values_after(rollout) if args.truncated_as == "bootstrap" else None
        advantages, returns = generalized_advantage_estimation(
            rewards, values, mask, gamma=args.gamma, lam=args.lam, final_values=final_values
        )
        if args.whiten_advantages:
            advantages = whiten(advantages, mask)
        return Experience(
            rollout,
            mask,
            logprobs,
            ref_logprobs,
            values,
            placed.logged,
            placed.trained,
            kl,
            rewards,
            advantages,
            returns,
        )

    def _penalized(self, scores: Tensor, rollout: Rollout) -> Tensor:
        args = self.args
        if args.missing_eos_penalty is not None:
            scores = penalize_missing_eos(scores, torch.tensor(rollout.ended), penalty=args.missing_eos_penalty)
        if args.short_response_penalty is not None:
            lengths, minimum = torch.tensor(rollout.lengths), args.min_response_length
            scores = penalize_short(scores, lengths, minimum=minimum, penalty=args.short_response_penalty)
        return scores

    def _update(self, experience: Experience) -> dict[str, float]:
        """Several passes over the batch. Returns the mean of each metric over all optimizer steps, and how many."""
        totals: dict[str, list[float]] = defaultdict(list)
        self.roles.train()
        try:
            for rows in self._mini_batches(len(experience.rollout)):
                # The first step is taken in any case: with active dropout its KL is not 0 either.
                metrics = self._optimize_mini_batch(experience, rows, self.args.update_kl_limit if totals else None)
                if metrics is None:
                    break
                for name, value in metrics.items():
                    totals[name].append(value)
        finally:
            self.roles.eval()
            self.optimizer.zero_grad()  # what an error or Ctrl-C leaves behind is no part of the next step
        means = {name: sum(values) / len(values) for name, values in totals.items()}
        return {**means, "optimizer_steps": float(len(totals["grad_norm"]))}

    def _mini_batches(self, rows: int) -> Iterator[list[int]]:
        """Rows of each optimizer step of an update: every pass divides them anew."""
        number = min(self.args.num_mini_batches, rows)
        for _ in range(self.args.num_ppo_epochs):
            order = torch.randperm(rows).tolist()
            for i in range(number):  # of equal size, but for one row where they do not divide
                yield order[i * rows // number : (i + 1) * rows // number]

    def _optimize_mini_batch(
        self, experience: Experience, rows: list[int], kl_limit: float | None
    ) -> dict[str, float] | None:
        """One optimizer step from the gradient over all tokens of the mini-batch; None, and no step, over the limit."""
        # accelerate passes over optimizer steps by a switch of the whole process, which a stage that was stopped in the
        # middle of its accumulation leaves off.
        self.accelerator.gradient_state._set_sync_gradients(True)
        totals = self._backward_mini_batch(experience, rows)
        if kl_limit is not None and totals["approx_kl"] > kl_limit:
            return None
        if not self._gradients_checked:
            # float16 gradients are scaled up, and may overflow: the scaler then skips the step and lowers the scale.
            learning = [role for role in self.roles.trained_roles if role != "value" or self.args.vf_coef > 0]
            self_checks.check_gradients(self.roles, learning, scaled=self.args.fp16)
            self._gradients_checked = True
        norm = self._clip_gradients()
        if norm is not None:
            totals["grad_norm"] = norm
        self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        self.optimizer.step()
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        self.optimizer.zero_grad()
        return totals

    def _clip_gradients(self) -> float | None:
        """The norm of all gradients, before they are clipped where `max_grad_norm` says so.

        None where float16 has overflowed: the loss scaler then passes over the step, and lowers its scale.

        Raises:
            SelfCheckError: it is not finite, and there is no scaler.
        """
        parameters = [p for role in self.roles.trained_roles for p in self.roles.parameters_of(role)]
        # A limit of 0 is none. Without one the norm is read all the same: NaN would stay in the weights for good.
        limit = self.args.max_grad_norm or float("inf")
        norm = float(self.accelerator.clip_grad_norm_(parameters, limit))
        if math.isfinite(norm):
            return norm
        if not self.args.fp16:
            raise SelfCheckError(
                f"the gradient's norm is {norm} at update {self.state.global_step + 1}. The weights are those before "
                "this optimizer step: go on from the last checkpoint with a lower ppo.learning_rate, or with "
                "base.dtype=float32 if that does not help."
            )
        return None

    def _backward_mini_batch(self, experience: Experience, rows: list[int]) -> dict[str, float]:
        """Add the mini-batch's gradient to the parameters, micro-batch by micro-batch."""
        count = float(experience.response_mask[rows].sum())
        totals: dict[str, float] = defaultdict(float)
        for part in self._by_length(experience.rollout, rows, self.args.per_device_train_batch_size):
            for name, value in self._backward_micro_batch(experience, part, count).items():
                totals[name] += value
            release_memory()
        return totals

    def _backward_micro_batch(self, experience: Experience, part: list[int], count: float) -> dict[str, float]:
        """Losses of a few rows as their share of a mini-batch of `count` tokens, and their gradients."""
        args, roles = self.args, self.roles
        sequences = self._sequences(experience.rollout, part)
        mask = sequences.response_mask
        old_logprobs, ref_logprobs, old_values, advantages, returns = (
            x[part, : mask.shape[1]].to(roles.device)
            for x in (
                experience.old_logprobs,
                experience.ref_logprobs,
                experience.old_values,
                experience.advantages,
                experience.returns,
            )
        )
        targets = PolicyTargets(old_logprobs, ref_logprobs, advantages, mask)

        def value_loss(values: Tensor) -> ClippedLoss:
            pooled = pool_values(values, mask, args.value_pooling)
            return clipped_value_loss(pooled, old_values, returns, mask, cliprange=args.cliprange_value, count=count)

        with roles.role("policy"):
            with self.compute_loss_context_manager():
                reading = read_policy(
                    roles,
                    sequences,
                    temperature=args.temperature,
                    chunk_size=args.logprob_chunk_size,
                    entropy=args.entropy_coef > 0,
                    ref_kl=args.kl_penalty_in == "loss" and args.kl_estimator == "full",
                )
            loss, metrics = policy_objective(args, reading, targets, kl_coef=self.kl_coef, count=count)
            if reading.values is not None:
                value = value_loss(reading.values)
                loss = loss + args.vf_coef * value.loss
            self._check_ratio_once(reading.logprobs.detach() - old_logprobs, mask)
            self.accelerator.backward(loss)
        if reading.values is None:
            with roles.role("value"):
                with self.compute_loss_context_manager():
                    values = response_values(roles, sequences)
                value = value_loss(values)
                self.accelerator.backward(args.vf_coef * value.loss)
        metrics |= {"value_loss": value.loss, "value_clip_fraction": value.clip_fraction}
        return {name: float(metric.detach()) for name, metric in metrics.items()}

    def _check_ratio_once(self, log_ratio: Tensor, mask: Tensor) -> None:
        """Only the first micro-batch is before every update, and only without active dropout is its ratio 1."""
        if self._ratio_checked:
            return
        if self.roles.adapter_config("policy").lora_dropout == 0.0:
            dtype = (
                torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else self.roles.causal_lm.dtype
            )
            self_checks.check_ratio(log_ratio, mask, dtype)
        self._ratio_checked = True

    # ------------------------------------------------------------------ evaluation

    def evaluate_rollout(self, dataset: Dataset) -> tuple[dict[str, float], Rollout, Tensor]:
        """Answer, score and measure all prompts of a data set. See `toolkit.trainers.evaluation`."""
        return evaluate_rollout(self, dataset)
