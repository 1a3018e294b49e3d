"""The table of `docs/reward_stage.md`, made from the newest result of `benchmarks.reward_parity`.

python -m benchmarks.reward_table
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.paired import correctness
from benchmarks.records import DOCS, RESULTS, fill, markdown, newest, where
from benchmarks.reward_parity import verdict

PAGE = DOCS / "reward_stage.md"


def _row(arm: Mapping[str, Any]) -> list[str]:
    margins = torch.tensor(arm["margins"])
    return [
        arm["arm"],
        str(arm["seed"]),
        f"{correctness(margins).mean():.3f}",
        f"{margins.mean():.3f}",
        f"{arm['seconds']:.0f}",
        f"{arm['memory_gb']['resident']:.2f}",
    ]


def section(result: Mapping[str, Any] | None) -> str:
    """What stands between the markers."""
    if result is None or not result["arms"]:
        return "No result yet."
    settings, arms = result["settings"], sorted(result["arms"], key=lambda arm: (arm["seed"], arm["arm"]))
    about = (
        f"{where(result)} Model: {result['model']['architecture']} of {result['model']['parameters'] / 1e6:.1f} "
        f"million parameters. {settings['pairs']} training pairs, {settings['batch_size']} a step, and "
        f"{len(arms[0]['margins'])} held-out pairs."
    )
    columns = ("arm", "seed", "accuracy", "mean margin", "training s", "peak GB")
    verdicts = "\n".join(
        f"- seeds {', '.join(map(str, found['seeds']))}: {verdict(found)}; McNemar p "
        f"{', '.join(format(one['p'], '.2f') for one in found['mcnemar'])}"
        for found in result["comparisons"]
    )
    return "\n\n".join([about, markdown(columns, [_row(arm) for arm in arms]), verdicts])


def filled(page: str, folder: Path = RESULTS) -> str:
    """The page with its table anew from the results in a folder.

    Raises:
        ValueError: a marker is missing.
    """
    return fill(page, "reward results", "end of reward results", section(newest("reward", folder)))


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
