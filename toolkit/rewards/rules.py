"""Rules that a program can check as a reward callback, and the functions that shipped recipes name."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, ClassVar

from toolkit.data import Rollout, check_rules, share_kept, with_opening
from toolkit.errors import Problem, RewardError
from toolkit.rewards.dense import DenseScores
from toolkit.rewards.scorer import Prompts, Scorer, ScorerContext, check_column, problems_of
from toolkit.settings import setting

_PRAISE = (
    "amazing beautiful best brilliant charming clean comfortable cosy delicious delight delighted delightful easy "
    "elegant enjoy enjoyable enjoyed excellent exciting fantastic favorite favourite fresh friendly fun funny "
    "generous gorgeous great happy helpful impressed impressive incredible interesting kind love loved lovely "
    "magical memorable nice perfect pleasant pleased recommend smile stunning superb surprised sweet warm "
    "welcoming wonderful"
)
_BLAME = (
    "angry annoying awful bad boring broken cold confusing crowded cruel dirty disappointed disappointing "
    "disappointment disgusting dreadful dull empty expensive fail failed failure hate hated horrible lost mess "
    "never noisy nothing old pain pointless poor rude sad scary shame slow sorry stale stupid terrible tired ugly "
    "uncomfortable unhappy unpleasant upset useless waste weak worse worst wrong"
)
_WORD = re.compile(r"[^\W\d_]+")
_LETTERS = 6


def right_answer(rollout: Rollout) -> list[float]:
    """1 where a response ended and is exactly what the column `answer` says, 0 where it is anything else.

    Raises: RewardError: there is no such column, or an answer is no text.
    """
    check_column("answer", list(rollout.columns), field="function")
    if odd := [wanted for wanted in rollout.columns["answer"] if not isinstance(wanted, str)]:
        wrong = f"the column answer holds {odd[0]!r}, which no response could be: text is needed."
        raise RewardError(wrong, remedy="Put it in quotes in the file of the prompts.")
    rows = zip(rollout.responses, rollout.columns["answer"], rollout.ended, strict=True)
    return [float(ended and text == wanted) for text, wanted, ended in rows]


def sentiment(rollout: Rollout) -> list[float]:
    """Different words of praise less different words of blame, by two short lists; −3 to 3."""
    praise, blame = set(_PRAISE.split()), set(_BLAME.split())
    said = [{word.lower() for word in _WORD.findall(text)} for text in rollout.responses]
    return [float(max(-3, min(3, len(words & praise) - len(words & blame)))) for words in said]


def plain_words(rollout: Rollout) -> DenseScores:
    """−1 for each word of more than six letters, given at the token with which it is complete."""
    return DenseScores(
        spans=[
            [(*word.span(), -1.0) for word in _WORD.finditer(text) if len(word.group()) > _LETTERS]
            for text in rollout.responses
        ]
    )


class KeptRules:
    """Scores with the share of its rules that a response keeps: those for all responses, and those of its row; with 0
    where it does not keep one that is required.

    A row without rules is scored by those for all; one that has none at all is an error, as are rules that
    `toolkit.data.check_rules` refuses.

    Args:
        rules: for every response.
        column: of the prompts, with a list of rules each.

    Example:
        >>> short = KeptRules([{"rule": "at_most_words", "number": 3}, {"rule": "lower_case"}])
        >>> short(Rollout(["a", "b"], ["yes", "No"], [[1], [1]], [[2], [3]], [True, True]))
        [1.0, 0.5]
    """

    def __init__(self, rules: Sequence[Mapping[str, Any]] = (), column: str | None = None):
        if rules:
            check_rules(rules, "rules")
        self.rules, self.column = list(rules), column

    def scoring_digests(self) -> dict[str, str]:
        """Of its own rules: with others the scores of a run that goes on would be another reward's."""
        return {"the rules": sha256(json.dumps([self.rules, self.column], sort_keys=True).encode()).hexdigest()}

    def __call__(self, rollout: Rollout) -> list[float]:
        of_rows: Sequence[Any] = [()] * len(rollout)
        if self.column is not None:
            check_column(self.column, list(rollout.columns), field="column")
            of_rows = rollout.columns[self.column]
        asked = (self._of_row(f"row {row} of the batch", of_row) for row, of_row in enumerate(of_rows, 1))
        said = map(with_opening, rollout.responses, rollout.prompts)
        return [share_kept(rules, text) for rules, text in zip(asked, said, strict=True)]

    def check_rows(self, prompts: Prompts) -> None:
        """Raises: RewardError: prompts lack the column, or one has no rule. DataError: one has none that can be
        used."""
        assert self.column is not None
        check_column(self.column, prompts.rows.column_names, field="column")
        for place, of_row in zip(prompts.places, prompts.rows[self.column][:], strict=True):
            self._of_row(place, of_row)

    def _of_row(self, place: str, of_row: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
        """The rules of a row, those for all among them."""
        if of_row:
            check_rules(of_row, f'{place}, column "{self.column}"')
        elif not self.rules:
            raise RewardError(f'{place} has no rule in "{self.column}".', field="column")
        return [*self.rules, *(of_row or ())]


@dataclass(kw_only=True)
class RulesScorer(Scorer):
    """Rules that a program can check: the score is the share of them that a response keeps."""

    kind: ClassVar[str] = "rules"
    rules: list[dict[str, Any]] | None = setting(None, "for every prompt; each has a name, and number or words.")
    column: str | None = setting(None, "the column with the rules of each prompt.")

    def conflicts(self) -> Iterator[Problem]:
        if not self.rules and self.column is None:
            yield Problem(
                "rules or column is needed.", "rules", "Give the rules here, or name the column that has them."
            )
        if self.rules:
            yield from problems_of(check_rules, self.rules, "rules")

    def check(self, context: ScorerContext) -> list[Problem]:
        return [] if self.column is None else context.problems_of_prompts(self.build(context).check_rows)

    def build(self, context: ScorerContext) -> "KeptRules":
        return KeptRules(self.rules or (), self.column)
