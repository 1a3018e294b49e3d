"""Results as files, how they get into a page of the docs, and what is said on the way."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.disk import read_object
from toolkit.reports import machine, versions, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"


def say(text: str) -> None:
    """Tell whoever watches a benchmark, beside what it prints."""
    print(text, file=sys.stderr, flush=True)


def new_result(kind: str, **values: Any) -> dict[str, Any]:
    """A result of today on this machine and by this code, with these values; of which commit, where git is there."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    found = {"kind": kind, "date": now, "machine": machine(), "versions": versions(), "sources": _sources()}
    with suppress(OSError, subprocess.CalledProcessError):
        changed = _git("status", "--porcelain", "--", "toolkit", "recipes", "benchmarks/*.py")
        found["commit"] = _git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    return found | values


def _sources() -> str:
    """A digest of code and recipes: a machine that is lent has no git, and what is not committed no number."""
    kinds = ("toolkit/**/*.py", "benchmarks/*.py", "recipes/*.yaml")
    files = sorted(path for kind in kinds for path in ROOT.glob(kind))
    return sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _git(*arguments: str) -> str:
    asked = ("git", "-C", str(ROOT), *arguments)
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def result_path(result: Mapping[str, Any], folder: Path) -> Path:
    """`<date>_<kind>.json`."""
    return folder / f"{result['date'][:10]}_{result['kind']}.json"


def write_result(result: dict[str, Any], folder: Path) -> Path:
    """Write a result in place of one of the same kind and day."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_json(result_path(result, folder), result)


def read_result(result: Mapping[str, Any], folder: Path) -> dict[str, Any] | None:
    """What stands where a result is to be written, or None."""
    return read_object(result_path(result, folder))


def add_result(result: dict[str, Any], folder: Path) -> Path:
    """Write a result of seeds, or of arms and their seeds, beside the others of one of the same kind and day, where
    that was run by the same code in the same way; else in its place."""
    before = read_result(result, folder) or {}
    if any(before.get(key) != result[key] for key in result.keys() - {"arms", "seeds", "date"}):
        return write_result(result, folder)
    if "seeds" in result:
        return write_result(result | {"seeds": before["seeds"] | result["seeds"]}, folder)
    arms = before["arms"] | {arm: before["arms"].get(arm, {}) | of for arm, of in result["arms"].items()}
    return write_result(result | {"arms": arms}, folder)


def newest(kind: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """The newest result of a kind, or None."""
    files = sorted(folder.glob(f"????-??-??_{kind}.json"))
    return read_object(files[-1]) if files else None


def _days(result: Mapping[str, Any]) -> str:
    """The day of a result; of one of stages those on which they ran, which may have been there before."""
    arms = result.get("arms")  # of `reward_parity` a list, whose arms have no days of their own
    seeds = [of for by_seed in arms.values() for of in by_seed.values()] if isinstance(arms, Mapping) else []
    days = sorted({of["date"][:10] for of in (*seeds, *result.get("seeds", {}).values()) if "date" in of})
    return " and ".join(days or [result["date"][:10]])


def where(result: Mapping[str, Any]) -> str:
    """Date, machine and versions of a result."""
    machine = result["machine"]
    gpu = f", {machine['gpu']} with {machine['gpu_memory_gb']:.0f} GB" if "gpu" in machine else ""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"{_days(result)}, {machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"{machine['memory_gb']:.0f} GB{gpu}; {versions}."
    )


def chip_and_day(result: Mapping[str, Any]) -> str:
    """Processor and date of a result."""
    return f"{result['machine']['processor']}, {_days(result)}."


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], *, texts: bool = False) -> str:
    """A table, its columns but the first aligned to the right, unless they are texts."""
    lines = [columns, ["---", *["---" if texts else "---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def folded(summary: str, *parts: str) -> str:
    """What a page shows when a reader asks for it; nothing where there is none."""
    text = "\n\n".join(filter(None, parts))
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>" if text else ""


def fill(page: str, begin: str, end: str, text: str) -> str:
    """A page with another text between two markers, which are HTML comments of these texts.

    Raises:
        ValueError: a marker is missing.
    """
    before, opening, rest = page.partition(f"<!-- {begin} -->\n")
    _, closing, after = rest.partition(f"<!-- {end} -->")
    if not opening or not closing:
        raise ValueError(f'the page lacks the markers "{begin}" and "{end}"')
    return f"{before}{opening}{text}\n{closing}{after}"


def fill_file(page: Path, begin: str, end: str, text: str) -> None:
    """`fill` a page where it lies."""
    page.write_text(fill(page.read_text(encoding="utf-8"), begin, end, text), encoding="utf-8")


def save_figure(figure: "Figure", name: str) -> None:
    """Write a figure of the docs, `docs/figures/<name>.svg`: the same bytes for the same figure."""
    import matplotlib  # not above: `gpu` reads this module on machines without it

    folder = DOCS / "figures"
    folder.mkdir(exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
