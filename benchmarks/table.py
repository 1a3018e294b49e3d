"""The tables of `docs/benchmarks.md`, and its figure, made from the newest result of each kind and precision.

python -m benchmarks.table
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import CONTENDERS
from benchmarks.records import DOCS, RESULTS, fill, markdown, newest, save_figure, where
from benchmarks.start import PRECISIONS
from benchmarks.summary import bars_in_words
from benchmarks.work import PHASES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = DOCS / "benchmarks.md"
_COLUMNS = (
    "contender",
    *(f"{phase} s" for phase in PHASES),
    "update in all s",
    "samples/s",
    "tokens/s " + " / ".join(PHASES),
    "peak GB",
    "speed",
    "memory",
    "× floor",
)


def _spread(figure: Mapping[str, float]) -> str:
    least, most = figure["min"], figure["max"]
    return f"{figure['median']:.2f}{f' ({least:.2f}–{most:.2f})' if least < most else ''}"  # of one round none


def _cells(label: str, figures: Mapping[str, Any]) -> list[str]:
    seconds = figures["seconds"]
    return [
        label,
        *(f"{seconds[key]:.2f}" for key in (*PHASES, "total")),
        f"{figures['samples_per_second']:.2f}",
        " / ".join(f"{figures['tokens_per_second'][phase]:.0f}" for phase in PHASES),
        f"{figures['memory_gb']:.2f}",
        _spread(figures["speed"]),
        _spread(figures["memory"]),
        *([_spread(figures["over_floor"])] if "over_floor" in figures else []),
    ]


def _floor_cells(value: str, seconds: Mapping[str, float]) -> list[str]:
    times = [*(seconds[phase] for phase in PHASES), sum(seconds.values())]
    return [f"floor, {value} value", *(f"{time:.2f}" for time in times), *[""] * (len(_COLUMNS) - 5)]


def _contender_rows(found: Mapping[str, Any], dtype: str, *, rewarded: bool) -> list[list[str]]:
    shown = found["summary"]["contenders"].items()
    return [_cells(CONTENDERS[n].label(dtype), figures) for n, figures in shown if CONTENDERS[n].rewarded == rewarded]


def _rows(found: Mapping[str, Any], dtype: str) -> list[list[str]]:
    floors = found["summary"]["floor_seconds"].items()
    return _contender_rows(found, dtype, rewarded=True) + [_floor_cells(value, seconds) for value, seconds in floors]


def _size_title(size: str, work: Mapping[str, Any]) -> str:
    prompt, response = work["prompt_tokens"], work["response_tokens"]
    return (
        f"{size}: {work['rollouts']} rollouts, prompts of {min(prompt)}–{max(prompt)} tokens, responses of "
        f"{min(response)}–{max(response)}, {work['epochs']} epochs, micro-batch {work['micro_batch']}"
    )


def _rounds(found: Mapping[str, Any]) -> str:
    number = len(found["rounds"])
    return "one round" if number == 1 else f"medians of {number} rounds"


def _about(result: Mapping[str, Any]) -> str:
    model, updates = result["model"], result["arguments"]["updates"]
    return (
        f"{where(result)} Model: {model['architecture']} of {model['parameters'] / 1e6:.1f} million parameters, "
        f"{model['layers']} layers of width {model['hidden_size']}. "
        f"{updates} measured update{'s' * (updates > 1)} of each contender in a round. "
        f"{cpu_in_words(result['cpu'])}"
    )


def cpu_in_words(cpu: Mapping[str, Any]) -> str:
    """What `run.about_cpu` has found: instructions, and the rate of a product in each precision."""
    of_precision = cpu["gigaoperations_per_second"].items()
    rates = " and ".join(f"{rate:.0f} GFLOP/s in {precision}" for precision, rate in of_precision)
    return f"{cpu['capability']}; a square product reaches {rates}."


def _cpu(kind: str, result: Mapping[str, Any]) -> str:
    parts, dtype = [_about(result)], result["arguments"]["dtype"]
    for size, found in result["sizes"].items():
        fastest = CONTENDERS[found["summary"]["fastest_stock"]].label(dtype)
        title = f"**{_size_title(size, found['work'])}; {_rounds(found)}**"
        parts += [title, markdown(_COLUMNS, _rows(found, dtype))]
        parts += [f"The fastest stock form: {fastest}. {bars_in_words({size: found['bars']}, kind, dtype)}"]
    return "\n\n".join(parts)


def _agilerl(result: Mapping[str, Any]) -> str:
    parts, dtype = [_about(result)], result["arguments"]["dtype"]
    for size, found in result["sizes"].items():
        names = {kind: CONTENDERS[found["summary"][f"fastest_{kind}"]].label(dtype) for kind in ("agilerl", "stock")}
        parts += [
            f"**{_size_title(size, found['work'])}; {_rounds(found)}**",
            f"Without a reward role; speed and memory are held to {names['agilerl']}:",
            markdown(_COLUMNS[:-1], _contender_rows(found, dtype, rewarded=False)),
            f"With one, in the same rounds; they are held to {names['stock']}:",
            markdown(_COLUMNS, _rows(found, dtype)),
        ]
    return "\n\n".join(parts)


_OF_OURS = {"speed": "speed", "× floor": "over_floor"}


def _growth_size(found: Mapping[str, Any]) -> str:
    return f"{found['work']['rollouts']} × {found['work']['response_length']}"


def _growth_cells(size: str, found: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    work, summary = found["work"], found["summary"]
    tokens = work["tokens"]["score"]
    cells = [size, _growth_size(found), str(tokens), str(len(found["rounds"]))]
    for name in names:
        if (figures := summary["contenders"].get(name)) is None:
            cells += ["out of memory", ""]
        else:
            seconds = figures["seconds"]["total"]
            cells += [f"{seconds:.1f} ({1e3 * seconds / tokens:.1f})", f"{figures['memory_gb']:.2f}"]
        if CONTENDERS[name].kind == "ours":
            cells += [_spread(figures[ratio]) if figures and ratio in figures else "" for ratio in _OF_OURS.values()]
    return cells


def _growth(result: Mapping[str, Any]) -> str:
    sizes, dtype = result["sizes"], result["arguments"]["dtype"]
    names = next(iter(sizes.values()))["summary"]["contenders"]
    columns = ["", "rollouts × longest response", "tokens", "rounds"]
    for name in names:
        columns += [f"{CONTENDERS[name].label(dtype)}: s (ms a token)", "peak GB"]
        columns += _OF_OURS if CONTENDERS[name].kind == "ours" else []
    rows = [_growth_cells(size, found, names) for size, found in sizes.items()]
    about = f"{_about(result)} Medians of the rounds; speed is held to the stock form beside ours."
    by_size = {_growth_size(found): found["bars"] for found in sizes.values()}
    return "\n\n".join([about, markdown(columns, rows), bars_in_words(by_size, "growth", dtype)])


def growth_figure(result: Mapping[str, Any]) -> "Figure":
    """Seconds and peak memory of an update against its tokens, by more rollouts and by longer responses."""
    from matplotlib.figure import Figure  # not above: `gpu` reads this module on machines without it

    figure = Figure(figsize=(10, 4), layout="constrained")
    drawn = figure.subplots(1, 2)
    series = {"more rollouts": ("few", "base", "many"), "longer responses": ("few", "longer", "longest")}
    for colour, name in enumerate(next(iter(result["sizes"].values()))["summary"]["contenders"]):
        for style, (by, sizes) in zip(("o-", "s--"), series.items(), strict=True):
            every = [result["sizes"][size] for size in sizes if size in result["sizes"]]
            found = [one for one in every if name in one["summary"]["contenders"]]
            tokens = [one["work"]["tokens"]["score"] for one in found]
            figures = [one["summary"]["contenders"][name] for one in found]
            label = f"{CONTENDERS[name].label(result['arguments']['dtype'])}, {by}"
            drawn[0].plot(tokens, [one["seconds"]["total"] for one in figures], style, color=f"C{colour}", label=label)
            drawn[1].plot(tokens, [one["memory_gb"] for one in figures], style, color=f"C{colour}", label=label)
    for axes, title in zip(drawn, ("seconds of an update", "peak memory, GB"), strict=True):
        axes.set(title=title, xlabel="tokens of an update, prompts and responses", xlim=(0, None), ylim=(0, None))
        axes.grid(alpha=0.3)
    drawn[0].legend(fontsize=7)
    return figure


_GPU_COLUMNS = (
    "value",
    "checkpointing",
    "generation",
    "lengths",
    *(f"{phase} s" for phase in PHASES),
    *(f"{phase} peak GB" for phase in PHASES),
    "samples/s",
    "× floor",
)


def _gpu_cells(row: Mapping[str, Any]) -> list[str]:
    lowered = "".join(f", {phase} by {rows} rows" for phase, rows in row.get("lowered", {}).items())
    first = [
        row["value"],
        "on" if row["gradient_checkpointing"] else "off",
        f"{row['generation']}{lowered}",
        row["lengths"],
    ]
    if "refused" in row or "out_of_memory" in row:
        why = row.get("refused") or f"out of memory in {row['out_of_memory']}"
        return [*first, why, *[""] * (len(_GPU_COLUMNS) - 5)]

    def measured(name: str, planned: str) -> list[str]:
        beside = {phase: f" ({figure:.2f})" for phase, figure in row.get(planned, {}).items()}  # not of every card
        return [f"{row[name][phase]:.2f}{beside.get(phase, '')}" for phase in PHASES]

    return [
        *first,
        *measured("seconds", "planned_seconds"),
        *measured("peak_gb", "planned_gb"),
        f"{row['samples_per_second']:.2f}",
        f"{row['over_floor']:.2f}",
    ]


def _gpu(result: Mapping[str, Any]) -> str:
    model, work = result["model"], result["work"]
    weights = f": {model['weights_gb']:.2f} GB" if "weights_gb" in model else ""  # none where no base could be made
    about = (
        f"{where(result)} Model: a Llama of {model['parameters'] / 1e9:.2f} billion parameters with random weights, "
        f"hidden size {model['hidden_size']}, {model['layers']} layers, in NF4{weights}. "
        f"{work['rollouts']} rollouts, prompts of {work['prompt_tokens']} tokens, responses of "
        f"{work['response_tokens']} (uneven lengths are from an eighth of these to them), {work['epochs']} epochs, "
        f"micro-batch {work['micro_batch']}; medians of {result['arguments']['updates']} updates. In brackets what "
        "`toolkit plan` says."
    )
    processors = dict.fromkeys(row["processor"] for row in result["rows"] if "processor" in row)
    if len(processors | {result["machine"]["processor"]: None} if processors else {}) > 1:
        about += f" Beside the card the rows had different processors, one after the other: {', '.join(processors)}."
    return "\n\n".join([about, markdown(_GPU_COLUMNS, [*map(_gpu_cells, result["rows"])])])


_SECTIONS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "cpu": partial(_cpu, "cpu"),
    "apart": partial(_cpu, "apart"),
    "slice": partial(_cpu, "slice"),
    "growth": _growth,
    "agilerl": _agilerl,
    "gpu": _gpu,
}
KINDS = tuple(_SECTIONS)


def section(kind: str, *results: Mapping[str, Any]) -> str:
    """What stands between a kind's markers in the docs; the tables of machines are numbered, which the page names."""
    texts = [*map(_SECTIONS[kind], results)]
    if kind == "cpu":
        texts = [f"**Table {number}.** {text}" for number, text in enumerate(texts, 1)]
    return "\n\n".join(texts) or "No result yet."


def _newest(kind: str, folder: Path) -> list[dict[str, Any]]:
    """The newest result of a kind in each precision; a card's has one. Of contenders on a CPU that of each machine, the
    fastest first: some have one name, and differ twofold."""
    if kind not in ("cpu", "slice"):
        names = [kind] if kind == "gpu" else [f"{kind}_{dtype}" for dtype in PRECISIONS]
        return [result for name in names if (result := newest(name, folder))]
    return [result for dtype in PRECISIONS for result in _of_machines(f"{kind}_{dtype}", dtype, folder)]


def _of_machines(kind: str, dtype: str, folder: Path) -> list[dict[str, Any]]:
    found: list[tuple[float, dict[str, Any]]] = []
    for path in sorted(folder.glob(f"*_{kind}.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        rate, chip = math.log2(result["cpu"]["gigaoperations_per_second"][dtype]), result["machine"]["processor"]
        others = [one for one in found if one[1]["machine"]["processor"] != chip or abs(one[0] - rate) > 0.5]
        found = [*others, (rate, result)]
    return [result for _, result in sorted(found, key=lambda one: -one[0])]


def filled(page: str, folder: Path = RESULTS) -> str:
    """The page with its sections anew from the results in a folder.

    Raises:
        ValueError: a marker is missing.
    """
    for kind in KINDS:
        text = section(kind, *_newest(kind, folder))
        page = fill(page, f"{kind} results", f"end of {kind} results", text)
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for found in _newest("growth", RESULTS):
        save_figure(growth_figure(found), found["kind"])
