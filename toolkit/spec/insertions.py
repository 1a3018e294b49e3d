"""What a recipe may insert: `${key}`, the plain value that stands at another key of it, and nothing else."""

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from toolkit.errors import Problem, RecipeError
from toolkit.spec.plan import at
from toolkit.spec.sections import DEFAULT_SEED

_KEY = re.compile(r"\$\{([\w.-]+)\}")


def only_keys(values: Any, whose: str) -> DictConfig:
    """The same, if keys of the recipe are all that it inserts: where OmegaConf merges, it asks its resolvers for the
    rest, which read the environment and more.

    Raises:
        RecipeError: it would insert something else.
    """

    def others(value: Any, place: str) -> Iterator[Problem]:
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in inside:
            yield from others(item, f"{place}.{key}".lstrip("."))
        if isinstance(value, str) and "${" in _KEY.sub("", value):
            yield _no_plain_value(value, place)

    if problems := [*others(OmegaConf.to_container(values, resolve=False), "")]:
        raise RecipeError(whose, problems=problems)
    return DictConfig(values)


def _no_plain_value(text: str, place: str) -> Problem:
    wrong = f"{text!r}: only plain values of the recipe itself can be inserted, as ${{seed}}."
    return Problem(wrong, place, "Name one, or write the text without ${.")


def with_insertions(values: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """A recipe with `${key}` replaced by the plain value that stands at that key, and what else should be inserted.

    Not by OmegaConf, whose resolvers read the environment and more: a secret could so land in the resolved recipe that
    a run keeps.
    """
    problems = []
    known = {**values, "seed": DEFAULT_SEED if values.get("seed") is None else values["seed"]}

    def insert(value: Any, place: str) -> Any:
        if isinstance(value, dict):
            return {key: insert(item, f"{place}.{key}".lstrip(".")) for key, item in value.items()}
        if isinstance(value, list):
            return [insert(item, f"{place}.{i}") for i, item in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        whole = _KEY.fullmatch(value)
        inserted = at(known, whole[1]) if whole else _KEY.sub(lambda key: str(at(known, key[1])), value)
        keys = [at(known, key) for key in _KEY.findall(value)]
        if any(key is None or isinstance(key, (dict, list)) for key in keys) or "${" in str(inserted):
            problems.append(_no_plain_value(value, place))
        return inserted

    return insert(values, ""), problems
