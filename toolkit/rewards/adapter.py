"""The reward adapter on the shared base as a reward callback, and how whole sequences are read."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from toolkit import processes
from toolkit.data import PromptEncoder, Rollout, pad_rows
from toolkit.errors import Problem
from toolkit.models import LENGTH_MULTIPLE, SharedBase, sequence_logits
from toolkit.portion import Portion, by_tokens
from toolkit.rewards.base import Reward
from toolkit.rewards.scorer import ClassScorer, ScorerContext, classes_of
from toolkit.settings import setting


def logits_of(
    rows: Sequence[Sequence[int]], outputs: int, portion: Portion, forward: Callable[[list[int]], Tensor]
) -> Tensor:
    """Logits of N rows of token ids, float32 (N, outputs) on the CPU: those of similar length in one pass.

    `forward` gives the logits (n, outputs) of n rows by their indices. Each process reads a share of them.
    """

    def attempt(size: int) -> Tensor:
        logits, lengths = torch.zeros(len(rows), outputs), [len(row) for row in rows]
        with processes.agreed():
            for part in by_tokens(lengths, processes.own(lengths), size):
                logits[part] = forward(part).float().cpu()
        return logits

    logits = portion(attempt, most=len(rows))
    processes.sum_([logits])
    return logits


@torch.no_grad()
def read_sequences(
    base: SharedBase | PreTrainedModel | PeftModel,
    rows: Sequence[Sequence[int]],
    *,
    pad_token_id: int,
    batch_size: int | Portion,
    role: str = "reward",
) -> Tensor:
    """The scores or classes of whole sequences: float32 (N, num_labels), on the CPU.

    Args:
        base: carries the role, whose head is read; or a sequence classifier, read as its own class reads.
        rows: N sequences of token ids, prompt and response.
        pad_token_id: the one that the head was trained with.
        batch_size: sequences a forward pass.
    """
    if isinstance(base, SharedBase):
        outputs, multiple = base.head(role).out_features, LENGTH_MULTIPLE
    else:
        outputs, multiple = base.config.num_labels, 1  # rounded up, a length could pass the last position

    def forward(part: list[int]) -> Tensor:
        padded = pad_rows([rows[i] for i in part], pad_token_id=pad_token_id, side="right", multiple=multiple)
        ids, mask = (tensor.to(base.device) for tensor in padded)
        if isinstance(base, SharedBase):
            return sequence_logits(base, ids, mask, pad_token_id=pad_token_id, role=role)
        return base(input_ids=ids, attention_mask=mask).logits

    was_training = base.training
    base.eval()
    try:
        portion = batch_size if isinstance(batch_size, Portion) else Portion("the reward's batch size", batch_size)
        with base.weights_kept() if isinstance(base, SharedBase) else nullcontext():
            return logits_of(rows, outputs, portion, forward)
    finally:
        base.train(was_training)


@dataclass(kw_only=True)
class AdapterScorer(ClassScorer):
    """The reward adapter on the shared base, which the reward stage trains; for a judge that of `start.judge`."""

    kind: ClassVar[str] = "adapter"
    adapter: str | None = setting(None, "in a part of a sum: PEFT folder of another adapter, used in its place.")

    def role_in(self, context: ScorerContext) -> str:
        """The role that it reads."""
        return context.adapters[self.adapter] if self.adapter else context.role

    def check(self, context: ScorerContext) -> list[Problem]:
        outputs, role = None, self.role_in(context)
        if context.roles is not None and role in context.roles.roles:
            outputs = context.roles.head(role).out_features
        classes = None if outputs is None else classes_of(outputs)
        return self.check_head(context, outputs, classes, whose=f"the {role} head")

    def build(self, context: ScorerContext) -> Reward:
        assert context.roles is not None
        assert context.tokenizer is not None
        role = self.role_in(context)
        reading: dict[str, Any] = {"pad_token_id": context.pad_tokens[role], "batch_size": context.batch_size}
        reading["eos_token_id"] = int(context.tokenizer.eos_token_id)
        if context.chats and context.roles.head(role).elsewhere:
            reading["closing"] = PromptEncoder(context.tokenizer).closing()
        own = {name: value for name, value in vars(self).items() if name != "adapter"}
        return RewardAdapter(context.roles, role=role, **reading | own)


@dataclass(eq=False, repr=False)
class RewardAdapter(ClassScorer):
    """Scores responses with a role of a shared base that has a head: "reward", "judge", or a further one, "reward_1".

    `pad_token_id` and `eos_token_id` are those that the head was trained with, `batch_size` responses go through a
    forward pass. With `closing` responses that ended have these tokens in place of their end: `trl.RewardTrainer` reads
    a conversation to the end of its template, which in ChatML is a line break behind the end. Raises: RewardError: a
    head with several outputs and no class to choose, or the reverse.
    """

    on_every_process: ClassVar[bool] = True
    base: SharedBase
    pad_token_id: int = field(kw_only=True)
    eos_token_id: int = field(kw_only=True)
    closing: Sequence[int] = field(default=(), kw_only=True)
    batch_size: int = field(default=64, kw_only=True)
    role: str = field(default="reward", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        outputs = self.base.head(self.role).out_features
        self.check_outputs(outputs, classes_of(outputs), whose=f"the {self.role} head")

    @cached_property
    def portion(self) -> Portion:
        return Portion("the reward's batch size", self.batch_size)

    @property
    def mean_score(self) -> float | None:
        """What it gives held-out responses on average."""
        return self.base.head(self.role).mean_score

    @property
    def high_score(self) -> float | None:
        """That of its head: beyond it the reward judges what it has hardly met."""
        return self.base.head(self.role).high_score

    def __call__(self, rollout: Rollout) -> Tensor:
        rows = rollout.sequences(eos_token_id=self.eos_token_id)
        if self.closing:
            closed = zip(rows, rollout.ended, strict=True)
            rows = [[*row[:-1], *self.closing] if ended else row for row, ended in closed]
        with self.base.autocast():
            logits = read_sequences(
                self.base, rows, pad_token_id=self.pad_token_id, batch_size=self.portion, role=self.role
            )
        return self.scores_of(logits, rollout, classes_of(logits.shape[1]))
