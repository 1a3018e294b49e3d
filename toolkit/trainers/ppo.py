"""PPO on a shared base, with a loop of our own.

The loop, as the PPO paper has it (Schulman et al. 2017, arXiv 1707.06347, algorithm 1; for language
models Ziegler et al. 2019, arXiv 1909.08593):

    rollout      the policy responds to a batch of prompts                     `generate`
    score        a reward callback gives each response one number              `score`
    shape        scores and the KL to the reference become token rewards  )
    advantages   generalised advantage estimation, whitened               )    `step`
    update       clipped losses, several passes over the batch            )

Details that decide whether it learns, and where they are:
 1. Old, new and reference log-probabilities come from the same kind of forward pass (`models/forward.py`),
    none from generation, so that the ratio is 1 before the first update. How far generation is from them is logged.
 2. Masks come from lengths. The end-of-sequence token is an action and is trained.
 3. The score stands at the last response token, not after it.
 4. Means are over the tokens of the whole mini-batch: the micro-batch size changes nothing.
 5. Each role's backward pass runs inside its role, policy first, so that one role's activations are freed
    before the next one's exist.
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from toolkit import functional as F
from toolkit import processes
from toolkit.data import Rollout, select
from toolkit.errors import NotFiniteError, SelfCheckError
from toolkit.models import read_policy, response_logprobs, response_values
from toolkit.rewards import DenseScores, ScoreLike, Scores, check_scores, score_with, select_scores, total_scores
from toolkit.sampling import key_of, prompts_in
from toolkit.trainers import self_checks
from toolkit.trainers.not_finite import loss_scale
from toolkit.trainers.objective import Experience, describe, importance_weights, policy_objective, sampler_logprobs
from toolkit.trainers.ppo_loop import PPOLoop
from toolkit.trainers.share import own_randomness, own_rows, sum_gradients
from toolkit.trainers.trainer_internals import by_own_accelerate, forget_unscaled


class PPOTrainer(PPOLoop):
    """PPO with the roles of one shared base.

    It is set up as transformers' `Trainer` (precision, seeds, callbacks, strategies), with a loop of its own, and is a
    `trl.experimental.ppo.PPOTrainer` where TRL has one. From a notebook:

        for batch in trainer.batches():
            responses = trainer.generate(batch)
            scores = trainer.score(batch, responses)
            stats = trainer.step(batch, responses, scores)

    `train()` is this loop plus logging, evaluation, checkpoints and warnings; it passes over an update that is not
    finite, and saves before an error of the reward ends it. An update may be of several rollouts: `train()` gathers
    `rollouts_per_update` of them, a loop of your own gives `step` those that it has joined.

    Args:
        roles: the shared base, carrying policy, value and reference.
        train_dataset: prompts: a column `input_ids`; other columns go to the reward and the metrics.
        named: those of `SamplingTrainer`.

    Raises:
        ConfigError: `value` is not what the value role is, or `loop` not this one; `generation` is merged, and there is
            nothing that it could merge, or no room for it; or it is with graphs, and the base is on no CUDA device.
        DataError: too few prompts, or no `input_ids`; a prompt that is empty or too long, or has a token that the base
            does not know; or nothing to evaluate, where that is asked for.
        SelfCheckError: tokenizer and base do not agree.
    """

    # ------------------------------------------------------------------ rollout and score

    def generate(self, batch: dict[str, Any], *, do_sample: bool | None = None) -> Rollout:
        """One response to each prompt of a batch from `dataloader` or a `PromptCollator`.

        What is sampled depends on the policy, `seed`, the update, the prompt, and how many responses to it the update
        has had since the last checkpoint: on nothing else in the batch, and on no random numbers that others draw.

        Args:
            do_sample: whether it is sampled or decoded greedily; None for `rollout_do_sample`.

        Raises:
            DataError: `max_length` leaves a prompt no room for a response.
        """
        do_sample = self.args.rollout_do_sample if do_sample is None else do_sample
        sampler = self.rollouts.sampler(do_sample=do_sample, **self.args.decoding)
        return sampler(batch, keys=self._keys(prompts_in(batch)) if do_sample else None)

    def _keys(self, prompts: list[list[int]]) -> Tensor:
        keys = []
        for prompt in (tuple(map(int, ids)) for ids in prompts):
            keys.append(key_of("response", self.args.seed, self.state.global_step, prompt, self._answered[prompt]))
            self._answered[prompt] += 1
        return torch.tensor(keys)

    def score(self, batch: dict[str, Any], responses: Rollout) -> Scores:
        """One score for each response: float32 (B,); `DenseScores` from a reward that gives them.

        Raises:
            RewardError: the reward callback raised, or did not return one finite number each.
        """
        scores = score_with(self._known_reward, responses)
        self._parts = dict(getattr(self.reward, "last_parts", {}))  # an evaluation scores others
        self._parts_of = scores
        return scores

    # ------------------------------------------------------------------ one update

    def step(self, batch: dict[str, Any], responses: Rollout, scores: ScoreLike) -> dict[str, float]:
        """One PPO update from a scored rollout, and its metrics; `scores`, (B,) or dense, may be from anywhere, of
        several processes the same in each.

        Raises:
            DataError: `importance_sampling_cap` is set, and it is not known with which probabilities tokens were drawn.
            SelfCheckError: something would be trained that is not meant, or several processes do not have the same.
        """
        self._prepare_training()
        if self.state.global_step >= self.total_updates:
            over = f"the {self.total_updates} updates of this run are done, and a further one uses what its schedule "
            over += f"has left: a learning rate of {self._learning_rate:.1e}. "
            over += "End the loop; a new trainer goes on with a larger max_steps and resume=True."
            warnings.warn(over, stacklevel=2)
        if len(responses) < self.args.update_batch_size and self.args.rollouts_per_update > 1:
            fewer = f"an update of {len(responses)} responses, where rollouts_per_update makes it "
            fewer += f"{self.args.update_batch_size}: step takes the rollouts of an update together. Join them "
            fewer += "(toolkit.data.concatenate), or set rollouts_per_update to 1."
            warnings.warn(fewer, stacklevel=2)
        parts = self._parts if scores is self._parts_of else {}
        scores = check_scores(scores, responses)
        self._check_same_update(responses, scores)
        self._warn_of_whole_scores(responses, scores)
        learning_rate = self._learning_rate
        shortest = self.args.min_response_length if self.args.drop_short_responses else 0
        kept = [row for row, length in enumerate(responses.lengths) if length >= shortest]
        if kept:
            parts = {name: part[kept] for name, part in parts.items()}
            stats = self._learn(select(responses, kept), select_scores(scores, kept), parts)
        else:
            all_dropped = "all responses of an update were shorter than min_response_length and dropped, so that it "
            all_dropped += "changed nothing: lower that, or see in samples what the policy says."
            warnings.warn(all_dropped, stacklevel=2)
            stats = {"kl_coef": self.kl_coef, "optimizer_steps": 0.0}
        if not self._followed and stats["optimizer_steps"]:  # they follow the policy that an update has made, too
            with processes.agreed():
                self._check_rollouts()
            self._followed = True
        if self.args.drop_short_responses:
            stats["dropped_responses"] = float(len(responses) - len(kept))
        self._count_update()
        self.state.episode += len(responses)
        self.state.epoch = self.epoch
        if self.skipped.total:
            stats["skipped_steps"] = float(self.skipped.total)
        return {**stats, "learning_rate": learning_rate}

    def _warn_of_whole_scores(self, rollout: Rollout, scores: Scores) -> None:
        """Once: of a response that was cut, a score of the whole leaves nothing that the value after it would add."""
        if self._told_of_whole_scores or self.args.truncated_as != "bootstrap":
            return
        whole = torch.as_tensor(scores.scores) if isinstance(scores, DenseScores) else scores
        if not whole[~torch.tensor(rollout.ended)].any():
            return
        self._told_of_whole_scores = True
        twice = "truncated_as is bootstrap, and responses that were cut have a score of the whole response, which is "
        twice += "counted twice with the value of what would follow: values drift further with each update, and scores "
        twice += "above 0 pay the policy for not ending. "
        twice += "Take terminal, or a reward that gives scores within responses alone (DenseScores without scores)."
        warnings.warn(twice, stacklevel=3)

    def _check_same_update(self, rollout: Rollout, scores: Scores) -> None:
        """All of several processes have the same responses and scores: where they differ, the sum of gradients does not
        show it, which is the same in all."""
        if processes.count() == 1:
            return
        held = {"responses": rollout.response_ids, "scores": total_scores(scores).tolist()}
        of_all = processes.gather({name: sha256(repr(value).encode()).digest() for name, value in held.items()})
        differ = [name for name in held if any(one[name] != of_all[0][name] for one in of_all)]
        if differ:
            wrong = f"at update {self.state.global_step + 1} the processes do not have the same {' and '.join(differ)}."
            remedy = "Let all processes do what one alone does there, as by a callback that changes weights, or share "
            remedy += "its result with toolkit.processes.by_main."
            with processes.agreed():  # told once
                raise SelfCheckError(wrong, remedy=remedy)

    @by_own_accelerate
    def _learn(self, rollout: Rollout, scores: Scores, parts: dict[str, Tensor]) -> dict[str, float]:
        """Optimizer steps from a scored rollout, and their metrics; `parts` are those of the scores, for the log."""
        seen = self.score_shaper.moments
        try:
            with self.roles.unpacked_for_gradients():
                experience = self._make_experience(rollout, scores)
                self._check_finite(experience)
                stats = self._update(experience)
        except BaseException:  # Ctrl-C too: scores of a step that is taken again would count twice
            self.score_shaper.moments = seen
            raise
        described = describe(experience, kl_coef=self.kl_coef, cap=self.args.importance_sampling_cap)
        if self.score_shaper.scales or self.score_shaper.penalizes:
            described["shaped_score"] = float(experience.shaped_scores.mean())
        means = {f"score/{name}": float(part.mean()) for name, part in parts.items()}
        stats = {**described, **means, "kl_coef": self.kl_coef, **stats}
        if (target := self.args.kl_target) is not None:
            kl, episodes, horizon = described["kl"], len(rollout), self.args.kl_horizon
            self.kl_coef = F.adapt_kl_coef(self.kl_coef, kl, target=target, episodes=episodes, horizon=horizon)
        return stats

    def _check_finite(self, experience: Experience) -> None:
        """One number that is not finite would be in every advantage of the update, and in all of its steps."""
        read = ("old_logprobs", "ref_logprobs", "old_values", "kl", "rewards", "advantages", "returns")
        broken = next((name for name in read if not getattr(experience, name).isfinite().all()), None)
        with processes.agreed():  # an error of all is told once
            if broken is not None:
                self._at_fault = {"rollout": experience.rollout, "tensors": experience._asdict()}
                remedy = "Begin a new run with a lower learning_rate, or with a base in float32 if that does not help."
                raise NotFiniteError(f"what is read of the responses is not finite ({broken}).", remedy=remedy)

    def _make_experience(self, rollout: Rollout, scores: Scores) -> Experience:
        args = self.args
        mask = torch.arange(max(rollout.lengths)) < torch.tensor(rollout.lengths).unsqueeze(1)
        full = args.kl_estimator == "full"
        logprobs, ref_logprobs, values, kl = self.rollouts.read(rollout, full_kl=full)
        logged, trained, at_end = self.score_shaper.place(scores, rollout)
        dense = scores.at_tokens(rollout, self.processing_class) if isinstance(scores, DenseScores) else None
        if not full:
            kl = F.KL_ESTIMATORS[args.kl_estimator](logprobs, ref_logprobs)
        kl_coef = self.kl_coef if args.kl_penalty_in == "reward" else 0.0
        rewards = F.shape_rewards(at_end, kl, mask, kl_coef=kl_coef, token_scores=dense)
        if args.whiten_rewards:
            rewards = F.scale_to_unit_variance(rewards, mask)
        final_values = self.rollouts.values_after(rollout) if args.truncated_as == "bootstrap" else None
        advantages, returns = F.generalized_advantage_estimation(
            rewards, values, mask, gamma=args.gamma, lam=args.lam, final_values=final_values
        )
        if args.whiten_advantages:
            advantages = F.whiten(advantages, mask)
        drawn_with = sampler_logprobs(rollout, mask)
        if (cap := args.importance_sampling_cap) is not None:
            advantages = advantages * importance_weights(logprobs, drawn_with, cap)
        read = (logprobs, ref_logprobs, values)
        return Experience(rollout, mask, *read, logged, trained, kl, rewards, advantages, returns, drawn_with)

    def _update(self, experience: Experience) -> dict[str, float]:
        """Several passes over the batch. Returns the mean of each metric over all optimizer steps, and how many."""
        totals: dict[str, list[float]] = defaultdict(list)
        self._broken_steps = 0
        self.roles.train()
        try:
            for rows in self._mini_batches(len(experience.rollout)):
                metrics = self._optimize_mini_batch(experience, rows, first="grad_norm" not in totals)
                if metrics is None:
                    break
                for name, value in metrics.items():
                    totals[name].append(value)
        except BaseException:
            forget_unscaled(self.accelerator.scaler)
            raise
        finally:
            self.roles.eval()
            self.optimizer.zero_grad()  # what an error or Ctrl-C leaves behind is no part of the next step
        if not self._broken_steps:
            self.skipped.in_a_row = 0
        means = {name: sum(values) / len(values) for name, values in totals.items()}
        return {**means, "optimizer_steps": float(len(totals["grad_norm"]))}

    def _mini_batches(self, rows: int) -> Iterator[list[int]]:
        """Rows of each optimizer step of an update: every pass divides them anew."""
        number = min(self.args.num_mini_batches, rows)
        for epoch in range(self.args.num_ppo_epochs):
            self._ppo_epoch = epoch
            seed = key_of("order", self.args.seed, self.state.global_step, epoch)
            order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
            for i in range(number):  # of equal size, but for one row where they do not divide
                yield order[i * rows // number : (i + 1) * rows // number]

    def _optimize_mini_batch(self, experience: Experience, rows: list[int], *, first: bool) -> dict[str, float] | None:
        """One optimizer step from the gradient over all tokens of the mini-batch; None, and no step, over the limit."""
        self.take_steps()
        totals = self._backward_mini_batch(experience, rows)
        self._ratio_checked = True  # by whichever process had a row of it
        # The first step is taken in any case: with active dropout its KL is not 0 either.
        limit = None if first else self.args.update_kl_limit
        if limit is not None and totals["approx_kl"] > limit:
            return None
        norm = self._clip_gradients()
        if math.isfinite(norm):
            totals["grad_norm"] = norm
            if first:
                self._look_at_gradients(experience, rows, totals)
        else:  # which says nothing of the roles: the next step is looked at
            self._note_broken(experience, norm)
            if self.accelerator.scaler is None:  # which would pass over the step, and lower its scale
                self.optimizer.zero_grad()
                return {}
        self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        with processes.agreed():  # its first one takes memory
            self.optimizer.step()
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        self.optimizer.zero_grad()
        return totals

    def _clip_gradients(self) -> float:
        """The norm that they had, all together."""
        # A limit of 0 is none. Without one the norm is read all the same: NaN would stay in the weights for good.
        largest = self.args.max_grad_norm or math.inf
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.unscale_(self.optimizer.optimizer)
        return float(torch.nn.utils.clip_grad_norm_(self.roles.trained_parameters, largest))

    def _look_at_gradients(self, experience: Experience, rows: list[int], metrics: dict[str, float]) -> None:
        """Of each role that has not been seen to learn, and has something to learn from here, none is 0."""
        learning = self._unchecked_roles & experience.learning_roles(rows)
        # An adapter's dropout alone can clip all of a mini-batch of a few tokens.
        clipped = {"policy": metrics["clip_fraction"], "value": metrics["value_clip_fraction"]}
        learning -= {role for role, share in clipped.items() if share > 0.9999}
        self_checks.check_gradients(self.roles, learning)
        self._unchecked_roles -= learning

    def _note_broken(self, experience: Experience, norm: float) -> None:
        """Count a gradient that is not finite, unless float16's scaler has only to find its scale; too many end it."""
        scale = loss_scale(self.accelerator)
        if scale is not None and scale > 1:
            return
        too_many = self.skipped.add(of_the_same=self._broken_steps > 0)
        self._broken_steps += 1
        if too_many:
            why = f"the gradient's norm is {norm}"
            self.stop_broken(why, rollout=experience.rollout, tensors=experience._asdict())

    def _backward_mini_batch(self, experience: Experience, rows: list[int]) -> dict[str, float]:
        """Add the mini-batch's gradient to the parameters, micro-batch by micro-batch, each process a share of them."""
        count = float(experience.response_mask[rows].sum())
        where = self.args.seed, self.state.global_step, self._ppo_epoch

        def attempt(size: int) -> dict[str, float]:
            own: dict[str, float] = defaultdict(float)
            self.optimizer.zero_grad()
            with processes.agreed(), own_randomness(*where, rows), self.roles.weights_kept():
                share = own_rows(experience.rollout, rows)
                for part in self.rollouts.passes(experience.rollout, share, size):
                    for name, value in self._backward_micro_batch(experience, part, count).items():
                        own[name] += value
            return own

        own = self.micro_batch(attempt, most=len(rows))
        sum_gradients(self.roles.trained_parameters, self.accelerator.scaler)
        totals: dict[str, float] = defaultdict(float)
        for of_process in processes.gather(dict(own)):
            for name, value in of_process.items():
                totals[name] += value
        return totals

    def _add_gradient(self, loss: Tensor) -> None:
        """As of the trainer's own settings: accelerate divides by what the last Accelerator of the process was given,
        and asks that one whether gradients are scaled."""
        scaler = self.accelerator.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()

    def _backward_micro_batch(self, experience: Experience, part: list[int], count: float) -> dict[str, float]:
        """Losses of a few rows as their share of a mini-batch of `count` tokens, and their gradients.

        `costs.update` counts it on a trainer that was not made, and has only what is read here.
        """
        args, roles = self.args, self.roles
        sequences = self.rollouts.sequences(experience.rollout, part)
        held, mask = experience.of(part, sequences.response_mask), sequences.response_mask

        def value_loss(values: Tensor) -> F.ClippedLoss:
            pooled, limit = F.pool_values(values, mask, args.value_pooling), args.cliprange_value
            return F.clipped_value_loss(pooled, held.old_values, held.returns, mask, cliprange=limit, count=count)

        reads: dict[str, Any] = {"temperature": args.temperature, "chunk_size": args.logprob_chunk_size}
        full_kl = args.kl_penalty_in == "loss" and args.kl_estimator == "full"
        with roles.role("policy"):
            with self.compute_loss_context_manager():
                reading = read_policy(roles, sequences, **reads, entropy=args.entropy_coef > 0, ref_kl=full_kl)
            loss, metrics = policy_objective(args, reading, held, kl_coef=self.kl_coef, count=count)
            if reading.values is not None:
                value = value_loss(reading.values)
                loss = loss + args.vf_coef * value.loss
            if not self._ratio_checked:  # only the first micro-batch is before every update
                logprobs = reading.logprobs.detach()
                if roles.adapter_config("policy").lora_dropout > 0:  # with it the policy is another in each pass
                    with torch.no_grad(), roles.without_dropout(), self.compute_loss_context_manager():
                        logprobs = response_logprobs(roles, sequences, **reads)
                self_checks.check_ratio(roles, args, logprobs - held.old_logprobs, mask)
                self._ratio_checked = True
            self._add_gradient(loss)
        if reading.values is None:
            with roles.role("value"):
                with self.compute_loss_context_manager():
                    values = response_values(roles, sequences)
                value = value_loss(values)
                self._add_gradient(args.vf_coef * value.loss)
        metrics |= {"value_loss": value.loss, "value_clip_fraction": value.clip_fraction}
        return {name: float(metric.detach()) for name, metric in metrics.items()}
