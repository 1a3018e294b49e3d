"""A part of a benchmark in a process of its own: its peak memory is that of nothing else."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError, KilledError

_ROOT = Path(__file__).parents[1]


def run_module(module: str, *words: object, what: str) -> dict[str, Any]:
    """Run a module of the benchmarks on the CPU, offline, in the repository's folder.

    Args:
        module: its name; it writes JSON to the file of its option `--output`, or nothing.
        words: its further arguments.
        what: how messages call it.

    Returns:
        What it wrote; {} for nothing.

    Raises:
        KilledError: the system killed it.
        BenchmarkError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "answer.json"
        done = subprocess.run(
            [sys.executable, "-m", module, *map(str, words), "--output", str(output)],
            cwd=_ROOT,
            # A machine's GPU stays out of it, and no step asks the hub for anything.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
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
