"""The stages, each a command of the same options."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.command import Overrides, Processes, RecipeName, Run, RunsDir, command, complete_run, join

_FROM = "Take finished stages from another run, where their settings agree."


def _stage(stage: str, text: str, example: str) -> None:
    def run_stage(
        recipe: RecipeName = "doubling",
        overrides: Overrides = None,
        run: Run = None,
        runs_dir: RunsDir = Path("runs"),
        overwrite: Annotated[
            bool, typer.Option("--overwrite", help="Repeat a finished stage; replace stages made with other settings.")
        ] = False,
        resume: Annotated[
            bool, typer.Option("--resume", help="Go on from the newest whole checkpoint of the run.")
        ] = False,
        from_run: Annotated[str | None, typer.Option(help=_FROM, autocompletion=complete_run)] = None,
        processes: Processes = 1,
        name: Annotated[str | None, typer.Option(hidden=True)] = None,
    ) -> None:
        join(processes)
        from toolkit.processes import agreed, by_main
        from toolkit.recipes import load
        from toolkit.runs import stages
        from toolkit.runs.folder import check_whole
        from toolkit.runs.owned import RECIPE_FILE

        with agreed():  # an error of all is told once
            path = Path(os.path.expanduser(recipe))
            if path.name == RECIPE_FILE and not os.path.isfile(path):  # a kill may have left that of a run aside
                by_main(lambda: check_whole(path.parent))
            loaded = load(recipe, *(overrides or ()), run=run, runs_dir=runs_dir)
        named = replace(loaded, name=name or loaded.name)
        stages.run(named, stage, overwrite=overwrite, resume=resume, from_run=from_run)

    run_stage.__doc__ = text
    command(example, name=stage)(run_stage)


_stage(
    "sft",
    "Pretrain a base from random weights, or train the policy's first adapter.",
    "toolkit sft doubling sft.max_steps=500",
)
_stage("reward", "Train the reward role.", "toolkit reward smollm2_135m_lora base.model=/models/SmolLM2-135M-Instruct")
_stage(
    "ppo",
    "Train policy and value with PPO; stages that it needs and that are missing run first.",
    "toolkit ppo doubling ppo.kl_coef=0.4 --run more-kl --from-run doubling",
)
_stage(
    "collect",
    "Sample responses to the training prompts and score them, for the q stage or for other tools.",
    "toolkit collect doubling_q collect.samples_per_prompt=2",
)
_stage(
    "q",
    "Learn Q-values from rated responses, without sampling any; stages that it needs and that are missing run first.",
    "toolkit q doubling_q q.gamma=1.0",
)
