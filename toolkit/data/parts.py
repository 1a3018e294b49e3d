"""Rows divided among stages, and rows held out: by number, at random, and without a prompt in two parts."""

import random
from collections.abc import Hashable, Mapping, Sequence
from difflib import get_close_matches

from toolkit.errors import DataError

STAGES = ("sft", "reward", "ppo")


def check_parts(parts: Mapping[str, int] | None) -> None:
    """Whether `parts` names stages and numbers.

    Raises:
        DataError: it does not.
    """
    for stage, number in (parts or {}).items():
        if stage not in STAGES:
            near = get_close_matches(stage, STAGES, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"The stages are {', '.join(STAGES)}."
            raise DataError(f'data.parts: no stage is called "{stage}". {hint}')
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise DataError(f"data.parts.{stage}: a whole number from 1 is needed, got {number!r}.")


def draw_parts(prompts: Sequence[str], parts: Mapping[str, int] | None, *, seed: int) -> dict[str, list[int]]:
    """Which rows each stage gets, in the order of the file. Rows with the same prompt go to one stage.

    Args:
        prompts: one a row.
        parts: how many rows each stage gets; a few more if prompts repeat. One that is not named gets the rest.
        seed: of the draw.

    Raises:
        DataError: there are too few rows.
    """
    wanted = dict(parts or {})
    if sum(wanted.values()) > len(prompts):
        asked = ", ".join(f"{number} for {stage}" for stage, number in wanted.items())
        raise DataError(f"data.parts asks for {asked}, and there are {len(prompts)} usable pairs. Lower them.")
    order = _shuffled_groups(prompts, seed)
    found: dict[str, list[int]] = {}
    for stage, number in wanted.items():
        rows: list[int] = []
        while len(rows) < number:
            if not order:
                raise DataError(
                    f"data.parts.{stage}: {number} pairs are asked for, and {len(rows)} are left, since pairs with the "
                    "same prompt stay together. Lower it."
                )
            rows += order.pop()
        found[stage] = sorted(rows)
    rest = sorted(row for group in order for row in group)
    return {stage: found.get(stage, rest) for stage in STAGES}


def draw_held_out(prompts: Sequence[Hashable], number: int, *, seed: int, source: str) -> set[int]:
    """Which rows to hold out. Those with the same prompt go together: none is both trained on and held out.

    Args:
        prompts: one a row.
        number: of rows; a few more if prompts repeat.
        seed: of the draw.
        source: of the rows, for the error.

    Raises:
        DataError: no row would be left to train on.
    """
    held_out: set[int] = set()
    for group in _shuffled_groups(prompts, seed):
        if len(held_out) < number:
            held_out.update(group)
    if len(held_out) == len(prompts):
        raise DataError(
            f"data.validation_size ({number}) leaves no training rows: {source} has {len(prompts)} that can be used. "
            "Lower it, or name held-out ones with data.validation=…."
        )
    return held_out


def _shuffled_groups(prompts: Sequence[Hashable], seed: int) -> list[list[int]]:
    """Rows by prompt, in an order drawn at random."""
    groups: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(row)
    order = list(groups.values())
    random.Random(seed).shuffle(order)
    return order
