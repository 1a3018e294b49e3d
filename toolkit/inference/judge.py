"""`toolkit judge`: several trained runs by a second reward, on one page."""

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from filecmp import cmp
from pathlib import Path
from typing import Any

from peft.utils import SAFETENSORS_WEIGHTS_NAME
from rich.table import Column, Table
from rich.text import Text

from toolkit import processes
from toolkit.checkpoints import checkpoints_in, problem_of
from toolkit.disk import write_output
from toolkit.errors import CheckpointError, PeerError, RecipeError, ToolkitError, printable
from toolkit.inference.evaluate import as_trained, measured
from toolkit.inference.saved_run import open_run, policy_folder
from toolkit.reports import ComparedRun, Output, comparison_page, read_result
from toolkit.runs.comparison import differing, labels_of
from toolkit.runs.folder import last_stage
from toolkit.runs.owned import check_output
from toolkit.runs.said import say
from toolkit.spec.recipe import Recipe


def judge(
    names: Sequence[str], *overrides: str, output: Path, runs_dir: Path = Path("runs"), checkpoints: bool = False
) -> dict[str, Any]:
    """Score what the policies of runs say to their held-out prompts by reward and judge, before and after training.

    The responses are sampled again, as `evaluate` does.

    Args:
        names: of the runs, or their folders.
        overrides: "section.key=value", of all runs: the section `judge`, where their recipes have none.
        output: the page to write; the figures go beside it as JSON.
        runs_dir: folder of all runs.
        checkpoints: whether those that a run has kept are asked, too, for a curve between before and after.

    Returns:
        By run, its metrics `before` and `after`, those of `checkpoints` by step if they were asked, the section `judge`
        with the adapter that it reads as `start.judge`, what of the recipe was `changed`, and of prompts that it did
        not hold out what `evaluate` says of them.

    Raises:
        RecipeError: there is no such run, it is not finished, or there is no judge for it. Of an error of a later run
            the page and the figures of those before it are written.
        CheckpointError: a checkpoint is damaged.
    """
    if not names:
        raise RecipeError("judge needs at least one run.", remedy="toolkit runs lists them.")
    opened = (open_run(name, *overrides, runs_dir=runs_dir, by_q=True) for name in names)
    of_folders = {recipe.folder.resolve(): recipe for recipe in opened}  # one that is named twice is judged once
    folders, recipes = list(of_folders), list(of_folders.values())
    figures_file = processes.by_main(lambda: _beside(output, folders))
    for recipe in recipes:
        if recipe.judge is None:
            remedy = (
                "Give one: judge.kind=adapter start.judge=runs/OTHER/reward/reward, or judge.kind=function and so on."
            )
            raise RecipeError(f'the run "{recipe.run}" has no section judge.', field="judge", remedy=remedy)
    kept = processes.by_main(lambda: [_checkpoints(recipe) if checkpoints else [] for recipe in recipes])
    runs: list[ComparedRun] = []
    figures: dict[str, Any] = {}
    told: list[str] = []

    def write() -> None:
        judges = dict.fromkeys(json.dumps(one["judge"], ensure_ascii=False) for one in figures.values())
        about, changed = f"The judge: {'; '.join(judges)}.", _changed(figures)
        about += f" What the recipes had otherwise: {changed}." if changed else ""
        about = " ".join([about, *told])
        write_output(output, comparison_page("judge", runs, differing(folders[: len(runs)]), about=about))
        write_output(figures_file, json.dumps(figures, indent=2, ensure_ascii=False) + "\n")

    for label, recipe, asked in zip(labels_of(folders), recipes, kept, strict=True):
        with _told_of(label) if len(recipes) > 1 else nullcontext():
            run, figures[label], sentences = _judged(label, recipe, asked)
        gc.collect()  # a base with adapters holds itself in a cycle, and a card may not have the room for two
        runs.append(run)
        told += [f"{label}: {sentence}" for sentence in sentences]
        processes.by_main(write)  # a later run may fail
    for sentence in told:
        say(sentence)
    Output().print(_table(figures))
    return figures


@contextmanager
def _told_of(label: str) -> Iterator[None]:
    """An error inside says of which of several runs it is."""
    try:
        yield
    except PeerError:
        raise
    except ToolkitError as error:
        raise type(error)(f'the run "{label}"', problems=error.problems) from error


def _judged(label: str, recipe: Recipe, checkpoints: Sequence[Path]) -> tuple[ComparedRun, dict[str, Any], list[str]]:
    """A run for the page, its figures for the file, and what there is to say of its prompts."""
    result, samples = measured(recipe, checkpoints)
    trained = read_result(recipe.stage_folder(last_stage(recipe.folder))) or {}
    sides = {side: result[side] for side in ("before", "after")}
    between = result.get("checkpoints", {})
    rows = [{"step": step} | {f"eval_{key}": value for key, value in of.items()} for step, of in between.items()]
    # Without the metrics of training.
    run = ComparedRun(label, sides | {"warnings": trained.get("warnings", [])}, rows, samples)
    adapter = recipe.values.get("start", {}).get("judge")  # which one, where the judge is one
    figures = sides | {"judge": recipe.values["judge"] | ({"start.judge": adapter} if adapter else {})}
    figures |= {key: result[key] for key in ("checkpoints", "changed") if key in result}
    found, sentences = as_trained(recipe, result)
    return run, figures | found, sentences


def _checkpoints(recipe: Recipe) -> list[Path]:
    """Those of the ppo stage whose policy is another than the one at the end."""
    if last_stage(recipe.folder) == "q":
        raise RecipeError(f'the run "{recipe.run}" has Q-values, whose checkpoints are not judged.')
    last, found = policy_folder(recipe) / SAFETENSORS_WEIGHTS_NAME, []
    for folder in checkpoints_in(recipe.stage_folder("ppo")):
        if problem := problem_of(folder):
            raise CheckpointError(f"{folder}: {problem}.", remedy="Delete it, or judge without checkpoints.")
        if not cmp(last, folder / "policy" / SAFETENSORS_WEIGHTS_NAME, shallow=False):
            found.append(folder)
    return found


def _changed(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The keys, beside the judge's, that were given in place of what the recipes of runs say."""
    pairs = (pair for one in figures.values() for pair in one.get("changed", {}).items())
    otherwise = {key: value for key, value in pairs if key != "start.judge" and not key.startswith("judge.")}
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in otherwise.items())


def _beside(page: Path, runs: Sequence[Path]) -> Path:
    """Where the figures go: beside the page, and onto nothing that stands there without one."""
    check_output(page, runs)
    file = page.with_suffix(".json")
    if file == page or (file.exists() and not page.exists()):
        wrong = f"figures go to {file}, which is {'the page' if file == page else 'there already, without its page'}."
        raise ToolkitError(wrong, remedy="Name another page.")
    check_output(file, runs)
    return file.resolve()


def _table(figures: dict[str, dict[str, dict[str, float]]]) -> Table:
    table = Table(Column("run", overflow="fold"), "score before", "after", "judge before", "after", "KL")
    for name, sides in figures.items():
        both = [sides["before"], sides["after"]]
        cells = [f"{side[of]:.3f} ± {side[f'{of}_se']:.3f}" for of in ("score", "judge") for side in both]
        table.add_row(Text(printable(name)), *cells, f"{sides['after']['kl']:.3f}")
    return table
