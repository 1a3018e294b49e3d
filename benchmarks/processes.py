"""A part of a benchmark in a process of its own: its peak memory is that of nothing else."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError, KilledError

_ROOT = Path(__file__).parents[1]


def python_of(environment: str) -> Path:
    """The Python of an environment, by its folder or by its own path.

    Raises:
        BenchmarkError: there is none.
    """
    # Not resolved: the Python of a virtual environment is a link to another, which knows nothing of it.
    place = Path(environment).expanduser().absolute()
    inside = (place, place / "bin" / "python", place / "Scripts" / "python.exe")
    found = next((path for path in inside if path.is_file()), None)
    if found is None:
        raise BenchmarkError(f"{environment} is no environment: it has no bin/python.")
    return found


def run_module(
    module: str,
    *words: object,
    what: str,
    python: Path | None = None,
    variables: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Run a module of the benchmarks on the CPU, offline, in the repository's folder.

    Args:
        module: its name; it writes JSON to the file of its option `--output`, or nothing.
        words: its further arguments.
        what: how messages call it.
        python: of another environment than this one.
        variables: of its environment, where they are not set already.

    Returns:
        What it wrote; {} for nothing.

    Raises:
        KilledError: the system killed it.
        BenchmarkError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "answer.json"
        done = subprocess.run(
            [str(python or sys.executable), "-m", module, *map(str, words), "--output", str(output)],
            cwd=_ROOT,
            # A machine's GPU stays out of it, and no step asks the hub for anything.
            env={
                **variables,
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == -signal.SIGKILL:
            raise KilledError(f"{what} was killed, as where memory runs out.")
        if done.returncode != 0:
            said = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing was said"]
            raise BenchmarkError(f"{what} failed: {said[-1].strip()}")
        return json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {}
