"""Read what a recipe says: its file, sections from Python, and overrides, each held to plain YAML."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml.representer import RepresenterError

from toolkit.errors import Problem, RecipeError
from toolkit.spec.as_text import to_yaml
from toolkit.spec.find import reason
from toolkit.spec.plan import STAGES

_DEEPEST, _MOST = 50, 100_000  # of the values of a recipe
_LONGEST = 100  # digits of a whole number

# What reading YAML can come to: ValueError also for text that is not UTF-8, or `!!float x`.
_UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, TypeError, RecursionError)
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_OF_YAML_1_1 = re.compile(r"[-+]?(0[0-7_]+$|.*:)")  # 010 is 8 and 1:30 is 90


def check_yaml(text: str) -> yaml.Node | None:
    """What a text is; None of an empty one.

    Its keys are text, no number is beyond all sense, and a few lines do not stand for thousands of values, as with
    aliases of aliases.

    Raises:
        ValueError: they are not, or do.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    nodes, seen = [(root, 0)] if root is not None else [], 0
    while nodes:
        node, depth = nodes.pop()
        seen += 1
        if depth > _DEEPEST or seen > _MOST:
            raise ValueError(f"it is nested more than {_DEEPEST} deep, or has more than {_MOST:,} values.")
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                    what = repr(key.value) if isinstance(key, yaml.ScalarNode) else f"a {key.id}"
                    line = key.start_mark.line + 1
                    raise ValueError(f"a key has to be text, in quotes if need be: {what} in line {line} is not.")
                nodes.append((value, depth + 1))
        elif isinstance(node, yaml.SequenceNode):
            nodes += [(item, depth + 1) for item in node.value]
        elif node.tag == "tag:yaml.org,2002:int" and len(node.value) > _LONGEST:
            raise ValueError(f"it has a number of {len(node.value):,} digits.")
        elif node.tag in _NUMBERS and _OF_YAML_1_1.match(node.value):
            wrong = f"{node.value} would be a number to base 8 or 60. Write it in tens, or in quotes if it is text."
            raise ValueError(wrong)
    return root


def _plain(values: Any) -> Any:
    """What OmegaConf has parsed, as plain dicts and lists: where it merged or resolved, it would ask its resolvers for
    what `${…}` names, and they read the environment and more."""
    return OmegaConf.to_container(values, resolve=False)


def read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        root = check_yaml(text)
        values = _plain(OmegaConf.create(text)) if root is None or isinstance(root, yaml.MappingNode) else None
    except _UNREADABLE as error:
        raise RecipeError(f"{path} cannot be read as YAML: {reason(error)}") from error
    if not isinstance(values, dict):
        kind = type(root).__name__.removesuffix("Node").lower()
        raise RecipeError(f"{path}: a recipe is a mapping of sections, this is a {kind}.")
    if empty := next(_empty_stages(root), None):
        wrong = "is empty, which is YAML's null, and null takes a stage away."
        raise RecipeError(str(path), problems=[Problem(wrong, empty, f"Write {empty}: {{}} for its defaults.")])
    return values


def _empty_stages(root: yaml.Node | None) -> Iterator[str]:
    """The stages of a recipe's file after whose name nothing stands."""
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value in STAGES and isinstance(value, yaml.ScalarNode) and not (value.value or value.style):
            yield key.value


def read_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections from Python, held to what a file can say."""
    try:
        text = to_yaml(dict(values))
        check_yaml(text)
        return cast(dict[str, Any], _plain(OmegaConf.create(text)))
    except RepresenterError as error:
        wrong = f"what was given cannot be a recipe: {_key_of(error.args[-1], values)} is {error.args[-1]!r}."
        raise RecipeError(wrong, remedy="Give text, numbers, lists and sections.") from error
    except _UNREADABLE as error:
        raise RecipeError(f"what was given cannot be a recipe: {reason(error)}") from error


def _key_of(item: Any, values: Any, above: str = "") -> str:
    """The key at which an item stands within values."""
    inside = values.items() if isinstance(values, Mapping) else enumerate(values) if isinstance(values, list) else ()
    for key, value in inside:
        place = f"{above}.{key}".lstrip(".")
        if found := place if value is item else _key_of(item, value, place):
            return found
    return ""


def read_override(override: str) -> dict[str, Any]:
    """What an override says, as sections."""
    if not isinstance(override, str):
        wrong = f"override {override!r} is no text of the form section.key=value."
        raise RecipeError(wrong, remedy="Sections are given by name: ppo={…}.")
    key, equals, value = override.strip().partition("=")
    if not equals or not all(part.strip("[]{} ") for part in key.split(".")) or key.count(".") > _DEEPEST:
        raise RecipeError(f'override "{override}" is not of the form section.key=value.')
    if not value.strip():  # YAML's null, as where a variable of the shell is not set
        wrong = f'override "{override}" has no value.'
        empty = f'an empty text is "{key}=\'\'" on the command line, SET="{key}=\\"\'\'\\"" with make'
        raise RecipeError(wrong, field=key, remedy=f"Give one: {empty}; null takes a stage's key away.")
    try:
        node = check_yaml(value)
        change: dict[str, Any] = _plain(OmegaConf.from_dotlist([override.strip()]))
    except _UNREADABLE as error:
        raise RecipeError(f'override "{override}" cannot be read: {reason(error)}') from error
    if left_out := value[0 if node is None else node.end_mark.index :].strip():
        wrong = f'override "{override}": "{left_out}" would be a comment of YAML.'
        raise RecipeError(wrong, field=key, remedy="Put the value in quotes of its own.")
    return change
