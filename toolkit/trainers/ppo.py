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

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GenerationConfig, PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from trl.experimental.ppo import PPOTrainer as TRLPPOTrainer
from trl.experimental.ppo.ppo_trainer import OnlineTrainerState

from toolkit.data import PromptCollator, Rollout, concatenate
from toolkit.errors import ToolkitError
from toolkit.functional import (
    KL_ESTIMATORS,
    clipped_policy_loss,
    clipped_value_loss,
    generalized_advantage_estimation,
    kl_k1,
    kl_k3,
    masked_mean,
    masked_var,
    penalize_missing_eos,
    scale_to_unit_variance,
    shape_rewards,
    standard_error,
    whiten,
)
from toolkit.models import (
    Sequences,
    SharedBase,
    load_weights,
    response_logprobs,
    response_logprobs_and_values,
    response_values,
    save_role,
)
from toolkit.rewards import Reward, check_scores
from toolkit.trainers import self_checks
from toolkit.trainers.ppo_config import PPOConfig


class Experience(NamedTuple):
    """What an update needs to know about a rollout of B responses of up to T tokens."""

    rollout: Rollout
    response_mask: Tensor  # bool (B, T)
    old_logprobs: Tensor  # (B, T)
    ref_logprobs: Tensor  # (B, T)
    old_values: Tensor  # (B, T)
    scores: Tensor  # (B,), penalties included
    kl: Tensor  # (B, T), by the configured estimator
    rewards: Tensor  # (B, T)
    advantages: Tensor  # (B, T), whitened
    returns: Tensor  # (B, T)


class PPOTrainer(TRLPPOTrainer):
    """PPO with the roles of one shared base.

    It is a `trl.experimental.ppo.PPOTrainer`, set up as transformers' `Trainer` (precision, seeds,
    callbacks, strategies), with a loop of its own. From a notebook:

        for batch in trainer.dataloader:
            responses = trainer.generate(batch)
            scores = trainer.score(batch, responses)
            stats = trainer.step(batch, responses, scores)

    `train()` is this loop plus logging, evaluation and checkpoints.

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

    _tag_names = ("trl", "ppo", "ppo-lora-toolkit")
    # Set by transformers' Trainer.
    state: Any
    control: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        args: PPOConfig,
        processing_class: PreTrainedTokenizerBase,
        roles: SharedBase,
        reward: Reward,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        *,
        metrics: Callable[[Rollout], dict[str, float]] | None = None,
        base_name: str = "",
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
    ):
        self_checks.check_dataset(train_dataset, args.rollout_batch_size)
        self_checks.check_tokenizer(processing_class, roles)
        roles.train_roles("policy", "value")
        collator = PromptCollator(processing_class.pad_token_id)
        # Not TRL's __init__, which builds an Accelerator without precision, sets no seed, zeroes dropout and
        # changes the model: transformers' own, two classes up.
        Trainer.__init__(
            self,
            model=roles,
            args=args,
            data_collator=collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        if self.accelerator.num_processes > 1:
            raise ToolkitError("PPO here runs on one GPU; start it without torchrun or accelerate launch.")
        if callbacks:
            self.remove_callback(DEFAULT_PROGRESS_CALLBACK)
            self.remove_callback(PrinterCallback)
        self.roles, self.reward, self.metrics = roles, reward, metrics
        self.base_name = base_name
        self.state = OnlineTrainerState(**{**vars(self.state), "episode": 0})
        self.is_peft_model = True
        if args.gradient_checkpointing:
            roles.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
        order = torch.Generator().manual_seed(args.seed if args.data_seed is None else args.data_seed)
        self.dataloader = DataLoader(
            train_dataset,
            batch_size=args.rollout_batch_size,
            shuffle=True,
            generator=order,
            collate_fn=collator,
            drop_last=True,
            num_workers=args.dataloader_num_workers,
        )
        self.total_updates = args.number_of_updates(len(train_dataset))
        self._ready = self._ratio_checked = self._gradients_checked = False

    # ------------------------------------------------------------------ rollout and score

    def generate(self, batch: dict[str, Any], *, do_sample: bool = True) -> Rollout:
        """Sample one response to each prompt of a batch.

        Args:
            batch: from `dataloader`, or made by `PromptCollator`.
            do_sample: False decodes greedily.
        """
        tokenizer = self.processing_class
        config = GenerationConfig(
            max_new_tokens=self.args.response_length,
            do_sample=do_sample,
            # The whole distribution is sampled, which is what the log-probabilities of the update are of.
            **({"temperature": self.args.temperature, "top_k": 0, "top_p": 1.0} if do_sample else {}),
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        device = self.roles.device
        with self.roles.role("policy"), self.compute_loss_context_manager():
            output = self.roles.generate(batch["input_ids"].to(device), batch["attention_mask"].to(device), config)
        response_ids, ended = [], []
        for row in output.tolist():
            stop = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else 0
            response_ids.append(row[:stop] if stop else row)
            ended.append(bool(stop))
        return Rollout(
            prompts=tokenizer.batch_decode(batch["prompt_ids"]),
            responses=tokenizer.batch_decode(response_ids, skip_special_tokens=True),
            prompt_ids=batch["prompt_ids"],
            response_ids=response_ids,
            ended=ended,
            columns=batch["columns"],
        )

    def score(self, batch: dict[str, Any], responses: Rollout) -> Tensor:
        """One score for each response: float32 (B,).

        Raises:
            RewardError: the reward callback did not return one finite number each.
        """
        with self.compute_loss_context_manager():
            return check_scores(self.reward(responses), responses)

    # ------------------------------------------------------------------ one update

    def step(self, batch: dict[str, Any], responses: Rollout, scores: Tensor | Sequence[float]) -> dict[str, float]:
        """One PPO update from a scored rollout.

        Args:
            batch: the prompts.
            responses: from `generate`.
            scores: (B,), from `score` or anywhere else.

        Returns:
            The metrics of the update.
        """
        self._prepare_training()
        experience = self._make_experience(responses, check_scores(scores, responses))
        stats = self._update(experience)
        self.lr_scheduler.step()
        self.state.global_step += 1
        self.state.episode += len(responses)
        self.state.epoch = self.state.episode / len(self.train_dataset)
        return {**self._describe(experience), **stats}

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
    def _read_roles(self, rollout: Rollout, *, values: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities under policy and reference, and values: float32 (B, T) each, on the CPU."""
        shape = (len(rollout), max(rollout.lengths))
        logprobs, ref_logprobs, old_values = (torch.zeros(shape) for _ in range(3))
        rows = range(len(rollout))
        with self.roles.in_eval_mode(), self.compute_loss_context_manager():
            for part in self._by_length(rollout, rows, self.args.local_rollout_forward_batch_size):
                sequences = self._sequences(rollout, part)
                length = sequences.response_mask.shape[1]
                with self.roles.role("policy"):
                    if values and self.roles.shares_value:
                        logprobs[part, :length], old_values[part, :length] = (
                            x.cpu() for x in self._logprobs_and_values(sequences)
                        )
                    else:
                        logprobs[part, :length] = self._logprobs(sequences).cpu()
                with self.roles.role("reference"):
                    ref_logprobs[part, :length] = self._logprobs(sequences).cpu()
                if values and not self.roles.shares_value:
                    with self.roles.role("value"):
                        old_values[part, :length] = response_values(self.roles, sequences).cpu()
        return logprobs, ref_logprobs, old_values

    def _make_experience(self, rollout: Rollout, scores: Tensor) -> Experience:
        args = self.args
        mask = torch.arange(max(rollout.lengths)) < torch.tensor(rollout.lengths).unsqueeze(1)
        logprobs, ref_logprobs, values = self._read_roles(rollout)
        if args.missing_eos_penalty is not None:
            scores = penalize_missing_eos(scores, torch.tensor(rollout.ended), penalty=args.missing_eos_penalty)
        kl = KL_ESTIMATORS[args.kl_estimator](logprobs, ref_logprobs)
        rewards = shape_rewards(scores, kl, mask, kl_coef=args.kl_coef)
        if args.whiten_rewards:
            rewards = scale_to_unit_variance(rewards, mask)
        advantages, returns = generalized_advantage_estimation(rewards, values, mask, gamma=args.gamma, lam=args.lam)
        advantages = whiten(advantages, mask)
        return Experience(rollout, mask, logprobs, ref_logprobs, values, scores, kl, rewards, advantages, returns)

    def _update(self, experience: Experience) -> dict[str, float]:
        """Several passes over the batch. Returns the mean of each metric over all optimizer steps."""
        totals: dict[str, list[float]] = defaultdict(list)
        rows = len(experience.rollout)
        size = rows // self.args.num_mini_batches
        self.roles.train()
        for _ in range(self.args.num_ppo_epochs):
            order = torch.randperm(rows).tolist()
            for start in range(0, size * self.args.num_mini_batches, size):
                for name, value in self._optimize_mini_batch(experience, order[start : start + size]).items():
                    totals[name].append(value)
        self.roles.eval()
        return {name: sum(values) / len(values) for name, values in totals.items()}

    def _optimize_mini_batch(self, experience: Experience, rows: list[int]) -> dict[str, float]:
        """One optimizer step from the gradient over all tokens of the mini-batch."""
        totals = self._backward_mini_batch(experience, rows)
        if not self._gradients_checked:
            self_checks.check_gradients(self.roles, self.roles.trained_roles)
            self._gradients_checked = True
        parameters = [p for role in self.roles.trained_roles for p in self.roles.parameters_of(role)]
        if self.args.max_grad_norm:
            totals["grad_norm"] = float(self.accelerator.clip_grad_norm_(parameters, self.args.max_grad_norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return totals

    def _backward_mini_batch(self, experience: Experience, rows: list[int]) -> dict[str, float]:
        """Add the mini-batch's gradient to the parameters, micro-batch by micro-batch."""
        count = float(experience.response_mask[rows].sum())
        totals: dict[str, float] = defaultdict(float)
        for part in self._by_length(experience.rollout, rows, self.args.per_device_train_batch_size):
            for name, value in self._backward_micro_batch(experience, part, count).items():
                totals[name] += value
        return totals

    def _backward_micro_batch(self, experience: Experience, part: list[int], count: float) -> dict[str, float]:
        """Losses of a few rows as their share of a mini-batch of `count` tokens, and their gradients."""
        args, roles = self.args, self.roles
        sequences = self._sequences(experience.rollout, part)
        mask = sequences.response_mask
        old_logprobs, old_values, advantages, returns = (
            x[part, : mask.shape[1]].to(roles.device)
            for x in (experience.old_logprobs, experience.old_values, experience.advantages, experience.returns)
        )
        with roles.role("policy"):
            with self.compute_loss_context_manager():
                if roles.shares_value:
                    logprobs, values = self._logprobs_and_values(sequences)
                else:
                    logprobs, values = self._logprobs(sequences), None
            policy = clipped_policy_loss(
                logprobs, old_logprobs, advantages, mask, cliprange=args.cliprange, count=count
            )
            loss = policy.loss
            if values is not None:
                value = clipped_value_loss(
                    values, old_values, returns, mask, cliprange=args.cliprange_value, count=count
                )
                loss = loss + args.vf_coef * value.loss
            self._check_ratio_once(logprobs.detach() - old_logprobs, mask)
            self.accelerator.backward(loss)
        if values is None:
            with roles.role("value"):
                with self.compute_loss_context_manager():
                    values = response_values(roles, sequences)
                value = clipped_value_loss(
                    values, old_values, returns, mask, cliprange=args.cliprange_value, count=count
                )
                self.accelerator.backward(args.vf_coef * value.loss)
        with torch.no_grad():
            return {
                "policy_loss": float(policy.loss),
                "value_loss": float(value.loss),
                "clip_fraction": float(policy.clip_fraction),
                "value_clip_fraction": float(value.clip_fraction),
                # The old policy sampled, so that it is the first argument: KL(old policy, new policy).
                "approx_kl": float(masked_mean(kl_k3(old_logprobs, logprobs), mask, count=count)),
                "ratio": float(masked_mean((logprobs - old_logprobs).exp(), mask, count=count)),
            }

    def _describe(self, experience: Experience) -> dict[str, float]:
        """Metrics of the rollout and of the critic on it."""
        mask = experience.response_mask
        kl = experience.kl.masked_fill(~mask, 0.0).sum(dim=1).mean()
        entropy = -experience.old_logprobs.masked_fill(~mask, 0.0).sum(dim=1).mean()
        variance = masked_var(experience.returns, mask)
        residual = masked_var(experience.returns - experience.old_values, mask)
        lengths = torch.tensor(experience.rollout.lengths, dtype=torch.float32)
        return {
            "score": float(experience.scores.mean()),
            "score_se": standard_error(experience.scores),
            "kl": float(kl),
            "rlhf_reward": float(experience.scores.mean() - self.args.kl_coef * kl),
            "length": float(lengths.mean()),
            "eos_share": sum(experience.rollout.ended) / len(experience.rollout),
            "entropy": float(entropy),
            "explained_variance": float(1 - residual / variance.clamp(min=1e-8)),
            "learning_rate": self.lr_scheduler.get_last_lr()[0],
        }

    # ------------------------------------------------------------------ set-up and self-checks

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """An optimizer over the trained roles by name, whichever of them happens to be active."""
        if self.optimizer is None:
            kind, arguments = self.get_optimizer_cls_and_kwargs(self.args, self.roles)
            groups = [
                {"params": self.roles.parameters_of(role), "weight_decay": self.args.weight_decay, "role": role}
                for role in self.roles.trained_roles
            ]
            self.optimizer = kind(groups, **arguments)
        return self.optimizer

    def _prepare_training(self) -> None:
        if self._ready:
            return
        self.create_optimizer()
        self.create_scheduler(num_training_steps=self.total_updates, optimizer=self.optimizer)
        self_checks.check_in_optimizer(self.roles, self.optimizer)
        self.optimizer = self.accelerator.prepare(self.optimizer)
        prompt = self.train_dataset[0]["input_ids"]
        self_checks.check_rollout_uses_policy(
            self.roles,
            prompt,
            pad_token_id=self.processing_class.pad_token_id,
            autocast=self.compute_loss_context_manager,
        )
        self._ready = True

    def _check_ratio_once(self, log_ratio: Tensor, mask: Tensor) -> None:
        """Only the first micro-batch is before every update, and only without active dropout is its ratio 1."""
        if self._ratio_checked:
            return
        self._ratio_checked = True
        if self.roles.adapter_config("policy").lora_dropout == 0.0:
            dtype = (
                torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else self.roles.causal_lm.dtype
            )
            self_checks.check_ratio(log_ratio, mask, dtype)

    # ------------------------------------------------------------------ the whole run

    def train(self) -> dict[str, float]:
        """Train for `total_updates` updates: the loop of `generate`, `score` and `step`, with events.

        Returns:
            The metrics of the last update.
        """
        args, state = self.args, self.state
        self._prepare_training()
        state.max_steps = self.total_updates
        state.num_train_epochs = self.total_updates * args.rollout_batch_size / len(self.train_dataset)
        state.compute_steps(args, self.total_updates)
        self.is_in_train = True
        self.callback_handler.optimizer, self.callback_handler.lr_scheduler = self.optimizer, self.lr_scheduler
        self.control = self.callback_handler.on_train_begin(args, state, self.control)
        if args.eval_on_start and self.eval_dataset is not None:
            self.evaluate()
        metrics: dict[str, float] = {}
        while state.global_step < self.total_updates and not self.control.should_training_stop:
            self.control = self.callback_handler.on_epoch_begin(args, state, self.control)
            for batch in self.dataloader:
                self.control = self.callback_handler.on_step_begin(args, state, self.control)
                metrics = self._timed_step(batch)
                self.control = self.callback_handler.on_step_end(args, state, self.control)
                self._act(metrics)
                if state.global_step >= self.total_updates or self.control.should_training_stop:
                    break
            self.control = self.callback_handler.on_epoch_end(args, state, self.control)
            self._act(metrics)
        if args.load_best_model_at_end and state.best_model_checkpoint:
            for role in self.roles.trained_roles:
                load_weights(self.roles, role, Path(state.best_model_checkpoint) / role)
        self.is_in_train = False
        self.control = self.callback_handler.on_train_end(args, state, self.control)
        return metrics

    def _timed_step(self, batch: dict[str, Any]) -> dict[str, float]:
        times = [time.perf_counter()]
        rollout = self.generate(batch)
        times.append(time.perf_counter())
        scores = self.score(batch, rollout)
        times.append(time.perf_counter())
        metrics = self.step(batch, rollout, scores)
        times.append(time.perf_counter())
        rollout_seconds, score_seconds, step_seconds = (b - a for a, b in itertools.pairwise(times))
        return {
            **metrics,
            "episode": self.state.episode,
            "samples_per_second": len(rollout) / (times[-1] - times[0]),
            "rollout_seconds": rollout_seconds,
            "score_seconds": score_seconds,
            "step_seconds": step_seconds,
        }

    def _act(self, metrics: dict[str, float]) -> None:
        """Do what the callbacks asked for: log, evaluate, save."""
        if self.control.should_log:
            self.control.should_log = False
            self.log(dict(metrics))
        best = False
        if self.control.should_evaluate and self.eval_dataset is not None:
            self.control.should_evaluate = False
            best = self._determine_best_metric(self.evaluate(), trial=None)
        if self.control.should_save or (best and self.args.save_strategy == "best"):
            self.control.should_save = False
            self._save_checkpoint(self.roles, trial=None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    # ------------------------------------------------------------------ evaluation

    def evaluate_rollout(self, dataset: Dataset) -> tuple[dict[str, float], Rollout, Tensor]:
        """Answer, score and measure all prompts of a data set. Training's random state is left as it was.

        Returns:
            metrics: `score`, `score_se`, `kl` (mean over responses of the sum of log-ratios to the reference;
            an estimate of the KL divergence where responses are sampled), `length`, `eos_share`, and the
            metrics given to the constructor; then the rollout and its scores (N,).
        """
        size = self.args.per_device_eval_batch_size
        rollouts, scores, kls = [], [], []
        devices = [self.roles.device] if self.roles.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(self.args.seed)
            for start in range(0, len(dataset), size):
                batch = self.data_collator([dataset[i] for i in range(start, min(start + size, len(dataset)))])
                rollout = self.generate(batch, do_sample=self.args.eval_do_sample)
                logprobs, ref_logprobs, _ = self._read_roles(rollout, values=False)
                rollouts.append(rollout)
                scores.append(self.score(batch, rollout))
                kls.append(kl_k1(logprobs, ref_logprobs).sum(dim=1))  # both are 0 outside the mask
        whole, all_scores = concatenate(rollouts), torch.cat(scores)
        metrics = {
            "score": float(all_scores.mean()),
            "score_se": standard_error(all_scores),
            "kl": float(torch.cat(kls).mean()),
            "length": sum(whole.lengths) / len(whole),
            "eos_share": sum(whole.ended) / len(whole),
            **(self.metrics(whole) if self.metrics else {}),
        }
        return metrics, whole, all_scores

    def evaluate(
        self, eval_dataset: Dataset | None = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Metrics of held-out prompts, logged under `metric_key_prefix`.

        Raises:
            ToolkitError: there are no held-out prompts.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ToolkitError("evaluate needs held-out prompts: give eval_dataset.")
        metrics, _, _ = self.evaluate_rollout(dataset)
        named = {f"{metric_key_prefix}_{key}": value for key, value in metrics.items()}
        self.log(dict(named))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named

    # ------------------------------------------------------------------ saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save each trained role as a PEFT folder named after it, and TRL's model card."""
        folder = Path(output_dir or self.args.output_dir)
        for role in self.roles.trained_roles:
            save_role(
                self.roles,
                role,
                folder / role,
                pad_token_id=self.processing_class.pad_token_id,
                base_name=self.base_name,
            )
        if not _internal_call:
            self.create_model_card(model_name=folder.name)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self.save_model(str(folder), _internal_call=True)
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
        self.state.save_to_json(str(folder / "trainer_state.json"))
        rotate_checkpoints(self.args.output_dir, self.args.save_total_limit, self.state.best_model_checkpoint)

    # TRL's remaining methods read models that a shared base does not have.

    def null_ref_context(self) -> Any:
        """The reference role, as TRL names it."""
        return self.roles.role("reference")

    def get_train_dataloader(self) -> DataLoader:
        return self.dataloader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Held-out prompts in batches, in order."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        return DataLoader(dataset, batch_size=self.args.per_device_eval_batch_size, collate_fn=self.data_collator)

    def generate_completions(self, sampling: bool = False) -> None:
        """TRL's sample table: the responses to the held-out prompts with their scores; all, or the first batch."""
        if self.eval_dataset is None:
            return
        rows = min(len(self.eval_dataset), self.args.per_device_eval_batch_size) if sampling else len(self.eval_dataset)
        _, rollout, scores = self.evaluate_rollout(self.eval_dataset.select(range(rows)))
        table = Table(show_lines=True)
        for name in ("query", "model response", "score"):
            table.add_column(name)
        for prompt, response, score in zip(rollout.prompts, rollout.responses, scores.tolist(), strict=True):
            table.add_row(Text(prompt), Text(response), f"{score:.3f}")
        Console().print(table)
