"""The reward adapter on the shared base as a reward callback, and how whole sequences are read."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from toolkit.data import Rollout, pad_rows
from toolkit.models import LENGTH_MULTIPLE, SharedBase, release_memory, sequence_logits
from toolkit.rewards.classes import ClassScore, check_outputs, scores_of

Judge: TypeAlias = SharedBase | PreTrainedModel | PeftModel
"""What scores: a shared base that carries the role "reward", or a sequence classifier on a base of its own."""


@torch.no_grad()
def read_sequences(base: Judge, rows: Sequence[Sequence[int]], *, pad_token_id: int, batch_size: int) -> Tensor:
    """The scores or classes of whole sequences: float32 (N, num_labels), on the CPU.

    Args:
        base: carries the role "reward", whose head is read; or a sequence classifier, read as its own class reads.
        rows: N sequences of token ids, prompt and response.
        pad_token_id: the one that the head was trained with.
        batch_size: sequences a forward pass.
    """
    if isinstance(base, SharedBase):
        outputs, multiple = base.head("reward").out_features, LENGTH_MULTIPLE
    else:
        outputs, multiple = base.config.num_labels, 1  # rounded up, a length could pass the last position
    logits = torch.zeros(len(rows), outputs)
    # Rows of similar length together: less padding is computed.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    was_training = base.training
    base.eval()
    try:
        for start in range(0, len(rows), batch_size):
            part = order[start : start + batch_size]
            ids, mask = pad_rows([rows[i] for i in part], pad_token_id=pad_token_id, side="right", multiple=multiple)
            logits[part] = _logits(base, ids.to(base.device), mask.to(base.device), pad_token_id).float().cpu()
            release_memory()
    finally:
        base.train(was_training)
    return logits


def _logits(base: Judge, input_ids: Tensor, attention_mask: Tensor, pad_token_id: int) -> Tensor:
    if isinstance(base, SharedBase):
        return sequence_logits(base, input_ids, attention_mask, pad_token_id=pad_token_id)
    return base(input_ids=input_ids, attention_mask=attention_mask).logits


class RewardAdapter:
    """Scores responses with the role "reward" of a shared base.

    Args:
        base: carries the role.
        pad_token_id: the one that the head was trained with.
        class_column: for a head with several outputs, the data set's column with the index of the wanted
            class.
        class_score: what a class's score is: "logprob", which saturates at 0 once the class is certain, or "logit",
            which goes on paying for more of the same.
        batch_size: responses a forward pass.

    Raises:
        RewardError: a head with several outputs and no column to choose by, or the reverse.
    """

    def __init__(
        self,
        base: SharedBase,
        *,
        pad_token_id: int,
        class_column: str | None = None,
        class_score: ClassScore = "logprob",
        batch_size: int = 64,
    ):
        check_outputs(base.head("reward").out_features, class_column, whose="the reward head")
        self.base, self.pad_token_id = base, pad_token_id
        self.class_column, self.class_score = class_column, class_score
        self.batch_size = batch_size

    def __call__(self, rollout: Rollout) -> Tensor:
        rows = [[*p, *r] for p, r in zip(rollout.prompt_ids, rollout.response_ids, strict=True)]
        with self.base.autocast():
            logits = read_sequences(self.base, rows, pad_token_id=self.pad_token_id, batch_size=self.batch_size)
        return scores_of(logits, rollout, class_column=self.class_column, class_score=self.class_score)
