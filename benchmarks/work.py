"""What every contender has to do: the same prompts, answered with the same tokens.

Free sampling would give each contender other responses, of other lengths. So the responses are sampled once beforehand,
cut at uneven lengths and ended by end-of-sequence; while a contender generates, each token it draws is replaced by the
one that stands there. It pays for its own generation, and what it generates is known.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from benchmarks.errors import BenchmarkError
from toolkit.data import pad_rows
from toolkit.models import RowProcessor, load_tokenizer

PHASES = ("rollout", "score", "update")
PROMPTS = Path(__file__).with_name("prompts.txt")


@dataclass(frozen=True)
class Size:
    """How much one update is.

    Args:
        rollouts: prompts of an update, one response each.
        response_length: longest response, in tokens.
        micro_batch: rows of a forward and backward pass of the update; ours takes more of short ones.
        epochs: passes over the rollouts.
        apart: whether prompts begin with nothing in common: two questions each, without the chat template.
    """

    rollouts: int
    response_length: int
    micro_batch: int = 4
    epochs: int = 2
    apart: bool = False


SIZES = {
    "base": Size(rollouts=16, response_length=48, micro_batch=8),
    "apart": Size(rollouts=16, response_length=48, micro_batch=8, apart=True),
    "few": Size(rollouts=8, response_length=48),
    "many": Size(rollouts=64, response_length=48),
    "longer": Size(rollouts=8, response_length=256),
    "longest": Size(rollouts=8, response_length=1024),
}


@dataclass(frozen=True)
class Work:
    """The prompts of one update and the responses that every contender gives.

    Args:
        size: how much it is.
        prompt_ids: ids of each prompt, without padding.
        sampled: `size.response_length` ids for each prompt; none is end-of-sequence or padding.
        lengths: tokens of each response, end-of-sequence included.
        eos_token_id: ends every response that is shorter than `size.response_length`.
    """

    size: Size
    prompt_ids: list[list[int]]
    sampled: list[list[int]]
    lengths: list[int]
    eos_token_id: int

    @property
    def responses(self) -> list[list[int]]:
        """Ids of each response. One of full length has no end-of-sequence: the limit cuts it."""
        return [
            ids if length == self.size.response_length else [*ids[: length - 1], self.eos_token_id]
            for ids, length in zip(self.sampled, self.lengths, strict=True)
        ]

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens of one update by phase: new ones in the rollout, prompt and response in the passes over them."""
        whole = sum(map(len, self.prompt_ids)) + sum(self.lengths)
        return {"rollout": sum(self.lengths), "score": whole, "update": self.size.epochs * whole}

    def one_micro_batch(self) -> "Work":
        """The first rows alone, all of full length, one epoch: what the contenders' losses are compared on.

        With one micro-batch and full lengths no mean and no position depends on how a trainer treats padding.
        """
        rows = self.size.micro_batch
        return replace(
            self,
            size=replace(self.size, rollouts=rows, epochs=1),
            prompt_ids=self.prompt_ids[:rows],
            sampled=self.sampled[:rows],
            lengths=[self.size.response_length] * rows,
        )

    def row_of(self, ids: Sequence[int]) -> int:
        """Which prompt a left-padded row of ids is, whatever it is padded with."""
        found = [i for i, prompt in enumerate(self.prompt_ids) if list(ids[-len(prompt) :]) == prompt]
        if len(found) != 1:
            raise BenchmarkError(f"a contender generates from a row that is {len(found)} of the prompts, not one.")
        return found[0]

    def check(self, response_ids: Sequence[Sequence[int]]) -> None:
        """The responses that a contender saw are the given ones; what follows the end of one does not count.

        Raises:
            BenchmarkError: it is not.
        """
        for row, (seen, given) in enumerate(zip(response_ids, self.responses, strict=True)):
            if list(seen[: len(given)]) != given:
                raise BenchmarkError(f"the response to prompt {row} is not the given one; nothing was measured.")

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Work":
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**values, "size": Size(**values["size"])})


def padding_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, padding with a token that is not end-of-sequence.

    TRL makes its masks from pad ids: with pad == eos its contenders would train one token a response less.

    Raises:
        BenchmarkError: it has no such token.
    """
    tokenizer = load_tokenizer(model)
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        if tokenizer.unk_token_id in (None, tokenizer.eos_token_id):
            raise BenchmarkError("the tokenizer has neither a pad token nor an unk token beside its eos token.")
        tokenizer.pad_token = tokenizer.unk_token
    return tokenizer


def uneven_lengths(rollouts: int, longest: int) -> list[int]:
    """Lengths in even steps from a sixth of the longest to all of it, in an order that keeps no two steps together."""
    first = max(2, longest // 6)
    steps = [round(first + (longest - first) * i / max(1, rollouts - 1)) for i in range(rollouts)]
    stride = next(n for n in range(max(1, rollouts * 3 // 8), 0, -1) if math.gcd(n, rollouts) == 1)
    return [steps[(i * stride + rollouts - 1) % rollouts] for i in range(rollouts)]


@torch.no_grad()
def sample_work(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, size: Size, *, prompts: Sequence[str]
) -> Work:
    """The first prompts, where they are apart each with one of the last, and responses to them that the checkpoint
    samples at temperature 1, as it is. The tokenizer is from `padding_tokenizer`, with a chat template."""
    if size.apart:
        texts = [
            f"{first} {second}" for first, second in zip(prompts[: size.rollouts], reversed(prompts), strict=False)
        ]
    else:
        turns = ([{"role": "user", "content": text}] for text in prompts[: size.rollouts])
        texts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    prompt_ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    ids, mask = pad_rows(prompt_ids, pad_token_id=tokenizer.pad_token_id, side="left")
    torch.manual_seed(0)
    config = GenerationConfig(
        max_new_tokens=size.response_length,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        suppress_tokens=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    return Work(
        size=size,
        prompt_ids=prompt_ids,
        sampled=output[:, ids.shape[1] :].tolist(),
        lengths=uneven_lengths(len(prompt_ids), size.response_length),
        eos_token_id=tokenizer.eos_token_id,
    )


class _Given(RowProcessor):
    """Follows one generation and gives out its tokens.

    Where transformers samples, the logits stay, since TRL takes its log-probabilities from them; ours decodes greedily
    from what its own processor has drawn, and is left the given token in its place.
    """

    def __init__(self, work: Work, *, samples: bool):
        self.work, self.samples = work, samples
        self.table: Tensor | None = None  # int64 (B, T), -1 after a response's end
        self.step = -1
        self.multinomial = torch.multinomial

    def keep(self, rows: Tensor) -> None:
        if self.table is not None:
            self.table = self.table[rows]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.table is None:
            responses = self.work.responses
            given = [responses[self.work.row_of(ids)] for ids in input_ids.tolist()]
            longest = self.work.size.response_length
            self.table = torch.tensor([ids + [-1] * (longest - len(ids)) for ids in given], device=input_ids.device)
        self.step += 1
        return scores if self.samples else torch.zeros_like(scores).scatter(1, self._next(scores.argmax(-1, True)), 1.0)

    def draw(self, probabilities: Tensor, num_samples: int, **options: Any) -> Tensor:
        """Draws as ever, and returns the given token wherever the response goes on: int64 (B, 1)."""
        return self._next(self.multinomial(probabilities, num_samples, **options))

    def _next(self, drawn: Tensor) -> Tensor:
        assert self.table is not None
        given = self.table[:, self.step : self.step + 1]
        return torch.where(given >= 0, given, drawn)


@contextmanager
def given_responses(model: PreTrainedModel, work: Work) -> Iterator[None]:
    """While it lasts, the model answers the prompts of `work` with its responses. It is the one whose `generate` is
    called in the end, below PEFT and below any view."""
    generate = model.generate

    def follow(*args: Any, **kwargs: Any) -> Any:
        given = _Given(work, samples=kwargs["generation_config"].do_sample)
        processors = LogitsProcessorList([*(kwargs.get("logits_processor") or ()), given])
        # transformers samples with torch.multinomial and with nothing else.
        with mock.patch.object(torch, "multinomial", given.draw):
            return generate(*args, **{**kwargs, "logits_processor": processors})

    with mock.patch.object(model, "generate", follow):
        yield
