"""Data files with cells or bytes changed: rows that were not touched are used, and all others are accounted for."""

import copy
import csv
import json
import os
import random
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzz.cases import Case, Place, damaged, mutated, refusal
from tests.tiny_runs import byte_tokenizer
from toolkit.data import TASKS
from toolkit.data.rows import Split

_SOURCES = {  # by task, with the kind of rows that it makes
    "prompts": ("prompts", ("data/queries.jsonl", "data/messages.jsonl")),
    "preferences": ("pairs", ("data/preferences_example.jsonl",)),
    "demonstrations": ("demonstrations", ("data/demonstrations.jsonl",)),
    "labelled": ("labelled", ("data/labelled.jsonl",)),
    "rated": ("rated", ("rated.jsonl",)),
}


def file_case(place: Place, draw: random.Random) -> Case:
    task = draw.choice(list(_SOURCES))
    kind, names = _SOURCES[task]
    rows = [json.loads(line) for line in (place.folder / draw.choice(names)).read_text(encoding="utf-8").splitlines()]
    folder, ending = Path(tempfile.mkdtemp(dir=place.folder)), draw.choice(["jsonl", "json", "parquet", "csv", "txt"])
    path, touched, changed, what = folder / f"fuzz.{ending}", set(), copy.deepcopy(rows), ""
    way = draw.choice(["cells", "cells", "cells", "bytes", "file"])
    for _ in range(draw.choice([1, 1, 2, 5]) if way == "cells" else 0):
        number = draw.randrange(len(rows))
        changed[number], how = mutated(draw, changed[number])
        touched.add(number + 1)
        what += f"row {number + 1}, {how}; "
    try:
        _write(path, changed)
    except Exception:  # that kind of file cannot say it
        way, path = "bytes", folder / "fuzz.jsonl"
        _write(path, rows)
    if way == "bytes":
        path.write_bytes(damaged(draw, path.read_bytes()))
    what += _odd_file(draw, path) if way == "file" else way
    settings: dict[str, Any] = {"chat": draw.random() < 0.7} | ({} if task == "rated" else {"validation_size": 2})
    read: list[Split] = []

    def encode() -> None:
        made = TASKS[task](byte_tokenizer(), str(path), **settings)
        read.extend(made._splits.values())
        made.dataset(kind, "train")

    def check() -> str:
        shutil.rmtree(folder, ignore_errors=True)
        if way != "cells" or ending not in ("jsonl", "json") or not read:
            return ""
        count = sum(len(part.rows) + len(part.left_out) for part in read)
        left = {place for part in read for place, _ in part.left_out}
        left_out = {int(found[1]) for where in left if (found := re.search(r"(?:line|row) (\d+)$", where))}
        if count != len(rows):
            return f"{count} of {len(rows)} rows accounted for"
        lost = left_out - touched
        return f"rows {lost} left out, which are as they were" if lost and settings["chat"] else ""

    return Case(f"{task} {path.name}: {what[:300]}", lambda: refusal(encode), (path.name, folder.name), "", check)


def _write(path: Path, rows: list[Any]) -> None:
    """Rows as a file of the kind that its name says."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, default=str), encoding="utf-8")
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".txt":
        path.write_text("".join(f"{next(iter(row.values()), '')}\n" for row in rows), encoding="utf-8")
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def _odd_file(draw: random.Random, path: Path) -> str:
    """Something else in place of a file; in words."""
    way, raw = draw.choice(["folder", "fifo", "loop", "gone", "other kind", "null device"]), path.read_bytes()
    path.unlink()
    if way == "folder":
        path.mkdir()
    elif way == "fifo":
        os.mkfifo(path)
    elif way in ("loop", "null device"):
        path.symlink_to(path if way == "loop" else "/dev/null")
    elif way == "other kind":
        path.write_bytes(b"PAR1" + raw + b"PAR1")
    return way
