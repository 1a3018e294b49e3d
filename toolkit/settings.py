"""What a setting may be, declared once, in the dataclass that has it; its problems are derived from that."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from toolkit.errors import ConfigError, Problem


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may be."""

    words: str  # what follows "must be"
    holds: Callable[[float], bool]


POSITIVE = Range("positive", lambda x: x > 0)
NOT_NEGATIVE = Range("0 or more", lambda x: x >= 0)
AT_LEAST_1 = Range("at least 1", lambda x: x >= 1)
BELOW_1 = Range("from 0 to below 1", lambda x: 0 <= x < 1)
UP_TO_1 = Range("between 0 and 1", lambda x: 0 <= x <= 1)
A_TEMPERATURE = Range("at least 0.0001", lambda x: x >= 1e-4)  # by which logits are divided in float32
A_SEED = Range("from 0 to 4294967295", lambda x: 0 <= x < 2**32)  # what numpy takes

# Of fields that TRL, transformers and PEFT declare, which they would find out about when the stage runs, or take for
# something else (0 steps for all epochs).
_NAMES = {
    AT_LEAST_1: "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps "
    "num_mini_batches num_ppo_epochs response_length total_episodes local_rollout_forward_batch_size "
    "max_length r eval_accumulation_steps pad_to_multiple_of dataset_num_proc",
    POSITIVE: "num_train_epochs save_steps eval_steps logging_steps missing_eos_penalty lora_alpha",
    NOT_NEGATIVE: "learning_rate weight_decay adam_epsilon max_grad_norm warmup_steps save_total_limit kl_coef vf_coef "
    "dataloader_num_workers neftune_noise_alpha eval_delay",
    A_TEMPERATURE: "temperature",
    A_SEED: "seed data_seed",
    UP_TO_1: "gamma lam",
    BELOW_1: "lora_dropout adam_beta1 adam_beta2 label_smoothing_factor",
    Range("at least 1, or -1 for what num_train_epochs says", lambda x: x >= 1 or x == -1): "max_steps",
}
_LARGEST = 2.0**63  # of a number: what torch holds in an int64
_INHERITED = {name: allowed for allowed, names in _NAMES.items() for name in names.split()}


@dataclass(frozen=True)
class Setting:
    """What `setting` was told of a field, beside its help."""

    default: Any
    allowed: Range | None
    only_with: Mapping[str, Any]
    in_trl_loop: bool


# Not in the fields' metadata, all of which transformers' HfArgumentParser hands to argparse.
_DECLARED: dict[Field[Any], Setting] = {}


def setting(
    default: Any,
    help: str,
    allowed: Range | None = None,
    *,
    only_with: Mapping[str, Any] | None = None,
    in_trl_loop: bool = False,
) -> Any:
    """A field of a dataclass; its words are those of its `Literal` type.

    Args:
        default: its value where none is given.
        help: what it is, for the recipe reference.
        allowed: the numbers that it may be.
        only_with: what other settings have to be for this one to have an effect.
        in_trl_loop: of the ppo stage: whether `loop: trl` knows it, though TRL's class does not have it.
    """
    made: Field[Any] = field(default=default, metadata={"help": help})
    _DECLARED[made] = Setting(default, allowed, only_with or {}, in_trl_loop)
    return made


hints_of: Callable[[Any], Mapping[str, Any]] = cache(get_type_hints)
"""The types of a class's fields, evaluated once."""


def declared(owner: type) -> dict[str, Setting]:
    """The fields of a class that were declared by `setting`."""
    return {f.name: _DECLARED[f] for f in fields(owner) if f in _DECLARED} if is_dataclass(owner) else {}


def range_of(owner: type, name: str) -> Range | None:
    """The numbers that a field of a class may be; None where that is not known."""
    ours = declared(owner)
    return ours[name].allowed if name in ours else _INHERITED.get(name)


@cache
def _adapter(hint: Any) -> TypeAdapter[list[Any]]:
    # A list, since a dataclass by itself takes no configuration.
    return TypeAdapter(list[hint], config=ConfigDict(arbitrary_types_allowed=True))


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from a recipe is of the type that a field is annotated with.

    By pydantic's strict rules for JSON, which has the types of YAML: 1 is a number, true is none, and a member of an
    enum is given as text.
    """
    try:
        _adapter(hint).validate_json(json.dumps([value]), strict=True)
    except (ValidationError, TypeError):
        return False
    return True


_TYPES = {
    type(None): "null",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a section with keys",
}


def type_name(hint: Any) -> str:
    """A type as a reader of a recipe would name it."""
    if get_origin(hint) is Literal:
        return " or ".join(repr(word) for word in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(dict.fromkeys(type_name(part) for part in get_args(hint)))
    return _TYPES.get(get_origin(hint) or hint, getattr(hint, "__name__", str(hint)))


def problems_of(owner: type, values: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with values that are given for settings of a class: type, words, numbers, and what they need."""
    hints, ours = hints_of(owner), declared(owner)
    # What TRL and transformers list where the type is any text.
    listed = {f.name: f.metadata.get("choices") for f in fields(owner)} if is_dataclass(owner) else {}
    problems = []
    for name, value in values.items():
        hint, choices, allowed = hints.get(name, Any), listed.get(name), range_of(owner, name)
        if not fits(value, hint):
            problems.append(Problem(f"{type_name(hint)} is needed, got {value!r}.", name))
        elif choices and value is not None and value not in choices:
            problems.append(Problem(f"{' or '.join(choices)} is needed, got {value!r}.", name))
        elif isinstance(value, (int, float)) and not -_LARGEST < value < _LARGEST:  # nor where it is NaN
            problems.append(Problem(f"a finite number below 2^63 is needed, got {value!r}.", name))
        elif allowed and isinstance(value, (int, float)) and not allowed.holds(value):
            or_null = " or null" if fits(None, hint) else ""
            problems.append(Problem(f"must be {allowed.words}{or_null}, got {value!r}.", name))
        else:
            said = name in ours and value != ours[name].default
            needs = ours[name].only_with if said else {}
            lacking = {key: want for key, want in needs.items() if values.get(key, ours[key].default) != want}
            as_yaml = (f"{key}: {str(want).lower()}" for key, want in lacking.items())
            problems += [Problem(f"would have no effect without {text}.", name) for text in as_yaml]
    return problems


def check(config: Any, conflicts: Callable[[], Iterable[Problem]] = tuple) -> None:
    """Check the settings of a dataclass: those that it declares, and those of its parents whose range is known.

    Raises a ConfigError with all problems. `conflicts`, between values, are asked for where each can be by itself.
    """
    known = declared(type(config)).keys() | _INHERITED.keys()
    set_here = (f for f in fields(config) if f.name in known and getattr(config, f.name) != f.default)
    given = {f.name: getattr(config, f.name) for f in set_here}
    problems = problems_of(type(config), given) or list(conflicts())
    if problems:
        raise ConfigError(type(config).__name__, problems=problems)
