"""Offline Q-learning on a shared base: from responses with rewards, without sampling any while it trains.

Chebotar et al. 2023, "Q-Transformer", arXiv 2309.10150, with tokens in the place of action dimensions. A step:

    target      the role "q_target" gives the largest Q of each state, without gradient
    targets     y = r + γ max Q̄ or max Q̄, at least the Monte-Carlo return             `toolkit.functional.q_targets`
    losses      ½ (Q − y)², and ½ (Q − lowest)² over the tokens that were not taken
    average     after the optimizer's step q_target moves towards q
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback

from toolkit import functional as F
from toolkit import models
from toolkit.data import RatedCollator, Rollout, check_rated, values_of
from toolkit.errors import ConfigError, DataError, ToolkitError
from toolkit.rewards import score_with, total_scores
from toolkit.sampling import BestOf, Rows
from toolkit.trainers.common import SamplingTrainer
from toolkit.trainers.q_config import QConfig
from toolkit.trainers.rollouts import QRollouts
from toolkit.trainers.transformers_loop import TransformersLoop


class _AverageTarget(TrainerCallback):
    def __init__(self, roles: models.SharedBase, decay: float):
        self.roles, self.decay = roles, decay

    def on_optimizer_step(self, *arguments: Any, **kwargs: Any) -> None:
        models.update_q_target(self.roles, decay=self.decay)


class QTrainer(TransformersLoop, SamplingTrainer):
    """transformers' `Trainer` for the role "q" of a shared base; `named` arguments are those of `SamplingTrainer`.

    Args:
        roles: the shared base, carrying q and q_target, and reference where responses are to be measured.
        train_dataset: rated responses: `prompt_ids`, `response_ids`, `rewards` (a number or None a token), `ended`.

    Raises:
        DataError: a column is missing, a row does not fit, or a return lies outside what the configuration says.
        ConfigError: the roles have another bound than the configuration says, or none where it says one.
        ModelError: gradient checkpointing, and the base has none.
        SelfCheckError: tokenizer and base do not agree.
    """

    learnt_roles, saved_roles = ("q",), ("q", "q_target")
    collator_type, rollouts_type = RatedCollator, QRollouts

    def __init__(
        self,
        args: QConfig,
        processing_class: PreTrainedTokenizerBase,
        roles: models.SharedBase,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        **named: Any,
    ):
        check_rated(train_dataset)
        check_returns(train_dataset, args)
        _check_bound(roles, args)
        _check_positions(train_dataset, roles)
        if args.gradient_checkpointing:
            models.check_checkpointing(roles.causal_lm)
        # By metric, an entry a micro-batch since the last line, in the place where TRL's trainers have theirs.
        self._metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list)}
        self._sums_from = 0  # the step of that line
        super().__init__(args, processing_class, roles, train_dataset, eval_dataset, **named)
        # The loss is a mean over the response tokens of the whole batch, whatever its parts.
        self.model_accepts_loss_kwargs = True
        self.add_callback(_AverageTarget(roles, args.target_decay))

    def _run(self, checkpoint: Path | None, arguments: dict[str, Any]) -> Any:
        if checkpoint is None:
            self._metrics["train"].clear()
            self._sums_from = 0
        return super()._run(checkpoint, arguments)

    def metric_of_all(self, name: str, parts: list[tuple[float, float]]) -> float:
        return sum(value for _, value in parts)  # each is a share of the mean over the step's tokens

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """L = L_TD + α · L_conservative over the response tokens of a batch, of which these are a part."""
        args, roles = self.args, self.roles
        sequences = models.Sequences(inputs["input_ids"], inputs["prompt_lengths"], inputs["response_lengths"])
        mask = sequences.response_mask
        # As wide as the longest response of the micro-batch, of which these rows may be a part.
        rewards, given = (inputs[name][:, : mask.shape[1]] for name in ("rewards", "reward_mask"))
        count = float(num_items_in_batch)  # which transformers gives to a loss that takes it
        values = models.response_state_values(roles, sequences, chunk_size=args.q_chunk_size)
        cut = ~inputs["ended"] if args.truncated_as == "bootstrap" else torch.zeros_like(inputs["ended"])
        after = torch.where(cut, values.after, torch.zeros_like(values.after))
        steps: dict[str, Any] = {"gamma": args.gamma, "n_steps": args.n_steps, "final_values": after}
        targets = F.q_targets(values.before, rewards, given, mask, **steps)
        if args.monte_carlo_bound:
            targets = torch.maximum(targets, F.monte_carlo_returns(rewards, given, mask, gamma=args.gamma, cut=cut))
        if args.bound == "sigmoid":  # a reward with what comes after it may be more than any Q can be
            targets = torch.where(mask, targets.clamp(args.lowest_return, args.highest_return), targets)
        with roles.role("q"):
            read = models.response_q(roles, sequences, lowest=args.lowest_return, chunk_size=args.q_chunk_size)
        td = F.td_loss(read.q, targets, mask, count=count)
        conservative = F.conservative_loss(read.excess, mask, count=count)
        share = float(mask.sum()) / count
        shares = {
            "td_loss": float(td.detach()),
            "conservative_loss": float(conservative.detach()),
            "q": share * float(F.masked_mean(read.q.detach(), mask)),
            "q_target": share * float(F.masked_mean(targets, mask)),
        }
        for name, value in shares.items():
            self._metrics["train"][name].append(value)
        return td + args.conservative_coef * conservative if args.conservative_coef else td

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        """As in `Trainer`, with the parts of the loss and the means of Q and its targets since the last line."""
        if "loss" in logs and (metrics := self._metrics["train"]):
            steps = max(self.state.global_step - self._sums_from, 1)
            logs = {**logs, **{name: sum(values) / steps for name, values in metrics.items()}}
            metrics.clear()
            self._sums_from = self.state.global_step
        super().log(logs, *arguments, **named)

    def generate(self, batch: dict[str, Any]) -> Rollout:
        """One response to each prompt of a batch from `PromptCollator`, as `decoding` says."""
        return self.rollouts.sampler()(batch)

    def score(self, batch: dict[str, Any], responses: Rollout) -> Tensor:
        """One score for each response, float32 (B,), by the reward that the trainer was made with."""
        return total_scores(score_with(self._known_reward, responses))

    def best_of(self, prompts: Rows, n: int) -> BestOf:
        """As of PPO; greedy `decoding` has one response to a prompt alone, and is refused for more."""
        if self.args.decoding == "greedy" and n > 1:
            wrong = "it is greedy, so that all responses to a prompt are the same."
            raise ToolkitError(wrong, field="decoding", remedy="Set it to sample.")
        return super().best_of(prompts, n)

    def own_state(self) -> dict[str, Any]:
        return {**super().own_state(), "sums_from": self._sums_from, "frozen": self.frozen}

    def load_own_state(self, state: dict[str, Any]) -> None:
        super().load_own_state(state)
        self._sums_from = state["sums_from"]


def _check_bound(roles: models.SharedBase, args: QConfig) -> None:
    """Raises ConfigError unless the roles' Q lies between the returns where it is to be bounded, and only there."""
    asked = (args.lowest_return, args.highest_return) if args.bound == "sigmoid" else None
    held = dict(roles.heads.named_children())
    for head in map(held.get, QTrainer.saved_roles):
        found = (head.lowest, head.highest) if isinstance(head, models.QBound) else None
        if found != asked:
            has, needed = ("no bound" if of is None else f"the bound {of[0]} to {of[1]}" for of in (found, asked))
            wrong = f"the roles q and q_target have {has}, and the configuration says {needed}."
            raise ConfigError(wrong, field="bound", remedy="Give add_q_roles the QBound of these returns, or none.")


def _check_positions(dataset: Dataset, roles: models.SharedBase) -> None:
    """Rows fit into the base, which would end in the middle of training at one that does not."""
    positions, whose = roles.positions
    sides = values_of(dataset, "prompt_ids"), values_of(dataset, "response_ids")
    for row, (prompt, response) in enumerate(zip(*sides, strict=True)):
        if positions is not None and (tokens := len(prompt) + len(response)) > positions:
            wrong = f"row {row} of the rated responses has {tokens} tokens, and {whose} has positions for {positions}."
            raise DataError(wrong, remedy="Limit max_prompt_length and max_response_length of q_data.")


def check_returns(dataset: Dataset, args: QConfig) -> None:
    """What any response of the data still gets from any token on lies between the lowest and the highest return: else a
    conservative term would draw unseen tokens above worse ones that were seen, and a bound could not reach it."""
    lowest, highest = float("inf"), float("-inf")
    for rewards in values_of(dataset, "rewards"):
        following = 0.0
        for reward in reversed(rewards):
            if reward is not None:
                following = reward + args.gamma * following
            lowest, highest = min(lowest, following), max(highest, following)
    bounded, said = args.bound == "sigmoid", "it is {}, and a response in the data gets {}."
    # Scores are rounded to float32, and their sums.
    below, above = (1e-6 * max(1.0, abs(limit)) for limit in (args.lowest_return, args.highest_return))
    if lowest < args.lowest_return - below and (args.conservative_coef or bounded):
        wrong, remedy = said.format(args.lowest_return, lowest), f"Set it to {lowest} or lower."
        raise DataError(wrong, field="lowest_return", remedy=remedy)
    if highest > args.highest_return + above and bounded:
        wrong, remedy = said.format(args.highest_return, highest), f"Set it to {highest} or higher."
        raise DataError(wrong, field="highest_return", remedy=remedy)
