"""What a recipe says about its reward, and what of it cannot be."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit


@dataclass(frozen=True)
class ScorerSection:
    """Section `scorer`: where a response's score comes from. `docs/rewards.md` shows each kind.

    Args:
        kind: the reward adapter on the shared base, a Python function, another model, a server, or a weighted sum.
        function: kind function: "module:function" or "file.py:function", sync or async.
        model: kind model: hub id or local folder of a sequence classifier, with its own tokenizer; null is the model
            that the reward stage trains (section `reward_model`).
        revision: kind model: of a hub id.
        trust_remote_code: kind model: run code that comes with the checkpoint.
        quantization: kind model: arguments of transformers' `BitsAndBytesConfig`.
        dtype: kind model: of the weights that are not quantised.
        reads: kind model: prompt and response in its chat template, one after the other, as a pair of texts, the
            response alone, or the policy's own tokens; null is its chat template if it has one, else text, and tokens
            for the model that the reward stage trains.
        prompt_column: kind model: the column with the prompt as text or messages; null is `messages`, else `prompt`.
        max_length: kind model: tokens; a longer text loses its beginning. null is what the model takes.
        class_column: kinds adapter and model: for several outputs, the column that names the wanted class.
        class_score: kinds adapter and model: log p(class), which saturates, or its logit, which does not.
        url: kind remote: where batches are sent by POST.
        batch_size: kinds model and remote: responses a forward pass or a request.
        timeout: kind remote: seconds in which the server may be silent.
        retries: kind remote: tries of a request after the first, each after a wait twice as long.
        token_variable: kind remote: name of the environment variable that holds a bearer token.
        parts: kind sum: by a name of yours, each a scorer with a `weight`, 1 by default.
    """

    kind: Literal["adapter", "function", "model", "remote", "sum"] = "adapter"
    function: str | None = None
    model: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    quantization: dict[str, Any] | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    reads: Literal["conversation", "text", "pair", "response", "tokens"] | None = None
    prompt_column: str | None = None
    max_length: int | None = None
    class_column: str | None = None
    class_score: Literal["logprob", "logit"] = "logprob"
    url: str | None = None
    batch_size: int = 16
    timeout: float = 30.0
    retries: int = 5
    token_variable: str | None = None
    parts: dict[str, Any] = field(default_factory=dict)

    @property
    def needs_reward_role(self) -> bool:
        """Whether it reads the reward adapter on the shared base, alone or as a part of a sum."""
        return self.kind == "adapter" or any(part.kind == "adapter" for part in self.part_sections.values())

    @property
    def needs_reward_model(self) -> bool:
        """Whether it reads the model that the reward stage trains on a base of its own, alone or as a part of a sum."""
        every = self.part_sections.values() if self.kind == "sum" else [self]
        return any(part.kind == "model" and part.model is None for part in every)

    @property
    def part_sections(self) -> dict[str, "PartSection"]:
        """The parts of a sum."""
        return {name: PartSection(**values) for name, values in self.parts.items()}


@dataclass(frozen=True)
class PartSection(ScorerSection):
    """A part of a sum.

    Args:
        weight: its share in the sum; 0 logs it alone.
    """

    weight: float = 1.0


_KINDS_OF = {
    "function": ("function",),
    **dict.fromkeys(("class_column", "class_score"), ("adapter", "model")),
    **dict.fromkeys(
        ("model", "revision", "trust_remote_code", "quantization", "dtype", "reads", "prompt_column", "max_length"),
        ("model",),
    ),
    "batch_size": ("model", "remote"),
    **dict.fromkeys(("url", "timeout", "retries", "token_variable"), ("remote",)),
    "parts": ("sum",),
}
_OF_A_CHECKPOINT = {"revision", "trust_remote_code", "quantization", "dtype", "reads", "prompt_column"}
_NEEDED = {
    "function": ("function", "module:function or file.py:function"),
    "remote": ("url", "http:// or https://"),
    "sum": ("parts", "one or more"),
}
_PART_NAME = re.compile(r"[\w.-]+")
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def section_problems(place: str, values: dict[str, Any]) -> list[str]:
    """What is wrong with a scorer or a part whose keys and types are right."""
    given = {key: value for key, value in values.items() if value is not None}
    return [f"{place}.{problem}" for problem in (*_misplaced(place, given), *_out_of_range(given))]


def _misplaced(place: str, given: dict[str, Any]) -> Iterator[str]:
    kind = given.get("kind", "adapter")
    for key in given:
        if kind not in _KINDS_OF.get(key, (kind,)):
            kinds = " and ".join(_KINDS_OF[key])
            yield (
                f"{key} — belongs to scorer.kind: {kinds}, and would have no effect with kind: {kind}. Remove it "
                f"({place}.{key}=null)."
            )
    if kind == "model" and "model" not in given:
        for key in sorted(_OF_A_CHECKPOINT & given.keys()):
            yield (
                f"{key} — would have no effect: there is no scorer.model, and the section reward_model describes the "
                "model that the reward stage trains. Remove it, or name a model."
            )
    needed, form = _NEEDED.get(kind, ("kind", ""))
    if form and not given.get(needed):
        yield f"{needed} — belongs to scorer.kind: {kind}, and is needed there ({form})."
    if "class_score" in given and "class_column" not in given:
        yield "class_score — would have no effect: class_column, which names the wanted class, is missing."
    if given.get("reads") == "response" and "prompt_column" in given:
        yield "prompt_column — would have no effect: the response alone is read."
    if given.get("reads") == "tokens" and "prompt_column" in given:
        yield "prompt_column — would have no effect: the policy's own tokens are read."


def _out_of_range(given: dict[str, Any]) -> Iterator[str]:
    for key, least in (("batch_size", 1), ("max_length", 1), ("retries", 0)):
        if given.get(key, least) < least:
            yield f"{key} — a number from {least} is needed, got {given[key]}."
    if not 0 < given.get("timeout", 1) < math.inf:
        yield f"timeout — seconds above 0 are needed, got {given['timeout']}."
    if not math.isfinite(given.get("weight", 1)):
        yield f"weight — a finite number is needed, got {given['weight']}."
    if "url" in given:
        yield from _url_problems(given["url"])
    if not _VARIABLE.fullmatch(given.get("token_variable", "x")):
        # It may be the token itself, which must not be shown.
        yield "token_variable — the name of an environment variable is needed: letters, digits and _."
    for name in given.get("parts", ()):
        if not isinstance(name, str) or not _PART_NAME.fullmatch(name):
            yield f"parts — {name!r} cannot name a part: its mean is logged as score/NAME. Use letters, digits, _ . -"


def _url_problems(url: str) -> Iterator[str]:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        known = False
    if not known or any(sign.isspace() for sign in url):
        yield f"url — http:// or https:// with a host is needed, got {url!r}."
    elif parts.username is not None or parts.password is not None:
        yield "url — holds a user or password, and the recipe is saved with the run: use token_variable."
