"""Medians, ratios with their spread, and the bars, from the raw figures of a run.

A ratio is taken within a round, where the contenders ran one after another: what else a machine is doing changes from
round to round, and a ratio of two medians would hide it.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.contenders import CONTENDERS
from benchmarks.work import PHASES

# Of our contenders, by value role: at least so many times as fast as the fastest form that stock TRL allows.
SPEED_BAR = {"separate": 2.0, "shared": 2.5}
MEMORY_BAR = 0.45  # of that form's peak memory, at most
# Times the floor, at most, by kind of result.
FLOOR_BAR = dict.fromkeys(("cpu", "apart", "growth", "agilerl"), 2.0) | {"slice": 1.4}

_WORDS = {"speed": "speed", "memory": "memory", "over_floor": "× floor"}

Round = Mapping[str, Any]  # {"contenders": {name: worker.measure(…)}, "floor": worker.measure_floor(…)}


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def seconds_of(measured: Mapping[str, Any]) -> dict[str, float]:
    """Median seconds of one process's updates, by phase and as `total`."""
    updates = measured["updates"]
    by_phase = {phase: statistics.median(update[phase] for update in updates) for phase in PHASES}
    return {**by_phase, "total": statistics.median(sum(update.values()) for update in updates)}


def _total(one: Round, name: str) -> float:
    return seconds_of(one["contenders"][name])["total"]


def _memory(one: Round, name: str) -> float:
    return one["contenders"][name]["memory_gb"]["resident"]


def _floor(one: Round, value: str) -> float:
    return sum(one["floor"][value]["seconds"].values())


def fastest(kind: str, rounds: Sequence[Round], names: Iterable[str]) -> str | None:
    """The contender of a kind with the smallest median time, None where none of these is of it.

    Of stock TRL, that is: the views of our base, a kind of their own, are not TRL's own interface.
    """
    of_kind = [name for name in names if CONTENDERS[name].kind == kind]
    return min(of_kind, key=lambda name: statistics.median(_total(one, name) for one in rounds), default=None)


def summarise(rounds: Sequence[Round], *, tokens: Mapping[str, int], rollouts: int) -> dict[str, Any]:
    """Medians and ratios of each contender that all rounds have, and the seconds of the floor.

    The ratios of one without a reward role are to AgileRL's, which has none; the floor has one. Tokens, by phase, and
    rollouts are those of one update.
    """
    names = [name for name in rounds[0]["contenders"] if all(name in one["contenders"] for one in rounds)]
    rivals = {True: fastest("stock", rounds, names), False: fastest("agilerl", rounds, names)}
    contenders: dict[str, dict[str, Any]] = {}
    for name in names:
        seen = [seconds_of(one["contenders"][name]) for one in rounds]
        seconds = {key: statistics.median(one[key] for one in seen) for key in (*PHASES, "total")}
        value, rewarded = CONTENDERS[name].value, CONTENDERS[name].rewarded
        contenders[name] = {
            "seconds": seconds,
            "samples_per_second": rollouts / seconds["total"],
            "tokens_per_second": {phase: tokens[phase] / seconds[phase] for phase in PHASES},
            "memory_gb": statistics.median(_memory(one, name) for one in rounds),
        }
        if rewarded:
            contenders[name]["over_floor"] = spread([_total(one, name) / _floor(one, value) for one in rounds])
        if (rival := rivals[rewarded]) is not None:
            contenders[name]["speed"] = spread([_total(one, rival) / _total(one, name) for one in rounds])
            contenders[name]["memory"] = spread([_memory(one, name) / _memory(one, rival) for one in rounds])
    floor = {
        value: {phase: statistics.median(one["floor"][value]["seconds"][phase] for one in rounds) for phase in PHASES}
        for value in SPEED_BAR
    }
    fastest_ones = {"fastest_stock": rivals[True], "fastest_agilerl": rivals[False]}
    return {**fastest_ones, "contenders": contenders, "floor_seconds": floor}


def bars(summary: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    """What is asked of our contenders, what they reach by a summary, and whether it is met."""
    found = []
    for name, figures in summary["contenders"].items():
        contender = CONTENDERS[name]
        if contender.kind != "ours" or not contender.rewarded:
            continue
        at_most = {"memory": MEMORY_BAR, "over_floor": FLOOR_BAR[kind]}
        for bar, needed in {"speed": SPEED_BAR[contender.value], **at_most}.items():
            if bar not in figures:  # no stock form to hold it against
                continue
            reached = figures[bar]["median"]
            met = reached <= needed if bar in at_most else reached >= needed
            found.append({"contender": name, "bar": bar, "needed": needed, "reached": reached, "met": met})
    return found


def bars_in_words(bars: Mapping[str, Iterable[Mapping[str, Any]]], kind: str, dtype: str) -> str:
    """The bars and where they are missed, in a paragraph; by the sizes where there are several."""
    asked = (
        f"Asked of ours: speed of {SPEED_BAR['separate']:g} with a separate value and {SPEED_BAR['shared']:g} with a "
        f"shared one, memory of {MEMORY_BAR:g}, {FLOOR_BAR[kind]:g} × floor."
    )
    missed = {size: text for size, of_size in bars.items() if (text := _missed(of_size, dtype))}
    if not missed:
        return f"{asked} All are met."
    where = (f"{f' at {size}' * (len(bars) > 1)} by {text}" for size, text in missed.items())
    return f"{asked} Missed{';'.join(where)}."


def _missed(bars: Iterable[Mapping[str, Any]], dtype: str) -> str:
    missed: dict[str, list[str]] = {}
    for bar in bars:
        if not bar["met"]:
            of_contender = missed.setdefault(CONTENDERS[bar["contender"]].label(dtype), [])
            of_contender.append(f"{_WORDS[bar['bar']]} {bar['reached']:.2f}")
    return "; ".join(f"{label}: {', '.join(figures)}" for label, figures in missed.items())
