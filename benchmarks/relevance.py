"""How near a response is to its prompt in meaning, by a sentence encoder: a judge that no pairs have taught.

The encoder is MiniLM (Wang et al. 2020, arXiv 2002.10957) as sentence-transformers trained it to compare texts
(Reimers and Gurevych 2019, arXiv 1908.10084): the mean of its last hidden states, and the cosine of two of them.
"""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

_TURN = re.compile(r"(?s:.*)<\|im_start\|>user\n(.*?)<\|im_end\|>|(?s:.*)\n\nHuman: (.*?)\n\nAssistant:", re.DOTALL)
_FUNCTION = """from benchmarks.relevance import relevance


def relevant(rollout):
    return relevance(rollout.prompts, rollout.responses, {model!r})
"""


def asked(prompt: str) -> str:
    """What a person says last in a prompt by SmolLM2's chat template, or in a dialogue as hh-rlhf has it."""
    found = _TURN.match(prompt)
    return prompt if found is None else found[1] or found[2]


@cache
def _encoder(model: str) -> tuple[Any, Any]:
    return AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()


@torch.no_grad()
def _encoded(texts: Sequence[str], model: str) -> Tensor:
    """Directions, float32 (N, H)."""
    tokenizer, encoder = _encoder(model)
    padding = {"padding": True, "padding_side": "right", "return_tensors": "pt"}  # positions count from the left
    rows = tokenizer(list(texts), truncation=True, max_length=256, **padding)
    states, mask = encoder(**rows).last_hidden_state.float(), rows["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)


def relevance(prompts: Sequence[str], responses: Sequence[str], model: str) -> list[float]:
    """The cosine of each response and what its prompt asks, from -1 to 1, by the encoder in a folder."""
    cosines = _encoded([asked(prompt) for prompt in prompts], model) * _encoded(responses, model)
    found: list[float] = cosines.sum(dim=-1).tolist()
    return found


def as_function(model: str, folder: Path) -> str:
    """What a recipe names it by, in a file that is written into a folder."""
    file = folder / "relevance.py"
    file.write_text(_FUNCTION.format(model=model), encoding="utf-8")
    return f"{file}:relevant"


def share_told(pairs: Sequence[tuple[str, str, str]], model: str) -> float:
    """Of prompts with their own response and another's, how many it tells apart."""
    prompts, own, others = zip(*pairs, strict=True)
    both = zip(relevance(prompts, own, model), relevance(prompts, others, model), strict=True)
    return sum(one > other for one, other in both) / len(pairs)
