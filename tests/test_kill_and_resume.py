import sys

import pytest

from tests.kill_and_resume import trials


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL and no fork server")
def test_runs_that_are_killed_and_resumed_end_as_the_others(tmp_path, capsys):
    """Two trials, both killed in a write, one of them after a kill at another time; by hand there are fifty."""
    short = ("sft.max_steps=2", "reward.max_steps=2")  # which only have to be there
    assert trials(2, 2, tmp_path, *short) == 2, capsys.readouterr().out
