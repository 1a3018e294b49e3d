"""What differs between the recipe that a run folder keeps and another one, as far as a stage reads it."""

import json
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from toolkit.checkpoints import checkpoint_folders, step_of
from toolkit.data import source_digest
from toolkit.disk import read_text
from toolkit.reports import read_result
from toolkit.rewards import in_no_file
from toolkit.runs.owned import RECIPE_FILE
from toolkit.spec.plan import section
from toolkit.spec.read import check_yaml
from toolkit.spec.recipe import Recipe
from toolkit.spec.sections import DATA_SECTIONS, STAGE_CLASSES
from toolkit.spec.shipped import as_shipped

# What says how often figures are logged and where they go, of any stage: nothing that was done depends on it.
_SHOWN_BY = (
    "logging_steps", "logging_first_step", "report_to", "run_name", "dataloader_num_workers", "disable_tqdm",
    "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "hub_private_repo", "rollouts_shown",
)  # fmt: skip
# How rows lie in a pass, which moves results by rounding alone: what was trained stays, and goes on.
_LAID_OUT_BY = "base.pack_rows"
# What a stage can go on with changed: it decides when something is written or how much memory is taken, and nothing of
# what the run has done so far.
_MAY_CHANGE = (
    "gradient_checkpointing", "logprob_chunk_size", "q_chunk_size",
    "local_rollout_forward_batch_size", "per_device_eval_batch_size", "eval_strategy", "eval_steps", "eval_on_start",
    "save_strategy", "save_steps", "save_total_limit", "use_cpu",
)  # fmt: skip
_LENGTHS = ("max_steps", "num_train_epochs")  # these may grow, and steps shrink to what has been done
_ROWS_OF_A_STEP = ("per_device_train_batch_size", "gradient_accumulation_steps")
_NAME_DATA = {f"{section}.{key}" for section in DATA_SECTIONS for key in ("train", "validation")}
_TOLD = 3  # differences that a message names
_LONGEST = 60  # characters of a value in it
COLLECTED = "the run's collect/responses.jsonl"  # as a source of its q stage
SOURCES = "sources"  # key of a result: the SHA-256 of each file or folder of data that the stage read
ABSENT = object()  # the value of a key that a recipe does not have
Changes: TypeAlias = Mapping[str, tuple[Any, Any]]


@lru_cache(maxsize=8)  # a stage asks for the same two some forty times
def _parsed(text: str) -> Any:
    check_yaml(text)  # a run may be somebody else's
    return yaml.safe_load(text)


def recorded(folder: Path) -> dict[str, Any]:
    """The recipe that a run folder keeps; empty where it keeps none that can be read."""
    try:
        values = _parsed(read_text(folder / RECIPE_FILE))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def leaves(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a recipe by their dotted keys."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def changes(recipe: Recipe, stage: str, folder: Path) -> Changes:
    """Dotted keys that the stage, or one before it, reads, with their values in the folder's recipe and in this one.

    Those alone that differ, but for what decides how it is shown; of a stage that is not the recipe's, all that differ.
    """
    there, here = dict(leaves(recorded(folder))), dict(leaves(_parsed(recipe.to_yaml())))
    plan = recipe.plan.stages.get(stage)
    passed_over = {f"{other}.{name}" for other in STAGE_CLASSES for name in _SHOWN_BY} | {_LAID_OUT_BY}
    read = [key for key in {**there, **here} if plan is None or (plan.reads_key(key) and key not in passed_over)]
    pairs = {key: (there.get(key, ABSENT), here.get(key, ABSENT)) for key in read}
    # An empty section of one is no key beside those that the other has in it.
    below = {**there, **here}
    filled = {key for key, pair in pairs.items() if {} in pair and any(one.startswith(f"{key}.") for one in below)}
    same = {key for key in pairs.keys() & _NAME_DATA if len({*map(str, map(as_shipped, pairs[key]))}) == 1}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1] and key not in filled | same}


def digest_of(source: str, run: Path) -> str | None:
    """As `source_digest`; of the responses that a run has collected those of this one."""
    return source_digest(str(run / "collect/responses.jsonl") if source == COLLECTED else source)


def changed_data(folder: Path) -> str:
    """Which data are not as the finished stage in a folder read them, as a sentence begins: "pairs.jsonl has changed".

    "" where none is known to be: nothing is known of the hub's data, of what cannot be read here, and of a stage whose
    result keeps no digests.
    """
    kept = (read_result(folder) or {}).get(SOURCES)
    then = kept if isinstance(kept, dict) else {}
    now = {source: digest_of(source, folder.parent) for source in then}
    changed = [source for source, digest in now.items() if digest not in (None, then[source])]
    named = [*changed[:_TOLD], *([f"{len(changed) - _TOLD} more"] if len(changed) > _TOLD else [])]
    return f"{' and '.join(named)} {'has' if len(changed) == 1 else 'have'} changed" if changed else ""


def may_change(recipe: Recipe, stage: str, folder: Path) -> set[str]:
    """Keys that may differ where a stage goes on: those above, a length that grows, or falls to no less than what its
    newest checkpoint has behind it, a product that stays, the place of a function that a notebook has given."""
    names, before = {*_MAY_CHANGE}, recorded(folder)
    functions = {f"{name}.function" for name in ("scorer", "judge") if in_no_file(_function(before, name))}
    if stage in STAGE_CLASSES:
        there, here = (_numbers(values, stage) for values in (before, recipe.values))
        names |= {name for name in _LENGTHS if 0 < there[name] < here[name]}
        saved = checkpoint_folders(folder / stage)
        if saved and step_of(saved[-1]) <= here["max_steps"] < there["max_steps"]:
            names.add("max_steps")
        product_stays = len({math.prod(of[name] for name in _ROWS_OF_A_STEP) for of in (there, here)}) == 1
        # Where last rows are dropped, a pass would have another number of steps.
        if product_stays and not section(recipe.values, stage).get("dataloader_drop_last"):
            names |= {*_ROWS_OF_A_STEP}
    return {f"{stage}.{name}" for name in names} | functions


def _function(values: dict[str, Any], name: str) -> str:
    """The function of a section, as it is named there."""
    return str(section(values, name).get("function", ""))


def _numbers(values: dict[str, Any], stage: str) -> dict[str, float]:
    """The lengths and rows of a stage's section, or their defaults; -1 where there is no number."""
    owner, given = STAGE_CLASSES[stage], section(values, stage)
    numbers = {name: given.get(name, getattr(owner, name)) for name in (*_LENGTHS, *_ROWS_OF_A_STEP)}
    return {name: number if isinstance(number, (int, float)) else -1 for name, number in numbers.items()}


def shown(value: Any) -> str:
    """A value as a recipe has it; "not set" for `ABSENT`."""
    return "not set" if value is ABSENT else json.dumps(value, ensure_ascii=False, default=str)


def described(changes: Changes) -> str:
    """The first few of the keys, with the values there and here."""
    parts = [_difference(key, there, here) for key, (there, here) in changes.items()]
    more = len(parts) - _TOLD
    return "; ".join(parts[:_TOLD]) + (f"; and {more} more" if more > 0 else "")


def _difference(key: str, there: Any, here: Any) -> str:
    """A key with its values there and here: of long ones the part that differs, and of an address nothing behind its
    `?`, which may be a secret."""

    def short(there: str, here: str) -> Iterator[str]:
        same = next((i for i, pair in enumerate(zip(there, here, strict=False)) if len({*pair}) > 1), 0)
        for text in (there, here):
            start = 0 if len(text) <= _LONGEST or same < _LONGEST // 2 else same - _LONGEST // 3
            text = f"…{text[start:]}" if start else text
            yield text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"

    if key.rpartition(".")[2] == "url":
        there, here = (value.partition("?")[0] if isinstance(value, str) else value for value in (there, here))
        if there == here:
            return f"{key} has another query (behind its ?) there than here"
    there, here = short(shown(there), shown(here))
    return f"{key} is {there} there and {here} here"
