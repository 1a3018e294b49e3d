"""What a recipe is, before anything runs."""

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.command import IN_SHELL, Overrides, RecipeName, Run, RunsDir, command


@command("toolkit recipes", name="recipes", loads=False)
def list_recipes() -> None:
    """List the shipped recipes."""
    from toolkit.spec.find import about
    from toolkit.spec.shipped import names

    width = max(map(len, names()))
    for name in names():
        print(f"{name:{width}}  {about(name)}")


@command("toolkit check llama3_8b_lora base.model=/models/Llama-3.1-8B-Instruct")
def check(
    recipe: RecipeName = "doubling", overrides: Overrides = None, run: Run = None, runs_dir: RunsDir = Path("runs")
) -> None:
    """Check a recipe with its files, columns and adapters in seconds, without loading weights."""
    from toolkit import recipes
    from toolkit.spec.plan import by_trl

    loaded = recipes.load(recipe, *(overrides or ()), run=run, runs_dir=runs_dir)
    report = recipes.check(loaded)
    print(report.text(IN_SHELL))
    report.raise_problems()
    if "ppo" in loaded.plan.stages and not by_trl(loaded.values):
        for label, text in recipes.plan(loaded, notes=False).summary():
            print(f"{label:<10} {text}")


@command("toolkit plan llama3_8b_lora_fast base.model=/models/Llama-3.1-8B-Instruct --gpu 4090")
def plan(
    recipe: RecipeName = "doubling",
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="A GPU, e.g. H100 or 4090, or its memory, e.g. 24GB; this machine if not given.")
    ] = None,
    run: Run = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Memory and time of a recipe's PPO by phase, on a GPU or this machine: in seconds, without loading weights."""
    from toolkit import recipes

    loaded = recipes.load(recipe, *(overrides or ()), run=run, runs_dir=runs_dir)
    print(recipes.plan(loaded, gpu).text(IN_SHELL))


@command("toolkit show llama3_8b_lora ppo.kl_coef=0.1")
def show(
    recipe: RecipeName = "doubling", overrides: Overrides = None, run: Run = None, runs_dir: RunsDir = Path("runs")
) -> None:
    """Print a recipe as it is resolved, with what differs from the libraries' own defaults."""
    from toolkit import recipes

    print(recipes.show(recipes.load(recipe, *(overrides or ()), run=run, runs_dir=runs_dir)), end="")
