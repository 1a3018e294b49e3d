"""What a recipe says of its reward: the settings of one kind, which check themselves and build the reward callback."""

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from toolkit.data import Rollout
from toolkit.errors import ColumnError, DataError, Problem, RewardError, ToolkitError
from toolkit.models import SharedBase
from toolkit.rewards.base import Reward
from toolkit.settings import Range, check, setting

Classes: TypeAlias = Mapping[Hashable, int]
"""Numbers of a head's outputs by what rows call them."""


class Prompts(NamedTuple):
    """Prompts whose responses are scored, and of each the place where a person finds it."""

    rows: Dataset
    places: Sequence[str]

    def check_each(self, column: str, check: Callable[[Any], object]) -> None:
        """Call a check that raises with each row's value of a column. Raises: RewardError: what it says, and where."""
        for place, value in zip(self.places, self.rows[column][:], strict=True):
            with at_row(place):
                check(value)


@dataclass(frozen=True, kw_only=True)
class ScorerContext:
    """What a scorer is checked against and built from.

    Args:
        roles: the shared base, with the role where a scorer reads it; on the meta device for a check, and None
            where its base cannot be had.
        tokenizer: the policy's; None in a check that has none.
        prompts: gives those that it scores and that are known: to train on and held out, or the latter alone.
        reads_rows: whether each row is held against the scorer, and not the names of the columns alone.
        chats: whether the text of the prompts has the chat template of the base around it.
        pad_tokens: by role the one that its head was trained with; nothing in a check.
        batch_size: responses a forward pass of an adapter.
        role: the one on the shared base that an adapter is read in: "reward", or "judge" for a judge.
        adapters: by the folders that parts name, the roles in which these are read.
        untrained: roles that a stage has still to train, for a check.
        reward_outputs: of the model that the reward stage trains on a base of its own, for a check; None without one.
        reward_model: that model, trained, to build a scorer that reads it.
        level: of that model's scores of held-out responses, as far as it is known: see `toolkit.models.level_of`.
    """

    roles: SharedBase | None
    tokenizer: PreTrainedTokenizerBase | None
    prompts: Callable[[], Sequence[Prompts]]
    reads_rows: bool = False
    chats: bool = False
    pad_tokens: Mapping[str, int] = field(default_factory=dict)
    batch_size: int = 64
    role: str = "reward"
    adapters: Mapping[str, str] = field(default_factory=dict)
    untrained: Collection[str] = ()
    reward_outputs: int | None = None
    reward_model: PreTrainedModel | PeftModel | None = None
    level: Mapping[str, float] = field(default_factory=dict)

    def problems_of_prompts(self, check: Callable[[Prompts], object]) -> list[Problem]:
        """What a check that raises says of the first prompts that have something wrong."""
        return next((found for prompts in self.prompts() if (found := problems_of(check, prompts))), [])


@dataclass(kw_only=True)
class Scorer:
    """The settings of one kind of reward. Its callback has them too, beside what they name.

    Raises:
        ConfigError: settings that are out of range, or that have no effect.
    """

    kind: ClassVar[str]
    weight: float = setting(
        1.0, "as a part of a sum its share there; 0 logs it alone.", Range("a finite number", math.isfinite)
    )

    def __post_init__(self) -> None:
        check(self, self.conflicts)

    def conflicts(self) -> Iterator[Problem]:
        """What is wrong with its settings beyond their ranges."""
        yield from ()

    def check(self, context: ScorerContext) -> list[Problem]:
        """What is wrong with what it names. No weights are loaded, no file is run and no server asked."""
        return []

    def outlines(self) -> Iterator[PreTrainedModel]:
        """The models that it loads beside the base, on the meta device. Raises: ModelError: one cannot be had."""
        yield from ()

    def build(self, context: ScorerContext) -> Reward:
        """The reward callback. Raises: RewardError or ModelError: what it names cannot be used."""
        raise NotImplementedError


@dataclass(kw_only=True)
class ClassScorer(Scorer):
    """The settings of a model whose head may have several outputs."""

    class_column: str | None = setting(None, "for several outputs, the column that names the wanted class.")
    wanted_class: str | int | None = setting(
        None, "for several outputs, the class that every row wants, by its name or number, in place of a column."
    )
    class_score: Literal["logprob", "logit"] = setting(
        "logprob", "log p(class), which saturates, or its logit, which does not."
    )

    @property
    def scores_class(self) -> bool:
        """Whether a score is that of one of several classes."""
        return self.class_column is not None or self.wanted_class is not None

    def conflicts(self) -> Iterator[Problem]:
        if self.class_score != "logprob" and not self.scores_class:
            wrong = "would have no effect: class_column or wanted_class, which name the wanted class, is missing."
            yield Problem(wrong, "class_score")
        if self.class_column is not None and self.wanted_class is not None:
            wrong = "would have no effect: class_column names the wanted class of each row."
            yield Problem(wrong, "wanted_class", "Remove one of the two.")

    def check_head(
        self, context: ScorerContext, outputs: int | None, classes: Classes | None, *, whose: str
    ) -> list[Problem]:
        """What is wrong with a head of so many outputs, and with the classes that prompts name; None is not known."""
        column, problems = self.class_column, []
        if outputs is not None:
            problems = problems_of(self.check_outputs, outputs, classes, whose=whose)
        if column is None:
            return problems

        def check_rows(prompts: Prompts) -> None:
            check_column(column, prompts.rows.column_names, field="class_column")
            if context.reads_rows and classes is not None and not problems:
                prompts.check_each(column, lambda value: self._number(value, classes))

        return problems + context.problems_of_prompts(check_rows)

    def check_outputs(self, outputs: int, classes: Classes | None, *, whose: str) -> None:
        """Raises: RewardError: a head of one output and a class to choose, of several and none, or one without the
        class that is always wanted, as far as its classes are known."""
        field = "class_column" if self.wanted_class is None else "wanted_class"
        if (outputs == 1) == self.scores_class:
            raise RewardError(
                f"{whose} has {outputs} output(s) and {field} is {getattr(self, field)!r}: a score needs one output "
                "and no class, classes need the column that names the wanted one, or wanted_class for all rows.",
                field=field,
            )
        known = classes_of(outputs) if classes is None and isinstance(self.wanted_class, int) else classes
        if self.wanted_class is not None and known is not None:
            self._number(self.wanted_class, known)

    def scores_of(self, logits: Tensor, rollout: Rollout, classes: Classes) -> Tensor:
        """One score a response, float (B,), of logits (B, C): the only output, or that of the wanted class.

        Raises: RewardError: a row names no class of the head.
        """
        if not self.scores_class:
            return logits.squeeze(-1)
        if self.class_column is None:
            wanted = [self._number(self.wanted_class, classes)] * len(logits)
        else:
            check_column(self.class_column, list(rollout.columns), field="class_column")
            wanted = [self._number(value, classes) for value in rollout.columns[self.class_column]]
        outputs = logits.log_softmax(dim=-1) if self.class_score == "logprob" else logits
        return outputs.gather(1, torch.tensor(wanted).unsqueeze(1)).squeeze(1)

    def _number(self, value: Any, classes: Classes) -> int:
        if isinstance(value, Hashable) and value in classes:
            return classes[value]
        names = [name for name, number in classes.items() if isinstance(name, str) and name != str(number)]
        known = f"0 to {max(classes.values())}{' or ' if names else ''}{', '.join(names)}"
        if self.class_column is None:
            raise RewardError(f"the class {value!r} is wanted, and the head has {known}.", field="wanted_class")
        wrong = f'column "{self.class_column}" names the class {value!r}, and the head has {known}.'
        raise RewardError(wrong, field="class_column", remedy="Mend that row.")


def classes_of(outputs: int, label_ids: Mapping[str, int] = MappingProxyType({})) -> Classes:
    """The outputs of a head by what a row may call them: by number, as text or not, or by a name that it has."""
    classes: dict[Hashable, int] = {name: number for number in range(outputs) for name in (number, str(number))}
    classes.update(label_ids.items())
    return classes


def named_classes(config: PreTrainedConfig) -> Classes:
    """The outputs of a classifier, also by the names in its configuration."""
    return classes_of(config.num_labels, {str(name): int(number) for number, name in config.id2label.items()})


@contextmanager
def at_row(place: str) -> Iterator[None]:
    """An error of a reward, or of data, inside says in which row it is."""
    try:
        yield
    except (RewardError, DataError) as error:
        (one,) = error.problems
        raise type(error)(f"{place}: {one.wrong}", field=one.field, remedy=one.remedy) from error


def check_column(column: str, columns: Sequence[str], *, field: str) -> None:
    """Raises: RewardError: the prompts lack a column that a field names."""
    if column not in columns:
        wrong = f'the prompts have no column "{column}"; present: {", ".join(columns) or "none"}.'
        raise ColumnError(wrong, field=field)


def problems_of(check: Callable[..., object], *arguments: object, **named: object) -> list[Problem]:
    """What a check that raises says."""
    try:
        check(*arguments, **named)
    except ToolkitError as error:
        return list(error.problems)
    return []
