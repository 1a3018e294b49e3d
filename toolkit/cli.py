"""Names and arguments of the command `toolkit`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

import toolkit

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="PPO with LoRA adapters for policy, value, reward and reference on one 4-bit base.",
)

RecipeArgument = Annotated[str, typer.Argument(help="Name of a shipped recipe, or path of a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help='Any key of the recipe, e.g. "ppo.kl_coef=0.1".', metavar="[KEY=VALUE]...")
]
Run = Annotated[str | None, typer.Option("--run", help="Name of the run; the recipe's name if not given.")]
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Folder of all runs.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Repeat a finished stage; replace another recipe's run.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Name = Annotated[str | None, typer.Option("--name", hidden=True)]


def _run(
    stage: str,
    recipe: str,
    overrides: list[str] | None,
    run: str | None,
    runs_dir: Path,
    overwrite: bool,
    debug: bool,
    name: str | None,
) -> None:
    from dataclasses import replace

    from toolkit.errors import ToolkitError

    try:
        # Imported here, so that --help answers at once.
        import datasets
        from transformers.utils import logging

        from toolkit.recipes import load, stages

        # One bar, ours, with what matters on it.
        logging.disable_progress_bar()
        datasets.disable_progress_bars()
        loaded = load(recipe, *(overrides or ()), run=run, runs_dir=runs_dir)
        stages.run(replace(loaded, name=name or loaded.name), stage, overwrite=overwrite)
    except ToolkitError as error:
        if debug:
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        print("Interrupted; a stage that had not finished will start anew.", file=sys.stderr)
        raise typer.Exit(130) from error


def _stage(stage: str, text: str) -> None:
    def command(
        recipe: RecipeArgument = "doubling",
        overrides: Overrides = None,
        run: Run = None,
        runs_dir: RunsDir = Path("runs"),
        overwrite: Overwrite = False,
        debug: Debug = False,
        name: Name = None,
    ) -> None:
        _run(stage, recipe, overrides, run, runs_dir, overwrite, debug, name)

    app.command(stage, help=text)(command)


_stage("sft", "Pretrain a base from random weights, or train the policy's first adapter.")
_stage("reward", "Train the reward role.")
_stage("ppo", "Train policy and value with PPO; stages that it needs and that are missing run first.")


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        print(toolkit.__version__)
        raise typer.Exit


@app.command("recipes", help="List the shipped recipes.")
def list_recipes() -> None:
    from toolkit.recipes import names

    print("\n".join(names()))
