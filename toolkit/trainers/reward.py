"""The reward stage: train the role "reward", or a sequence classifier on a base of its own, and what it is then worth.

One number a sequence is trained on pairs by TRL's `RewardTrainer`, with its Bradley–Terry loss or one at every token,
classes by transformers' `Trainer` with cross-entropy. A model reads the ids of the policy's tokenizer, at the same
position as in PPO.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.modeling_outputs import SequenceClassifierOutput
from trl import RewardConfig as TRLRewardConfig
from trl import RewardTrainer as TRLRewardTrainer

from toolkit import models
from toolkit.data import LabelledCollator, values_of
from toolkit.errors import DataError
from toolkit.functional import first_differences, token_level_preference_loss, wilson_interval
from toolkit.reports import ScoredPair
from toolkit.rewards import read_sequences
from toolkit.settings import AT_LEAST_1, check, setting
from toolkit.trainers.common import SupervisedTrainer, in_place_of_progress


@dataclass
class RewardConfig(TRLRewardConfig):
    """TRL's `RewardConfig` and what it lacks."""

    loss: Literal["bradley_terry", "token_level"] = setting(
        "bradley_terry",
        "Of pairs: the difference of the two scores, or that of the two values at every token from the first where "
        "they differ.",
    )
    max_length: int | None = setting(
        None,
        "Tokens of a side: TRL, whose default is 1024, leaves out longer pairs and says nothing. A recipe is refused a "
        "number here: the data section has limits, and reports what they leave out.",
        AT_LEAST_1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self)


class ScorerTrainer(SupervisedTrainer):
    """Trains what gives scores, which `Trainer` sees as a sequence classifier; by itself on classes.

    With `roles` it is the role "reward" and saved as a PEFT folder, else a classifier, or the adapter on it.
    """

    scorer: Any
    """What `read_sequences` reads: `roles` or the classifier."""
    learnt_roles = saved_roles = ("reward",)
    judged: Sequence[ScoredPair] = ()
    """Held-out pairs as they were last scored."""

    def take_over(self) -> None:
        """As of every trainer; and what the role scored before it is trained here says nothing of it then."""
        super().take_over()
        if self.roles is not None:
            head = self.roles.head("reward")
            head.mean_score = head.high_score = None


class RewardTrainer(ScorerTrainer, TRLRewardTrainer):
    """TRL's `RewardTrainer` with a loss at every token, too. Nothing is sent anywhere."""

    def rows_of(self, inputs: dict[str, Any]) -> int:
        return len(inputs["input_ids"]) // 2  # the chosen ones, then the rejected ones

    def some_rows(self, inputs: dict[str, Any], rows: list[int]) -> dict[str, Any]:
        pairs, number = [*rows, *(row + self.rows_of(inputs) for row in rows)], self.rows_of(inputs)
        return {name: value[rows if len(value) == number else pairs] for name, value in inputs.items()}

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's Bradley–Terry loss, or the token-level one with TRL's centring and metrics."""
        if getattr(self.args, "loss", None) != "token_level":  # TRL's own configuration has no such field
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        if self.roles is None:
            values = models.classifier_token_scores(self.scorer, ids, mask)  # (2B, L)
        else:
            values = model(input_ids=ids, attention_mask=mask, every_token=True).logits.squeeze(-1)
        ends = models.score_positions(ids, mask, self.processing_class.pad_token_id)  # (2B,)
        scores = values.gather(1, ends.unsqueeze(1))  # (2B, 1)
        outputs = SequenceClassifierOutput(logits=scores)
        with torch.no_grad():  # for accuracy, margin and the rest of what it logs
            super().compute_loss(lambda **_: outputs, inputs)
        bounds = dict(zip(("chosen_ends", "rejected_ends"), ends.chunk(2), strict=True))
        starts, margin = first_differences(*ids.chunk(2), **bounds), inputs.get("margin", 0.0)
        loss = token_level_preference_loss(*values.chunk(2), starts=starts, margin=margin, **bounds)
        if self.args.center_rewards_coefficient is not None:
            chosen, rejected = scores.squeeze(1).chunk(2)
            loss = loss + self.args.center_rewards_coefficient * (chosen + rejected).square().mean()
        return (loss, outputs) if return_outputs else loss


def reward_trainer(
    args: TRLRewardConfig,
    processing_class: PreTrainedTokenizerBase,
    model: models.SharedBase | PreTrainedModel | PeftModel,
    train_dataset: Dataset,
    eval_dataset: Dataset | None = None,
    *,
    base_name: str = "",
    callbacks: list[TrainerCallback] | None = None,
) -> ScorerTrainer:
    """A trainer for a reward.

    Args:
        args: TRL's or ours, also for classes.
        processing_class: the tokenizer whose ids the data sets hold; with a shared base the policy's.
        model: a shared base, whose role "reward" is made trainable, alone; or a sequence classifier on a base of its
            own, of which all weights are trained, or those of its adapter and head.
        train_dataset: `chosen_ids` and `rejected_ids` for one output, `input_ids` and `labels` for classes.
        base_name: as for `SamplingTrainer`, and so are the callbacks.

    Raises:
        DataError: the columns do not fit the head, or a row has more tokens than the model has positions.
        ModelError: a loss at every token, and the model is no decoder; gradient checkpointing, and it has none; or its
            4-bit weights are in a layout without gradients.
    """
    roles, pad_token_id = model if isinstance(model, models.SharedBase) else None, processing_class.pad_token_id
    if isinstance(model, models.SharedBase):
        outputs = model.head("reward").out_features
        model.train_roles("reward")
    else:
        models.keep_layout(model)
        outputs = int(model.config.num_labels)
        if getattr(args, "loss", None) == "token_level":
            models.check_reads_tokens(model)
    if args.gradient_checkpointing:
        models.check_checkpointing(model if roles is None else roles.causal_lm)
    elif roles is not None:  # an earlier trainer may have switched it on
        roles.gradient_checkpointing_disable()
    needed = ("chosen_ids", "rejected_ids") if outputs == 1 else ("input_ids", "labels")
    present = train_dataset.column_names
    if not set(needed) <= set(present):
        columns = f"{' and '.join(needed)} for a head with {outputs} output(s); present: {', '.join(present)}"
        raise DataError(f"the reward stage needs the columns {columns}.")
    if outputs > 1:
        check_labels(outputs, train_dataset, eval_dataset)
    read = model if roles is None else models.SequenceClassifierView(roles, pad_token_id=pad_token_id)
    kind, collator = (RewardTrainer, None) if outputs == 1 else (ScorerTrainer, LabelledCollator(pad_token_id))
    given: dict[str, Any] = {"processing_class": processing_class, "callbacks": callbacks}
    dropouts = [(one, one.p) for one in models.adapter_dropouts(model.modules())]
    trainer = kind(read, args, collator, train_dataset, eval_dataset, **given)
    for one, rate in dropouts:  # disable_dropout is of the base; TRL sets the adapters' own to 0 with it
        one.p = rate
    # Its loss is a mean over a batch's rows. transformers takes a classifier with **kwargs for one that divides by the
    # rows of all batches of a step, and would sum the means.
    trainer.model_accepts_loss_kwargs = False
    trainer.scorer, trainer.roles, trainer.base_name = model, roles, base_name
    if roles is None:
        models.train_in_float32(model)  # after TRL, which casts what trains on a quantised base to bfloat16
    trainer.check_positions(model, "Shorten the limits of the data section, or leave longer rows out.")
    in_place_of_progress(trainer, callbacks)
    return trainer


def check_labels(outputs: int, *datasets: Dataset | None) -> None:
    """Raises: DataError: a label of rows is none of the head's, of which cross-entropy says nothing that helps."""
    for rows in datasets:
        there = isinstance(rows, Dataset) and "labels" in rows.column_names  # a notebook may give others
        labels = {label for label in values_of(rows, "labels") if isinstance(label, int)} if there else set()
        if wrong := sorted(labels.difference(range(outputs))):
            told = f"a row has the label {wrong[-1]}, and the head has {outputs} outputs, for 0 to {outputs - 1}."
            more = f"Set reward_head.num_labels to {wrong[-1] + 1}, or mend" if wrong[0] >= 0 else "Mend"
            raise DataError(told, remedy=f"{more} the labels.")


def judge_pairs(
    scorer: Any, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *, batch_size: int
) -> list[ScoredPair]:
    """Both scores of each pair, with its texts and the lengths of its responses.

    Args:
        scorer: a base that carries the role "reward", or a classifier, with one output.
        dataset: `chosen_ids` and `rejected_ids`, and `prompt_length`; without that column the prompt is what both
            begin with.
    """
    sides = {side: dataset[f"{side}_ids"][:] for side in ("chosen", "rejected")}
    read = {"pad_token_id": tokenizer.pad_token_id, "batch_size": batch_size}
    scores = {side: read_sequences(scorer, ids, **read).squeeze(1).tolist() for side, ids in sides.items()}
    if "prompt_length" in dataset.column_names:
        prompts = dataset["prompt_length"][:]
    else:
        both = (zip(*pair, strict=False) for pair in zip(*sides.values(), strict=True))
        prompts = [len(list(takewhile(lambda ids: ids[0] == ids[1], pair))) for pair in both]
    judged = []
    for row, length in enumerate(prompts):
        pair: ScoredPair = {"prompt": tokenizer.decode(sides["chosen"][row][:length])}
        for side, ids in sides.items():
            response = ids[row][length:]
            pair[side] = tokenizer.decode(response, skip_special_tokens=True)
            pair[f"{side}_score"], pair[f"{side}_length"] = scores[side][row], len(response)
        judged.append(pair)
    return judged


def pair_figures(judged: Sequence[ScoredPair]) -> dict[str, Any]:
    """Accuracy on pairs, its Wilson interval of 95 %, the loss, and `margin`, the mean of chosen less rejected."""
    margin = torch.tensor([pair["chosen_score"] - pair["rejected_score"] for pair in judged])
    loss = float(-nn.functional.logsigmoid(margin).mean())
    return _with_accuracy(margin > 0, loss=loss, margin=float(margin.mean()))  # a tie counts as wrong


def class_figures(scorer: Any, dataset: Dataset, *, pad_token_id: int, batch_size: int) -> dict[str, Any]:
    """Accuracy on `input_ids` with `labels`, its Wilson interval of 95 %, and the loss."""
    logits = read_sequences(scorer, dataset["input_ids"], pad_token_id=pad_token_id, batch_size=batch_size)
    labels = torch.tensor(dataset["labels"])
    return _with_accuracy(logits.argmax(dim=1) == labels, loss=float(nn.functional.cross_entropy(logits, labels)))


def _with_accuracy(right: Tensor, **figures: float) -> dict[str, Any]:
    number, rows = int(right.sum()), len(right)
    return {"accuracy": number / rows, "accuracy_ci": [*wilson_interval(number, rows)], **figures, "rows": rows}
