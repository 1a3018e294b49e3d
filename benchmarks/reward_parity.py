"""Our reward adapter on the NF4 base against plain `trl.RewardTrainer` on bf16, pair by pair.

    python -m benchmarks.reward_parity --model /path/to/SmolLM2-135M-Instruct \\
        --train pairs.jsonl --validation held_out.jsonl --seeds 0 1 2

Each arm of each seed is trained on the same pairs in the same order, in a process of its own, and then judges the same
held-out pairs. The result goes to `benchmarks/results/<date>_reward.json` after every arm, or to the file that
`--output` names; a file that is there already is gone on with, so that arms which are done are not run again. Without
`--output` the table of `docs/comparisons.md` is written anew in the end.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.errors import BenchmarkError
from benchmarks.paired import compare, correctness
from benchmarks.processes import run_module
from benchmarks.records import DOCS, RESULTS, fill_file, markdown, new_result, say, where
from benchmarks.reward_arms import ARMS, Job
from benchmarks.run import about_model
from toolkit.disk import read_object
from toolkit.errors import ToolkitError
from toolkit.reports import write_json

# Stated before any arm was run. Training on so few pairs lifts the accuracy some 10 points over a coin, so that an arm
# within 5 points has kept at least half of what training gives; and with some 300 held-out pairs and three seeds the
# interval of a difference is about 3 points to either side, so that a loss of the margin's size would be seen.
MARGIN = 0.05
# (first, second): what is compared with what.
COMPARISONS = (("ours-nf4", "trl-bf16"), ("ours-nf4-token-level", "ours-nf4"), ("ours-nf4-token-level", "trl-bf16"))

Step = Callable[[str, Job], dict[str, Any]]


def arm_in_process(arm: str, job: Job) -> dict[str, Any]:
    """Run one arm in a process of its own.

    Raises:
        BenchmarkError: it failed.
    """
    words = ("--arm", arm, "--job", json.dumps(asdict(job)))
    return run_module("benchmarks.reward_arms", *words, what=f"the arm {arm} of seed {job.seed}")


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def settings_of(job: Job) -> dict[str, Any]:
    """What decides an arm's result besides model and seed; files by their contents."""
    found = {name: value for name, value in asdict(job).items() if name not in ("model", "seed")}
    return {**found, "train": _digest(job.train), "validation": _digest(job.validation)}


def comparisons(arms: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every comparison for which some seeds have both of its `arms`, which are from `reward_arms.run_arm`."""
    margins = {(arm["arm"], arm["seed"]): arm["margins"] for arm in arms}
    found = []
    for first, second in COMPARISONS:
        seeds = [seed for name, seed in sorted(margins) if name == first and (second, seed) in margins]
        if seeds:
            pair = ([margins[name, seed] for seed in seeds] for name in (first, second))
            found.append({"first": first, "second": second, "seeds": seeds, **compare(*pair, margin=MARGIN)})
    return found


def resumed(path: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """The result at `path` to go on with, or `fresh` where there is none.

    Raises:
        BenchmarkError: that one is of another model, other pairs or other settings.
    """
    earlier = read_object(path)
    if earlier is None:
        return fresh
    same = ("model", "settings", "versions", "machine", "sources")
    other = [key for key in same if earlier.get(key) != fresh[key]]
    if other:
        raise BenchmarkError(f"{path} differs from this run in {' and '.join(other)}. Name another file with --output.")
    return earlier


def run(
    job: Job, *, seeds: Sequence[int], arms: Sequence[str], output: Path, step: Step = arm_in_process
) -> dict[str, Any]:
    """Run every arm of every seed that the result at `output` does not have yet; saved after each. `job` may be of any
    seed."""
    model = about_model(job.model)
    fresh = new_result("reward", model=model, settings=settings_of(job), arms=[], comparisons=[])
    result = resumed(output, fresh)
    done = {(arm["arm"], arm["seed"]) for arm in result["arms"]}
    for seed in seeds:
        for name in arms:
            if (name, seed) in done:
                continue
            found = step(name, replace(job, seed=seed))
            right = sum(margin > 0 for margin in found["margins"]) / len(found["margins"])
            say(f"seed {seed} {name}: accuracy {right:.3f}, {found['seconds']:.0f} s")
            result["arms"].append(found)
            result["comparisons"] = comparisons(result["arms"])
            output.parent.mkdir(parents=True, exist_ok=True)
            write_json(output, result)
    return result


def verdict(found: Mapping[str, Any]) -> str:
    """A comparison in one sentence."""
    accuracy, loss = found["accuracy"], found["log_loss"]
    (low, high), (loss_low, loss_high) = accuracy["interval"], loss["interval"]
    word = "non-inferior" if found["non_inferior"] else "not shown to be non-inferior"
    return (
        f"{found['first']} against {found['second']}: accuracy {accuracy['first']:.3f} against "
        f"{accuracy['second']:.3f}, difference {accuracy['difference']:+.3f} ({low:+.3f} to {high:+.3f}), {word} by a "
        f"margin of {found['margin']:.2f}; log-loss {loss['difference']:+.4f} ({loss_low:+.4f} to {loss_high:+.4f})"
    )


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


def table(result: Mapping[str, Any]) -> str:
    """What stands between the markers of `docs/comparisons.md`."""
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


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a chat checkpoint, such as SmolLM2-135M-Instruct")
    parser.add_argument("--train", required=True, help="file of pairs; those that are not trained on are held out")
    parser.add_argument("--validation", required=True, help="file of held-out pairs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--output", type=Path, help="file of the result; one that is there is gone on with")
    args = parser.parse_args()
    # Arms run in the repository's folder.
    job = Job(_absolute(args.model), _absolute(args.train), _absolute(args.validation), seed=args.seeds[0])
    output = args.output or RESULTS / f"{datetime.now(UTC):%Y-%m-%d}_reward.json"
    try:
        result = run(job, seeds=args.seeds, arms=args.arms, output=output)
    except ToolkitError as error:
        say(f"{type(error).__name__}: {error}")
        return 1
    if args.output is None:
        fill_file(DOCS / "comparisons.md", "reward: made by benchmarks.reward_parity", "end of reward", table(result))
    for found in result["comparisons"]:
        print(verdict(found))
    say(f"result: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
