"""The sft stage on TRL's `SFTTrainer`: pretrain a base from random weights, or train the policy's first adapter."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback
from transformers.utils import SAFE_WEIGHTS_NAME
from trl import SFTConfig
from trl import SFTTrainer as TRLSFTTrainer

from toolkit.models import SharedBase, load_weights, save_role
from toolkit.trainers.resume import ResumableTrainer


class SFTTrainer(ResumableTrainer, TRLSFTTrainer):
    """TRL's `SFTTrainer`; nothing is sent anywhere.

    With `roles` it trains the policy's adapter and saves it as a PEFT folder, else all weights of a model.
    """

    roles: SharedBase | None = None
    base_name = ""

    def _send_telemetry(self) -> None:
        """TRL reports architecture and GPU of each run; the toolkit does not."""

    def _run(self, checkpoint: Path | None, arguments: dict[str, Any]) -> Any:
        if self.roles is None:
            return super()._run(checkpoint, arguments)
        with self.roles.role("policy"):
            return super()._run(checkpoint, arguments)

    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        if self.roles is None:
            return super().evaluate(*arguments, **named)
        with self.roles.role("policy"):
            return super().evaluate(*arguments, **named)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = Path(output_dir or self.args.output_dir)
        if self.roles is None:
            self.model.save_pretrained(folder / "model")
            self.processing_class.save_pretrained(folder / "model")
        else:
            pad_token_id = self.processing_class.pad_token_id
            save_role(self.roles, "policy", folder / "policy", pad_token_id=pad_token_id, base_name=self.base_name)

    def load_saved(self, folder: Path) -> None:
        """The model or the policy's adapter as `save_model` wrote it."""
        if self.roles is None:
            load_model(self.model, folder / "model" / SAFE_WEIGHTS_NAME)
        else:
            load_weights(self.roles, "policy", folder / "policy")


def cut_rows(dataset: Dataset, args: SFTConfig) -> dict[str, int]:
    """How many rows TRL will cut to `max_length`, and how many of these lose every token of the loss and are left out.

    Args:
        dataset: `input_ids`, and `labels` or none.
        args: TRL's configuration. Rows that are wrapped into others are divided, and none is cut.

    Returns:
        `cut` and `without_loss`; empty where no row is cut.
    """
    limit = args.max_length
    if limit is None or (args.packing and args.packing_strategy != "bfd"):
        return {}
    long = dataset.filter(lambda ids: len(ids) > limit, input_columns="input_ids")
    if not len(long):
        return {}
    lost = 0
    if "labels" in long.column_names and not args.packing:
        kept = slice(limit) if args.truncation_mode == "keep_start" else slice(-limit, None)
        lost = sum(all(label == -100 for label in labels[kept]) for labels in long["labels"])
    return {"cut": len(long), "without_loss": lost}


def sft_trainer(
    args: SFTConfig,
    processing_class: PreTrainedTokenizerBase,
    model: PreTrainedModel | SharedBase,
    train_dataset: Dataset,
    eval_dataset: Dataset | None = None,
    *,
    base_name: str = "",
    callbacks: list[TrainerCallback] | None = None,
) -> SFTTrainer:
    """A trainer for the sft stage.

    Args:
        args: TRL's configuration.
        processing_class: tokenizer.
        model: a model with random weights, all of which are trained; or a shared base that carries the policy,
            whose adapter is trained.
        train_dataset: `input_ids`, and `labels` (−100 where a token is not part of the loss) or none.
        eval_dataset: likewise.
        base_name: name of the base to write into the saved adapter.
        callbacks: as in `Trainer`; the default progress bar is not added if there are any.
    """
    roles = model if isinstance(model, SharedBase) else None
    if roles is not None:
        roles.train_roles("policy")
    trainer = SFTTrainer(
        model=model if roles is None else roles.model,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=processing_class,
        callbacks=callbacks,
    )
    trainer.roles, trainer.base_name = roles, base_name
    if roles is not None:
        # On a quantised base TRL casts what it trains to bfloat16, where AdamW's small steps round to nothing.
        for parameter in roles.parameters_of("policy"):
            parameter.data = parameter.data.to(torch.float32)
        roles.train_roles("policy")
    if callbacks:
        trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)
        trainer.remove_callback(PrinterCallback)
    return trainer
