"""The sft stage on TRL's `SFTTrainer`: pretrain a base from random weights, or train the policy's first adapter."""

import copy
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.loss.loss_utils import ForCausalLMLoss
from trl import SFTConfig
from trl import SFTTrainer as TRLSFTTrainer

from toolkit.errors import ConfigError
from toolkit.models import Sequences, SharedBase, check_checkpointing, scales_logits
from toolkit.trainers.common import SupervisedTrainer, in_place_of_progress
from toolkit.trainers.trl_compat import BALANCE_BY_PARTS


class SFTTrainer(SupervisedTrainer, TRLSFTTrainer):
    """TRL's `SFTTrainer`; nothing is sent anywhere.

    With `roles` it trains the policy's adapter and saves it as a PEFT folder, else all weights of a model.
    """

    learnt_roles = saved_roles = ("policy",)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's loss, of rows without padding where the base takes packed ones and TRL makes the logits."""
        if num_items_in_batch is not None:  # by which TRL 1.12 divides; packed rows can be prompts alone
            num_items_in_batch = torch.as_tensor(num_items_in_batch).clamp(min=1)
        further = 0
        if self._packs and "position_ids" not in inputs:
            inputs, further = _packed(inputs)
        elif self.roles is not None and not self.aux_loss_enabled and "position_ids" not in inputs:
            inputs, further = _without_mask(inputs)
        added = self.aux_loss_enabled and self.args.loss_type != "dft"  # which TRL takes of the logits alone
        whole = added and not BALANCE_BY_PARTS and self.share < 1 and num_items_in_batch is not None
        loss = super().compute_loss(model, inputs, return_outputs or whole, num_items_in_batch)
        if whole:  # a mixture's term of the micro-batch, which its parts would each add
            loss, outputs = loss
            # The argument of TRL 1.14 may be None.
            coefficient = getattr(self, "router_aux_loss_coef", self.args.router_aux_loss_coef)
            loss = loss - (1 - self.share) * coefficient * outputs.aux_loss
            loss = (loss, outputs) if return_outputs else loss
        if further and self.model.training:  # TRL counts what the mask lets through
            self.tokens_read -= further
            self.trl_metrics()["num_tokens"] = [self.tokens_read]
        return loss

    @property
    def _packs(self) -> bool:
        # As `packs_rows` of a base in training, which this one is not; the trial at load is without a loss, too, which
        # TRL 1.12 makes of the states by its default. What later ones do instead has not been tried.
        by_trl = self.args.loss_type == "chunked_nll" and not self.aux_loss_enabled
        return self.roles is not None and self.roles.packs_rows and not self.args.neftune_noise_alpha and by_trl

    def _run(self, checkpoint: Path | None, arguments: dict[str, Any]) -> Any:
        with self._trained_role():
            return super()._run(checkpoint, arguments)

    def evaluation_loop(self, *arguments: Any, **named: Any) -> Any:  # of `evaluate` and of `predict`
        with self._trained_role():
            return super().evaluation_loop(*arguments, **named)

    def _trained_role(self) -> AbstractContextManager:
        return nullcontext() if self.roles is None else self.roles.role("policy")


def _without_mask(inputs: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """A batch whose padding comes last with nothing left out, as `Sequences.attention_mask` has it, and how many tokens
    that are more than its own; another as it is."""
    mask = inputs.get("attention_mask")
    if mask is None or not mask[:, 0].all():
        return inputs, 0
    return {**inputs, "attention_mask": torch.ones_like(mask)}, mask.numel() - int(mask.sum())


def _packed(inputs: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """A batch with its rows one after the other, and how many tokens they are more than its own: padding, less what
    stands there once."""
    real = inputs["attention_mask"].bool()
    numbers, learnt = real.cumsum(dim=1) - 1, (inputs["labels"] != -100) & real
    # Tokens before the first of the loss may stand in the line once.
    prompts = torch.where(learnt, numbers, real.sum(dim=1, keepdim=True)).amin(dim=1).clamp(min=1)
    packed = Sequences.from_padded(inputs["input_ids"], real, prompts)
    labels = torch.full_like(packed.input_ids, -100)
    labels[0, packed.places(numbers)[real]] = inputs["labels"][real]
    labels[0, packed.own_starts] = -100  # the row before would predict it
    found: dict[str, Any] = {"input_ids": packed.input_ids, "attention_mask": packed.attention_mask, "labels": labels}
    found |= {"position_ids": packed.position_ids, "row_lengths": packed.row_lengths}
    found["common_length"] = packed.common_length
    return {**inputs, **found}, labels.numel() - int(real.sum())


def cut_rows(dataset: Dataset, args: SFTConfig, *, packing: bool) -> dict[str, int]:
    """`cut`: how many rows TRL will cut to `max_length`, and `without_loss`: how many of these lose every token of the
    loss and are left out. Empty where no row is cut; `packing` is that of the split."""
    limit = args.max_length
    if limit is None or (packing and args.packing_strategy != "bfd"):
        return {}  # rows that are wrapped into others are divided, and none is cut
    long = dataset.filter(lambda ids: len(ids) > limit, input_columns="input_ids")
    if not len(long):
        return {}
    return {"cut": len(long), "without_loss": len(long) - len(with_loss(long, args))}


def packs(args: SFTConfig, split: str) -> bool:
    """Whether TRL packs the rows of a split."""
    of_evaluation = args.packing if args.eval_packing is None else args.eval_packing
    return bool(args.packing if split == "train" else of_evaluation)


def with_loss(dataset: Dataset, args: SFTConfig) -> Dataset:
    """The rows of which TRL's cut to `max_length` leaves a token of the loss; it leaves the others out."""
    limit = args.max_length
    kept = slice(limit) if limit is None or args.truncation_mode == "keep_start" else slice(-limit, None)
    return dataset.filter(lambda labels: any(label != -100 for label in labels[kept]), input_columns="labels")


def _loss_of_own_logits(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The mean over tokens that transformers' models give with labels, of the logits as the model gives them."""
    return ForCausalLMLoss(outputs.logits, labels, outputs.logits.shape[-1], num_items_in_batch=num_items_in_batch)


def _fitting(args: SFTConfig, model: PreTrainedModel, *, own_loss: bool) -> SFTConfig:
    """The settings as TRL can follow them on a model. It makes logits itself, and leaves out Granite's scale."""
    text, name = model.config.get_text_config(), type(model).__name__
    args = copy.copy(args)  # one that is made anew would ask again for all cards in sight
    if own_loss:
        if args.loss_type not in ("nll", "chunked_nll"):
            wrong = f"TRL takes {args.loss_type} of logits without the scale that a {name} has."
            raise ConfigError(wrong, field="loss_type", remedy="Take nll.")
        if args.router_aux_loss_coef not in (0, SFTConfig.router_aux_loss_coef):
            wrong = f"would have no effect: the loss of a {name} has no term that balances experts."
            raise ConfigError(wrong, field="router_aux_loss_coef", remedy="Leave it out.")
        args.loss_type = "nll"
    if hasattr(text, "output_router_logits") and (own_loss or getattr(text, "num_local_experts", None) == 0):
        # TRL's term has no part in a loss of ours; and it takes dense Granite 4 for a mixture, and breaks off.
        args.router_aux_loss_coef = 0.0
    return args


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
        model: a model with random weights, all of which are trained; or a shared base that carries the policy,
            whose adapter is trained.
        train_dataset: `input_ids`, and `labels` (−100 where a token is not part of the loss) or none.
        base_name: as for `SamplingTrainer`, and so are the callbacks.

    Raises:
        ConfigError: a loss that TRL does not take of the model's own logits.
        DataError: a row has more tokens than the model has positions.
        ModelError: gradient checkpointing, and the model has none.
    """
    roles = model if isinstance(model, SharedBase) else None
    whole = model if roles is None else roles.causal_lm
    if args.gradient_checkpointing and roles is not None:  # transformers does so when training begins, on PEFT's model
        roles.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    elif args.gradient_checkpointing:
        check_checkpointing(whole)
    elif roles is not None:  # which an earlier trainer may have switched on
        roles.gradient_checkpointing_disable()
    if roles is not None:
        roles.train_roles("policy")
    given: dict[str, Any] = {"processing_class": processing_class, "callbacks": callbacks}
    own_loss = scales_logits(whole)
    args = _fitting(args, whole, own_loss=own_loss)
    trained = model if roles is None else roles.model
    # Where it packs TRL keeps rows of which the cut leaves no token of the loss.
    cut = args.packing_strategy == "bfd" and "labels" in train_dataset.column_names
    if cut and packs(args, "train"):
        train_dataset = with_loss(train_dataset, args)
    if cut and packs(args, "validation") and eval_dataset is not None:
        eval_dataset = with_loss(eval_dataset, args)
    as_given = [] if roles is None else [p.detach().clone() for p in roles.parameters_of("policy")]
    trainer = SFTTrainer(trained, args, train_dataset=train_dataset, eval_dataset=eval_dataset, **given)
    trainer.roles, trainer.base_name = roles, base_name
    trainer.check_positions(whole, "Set max_length of sft to {}, or leave longer rows out.")
    trainer.divide_by_tokens_of_the_loss()
    if own_loss:
        trainer.compute_loss_func = _loss_of_own_logits
    if hasattr(whole, "router_aux_loss_coef"):  # TRL sets that of the config, which some models have read by then
        whole.router_aux_loss_coef = whole.config.get_text_config().router_aux_loss_coef
    if roles is not None:
        # On a quantised base TRL casts what it trains to bfloat16, where AdamW's small steps round to nothing.
        for parameter, given_one in zip(roles.parameters_of("policy"), as_given, strict=True):
            parameter.data = given_one.to(parameter.device, torch.float32)
        roles.train_roles("policy")
    in_place_of_progress(trainer, callbacks)
    return trainer
