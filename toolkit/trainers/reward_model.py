"""The reward stage on a base of its own: train a whole sequence classifier, or LoRA on it, on pairs or on classes.

The losses are those of `toolkit.trainers.reward`: Bradley–Terry by TRL's `RewardTrainer`, cross-entropy by
transformers' `Trainer`. The model reads the ids of the policy's tokenizer, as in PPO.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback
from trl import RewardConfig as TRLRewardConfig

from toolkit.data import LabelledCollator
from toolkit.models import (
    check_reads_tokens,
    classifier_token_scores,
    load_classifier_weights,
    release_memory,
    save_classifier,
    train_in_float32,
)
from toolkit.reports import JudgedPair
from toolkit.trainers.resume import ResumableTrainer
from toolkit.trainers.reward import PairTrainer, check_columns
from toolkit.trainers.reward_config import RewardConfig


class _SavesModel(ResumableTrainer):
    """Saves and loads the model as a checkpoint folder of its own beside the state of the run."""

    judged: Sequence[JudgedPair] = ()
    """Held-out pairs as they were last judged."""

    @property
    def judge(self) -> PreTrainedModel | PeftModel:
        """What scores: see `read_sequences`."""
        return self.model

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        release_memory()
        return loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        save_classifier(self.model, self.processing_class, Path(output_dir or self.args.output_dir) / "model")

    def load_saved(self, folder: Path) -> None:
        """The model as `save_model` wrote it."""
        load_classifier_weights(self.model, folder / "model")


class PairModelTrainer(_SavesModel, PairTrainer):
    """TRL's `RewardTrainer` on a model of its own. Nothing is sent anywhere."""

    def _send_telemetry(self) -> None:
        """TRL reports architecture and GPU of each run; the toolkit does not."""

    def token_scores(self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        with self.accelerator.autocast():  # which is around the forward pass of the whole model alone
            return classifier_token_scores(self.accelerator.unwrap_model(model), input_ids, attention_mask)


class ClassModelTrainer(_SavesModel):
    """transformers' `Trainer` for a classifier of its own."""


def reward_model_trainer(
    args: TRLRewardConfig,
    processing_class: PreTrainedTokenizerBase,
    model: PreTrainedModel | PeftModel,
    train_dataset: Dataset,
    eval_dataset: Dataset | None = None,
    *,
    callbacks: list[TrainerCallback] | None = None,
) -> PairModelTrainer | ClassModelTrainer:
    """A trainer for a sequence classifier on a base of its own.

    Args:
        args: TRL's configuration or ours, also for classes.
        processing_class: the policy's tokenizer, whose ids the data sets hold.
        model: all its weights are trained, or those of its adapter and head.
        train_dataset: `chosen_ids` and `rejected_ids` for one output, `input_ids` and `labels` for classes.
        eval_dataset: likewise.
        callbacks: as in `Trainer`; the default progress bar is not added if there are any.

    Raises:
        DataError: the columns do not fit the head.
        ModelError: a loss at every token, and the model is no decoder.
    """
    if isinstance(args, RewardConfig) and args.loss == "token_level":
        check_reads_tokens(model)
    classes = model.config.num_labels > 1
    check_columns(train_dataset, model.config.num_labels)
    common: dict[str, Any] = {
        "model": model,
        "args": args,
        "train_dataset": train_dataset,
        "eval_dataset": eval_dataset,
        "processing_class": processing_class,
        "callbacks": callbacks,
    }
    trainer: PairModelTrainer | ClassModelTrainer
    if classes:
        trainer = ClassModelTrainer(**common, data_collator=LabelledCollator(processing_class.pad_token_id))
    else:
        trainer = PairModelTrainer(**common)
    # After TRL, which casts what trains on a quantised base to bfloat16.
    train_in_float32(model)
    if callbacks:
        trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)
        trainer.remove_callback(PrinterCallback)
    return trainer
