"""What a reward callback and a metric are given: prompts, responses, and the columns of the data set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rollout:
    """A batch of B prompts with one sampled response each. Nothing in it is padded.

    Args:
        prompts: the prompts as text, special tokens included.
        responses: the responses as text, without special tokens.
        prompt_ids: token ids of each prompt.
        response_ids: token ids of each response, up to and including the stop token if there is one.
        ended: True where the response ended by a stop token, False where the length limit cut it.
        columns: the data set's other columns, one entry a prompt.
    """

    prompts: Sequence[str]
    responses: Sequence[str]
    prompt_ids: Sequence[Sequence[int]]
    response_ids: Sequence[Sequence[int]]
    ended: Sequence[bool]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.response_ids)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each response, its stop token included."""
        return [len(ids) for ids in self.response_ids]


_ROWS = ("prompts", "responses", "prompt_ids", "response_ids", "ended")


def concatenate(rollouts: Sequence[Rollout]) -> Rollout:
    """One rollout of all rows, in order."""
    columns = {key: [x for r in rollouts for x in r.columns[key]] for key in rollouts[0].columns}
    return Rollout(**{name: [x for r in rollouts for x in getattr(r, name)] for name in _ROWS}, columns=columns)


def select(rollout: Rollout, rows: Sequence[int]) -> Rollout:
    """Some rows of a rollout, in the order given."""
    columns = {key: [values[i] for i in rows] for key, values in rollout.columns.items()}
    return Rollout(**{name: [getattr(rollout, name)[i] for i in rows] for name in _ROWS}, columns=columns)
