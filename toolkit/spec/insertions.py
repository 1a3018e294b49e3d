"""What a recipe may insert: `${key}`, the plain value that stands at another key of it, and nothing else."""

import re
from typing import Any

from toolkit.errors import Problem
from toolkit.spec.plan import at
from toolkit.spec.sections import DEFAULT_SEED

_KEY = re.compile(r"\$\{([\w.-]+)\}")


def _no_plain_value(text: str, place: str) -> Problem:
    wrong = f"{text!r}: only plain values of the recipe itself can be inserted, as ${{seed}}."
    return Problem(wrong, place, "Name one, or write the text without ${.")


def with_insertions(values: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """A recipe with `${key}` replaced by the plain value that stands at that key; and what else should be inserted, or
    has the value that OmegaConf takes for none.

    Not by OmegaConf, whose resolvers read the environment and more: a secret could so land in the resolved recipe that
    a run keeps.
    """
    problems = []
    known = {**values, "seed": DEFAULT_SEED if values.get("seed") is None else values["seed"]}

    def insert(value: Any, place: str) -> Any:
        if isinstance(value, dict):
            # OmegaConf makes a number of a key such as 1e3, which is text to YAML.
            return {str(key): insert(item, f"{place}.{key}".lstrip(".")) for key, item in value.items()}
        if isinstance(value, list):
            return [insert(item, f"{place}.{i}") for i, item in enumerate(value)]
        if value == "???":
            problems.append(Problem("has no value.", place, "Give one."))
        if not isinstance(value, str) or "${" not in value:
            return value
        whole = _KEY.fullmatch(value)
        inserted = at(known, whole[1]) if whole else _KEY.sub(lambda key: str(at(known, key[1])), value)
        keys = [at(known, key) for key in _KEY.findall(value)]
        if any(key is None or isinstance(key, (dict, list)) for key in keys) or "${" in str(inserted):
            problems.append(_no_plain_value(value, place))
        return inserted

    return insert(values, ""), problems
