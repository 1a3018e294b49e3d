import io

import pytest
from rich.console import Console

from benchmarks import reward_parity, reward_table
from tests.benchmarks.examples import scored_arm


def test_the_table_is_made_from_the_result(job, tmp_path):
    console = Console(file=io.StringIO())
    output = tmp_path / "2026-01-01_reward.json"
    reward_parity.run(
        job, seeds=[0], arms=("trl-bf16", "ours-nf4"), output=output, console=console,
        step=lambda arm, one: {**scored_arm(arm, one), "memory_gb": {"resident": 1.5}},
    )  # fmt: skip
    page = "a\n<!-- reward results -->\nold\n<!-- end of reward results -->\nb"
    found = reward_table.filled(page, tmp_path)
    assert "| trl-bf16 | 0 | 0.500 | 0.000 | 1 | 1.50 |" in found and "old" not in found  # right, wrong and a tie
    assert "| ours-nf4 | 0 | 0.667 | 0.100 | 1 | 1.50 |" in found and "McNemar p 1.00" in found
    assert reward_table.filled(page, tmp_path / "none").splitlines()[2] == "No result yet."
    with pytest.raises(ValueError, match="lacks the markers"):
        reward_table.filled("", tmp_path)
