"""Whether a checkpoint is of the run that is to go on from it: its data, its base, its versions."""

import warnings
from pathlib import Path
from typing import Any

from datasets import Dataset

from toolkit.data import data_digest
from toolkit.errors import CheckpointError
from toolkit.models import SharedBase, base_digest
from toolkit.reports import versions

# Other versions of these may round differently, or store their state differently.
_EXACT_WITH = ("torch", "transformers", "trl", "peft", "bitsandbytes")


def run_identity(dataset: Dataset, roles: SharedBase | None) -> dict[str, Any]:
    """What a checkpoint keeps to know its run by: `data`, `base` where a role of one is trained, `versions`."""
    return {
        "data": {"rows": len(dataset), "sha256": data_digest(dataset)},
        "base": None if roles is None else base_digest(roles),
        "versions": versions(),
    }


def check_same_run(checkpoint: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    """Stop where the state that a checkpoint holds means nothing in this run, and warn where it is not exact."""
    wrong = ""
    if then["data"] != now["data"]:
        rows = f"{then['data']['rows']} rows; now {now['data']['rows']}"
        wrong = f"was written on other training data ({rows}), so its place in them means nothing."
        remedy = "Give the data back, or start anew."
    elif "base" not in then:
        wrong = "was written by an earlier version of the toolkit, and lacks what this one goes on with."
        remedy = "Start anew, or go on with that version."
    elif then["base"] != now["base"]:
        wrong = "was written on a base with other weights: its adapters mean nothing on this one."
        remedy = "Give the base back, or start anew."
    if wrong:
        raise CheckpointError(f"{checkpoint} {wrong}", remedy=remedy)
    pairs = ((name, then["versions"].get(name), now["versions"].get(name)) for name in _EXACT_WITH)
    changed = [f"{name} {before} → {after}" for name, before, after in pairs if before != after]
    if changed:
        sentence = f"{checkpoint} was written with other versions ({', '.join(changed)}): not exact to the last bit."
        warnings.warn(sentence, stacklevel=3)
