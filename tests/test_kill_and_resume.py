import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL and no fork server")
def test_runs_that_are_killed_and_resumed_end_as_the_others():
    """Four trials, two of them killed in a write; `python -m tests.kill_and_resume` does fifty."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kill_and_resume", "--trials", "4"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "4 of 4 bit-identical" in done.stdout, done.stdout + done.stderr[-4000:]
