"""`result.json`: what a stage reached, on what, with which versions."""

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

RESULT_FILE = "result.json"
_PACKAGES = ("ppo-lora-toolkit", "torch", "transformers", "trl", "peft", "bitsandbytes", "datasets", "accelerate")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a source tree that is not installed
            found[name] = "not installed"
    return found


def _peak_resident_bytes() -> int:
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # Unix alone has it

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kibibytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_memory_gb() -> dict[str, float]:
    """Peak memory of this process in GB (10⁹ bytes): `resident`, and `gpu` where there is one."""
    peak = {"resident": _peak_resident_bytes() / 1e9}
    if torch.cuda.is_available():
        peak["gpu"] = torch.cuda.max_memory_allocated() / 1e9
    return {key: round(value, 3) for key, value in peak.items()}


def write_json(path: Path, value: dict[str, Any]) -> Path:
    """Write a JSON file: aside first, so that half a file never stands there."""
    aside = path.with_name(f"{path.name}.partial")
    aside.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    aside.replace(path)
    return path


def read_json(path: Path) -> dict[str, Any] | None:
    """What `write_json` wrote, or None where there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def write_result(folder: Path, result: dict[str, Any]) -> Path:
    """Write the file that marks a stage as finished."""
    return write_json(folder / RESULT_FILE, result)


def read_result(folder: Path) -> dict[str, Any] | None:
    """What a finished stage wrote, or None where it has not finished."""
    return read_json(folder / RESULT_FILE)
