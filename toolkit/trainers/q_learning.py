"""Offline Q-learning on a shared base: from responses with rewards, without sampling any while it trains.

Chebotar et al. 2023, "Q-Transformer", arXiv 2309.10150, with tokens in the place of action dimensions. A step:

    target      the role "q_target" gives the largest Q of each state, without gradient
    targets     y = r + γ max Q̄ or max Q̄, at least the Monte-Carlo return             `toolkit.functional.q_targets`
    losses      ½ (Q − y)², and ½ (Q − lowest)² over the tokens that were not taken
    average     after the optimizer's step q_target moves towards q
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import (
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback

from toolkit.checkpoints import kept_random_states
from toolkit.data import PromptCollator, RatedCollator, Rollout, check_rated, concatenate, rollout_of
from toolkit.errors import DataError, ToolkitError
from toolkit.functional import (
    conservative_loss,
    masked_mean,
    monte_carlo_returns,
    q_targets,
    standard_error,
    td_loss,
)
from toolkit.models import (
    LENGTH_MULTIPLE,
    Sequences,
    SharedBase,
    generate_by_q,
    load_weights,
    release_memory,
    response_log_ratios,
    response_q,
    response_state_values,
    save_role,
    update_q_target,
)
from toolkit.rewards import Reward, score_with, total_scores
from toolkit.trainers import self_checks
from toolkit.trainers.best_of import BestOf, best_of
from toolkit.trainers.evaluation import EvaluatesRollouts
from toolkit.trainers.q_config import QConfig
from toolkit.trainers.resume import ResumableTrainer

SAVED_ROLES = ("q", "q_target")


class _AverageTarget(TrainerCallback):
    """Moves the target towards q after each step of the optimizer."""

    def __init__(self, roles: SharedBase, decay: float):
        self.roles, self.decay = roles, decay

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        update_q_target(self.roles, decay=self.decay)


class QTrainer(EvaluatesRollouts, ResumableTrainer):
    """transformers' `Trainer` for the role "q" of a shared base.

    Args:
        args: the configuration.
        processing_class: tokenizer of the base.
        roles: the shared base, carrying q and q_target, and reference where answers are to be measured. q is made
            trainable, alone.
        train_dataset: rated responses: `prompt_ids`, `response_ids`, `rewards` (a number or None a token), `ended`.
        eval_dataset: held-out prompts with a column `input_ids`.
        reward: scores answers in evaluation. Training does not ask it.
        metrics: further metrics of answers, for evaluation.
        base_name: name of the base to write into saved adapters.
        callbacks: as in `Trainer`; the default progress bar is not added if there are any.

    Raises:
        DataError: a column is missing, a row does not fit, or a return lies outside what the configuration says.
        SelfCheckError: tokenizer and base do not agree.
    """

    control: Any  # set by transformers' Trainer

    def __init__(
        self,
        args: QConfig,
        processing_class: PreTrainedTokenizerBase,
        roles: SharedBase,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        *,
        reward: Reward | None = None,
        metrics: Callable[[Rollout], dict[str, float]] | None = None,
        base_name: str = "",
        callbacks: list[TrainerCallback] | None = None,
    ):
        check_rated(train_dataset)
        check_returns(train_dataset, args)
        self_checks.check_tokenizer(processing_class, roles)
        roles.train_roles("q")
        self.roles, self.reward, self.metrics, self.base_name = roles, reward, metrics, base_name
        self.stop_token_ids = roles.stop_token_ids(processing_class)
        self.data_collator_of_prompts = PromptCollator(processing_class.pad_token_id, multiple=LENGTH_MULTIPLE)
        self._sums: dict[str, list[float]] = {}  # by metric, an entry a micro-batch since the last line
        self._sums_from = 0  # the step of that line
        super().__init__(
            model=roles,
            args=args,
            data_collator=RatedCollator(processing_class.pad_token_id, multiple=LENGTH_MULTIPLE),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
        )
        if self.accelerator.num_processes > 1:
            raise ToolkitError("Q-learning here runs on one GPU; start it without torchrun or accelerate launch.")
        # The loss is a mean over the response tokens of the whole batch, whatever its parts.
        self.model_accepts_loss_kwargs = True
        self.add_callback(_AverageTarget(roles, args.target_decay))
        if callbacks:
            self.remove_callback(DEFAULT_PROGRESS_CALLBACK)
            self.remove_callback(PrinterCallback)

    def _run(self, checkpoint: Path | None, arguments: dict[str, Any]) -> Any:
        if checkpoint is None:
            self._sums, self._sums_from = {}, 0
        return super()._run(checkpoint, arguments)

    # ------------------------------------------------------------------ losses

    def training_step(self, *arguments: Any, **named: Any) -> Tensor:
        """A micro-batch forward and backward, in the role that is trained."""
        with self.roles.role("q"):
            loss = super().training_step(*arguments, **named)
        release_memory()
        return loss

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """L = L_TD + α · L_conservative over the response tokens of a batch, of which these are a part."""
        args, roles = self.args, self.roles
        sequences = Sequences(inputs["input_ids"], inputs["prompt_lengths"], inputs["response_lengths"])
        mask, rewards, given = sequences.response_mask, inputs["rewards"], inputs["reward_mask"]
        count = None if num_items_in_batch is None else float(num_items_in_batch)
        values = response_state_values(roles, sequences, chunk_size=args.q_chunk_size)
        cut = ~inputs["ended"] if args.truncated_as == "bootstrap" else torch.zeros_like(inputs["ended"])
        targets = q_targets(
            values.before,
            rewards,
            given,
            mask,
            gamma=args.gamma,
            n_steps=args.n_steps,
            final_values=torch.where(cut, values.after, torch.zeros_like(values.after)),
        )
        if args.monte_carlo_bound:
            targets = torch.maximum(targets, monte_carlo_returns(rewards, given, mask, gamma=args.gamma, cut=cut))
        with roles.role("q"):
            found = response_q(roles, sequences, lowest=args.lowest_return, chunk_size=args.q_chunk_size)
        td = td_loss(found.q, targets, mask, count=count)
        conservative = conservative_loss(found.excess, mask, count=count)
        share = 1.0 if count is None else float(mask.sum()) / count
        self._note(
            td_loss=float(td.detach()),
            conservative_loss=float(conservative.detach()),
            q=share * float(masked_mean(found.q.detach(), mask)),
            q_target=share * float(masked_mean(targets, mask)),
        )
        return td + args.conservative_coef * conservative if args.conservative_coef else td

    def _note(self, **metrics: float) -> None:
        """Keep what a part of a batch adds to its metrics until they are logged."""
        for name, value in metrics.items():
            self._sums.setdefault(name, []).append(value)

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        """As in `Trainer`, with the parts of the loss and the means of Q and its targets since the last line."""
        if "loss" in logs and self._sums:
            steps = max(self.state.global_step - self._sums_from, 1)
            logs = {**logs, **{name: sum(values) / steps for name, values in self._sums.items()}}
            self._sums, self._sums_from = {}, self.state.global_step
        super().log(logs, *arguments, **named)

    # ------------------------------------------------------------------ answers

    def generate(self, batch: dict[str, Any], *, by_q: bool = True) -> Rollout:
        """One answer to each prompt of a batch, as `decoding` says.

        Args:
            batch: made by `PromptCollator`.
            by_q: False answers as the reference does.
        """
        tokenizer, device = self.processing_class, self.roles.device
        with self.compute_loss_context_manager():
            output = generate_by_q(
                self.roles,
                batch["input_ids"].to(device),
                batch["attention_mask"].to(device),
                max_new_tokens=self.args.response_length,
                stop_token_ids=self.stop_token_ids,
                pad_token_id=tokenizer.pad_token_id,
                temperature=self.args.temperature,
                by_q=by_q,
            )
        release_memory()
        return rollout_of(batch, output.tolist(), tokenizer=tokenizer, stop_token_ids=self.stop_token_ids)

    def score(self, batch: dict[str, Any], responses: Rollout) -> Tensor:
        """One score for each answer: float32 (B,).

        Raises:
            ToolkitError: the trainer has no reward.
            RewardError: the reward callback raised, or did not return one finite number each.
        """
        if self.reward is None:
            raise ToolkitError("answers cannot be scored: the trainer was made without a reward.")
        return total_scores(score_with(self.reward, responses))

    def best_of(self, prompts: Dataset | list[dict[str, Any]], n: int) -> BestOf:
        """Sample n answers to each prompt and keep the one that the reward scores highest; of equals the first.

        Args:
            prompts: rows with `input_ids`, and the columns that the reward needs.
            n: at least 1.

        Raises:
            ToolkitError: `decoding` is greedy, so that all of them would be the same.
        """
        if self.args.decoding == "greedy" and n > 1:
            raise ToolkitError("q.decoding is greedy, so that all answers to a prompt are the same: set it to sample.")

        def sample(rows: list[dict[str, Any]]) -> tuple[Rollout, Tensor]:
            batch = self.data_collator_of_prompts(rows)
            rollout = self.generate(batch)
            return rollout, self.score(batch, rollout)

        return best_of(prompts, n, sample=sample, batch_size=self.args.per_device_eval_batch_size)

    @torch.no_grad()
    def evaluate_rollout(self, dataset: Dataset, *, by_q: bool = True) -> tuple[dict[str, float], Rollout, Tensor]:
        """Answer, score and measure all prompts of a data set. Training's random states are left as they were.

        Args:
            dataset: prompts with a column `input_ids`.
            by_q: False measures the reference, decoded in the same way.

        Returns:
            metrics: `score`, `score_se`, `kl`, `length`, `eos_share` and those given to the constructor. `kl` is the
            mean over answers of the sum of log π − log π_ref: an estimate of KL(π, π_ref) where answers are sampled,
            and the divergence of these answers where they are greedy, log π being 0 there. Then the rollout and its
            scores (N,).
        """
        args, size = self.args, self.args.per_device_eval_batch_size
        rollouts, scores, kls = [], [], []
        with kept_random_states():
            torch.manual_seed(args.seed)
            for start in range(0, len(dataset), size):
                rows = [dataset[i] for i in range(start, min(start + size, len(dataset)))]
                batch = self.data_collator_of_prompts(rows)
                rollouts.append(self.generate(batch, by_q=by_q))
                scores.append(self.score(batch, rollouts[-1]))
                kls.append(self._log_ratios(rollouts[-1], by_q))
        whole, all_scores = concatenate(rollouts), torch.cat(scores)
        metrics = {
            "score": float(all_scores.mean()),
            "score_se": standard_error(all_scores),
            "kl": statistics.fmean(torch.cat(kls).tolist()),
            "length": sum(whole.lengths) / len(whole),
            "eos_share": sum(whole.ended) / len(whole),
            **(self.metrics(whole) if self.metrics else {}),
        }
        return metrics, whole, all_scores

    def _log_ratios(self, rollout: Rollout, by_q: bool) -> Tensor:
        """log π − log π_ref of each answer: (B,)."""
        if not by_q and self.args.temperature is not None:
            return torch.zeros(len(rollout))  # π is the reference
        sequences = Sequences.from_ids(
            rollout.prompt_ids,
            rollout.response_ids,
            pad_token_id=self.processing_class.pad_token_id,
            device=self.roles.device,
        )
        with self.compute_loss_context_manager():
            found = response_log_ratios(
                self.roles, sequences, temperature=self.args.temperature, chunk_size=self.args.q_chunk_size
            )
        release_memory()
        return found.sum(dim=1).cpu()

    # ------------------------------------------------------------------ saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save q and its average as PEFT folders named after them."""
        pad_token_id = self.processing_class.pad_token_id
        for role in SAVED_ROLES:
            folder = Path(output_dir or self.args.output_dir) / role
            save_role(self.roles, role, folder, pad_token_id=pad_token_id, base_name=self.base_name)

    def load_saved(self, folder: Path) -> None:
        """q and its average as `save_model` wrote them."""
        for role in SAVED_ROLES:
            load_weights(self.roles, role, folder / role)

    def own_state(self) -> dict[str, Any]:
        """As of every trainer, with the sums from which the next line of metrics is made."""
        return {**super().own_state(), "sums": self._sums, "sums_from": self._sums_from}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Put back what `own_state` gave."""
        super().load_own_state(state)
        self._sums, self._sums_from = state["sums"], state["sums_from"]


def check_returns(dataset: Dataset, args: QConfig) -> None:
    """What any response of the data still gets from any token on lies between the lowest and the highest return.

    Raises:
        DataError: one does not; a conservative term would then draw unseen tokens above worse ones that were seen, and
            a bound could not reach it.
    """
    lowest, highest = float("inf"), float("-inf")
    for rewards in dataset["rewards"]:
        following = 0.0
        for reward in reversed(rewards):
            if reward is not None:
                following = reward + args.gamma * following
            lowest, highest = min(lowest, following), max(highest, following)
    if lowest < args.lowest_return and (args.conservative_coef or args.bound == "sigmoid"):
        raise DataError(
            f"q.lowest_return is {args.lowest_return}, and a response in the data gets {lowest:.6g}. "
            f"Set q.lowest_return={lowest:.6g} or lower."
        )
    if highest > args.highest_return and args.bound == "sigmoid":
        raise DataError(
            f"q.highest_return is {args.highest_return}, and a response in the data gets {highest:.6g}. "
            f"Set q.highest_return={highest:.6g} or higher."
        )
