"""What a reward callback and a metric are given: prompts, responses, and the columns of the data set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase


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


def rollout_of(
    batch: Mapping[str, Any],
    generated: Sequence[Sequence[int]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    limits: Sequence[int] | None = None,
) -> Rollout:
    """What generation gave for a batch, each response cut after its first stop token.

    Args:
        batch: the prompts, from `PromptCollator`.
        generated: for each prompt the tokens that came after it.
        tokenizer: of the policy.
        stop_token_ids: tokens that end a response.
        limits: tokens that each response may have; None for as many as there are.
    """
    response_ids, ended = [], []
    for row, limit in zip(generated, limits or [len(row) for row in generated], strict=True):
        # All rows go on to the longest limit of a batch: what one says before its own does not depend on what follows.
        own = list(row[:limit])
        stop = next((i + 1 for i, token in enumerate(own) if token in stop_token_ids), 0)
        response_ids.append(own[:stop] if stop else own)
        ended.append(bool(stop))
    return Rollout(
        prompts=tokenizer.batch_decode(batch["prompt_ids"]),
        responses=tokenizer.batch_decode(response_ids, skip_special_tokens=True),
        prompt_ids=batch["prompt_ids"],
        response_ids=response_ids,
        ended=ended,
        columns=batch["columns"],
    )


def concatenate(rollouts: Sequence[Rollout]) -> Rollout:
    """One rollout of all rows, in order."""
    return Rollout(
        prompts=[text for r in rollouts for text in r.prompts],
        responses=[text for r in rollouts for text in r.responses],
        prompt_ids=[ids for r in rollouts for ids in r.prompt_ids],
        response_ids=[ids for r in rollouts for ids in r.response_ids],
        ended=[flag for r in rollouts for flag in r.ended],
        columns={key: [x for r in rollouts for x in r.columns[key]] for key in rollouts[0].columns},
    )


def select(rollout: Rollout, rows: Sequence[int]) -> Rollout:
    """Some rows of a rollout, in the order given."""
    return Rollout(
        prompts=[rollout.prompts[i] for i in rows],
        responses=[rollout.responses[i] for i in rows],
        prompt_ids=[rollout.prompt_ids[i] for i in rows],
        response_ids=[rollout.response_ids[i] for i in rows],
        ended=[rollout.ended[i] for i in rows],
        columns={key: [values[i] for i in rows] for key, values in rollout.columns.items()},
    )
