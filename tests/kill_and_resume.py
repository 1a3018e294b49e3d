"""Kill PPO runs at random moments, resume them, and compare them with one that was never stopped.

    python -m tests.kill_and_resume --trials 50

Each trial is a run of the recipe `doubling` (small, a checkpoint at every update) in a process of its own, killed by
SIGKILL: every second one at a random time, the others while a checkpoint is being written. It is resumed, killed
again or not, and resumed to its end. Its adapters, optimizer, random states and metrics must then be those of the
uninterrupted run, bit for bit. Prints one line a trial and ends with 1 if one differs.

    python -m tests.kill_and_resume --trials 20 --processes 2

Here one of several processes, any of them, is killed at a random time, their start included. The command must end
within a minute with one message that names it, each checkpoint must be whole, and the resumed run end as the others.

    python -m tests.kill_and_resume --trials 50 --overwrite

Here each trial overwrites the finished run, is killed at a random time, and started once more without a word of what to
do: the finished stage must be there, with its bits, be it the old one or the new one.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests import FSYNC
from tests.several import context
from toolkit.checkpoints import checkpoint_folders, problem_of

UPDATES = 8
KILLS = 4  # of one of several processes, in a run
SMALL = (
    "sft.max_steps=30", "reward.max_steps=10", "data.test_size=16", "data.validation_size=16",
    f"ppo.max_steps={UPDATES}", "ppo.per_device_train_batch_size=16", "ppo.num_ppo_epochs=2",
    "ppo.save_steps=1", "ppo.eval_steps=1", "ppo.logging_steps=1", "ppo.save_total_limit=2",
)  # fmt: skip
TIMING = ("samples_per_second", "rollout_seconds", "score_seconds", "step_seconds")


def run(folder: Path, name: str, stage: str, way: dict[str, bool], *overrides: str) -> None:
    """One process of a trial: what `toolkit STAGE doubling … --run name [--resume]` does."""
    from toolkit.recipes import load
    from toolkit.runs import stages

    os.fsync = FSYNC  # while which a write is killed most often
    recipe = load("doubling", *SMALL, *overrides, run=name, runs_dir=folder)
    with (folder / f"{name}.log").open("a", encoding="utf-8") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
        stages.run(recipe, stage, **way)


class Runs:
    """Runs in one folder, each process forked from a server that has imported the toolkit once."""

    def __init__(self, folder: Path, *overrides: str):
        self.folder, self.overrides = folder, overrides
        self.context = context()
        self.seconds = 0.0

    def start(self, name: str, stage: str = "ppo", **way: bool) -> multiprocessing.process.BaseProcess:
        process = self.context.Process(target=run, args=(self.folder, name, stage, way, *self.overrides))
        process.start()
        return process

    def finish(self, name: str, stage: str = "ppo", **way: bool) -> None:
        process = self.start(name, stage, **way)
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"{name} failed:\n{(self.folder / f'{name}.log').read_text()[-4000:]}")

    def reference(self) -> None:
        """The run that is never stopped; the trials share its earlier stages."""
        for stage in ("sft", "reward"):
            self.finish("whole", stage)
        process = self.start("whole")
        before = self.folder / "whole" / "ppo" / "before.json"
        while not before.exists() and process.is_alive():
            time.sleep(0.001)
        began = time.perf_counter()
        process.join()
        self.seconds = time.perf_counter() - began

    def kill(self, name: str, dice: random.Random, *, writing: bool, resume: bool) -> str:
        """Start or resume a run and kill it. Returns what it was doing."""
        stage = self.folder / name / "ppo"
        process = self.start(name, resume=resume)
        step, moment = dice.randrange(1, UPDATES), dice.uniform(0, self.seconds)
        deadline: float | None = None
        while process.is_alive():
            if deadline is None and writing and any(_partial(stage, step)):
                deadline = time.perf_counter() + dice.uniform(0, 0.01)
            elif deadline is None and not writing and (stage / "before.json").exists():
                deadline = time.perf_counter() + moment
            if deadline is not None and time.perf_counter() >= deadline:
                os.kill(process.pid, signal.SIGKILL)
                break
            time.sleep(0.0002)
        process.join()
        if process.exitcode == 0:
            return "finished first"
        return "writing a checkpoint" if any(_partial(stage, 1)) else "training"


def _partial(stage: Path, least: int) -> list[Path]:
    return [path for path in stage.glob("checkpoint-*.partial") if _step(path) >= least]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1].split(".")[0])


def _newest(stage: Path) -> int:
    """The step of the newest checkpoint, be it whole or not; 0 where none is."""
    return max(map(_step, stage.glob("checkpoint-*")), default=0)


def outcome(stage: Path) -> dict[str, object]:
    """All that must be equal: files by their bytes, and metrics without the seconds that they took."""
    last = stage / f"checkpoint-{UPDATES}"
    found: dict[str, object] = {
        str(path.relative_to(stage)): path.read_bytes()
        for folder in (stage / "policy", stage / "value", last / "policy", last / "value")
        for path in sorted(folder.glob("*.safetensors"))
    }
    found["state.safetensors"] = (last / "state.safetensors").read_bytes()
    found["metrics"] = [
        {key: value for key, value in json.loads(line).items() if key not in TIMING}
        for line in (stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    result = json.loads((stage / "result.json").read_text(encoding="utf-8"))
    return {**found, "before": result["before"], "after": result["after"]}


def trials(number: int, seed: int, folder: Path, *overrides: str) -> int:
    """Run the trials, with further settings if they are given; returns how many ended as the uninterrupted run."""
    dice, runs = random.Random(seed), Runs(folder, *overrides)
    runs.reference()
    expected = outcome(folder / "whole" / "ppo")
    equal = 0
    for trial in range(number):
        name = f"trial-{trial}"
        shutil.copytree(folder / "whole", folder / name, ignore=shutil.ignore_patterns("ppo"))
        doing = [runs.kill(name, dice, writing=trial % 2 == 1, resume=False)]
        while dice.random() < 0.4:
            doing.append(runs.kill(name, dice, writing=dice.random() < 0.5, resume=True))
        runs.finish(name, resume=True)
        found = outcome(folder / name / "ppo")
        different = [key for key in expected if found.get(key) != expected[key]]
        equal += not different
        verdict = f"differs in {', '.join(different)}" if different else "bit-identical"
        print(f"{name}: killed while {', then while '.join(doing)}: {verdict}", flush=True)
        shutil.rmtree(folder / name)
    print(f"{equal} of {number} bit-identical", flush=True)
    return equal


def overwrites(number: int, seed: int, folder: Path) -> int:
    """Overwrite a finished run, kill that, and start again; returns how many then had the whole stage."""
    dice, runs = random.Random(seed), Runs(folder)
    runs.reference()
    expected, whole = outcome(folder / "whole" / "ppo"), 0
    began = time.perf_counter()
    runs.finish("whole", overwrite=True)
    seconds = time.perf_counter() - began
    for trial in range(number):
        name = f"trial-{trial}"
        shutil.copytree(folder / "whole", folder / name)
        old = (folder / name / "ppo" / "result.json").read_bytes()
        process = runs.start(name, overwrite=True)
        process.join(dice.uniform(0, seconds))
        process.kill()
        process.join()
        runs.finish(name)
        found = outcome(folder / name / "ppo")
        different = [key for key in expected if found.get(key) != expected[key]]
        left = [path.name for path in (folder / name).glob(".*") if path.name != ".unfinished"]
        which = "old" if (folder / name / "ppo" / "result.json").read_bytes() == old else "new"
        whole += not different and not left
        print(f"{name}: the {which} one, {f'but for {different} {left}' if different or left else 'whole'}", flush=True)
        shutil.rmtree(folder / name)
    print(f"{whole} of {number} whole", flush=True)
    return whole


def command(folder: Path, name: str, processes: int, *words: str) -> list[str]:
    asked = ["ppo", "doubling", *SMALL, "--run", name, "--runs-dir", str(folder), "--processes", str(processes)]
    return [sys.executable, "-m", "toolkit", *asked, *words]


def kill_one(words: list[str], log: Path, stage: Path, dice: random.Random, rank: int) -> tuple[float | None, int]:
    """Start a command of several processes and kill one at a random time: of its start, or once a checkpoint is begun;
    the seconds until all had ended, and its exit code. None where the command ended first."""
    with log.open("w", encoding="utf-8") as said:
        launcher = psutil.Popen(words, stdout=said, stderr=said)
    step = dice.choice([0, *range(_newest(stage) + 1, UPDATES + 1)])
    while launcher.poll() is None and _newest(stage) < step:
        time.sleep(0.001)
    time.sleep(dice.uniform(0, 2.0 if step else 20.0))
    victim, children = None, []
    while launcher.poll() is None and victim is None:  # the first ones may not have been started yet
        with suppress(psutil.Error):  # or may have ended by themselves just now
            children = launcher.children()
            victim = next((child for child in children if child.environ().get("RANK") == str(rank)), None)
        time.sleep(0.01)
    if victim is None:
        return None, launcher.wait()
    with suppress(psutil.Error):
        victim.kill()
    began = time.perf_counter()
    code = launcher.wait()
    psutil.wait_procs(children)
    return time.perf_counter() - began, code


def trials_of_several(number: int, seed: int, folder: Path, processes: int) -> int:
    """Kill one of several processes so many times, `KILLS` times a run that is then resumed to its end; returns how
    many kills went as they must."""
    dice, log = random.Random(seed), folder / "log"
    for stage in ("sft", "reward"):  # of one process, and shared
        Runs(folder).finish("whole", stage)
    shutil.copytree(folder / "whole", folder / "several")
    subprocess.run(command(folder, "several", processes), check=True, capture_output=True)
    expected, good, longest = outcome(folder / "several" / "ppo"), 0, 0.0
    for trial in range(0, number, KILLS):
        name, fine, resume = f"trial-{trial // KILLS}", 0, []
        shutil.copytree(folder / "whole", folder / name)
        stage, kills = folder / name / "ppo", min(KILLS, number - trial)
        for _ in range(kills):
            rank = dice.randrange(processes)
            took, code = kill_one(command(folder, name, processes, *resume), log, stage, dice, rank)
            checkpoints = checkpoint_folders(stage) if stage.is_dir() else []
            wrong = [f"{path.name}: {problem}" for path in checkpoints if (problem := problem_of(path))]
            if took is not None:
                longest = max(longest, took)
                messages = [line for line in log.read_text(encoding="utf-8").splitlines() if "Error" in line]
                named = f"ToolkitError: process {rank} of {processes} was killed by SIGKILL"
                wrong += ["hung"] * (took > 60) + [f"ended with {code}"] * (code != 1)
                wrong += [] if len(messages) == 1 and messages[0].startswith(named) else [f"said {messages}"]
            fine, resume = fine + (not wrong), ["--resume"]
            killed = f"process {rank} killed, all ended {took or 0.0:.1f} s later"
            at = "finished first" if took is None else killed
            names = [path.name for path in checkpoints]
            print(f"{name}: {at}; left {names}: {'; '.join(wrong) or 'whole'}", flush=True)
        with log.open("w", encoding="utf-8") as said:
            again = subprocess.run(command(folder, name, processes, "--resume"), stdout=said, stderr=said, check=False)
        if again.returncode:
            verdict = f"resuming ended with {again.returncode}: {log.read_text(encoding='utf-8')[-2000:]}"
        else:
            found = outcome(stage)
            different = [key for key in expected if found.get(key) != expected[key]]
            verdict = f"differs in {', '.join(different)}" if different else "bit-identical"
        good += fine if verdict == "bit-identical" else 0
        print(f"{name}: {verdict}", flush=True)
        shutil.rmtree(folder / name)
    print(f"{good} of {number} as they must be; the longest end took {longest:.1f} s", flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = (arguments.trials, arguments.seed, Path(folder))
        if arguments.processes > 1:
            equal = trials_of_several(*given, arguments.processes)
        else:
            equal = (overwrites if arguments.overwrite else trials)(*given)
    raise SystemExit(0 if equal == arguments.trials else 1)


if __name__ == "__main__":
    main()
