"""The runs that there are, and the machine that they are on."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.command import IN_SHELL, RunsDir, command, complete_run
from toolkit.errors import printable


@command("toolkit runs --runs-dir /data/runs", name="runs")
def list_runs(runs_dir: RunsDir = Path("runs")) -> None:
    """List all runs: how far they are, their last figures, and the command that goes on."""
    from toolkit.runs.listing import all_runs

    found = list(all_runs(runs_dir))
    if not found:
        holds = "holds no run yet" if runs_dir.is_dir() else "does not exist"
        print(f"{runs_dir} {holds}: toolkit ppo makes one.")
    for run in found:
        print(printable(run.name))
        for stage in run.stages:
            print(printable(f"  {stage.stage:<8}{stage.state:<10}{stage.where:<28} {stage.figures}").rstrip())
        if run.told:
            print(f"  {run.told.text(IN_SHELL)}")
        if run.command:
            print(printable(f"  {shlex.join(run.command)}"))


@command("toolkit compare doubling more-kl")
def compare(
    runs: Annotated[list[str], typer.Argument(help="Names of runs, or their folders.", autocompletion=complete_run)],
    stage: Annotated[
        str | None, typer.Option(help="Stage to compare; the last that all runs have begun if not given.")
    ] = None,
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("comparison.html"),
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write one HTML page about several runs: curves, figures, settings that differ, answers to the same prompts."""
    from toolkit.runs import comparison

    print(f"written: {comparison.compare(runs, output, runs_dir=runs_dir, stage=stage)}")


@command("toolkit env", name="env")
def show_environment() -> None:
    """Print versions and machine, for a bug report."""
    from toolkit.reports import environment

    for name, value in environment().items():
        print(printable(f"{name:<22}{value}"))
