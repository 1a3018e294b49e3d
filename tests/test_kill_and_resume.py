import sys

import pytest

from tests.kill_and_resume import trials


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL and no fork server")
def test_runs_that_are_killed_and_resumed_end_as_the_others(tmp_path, capsys):
    """Two trials, by these dice one killed after a third and then in a write, the other in a write; by hand fifty."""
    short = ("base.config.n_layer=1", "sft.max_steps=2", "reward.max_steps=2")  # which only have to be there
    equal, said = trials(2, 1349, tmp_path, *short), capsys.readouterr().out
    assert equal == 2 and "killed while finished first" not in said, said
