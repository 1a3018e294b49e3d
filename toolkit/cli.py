"""Names and arguments of the command `toolkit`.

Exit codes: 0, done; 1, something that the user can mend, said in one message; 2, an argument that does not exist; 130
and 143, stopped by Ctrl-C or SIGTERM. Whatever loads a library is imported inside a command, so that --help answers
at once.
"""

import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

import toolkit
from toolkit.errors import PeerError, RecipeError, RunInterrupted, ToolkitError, printable

# How the options that a remedy names are written on a command line: see `toolkit.errors.Problem`.
IN_SHELL = {
    "run": "RUN=name, --run name",
    "runs_dir": "--runs-dir folder",
    "overwrite": "OVERWRITE=1 (--overwrite)",
    "resume": "RESUME=1 (--resume)",
    "from_run": "FROM=run, --from-run run",
}

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="PPO with LoRA adapters for policy, value, reward and reference on one 4-bit base.",
    epilog="Examples: toolkit ppo doubling · toolkit check llama3_8b_lora base.model=/models/Llama-3.1-8B · "
    "toolkit chat my-run",
)


_speaks = True  # but for all of several processes that are not the main one


def _join(number: int) -> None:
    """Divide the command among several processes, if it is to be and is not yet: each comes here again."""
    from transformers.utils import logging

    from toolkit import processes

    global _speaks
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if number > 1 and launched == 1:
        from toolkit.runs.process import run_in_processes

        raise typer.Exit(run_in_processes([sys.executable, "-m", "toolkit", *sys.argv[1:]], number))
    if number not in (1, launched):
        wrong = f"--processes asks for {number} processes, and {launched} have been started."
        raise ToolkitError(wrong, remedy="Leave --processes out.")
    processes.join()
    if not processes.is_main():
        _speaks = False
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (as long as the process)
        logging.set_verbosity_error()
        warnings.simplefilter("ignore")


@contextmanager
def _errors(debug: bool, *, resumable: bool = False) -> Iterator[None]:
    """One message for what a user can mend; one bar, ours, with what matters on it."""
    try:
        import datasets
        from transformers.utils import logging

        logging.disable_progress_bar()
        datasets.disable_progress_bars()
        yield
    except RunInterrupted as stop:
        if _speaks:
            print(f"{stop}{_way_on() if resumable else ''}", file=sys.stderr)
        raise typer.Exit(128 + stop.signal_number) from stop
    except PeerError as error:  # whoever failed has said so
        raise typer.Exit(1) from error
    except ToolkitError as error:
        if debug:
            raise
        fields = {problem.field for problem in error.problems}
        hint = " With make: MODEL=/path/to/checkpoint." if "base.model" in fields else ""
        print(f"{type(error).__name__}: {error.text(IN_SHELL)}{hint}", file=sys.stderr)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        print(f"Interrupted.{_way_on() if resumable else ''}", file=sys.stderr)
        raise typer.Exit(130) from error


def _way_on() -> str:
    """The command that goes on where this one was stopped."""
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--overwrite", "--resume")]
    return f" To go on: {shlex.join(['toolkit', *arguments, '--resume'])} (make: RESUME=1)"


def _complete_recipe(incomplete: str) -> list[str]:
    from toolkit.spec.load import names

    return [name for name in names() if name.startswith(incomplete)]


def _complete_run(incomplete: str) -> list[str]:
    return sorted(path.parent.name for path in Path("runs").glob(f"{incomplete}*/recipe.yaml"))


RecipeName = Annotated[
    str, typer.Argument(help="Name of a shipped recipe, or path of a YAML file.", autocompletion=_complete_recipe)
]
RunName = Annotated[str, typer.Argument(help="Name of a run, or its folder.", autocompletion=_complete_run)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help='Any key of the recipe, e.g. "ppo.kl_coef=0.1".', metavar="[KEY=VALUE]...")
]
Run = Annotated[str | None, typer.Option(help="Name of the run; the recipe's name if not given.")]
RunsDir = Annotated[Path, typer.Option(help="Folder of all runs.")]
MaxNewTokens = Annotated[
    int | None, typer.Option(help="Of an answer; the recipe's response_length if not given.", min=1)
]
Processes = Annotated[
    int, typer.Option(help="Processes of this machine that do it together, to the same result: one a GPU.", min=1)
]
Seed = Annotated[int, typer.Option(help="Of sampling.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Compare = Annotated[bool, typer.Option("--compare", help="Show the reference's answers beside the policy's.")]
_FROM = "Take finished stages from another run, where their settings agree."


# ---------------------------------------------------------------------- stages


def _stage(stage: str, text: str, example: str) -> None:
    @app.command(stage, help=text, epilog=f"Example: {example}")
    def command(
        recipe: RecipeName = "doubling",
        overrides: Overrides = None,
        run: Run = None,
        runs_dir: RunsDir = Path("runs"),
        overwrite: Annotated[
            bool, typer.Option("--overwrite", help="Repeat a finished stage; replace stages of other settings.")
        ] = False,
        resume: Annotated[
            bool, typer.Option("--resume", help="Go on from the newest whole checkpoint of the run.")
        ] = False,
        from_run: Annotated[str | None, typer.Option(help=_FROM, autocompletion=_complete_run)] = None,
        processes: Processes = 1,
        debug: Debug = False,
        name: Annotated[str | None, typer.Option(hidden=True)] = None,
    ) -> None:
        # With a name it is part of another command, which says how to go on.
        with _errors(debug, resumable=name is None):
            from dataclasses import replace
            from functools import partial

            _join(processes)
            from toolkit.processes import by_main
            from toolkit.recipes import load
            from toolkit.runs import stages

            asked = partial(load, recipe, *(overrides or ()), run=run, runs_dir=runs_dir)
            by_main(lambda: bool(asked()))  # whose errors are then said once
            loaded = asked()
            named = replace(loaded, name=name or loaded.name)
            stages.run(named, stage, overwrite=overwrite, resume=resume, from_run=from_run)


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


# ---------------------------------------------------------------------- recipes


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        print(toolkit.__version__)
        raise typer.Exit


@app.command("recipes", help="List the shipped recipes.")
def list_recipes() -> None:
    from toolkit.spec.load import about, names

    width = max(map(len, names()))
    for name in names():
        print(f"{name:{width}}  {about(name)}")


@app.command(
    help="Check a recipe with its files, columns and adapters in seconds, without loading weights.",
    epilog="Example: toolkit check llama3_8b_lora base.model=/models/Llama-3.1-8B-Instruct",
)
def check(
    recipe: RecipeName = "doubling",
    overrides: Overrides = None,
    run: Run = None,
    runs_dir: RunsDir = Path("runs"),
    debug: Debug = False,
) -> None:
    with _errors(debug):
        from toolkit import recipes

        loaded = recipes.load(recipe, *(overrides or ()), run=run, runs_dir=runs_dir)
        report = recipes.check(loaded)
        print(report.text(IN_SHELL))
        report.raise_problems()
        if "ppo" in loaded.plan.stages and loaded.values["ppo"].get("loop") != "trl":
            for label, text in recipes.plan(loaded, notes=False).summary():
                print(f"{label:<10} {text}")


@app.command(
    help="Memory and time of a recipe's PPO by phase, on a card or this machine: in seconds, without loading weights.",
    epilog="Example: toolkit plan llama3_8b_lora_fast base.model=/models/Llama-3.1-8B-Instruct --gpu 4090",
)
def plan(
    recipe: RecipeName = "doubling",
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="A card, as H100 or 4090, or its memory, as 24GB; this machine if not given.")
    ] = None,
    debug: Debug = False,
) -> None:
    with _errors(debug):
        from toolkit import recipes

        print(recipes.plan(recipes.load(recipe, *(overrides or ())), gpu).text(IN_SHELL))


@app.command(
    help="Print a recipe as it is resolved, with what differs from the libraries' own defaults.",
    epilog="Example: toolkit show llama3_8b_lora ppo.kl_coef=0.1",
)
def show(recipe: RecipeName = "doubling", overrides: Overrides = None, debug: Debug = False) -> None:
    with _errors(debug):
        from toolkit import recipes

        print(recipes.show(recipes.load(recipe, *(overrides or ()))), end="")


# ---------------------------------------------------------------------- runs


@app.command(
    "runs",
    help="List all runs: how far they are, their last figures, and the command that goes on.",
    epilog="Example: toolkit runs --runs-dir /data/runs",
)
def list_runs(runs_dir: RunsDir = Path("runs"), debug: Debug = False) -> None:
    with _errors(debug):
        from toolkit.runs.listing import all_runs

        found = list(all_runs(runs_dir))
        if not found:
            print(f"{runs_dir} holds no run yet: toolkit ppo makes one.")
        for run in found:
            print(printable(run.name))
            for stage in run.stages:
                print(printable(f"  {stage.stage:<8}{stage.state:<10}{stage.where:<28}{stage.figures}").rstrip())
            if run.command:
                print(printable(f"  {shlex.join(run.command)}"))


@app.command(
    help="Write one HTML page about several runs: curves, figures, settings that differ, answers to equal prompts.",
    epilog="Example: toolkit compare doubling more-kl",
)
def compare(
    runs: Annotated[list[str], typer.Argument(help="Names of runs, or their folders.", autocompletion=_complete_run)],
    stage: Annotated[str | None, typer.Option(help="The last that all of them have begun, if not given.")] = None,
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("comparison.html"),
    runs_dir: RunsDir = Path("runs"),
    debug: Debug = False,
) -> None:
    with _errors(debug):
        from toolkit.runs import comparison

        print(f"written: {comparison.compare(runs, output, runs_dir=runs_dir, stage=stage)}")


@app.command("env", help="Print versions and machine, for a bug report.", epilog="Example: toolkit env")
def show_environment(debug: Debug = False) -> None:
    with _errors(debug):
        from toolkit.reports import environment

        for name, value in environment().items():
            print(printable(f"{name:<22}{value}"))


# ---------------------------------------------------------------------- trained policies


@app.command(
    help="Answer prompts with a trained policy: those given, those of a file, or the first held-out ones.",
    epilog='Example: toolkit generate doubling "S小写:5487x2=" --compare',
)
def generate(
    run: RunName,
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts as text.", metavar="[PROMPT]...")] = None,
    file: Annotated[Path | None, typer.Option(help="Prompts in any format of the data section.")] = None,
    number: Annotated[int, typer.Option(help="Held-out prompts, where none are given.", min=1)] = 5,
    compare: Compare = False,
    max_new_tokens: MaxNewTokens = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of sampling; 0 decodes greedily, and is the default.", min=0.0)
    ] = None,
    seed: Seed = 0,
    num_samples: Annotated[
        int, typer.Option(help="Sample so many answers and keep the best by the run's reward.", min=1)
    ] = 1,
    output: Annotated[Path | None, typer.Option(help="Write all answers as JSON Lines.")] = None,
    runs_dir: RunsDir = Path("runs"),
    processes: Processes = 1,
    debug: Debug = False,
) -> None:
    with _errors(debug):
        _join(processes)
        from toolkit.inference import generate
        from toolkit.inference.saved_run import open_run

        asked: dict[str, Any] = {"texts": prompts or (), "file": file, "number": number, "seed": seed, "output": output}
        if num_samples == 1:
            recipe = open_run(run, runs_dir=runs_dir, by_q=True)
            asked |= {"compare": compare, "max_new_tokens": max_new_tokens, "temperature": temperature or 0.0}
            generate.generate(recipe, **asked)
            return
        if temperature == 0 or compare:
            raise RecipeError("--num-samples samples from the policy alone: leave out --compare, and --temperature=0.")
        changes = {"temperature": temperature, "response_length": max_new_tokens}
        overrides = [f"ppo.{key}={value}" for key, value in changes.items() if value is not None]
        generate.generate_best(open_run(run, *overrides, runs_dir=runs_dir), num_samples=num_samples, **asked)


@app.command(
    help="Talk to a trained policy; its words appear as they come.",
    epilog="Example: toolkit chat smollm2_135m_lora --compare --temperature 0.7",
)
def chat(
    run: RunName,
    compare: Compare = False,
    max_new_tokens: MaxNewTokens = None,
    temperature: Annotated[float, typer.Option(help="Of sampling; 0 decodes greedily.", min=0.0)] = 1.0,
    seed: Seed = 0,
    runs_dir: RunsDir = Path("runs"),
    debug: Debug = False,
) -> None:
    with _errors(debug):
        from transformers import set_seed

        from toolkit.inference.generate import converse
        from toolkit.inference.saved_run import open_run, trained_sampler

        recipe = open_run(run, runs_dir=runs_dir, by_q=True)
        sampler = trained_sampler(recipe, max_new_tokens=max_new_tokens, temperature=temperature)
        set_seed(seed)
        converse(recipe, sampler, compare=compare)


@app.command(
    "eval",
    help="Measure a trained policy, or the answers by Q, on its held-out prompts: score, KL, lengths, own metrics.",
    epilog="Example: toolkit eval doubling data.test_size=5000",
)
def evaluate(
    run: RunName,
    overrides: Overrides = None,
    runs_dir: RunsDir = Path("runs"),
    processes: Processes = 1,
    debug: Debug = False,
) -> None:
    with _errors(debug):
        _join(processes)
        from toolkit.inference import evaluate
        from toolkit.inference.saved_run import open_run

        evaluate.evaluate(open_run(run, *(overrides or ()), runs_dir=runs_dir, by_q=True))


@app.command(
    help="Measure several trained runs by a second reward, the section judge, beside their own: a table and one page.",
    epilog="Example: toolkit judge my-run more-kl judge.kind=adapter start.judge=runs/other/reward/reward",
)
def judge(
    words: Annotated[
        list[str],
        typer.Argument(help="Names of runs, or their folders, and keys for all.", metavar="RUN... [KEY=VALUE]..."),
    ],
    output: Annotated[Path, typer.Option(help="The page to write, with its figures as .json beside it.")] = Path(
        "judged.html"
    ),
    runs_dir: RunsDir = Path("runs"),
    processes: Processes = 1,
    debug: Debug = False,
) -> None:
    with _errors(debug):
        _join(processes)
        from toolkit.inference.judge import judge as judge_runs

        runs, overrides = ([word for word in words if ("=" in word) == is_key] for is_key in (False, True))
        judge_runs(runs, *overrides, output=output, runs_dir=runs_dir)
        print(f"written: {output}")


@app.command(
    help="Write the policy for use elsewhere: its adapter, or with --merge a whole checkpoint in base.dtype.",
    epilog="Example: toolkit export my-run /models/my-policy --merge",
)
def export(
    run: RunName,
    output: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into the base, unquantised.")] = False,
    runs_dir: RunsDir = Path("runs"),
    debug: Debug = False,
) -> None:
    with _errors(debug):
        from toolkit.inference.saved_run import export_adapter, export_merged, open_run

        recipe = open_run(run, runs_dir=runs_dir)
        if merge:
            folder, said = export_merged(recipe, output)
            print(said)
        else:
            folder = export_adapter(recipe, output)
        print(f"written: {folder}")
