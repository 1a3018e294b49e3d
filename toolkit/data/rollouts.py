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
        gaps: what stands between the texts of prompt and response where both are read as one: the space with which
            Llama 2's tokenizer begins a word, and which it leaves out of a response that is decoded alone.
        sampler_logprobs: the log-probability with which each token was drawn; empty where that is not known. Who puts
            others in place of `response_ids` leaves it out.
    """

    prompts: Sequence[str]
    responses: Sequence[str]
    prompt_ids: Sequence[Sequence[int]]
    response_ids: Sequence[Sequence[int]]
    ended: Sequence[bool]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    gaps: Sequence[str] = ()
    sampler_logprobs: Sequence[Sequence[float]] = ()

    def __len__(self) -> int:
        return len(self.response_ids)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each response, its stop token included."""
        return [len(ids) for ids in self.response_ids]

    @property
    def continuations(self) -> list[str]:
        """The responses as they stand after the text of their prompts."""
        gaps = self.gaps or [""] * len(self)
        return [gap + response for gap, response in zip(gaps, self.responses, strict=True)]

    def sequences(self, *, eos_token_id: int) -> list[list[int]]:
        """Ids of prompt and response, as a reward is trained on them: whichever stop token ended a response, it is
        `eos_token_id` here."""
        rows = zip(self.prompt_ids, self.response_ids, self.ended, strict=True)
        return [
            [*prompt, *response[:-1], eos_token_id] if ended else [*prompt, *response]
            for prompt, response, ended in rows
        ]


_ROWS = ("prompts", "responses", "prompt_ids", "response_ids", "ended", "gaps", "sampler_logprobs")
_MAY_BE_EMPTY = ("gaps", "sampler_logprobs")


def concatenate(rollouts: Sequence[Rollout]) -> Rollout:
    """One rollout of all rows, in order."""
    columns = {key: [x for r in rollouts for x in r.columns[key]] for key in rollouts[0].columns}
    known = [name for name in _ROWS if name not in _MAY_BE_EMPTY or all(getattr(r, name) for r in rollouts)]
    return Rollout(**{name: [x for r in rollouts for x in getattr(r, name)] for name in known}, columns=columns)


def select(rollout: Rollout, rows: Sequence[int]) -> Rollout:
    """Some rows of a rollout, in the order given."""
    columns = {key: [values[i] for i in rows] for key, values in rollout.columns.items()}
    given = {name: values for name in _ROWS if (values := getattr(rollout, name))}
    return Rollout(**{name: [values[i] for i in rows] for name, values in given.items()}, columns=columns)
