"""Runs and bases of which a file is damaged. Files of the user's stay, and what was sealed is refused."""

import contextlib
import hashlib
import json
import math
import os
import random
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.fuzz.cases import Case, Place, command, damaged, mutated
from tests.tiny_runs import stages_here

_READ = ("runs", "compare", "check", "eval", "generate", "export")


def folder_case(place: Place, draw: random.Random) -> Case:
    return _base_case(place, draw) if draw.random() < 0.3 else _run_case(place, draw)


def _base_case(place: Place, draw: random.Random) -> Case:
    base = place.folder / "base"
    shutil.rmtree(base, ignore_errors=True)
    shutil.copytree(place.folder / "model", base)
    path = draw.choice(sorted(base.iterdir()))
    what = f"check {path.name}: {_damage(draw, path)}"[:300]
    return Case(what, lambda: command("check", "chat.yaml", "base.model=base"), ("base",))


def _run_case(place: Place, draw: random.Random) -> Case:
    origin, run = draw.choice(["chat", "chat", "by_q"]), place.folder / "runs" / "case"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(place.folder / "runs" / origin, run)
    folders = [run, *(path for path in sorted(run.rglob("*")) if path.is_dir())]
    path = draw.choice([path for path in sorted(run.rglob("*")) if path.is_file()])
    what = f"{origin}/{path.relative_to(run)}: {_damage(draw, path)}"
    policy = run / ("q/q" if origin == "by_q" else "ppo/policy")
    must = path.parent == policy and path.suffix in (".json", ".safetensors")
    if draw.random() < 0.7:
        _reseal(path, run)
        what, must = f"{what}, resealed", False
    theirs = [draw.choice(folders) / name for name in draw.sample(["notes.md", "judge.py", "my.safetensors"], 2)]
    theirs = [one for one in theirs if one.parent.is_dir()]
    for one in theirs:
        one.write_text("mine")
    last, recipe = "q" if origin == "by_q" else "ppo", "runs/case/recipe.yaml"
    commands = {
        "runs": ["runs"], "compare": ["compare", "case", origin, "--output", "page.html"], "check": ["check", recipe],
        "eval": ["eval", "case", "data.max_validation_rows=2"], "export": ["export", "case", f"out-{draw.random()}"],
        "generate": ["generate", "case", "a", "--max-new-tokens", "2"],
        "resume": [last, recipe, "--resume"], "overwrite": [last, recipe, "--overwrite"],
    }  # fmt: skip
    name = draw.choice([*commands, "generate", "export", "eval"])
    before = _digests(run)

    def act() -> tuple[int, str]:
        with stages_here():
            return command(*commands[name])

    def check() -> str:
        gone = [str(one) for one in theirs if not one.is_file() or one.read_text() != "mine"]
        after = _digests(run)
        changed = [one for one in before if after.get(one) != before[one] and not one.startswith("eval/")]
        changed = changed if name in _READ else []
        return f"{gone or changed} gone or changed" if gone or changed else ""

    must_be = "fine" if name == "runs" else "refused" if must and name in ("eval", "generate", "export") else ""
    names = (path.name, str(path.parent.relative_to(place.folder)), recipe, '"case"')
    return Case(f"{name} {what[:300]}", act, names, must_be, check)


def _digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _damage(draw: random.Random, path: Path) -> str:
    """Something wrong with a file of a run; in words."""
    way = draw.choice(["bytes", "content", "content", "content", "gone", "folder", "pipe"])
    if way in ("gone", "folder", "pipe"):
        path.unlink()
        {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "gone": lambda: None}[way]()
        return way
    raw = path.read_bytes()
    if way == "content" and path.suffix == ".safetensors":
        return _damaged_header(draw, path, raw) if draw.random() < 0.5 else _odd_tensor(draw, path)
    if way == "content" and path.suffix == ".json":
        value, what = mutated(draw, json.loads(raw))
        path.write_text(json.dumps(value, default=str), encoding="utf-8")
    elif way == "content" and path.suffix == ".yaml":
        value, what = mutated(draw, yaml.safe_load(raw))
        path.write_text(yaml.safe_dump(value), encoding="utf-8")
    elif way == "content" and path.suffix == ".jsonl" and raw:
        rows, what = mutated(draw, [json.loads(line) for line in raw.decode().split("\n")[:-1]])
        rows = rows if isinstance(rows, list) else [rows]
        path.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8")
    else:
        what = "bytes"
        path.write_bytes(damaged(draw, raw))
    return what


def _damaged_header(draw: random.Random, path: Path, raw: bytes) -> str:
    size = 8 + int.from_bytes(raw[:8], "little")
    header, what = mutated(draw, json.loads(raw[8:size]))
    text = json.dumps(header, default=str).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[size:])
    return f"header, {what}"


def _odd_tensor(draw: random.Random, path: Path) -> str:
    """Another tensor in place of one, or by another name."""
    state: dict[str, Any] = load_file(path)
    name = draw.choice(sorted(state))
    others = {
        "nan": lambda x: x.float() * math.nan, "flat": lambda x: x.flatten(), "float16": lambda x: x.half(),
        "int64": lambda x: x.long(), "bool": lambda x: x.bool(), "empty": lambda x: x.flatten()[:0],
        "scalar": lambda x: torch.zeros(()), "deeper": lambda x: x.unsqueeze(0), "negative": lambda x: -x.float(),
        "float8": lambda x: x.to(torch.float8_e5m2), "complex": lambda x: x.to(torch.complex64), "gone": None,
    }  # fmt: skip
    way, new = draw.choice(list(others)), draw.choice([name, name, "bogus", f"{name}x", "a.score.weight"])
    tensor = state.pop(name)
    if others[way] is not None:
        state[new] = others[way](tensor).contiguous()
    save_file(state, path, metadata={"format": "pt"})
    return f"tensor {name}: {way}, as {new}"


def _reseal(path: Path, run: Path) -> None:
    """Let the manifests above a damaged file agree with it: what they find out is then left to whoever reads it."""
    for manifest in run.rglob("manifest.json") if path.is_file() else ():  # a pipe would be read for ever
        with contextlib.suppress(ValueError, TypeError, KeyError, OSError):
            listed = json.loads(manifest.read_text())
            entry = listed["files"][path.relative_to(manifest.parent).as_posix()]
            entry |= {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            manifest.write_text(json.dumps(listed))
