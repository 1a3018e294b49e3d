"""The reward stage: train the role "reward" on pairs, or on classes.

Scalar rewards are trained by TRL's `RewardTrainer`, with its Bradley–Terry loss or with one at every token, classes by
transformers' `Trainer` with cross-entropy. Both see the role as a sequence classifier, read at the same position as
in PPO.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback
from trl import RewardConfig as TRLRewardConfig
from trl import RewardTrainer as TRLRewardTrainer

from toolkit.data import LabelledCollator
from toolkit.errors import DataError
from toolkit.functional import first_differences, token_level_preference_loss, wilson_interval
from toolkit.models import (
    SequenceClassifierView,
    SharedBase,
    load_weights,
    release_memory,
    save_role,
    score_positions,
)
from toolkit.reports import JudgedPair
from toolkit.rewards import Judge, read_sequences
from toolkit.trainers.resume import ResumableTrainer
from toolkit.trainers.reward_config import RewardConfig


class _SavesRole(ResumableTrainer):
    """Saves and loads the reward role as a PEFT folder where `Trainer` would take the whole view."""

    roles: SharedBase
    role_arguments: dict[str, Any]
    judged: Sequence[JudgedPair] = ()
    """Held-out pairs as they were last judged."""

    @property
    def judge(self) -> SharedBase:
        """What scores: see `read_sequences`."""
        return self.model.base

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        release_memory()
        return loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = Path(output_dir or self.args.output_dir) / "reward"
        save_role(self.model.base, "reward", folder, **self.role_arguments)

    def load_saved(self, folder: Path) -> None:
        """The reward role as `save_model` wrote it."""
        load_weights(self.model.base, "reward", folder / "reward")


class PairTrainer(TRLRewardTrainer):
    """TRL's `RewardTrainer` with a loss at every token, too."""

    def token_scores(self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The head at every token: float32 (B, L)."""
        raise NotImplementedError

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's Bradley–Terry loss, or the token-level one with TRL's centring and metrics."""
        if not (isinstance(self.args, RewardConfig) and self.args.loss == "token_level"):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        values = self.token_scores(model, ids, mask)  # (2B, L)
        ends = score_positions(ids, mask, self.processing_class.pad_token_id)  # (2B,)
        scores = values.gather(1, ends.unsqueeze(1))  # (2B, 1)
        outputs = SequenceClassifierOutput(logits=scores)
        with torch.no_grad():  # for accuracy, margin and the rest of what it logs
            super().compute_loss(lambda **_: outputs, inputs)
        chosen_ends, rejected_ends = ends.chunk(2)
        bounds = {"chosen_ends": chosen_ends, "rejected_ends": rejected_ends}
        loss = token_level_preference_loss(
            *values.chunk(2),
            starts=first_differences(*ids.chunk(2), **bounds),
            margin=inputs.get("margin", 0.0),
            **bounds,
        )
        if self.args.center_rewards_coefficient is not None:
            chosen, rejected = scores.squeeze(1).chunk(2)
            loss = loss + self.args.center_rewards_coefficient * (chosen + rejected).square().mean()
        return (loss, outputs) if return_outputs else loss


class RewardTrainer(_SavesRole, PairTrainer):
    """TRL's `RewardTrainer` on the shared base. Nothing is sent anywhere, and the head stays in float32."""

    def _send_telemetry(self) -> None:
        """TRL reports architecture and GPU of each run; the toolkit does not."""

    def token_scores(self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = model(input_ids=input_ids, attention_mask=attention_mask, every_token=True).logits
        return scores.squeeze(-1)


class ClassTrainer(_SavesRole):
    """transformers' `Trainer` for a reward head with several outputs."""


def check_columns(dataset: Dataset, outputs: int) -> None:
    """Nothing, if a data set has the columns that a head of so many outputs is trained on.

    Raises:
        DataError: it has not.
    """
    needed = ("input_ids", "labels") if outputs > 1 else ("chosen_ids", "rejected_ids")
    if not set(needed) <= set(dataset.column_names):
        raise DataError(
            f"the reward stage needs the columns {' and '.join(needed)} for a head with {outputs} output(s); present: "
            f"{', '.join(dataset.column_names)}."
        )


def reward_trainer(
    args: TRLRewardConfig,
    processing_class: PreTrainedTokenizerBase,
    roles: SharedBase,
    train_dataset: Dataset,
    eval_dataset: Dataset | None = None,
    *,
    base_name: str = "",
    callbacks: list[TrainerCallback] | None = None,
) -> RewardTrainer | ClassTrainer:
    """A trainer for the role "reward", which `roles` carries with its head.

    Args:
        args: TRL's configuration or ours, also for classes.
        processing_class: tokenizer.
        roles: the shared base. Its reward role is made trainable, alone.
        train_dataset: `chosen_ids` and `rejected_ids` for a scalar head, `input_ids` and `labels` for classes.
        eval_dataset: likewise.
        base_name: name of the base to write into the saved adapter.
        callbacks: as in `Trainer`; the default progress bar is not added if there are any.

    Raises:
        DataError: the columns do not fit the head.
    """
    classes = roles.head("reward").out_features > 1
    check_columns(train_dataset, roles.head("reward").out_features)
    roles.train_roles("reward")
    view = SequenceClassifierView(roles, pad_token_id=processing_class.pad_token_id)
    common = {
        "model": view,
        "args": args,
        "train_dataset": train_dataset,
        "eval_dataset": eval_dataset,
        "processing_class": processing_class,
        "callbacks": callbacks,
    }
    trainer: RewardTrainer | ClassTrainer
    if classes:
        trainer = ClassTrainer(**common, data_collator=LabelledCollator(processing_class.pad_token_id))
    else:
        trainer = RewardTrainer(**common)
    trainer.roles = roles
    trainer.role_arguments = {"pad_token_id": processing_class.pad_token_id, "base_name": base_name}
    if callbacks:
        trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)
        trainer.remove_callback(PrinterCallback)
    return trainer


def judge_pairs(
    roles: Judge, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *, pad_token_id: int, batch_size: int
) -> list[JudgedPair]:
    """Both scores of each pair, with its texts and the lengths of its responses.

    Args:
        roles: what scores, with one output: a base that carries the role "reward", or a classifier.
        dataset: `chosen_ids` and `rejected_ids`, and `prompt_length`; without that column the prompt is what both
            begin with.
        tokenizer: turns ids into text.
        pad_token_id: see `toolkit.models.score_positions`.
        batch_size: sequences a forward pass.
    """
    sides = {side: dataset[f"{side}_ids"][:] for side in ("chosen", "rejected")}
    read = {"pad_token_id": pad_token_id, "batch_size": batch_size}
    scores = {side: read_sequences(roles, ids, **read).squeeze(1).tolist() for side, ids in sides.items()}
    if "prompt_length" in dataset.column_names:
        prompts = dataset["prompt_length"][:]
    else:
        prompts = [_shared_beginning(*pair) for pair in zip(*sides.values(), strict=True)]
    judged = []
    for row, length in enumerate(prompts):
        pair: JudgedPair = {"prompt": tokenizer.decode(sides["chosen"][row][:length])}
        for side, ids in sides.items():
            response = ids[row][length:]
            pair[side] = tokenizer.decode(response, skip_special_tokens=True)
            pair[f"{side}_score"], pair[f"{side}_length"] = scores[side][row], len(response)
        judged.append(pair)
    return judged


def _shared_beginning(chosen: Sequence[int], rejected: Sequence[int]) -> int:
    same = [a == b for a, b in zip(chosen, rejected, strict=False)]
    return same.index(False) if False in same else len(same)


def pair_figures(judged: Sequence[JudgedPair]) -> dict[str, Any]:
    """Accuracy on pairs with its 95 % interval, loss, and mean margin.

    Args:
        judged: from `judge_pairs`.

    Returns:
        As `evaluate_reward` for pairs.
    """
    margin = torch.tensor([pair["chosen_score"] - pair["rejected_score"] for pair in judged])
    figures = {"loss": float(-nn.functional.logsigmoid(margin).mean()), "margin": float(margin.mean())}
    return _with_accuracy(int((margin > 0).sum()), len(judged), figures)


def _with_accuracy(right: int, rows: int, figures: dict[str, float]) -> dict[str, Any]:
    low, high = wilson_interval(right, rows)
    return {"accuracy": right / rows, "accuracy_ci": [low, high], **figures, "rows": rows}


def evaluate_reward(roles: Judge, dataset: Dataset, *, pad_token_id: int, batch_size: int) -> dict[str, Any]:
    """Accuracy of the reward role on held-out rows, with its 95 % interval, and the loss.

    Args:
        roles: carries the role; or a classifier on a base of its own.
        dataset: pairs or labelled sequences, as the head needs.
        pad_token_id: see `toolkit.models.score_positions`.
        batch_size: sequences a forward pass.

    Returns:
        `accuracy` (a tie counts as wrong), `accuracy_ci` (Wilson), `loss`, `rows`, and for pairs `margin`, the mean
        of chosen less rejected.
    """
    read = {"pad_token_id": pad_token_id, "batch_size": batch_size}
    if "labels" in dataset.column_names:
        logits = read_sequences(roles, dataset["input_ids"], **read)
        labels = torch.tensor(dataset["labels"])
        right = int((logits.argmax(dim=1) == labels).sum())
        return _with_accuracy(right, len(dataset), {"loss": float(nn.functional.cross_entropy(logits, labels))})
    chosen, rejected = (read_sequences(roles, dataset[f"{side}_ids"], **read) for side in ("chosen", "rejected"))
    scores = zip(chosen.squeeze(1).tolist(), rejected.squeeze(1).tolist(), strict=True)
    return pair_figures([{"chosen_score": better, "rejected_score": worse} for better, worse in scores])
