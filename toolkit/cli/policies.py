"""What a trained policy is used for."""

import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.cli.command import Overrides, Processes, RunName, RunsDir, command, complete_run, join
from toolkit.errors import RecipeError
from toolkit.inference import NOT_READ

MaxNewTokens = Annotated[
    int | None, typer.Option(help="Most tokens of an answer; the recipe's response_length if not given.", min=1)
]
_OF_USE = ("base", "value_model", "reward_model", "start", "data", "scorer", "judge")
_OF_TRAINING = (*NOT_READ, "adapters", "reward_head", "seed")
_SETTING = re.compile(rf"({'|'.join(_OF_USE)})(\.\w+)+=.*|({'|'.join(_OF_TRAINING)})(\.\w+)+=\S*")
Checkpoint = Annotated[
    int | None,
    typer.Option(help="Step of a checkpoint of the run, whose policy is meant; its end if not given.", min=0),
]
Seed = Annotated[int, typer.Option(help="Seed of sampling.", min=0, max=2**32 - 1)]


def _of_use(overrides: list[str] | None) -> list[str]:
    """Keys for a command that does not train; an error where one is of training, and would have no effect."""
    for word in overrides or ():
        if re.split(r"[.=\[]", word, maxsplit=1)[0] in _OF_TRAINING:
            wrong = f'"{word}" is a setting of training, which is done.'
            remedy = "Options say how responses are made (--help); as a prompt it can be in generate's --file."
            raise RecipeError(wrong, remedy=remedy)
    return overrides or []


def _temperature(value: float | None) -> float | None:
    if value is not None and value != 0 and not 1e-4 <= value < math.inf:  # by which logits are divided in float32
        raise typer.BadParameter(f"{value} is neither 0 nor a finite number from 0.0001.")
    return value


def _temperature_option(default: str) -> Any:
    told = f"Sampling temperature; 0 is greedy. Default: {default}."
    return typer.Option(help=told, min=0.0, callback=_temperature)


Compare = Annotated[bool, typer.Option("--compare", help="Show the reference's answers beside the policy's.")]


@command('toolkit generate doubling "S小写:5487x2=" --compare')
def generate(
    run: RunName,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help='Prompts as text, and recipe keys, e.g. "base.model=/new/place".', metavar="[PROMPT]... [KEY=VALUE]..."
        ),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Prompts in any format of the data section.")] = None,
    number: Annotated[int, typer.Option(help="How many held-out prompts to answer if none are given.", min=1)] = 5,
    compare: Compare = False,
    max_new_tokens: MaxNewTokens = None,
    temperature: Annotated[
        float | None, _temperature_option("0; for Q and with --num-samples as in the recipe")
    ] = None,
    seed: Seed = 0,
    num_samples: Annotated[
        int | None,
        typer.Option(help="Sample so many answers and keep the best by the run's reward.", min=1, max=10_000),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write all answers as JSON Lines.")] = None,
    checkpoint: Checkpoint = None,
    runs_dir: RunsDir = Path("runs"),
    processes: Processes = 1,
) -> None:
    """Answer prompts with a trained policy: those given, those of a file, or the first held-out ones."""
    overrides = _of_use([word for word in words or () if _SETTING.fullmatch(word)])
    prompts = [word for word in words or () if word not in overrides]
    join(processes)
    from toolkit.inference import generate
    from toolkit.inference.saved_run import open_run

    asked: dict[str, Any] = {"texts": prompts, "file": file, "number": number, "seed": seed, "output": output}
    if num_samples is None:
        recipe = open_run(run, *overrides, runs_dir=runs_dir, by_q=True, checkpoint=checkpoint)
        asked |= {"compare": compare, "max_new_tokens": max_new_tokens, "temperature": temperature}
        generate.generate(recipe, **asked)
        _say_written(output)
        return
    if temperature == 0 or compare:
        raise RecipeError("--num-samples samples from the policy alone: leave out --compare, and --temperature=0.")
    changes = {"temperature": temperature, "response_length": max_new_tokens}
    overrides += [f"ppo.{key}={value}" for key, value in changes.items() if value is not None]
    if max_new_tokens is not None:  # which may be below a minimum that is for training alone
        overrides += ["ppo.min_response_length=1", "ppo.drop_short_responses=false", "ppo.short_response_penalty=null"]
    recipe = open_run(run, *overrides, runs_dir=runs_dir, checkpoint=checkpoint)
    generate.generate_best(recipe, num_samples=num_samples, **asked)
    _say_written(output)


def _say_written(output: Path | None) -> None:
    if output is not None:
        print(f"written: {output}")


@command("toolkit chat smollm2_135m_lora --compare --temperature 0.7")
def chat(
    run: RunName,
    overrides: Overrides = None,
    compare: Compare = False,
    max_new_tokens: MaxNewTokens = None,
    temperature: Annotated[float | None, _temperature_option("1; for Q as in the recipe")] = None,
    seed: Seed = 0,
    checkpoint: Checkpoint = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Talk to a trained policy; its words appear as they come."""
    from transformers import set_seed

    from toolkit.inference.generate import converse
    from toolkit.inference.saved_run import open_run, trained_sampler

    recipe = open_run(run, *_of_use(overrides), runs_dir=runs_dir, by_q=True, checkpoint=checkpoint)
    sampler = trained_sampler(recipe, max_new_tokens=max_new_tokens, temperature=temperature, compare=compare)
    set_seed(seed)
    converse(recipe, sampler, compare=compare)


@command("toolkit eval my-run data.validation=unseen.jsonl", name="eval")
def evaluate(
    run: RunName,
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    runs_dir: RunsDir = Path("runs"),
    processes: Processes = 1,
) -> None:
    """Measure a trained policy, or what Q-learning gave, on held-out prompts: score, KL, lengths, own metrics."""
    join(processes)
    from toolkit.inference import evaluate
    from toolkit.inference.saved_run import open_run

    evaluate.evaluate(open_run(run, *(overrides or ()), runs_dir=runs_dir, by_q=True, checkpoint=checkpoint))


@command("toolkit judge my-run more-kl judge.kind=adapter start.judge=runs/other/reward/reward")
def judge(
    words: Annotated[
        list[str],
        typer.Argument(
            help="Names of runs, or their folders, and recipe keys that apply to all.",
            metavar="RUN... [KEY=VALUE]...",
            autocompletion=complete_run,
        ),
    ],
    output: Annotated[Path, typer.Option(help="The page to write, with its figures as .json beside it.")] = Path(
        "judged.html"
    ),
    checkpoints: Annotated[
        bool,
        typer.Option("--checkpoints", help="Also measure each run's saved checkpoints, for a curve."),
    ] = False,
    runs_dir: RunsDir = Path("runs"),
    processes: Processes = 1,
) -> None:
    """Measure several trained runs by a second reward, the section judge, beside their own: a table and one page."""
    join(processes)
    from toolkit import processes as all_processes
    from toolkit.inference.judge import judge as judge_runs
    from toolkit.runs.folder import run_folder

    def is_run(word: str) -> bool:
        with suppress(OSError):  # a key with a value that is too long for a name
            return run_folder(word, runs_dir) is not None
        return False

    runs = all_processes.by_main(lambda: [word for word in words if "=" not in word or is_run(word)])
    overrides = [word for word in words if word not in runs]
    judge_runs(runs, *overrides, output=output, runs_dir=runs_dir, checkpoints=checkpoints)
    print(f"written: {output}")


@command("toolkit export my-run /models/my-policy --merge")
def export(
    run: RunName,
    output: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    overrides: Overrides = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into the base, unquantised.")] = False,
    checkpoint: Checkpoint = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write the policy for use elsewhere: its adapter, or with --merge a whole checkpoint in base.dtype."""
    from toolkit.inference.export import export_adapter, export_merged
    from toolkit.inference.saved_run import open_run

    recipe = open_run(run, *_of_use(overrides), runs_dir=runs_dir, checkpoint=checkpoint)
    if merge:
        folder, said = export_merged(recipe, output)
        print(said)
    else:
        folder = export_adapter(recipe, output)
    print(f"written: {folder}")
