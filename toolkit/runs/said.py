"""What a stage says to a person: sentences, where it runs and what it trains, its figures at the end."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from transformers import PreTrainedModel

from toolkit import processes, reports
from toolkit.data import PER_RULE
from toolkit.errors import ToolkitError, printable
from toolkit.reports import Output
from toolkit.runs.owned import BEFORE_FILE
from toolkit.sampling import SIGNS
from toolkit.spec.recipe import Recipe
from toolkit.trainers.same_run import is_another_base, of_base
from toolkit.trainers.stock_ppo import stock_rollouts


def say(sentence: str) -> None:
    """A line for a person, not coloured, and wrapped only above a panel; square brackets in it are no markup."""
    Output().print(printable(sentence), highlight=False, soft_wrap=True, markup=False)


def say_shares(stage: str, rows: int) -> None:
    """Say where several processes do not come out even, and what would."""
    number = processes.count()
    if rows % number:
        wrong = f"{stage}: {number} processes divide the {rows} rows of a step, to the same result, but not evenly: "
        wrong += f"{number - rows} have none" if rows < number else f"some have {-(-rows // number)}"
        even = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        say(f"{wrong}. Numbers that divide them: {even}.")


def banner(recipe: Recipe, stage: str, trainer: Any) -> Iterator[str]:
    """Lines about a stage whose trainer has been made: where it runs, what it trains, where it goes."""
    args, together = trainer.args, f" × {processes.count()} processes" if processes.count() > 1 else ""
    precision = "bfloat16" if args.bf16 else "float16" if args.fp16 else recipe.precision(stage).dtype
    bits = recipe.base.quantization
    base = f", base in {'4' if bits.get('load_in_4bit') else '8'} bits" if bits else ""
    yield f"{recipe.run} {stage}: {reports.device_in_words(args.device)}{together}; {precision}{base}"

    def number(parameters: Any) -> int:
        return sum(p.numel() for p in parameters if p.requires_grad)

    roles = trainer.roles if hasattr(trainer, "roles") else stock_rollouts(trainer).roles
    if roles is None:
        trained = f"{number(trainer.model.parameters()):,} of the model's own weights"
    else:
        of_roles = {role: number(roles.parameters_of(role)) for role in roles.trained_roles}
        trained = " and ".join(f"{role} ({weights:,} weights)" for role, weights in of_roles.items())
    yield f"trains {trained}; writes to {recipe.stage_folder(stage)}"


def warn_of_other_weights(recipe: Recipe, stage: str, model: PreTrainedModel, remedy: str) -> None:
    """Warn where a base can be told from the one that a stage was trained on, as where a hub id has moved on."""
    folder = recipe.stage_folder(stage)
    with suppress(ToolkitError):  # damaged; what it says is for nothing but this
        then = (reports.read_json(folder / BEFORE_FILE) or {}).get("made_with")
        if then is not None and is_another_base(then, of_base(model)):
            wrong = f"{recipe.base_path} has other weights than the base that {folder} was trained on, so its adapters "
            wrong += "were not made for it (unless another transformers version only stores the same weights "
            warnings.warn(f"{wrong}differently). {remedy}", stacklevel=3)


def figures_shown(result: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Figures before and after, by name, but the signs of a reward that is fooled and single rules."""
    before, after = result["before"], result["after"]
    both = {key: (before[key], value) for key, value in after.items() if key in before}
    return {
        key: values
        for key, values in both.items()
        if key not in SIGNS and not key.startswith(PER_RULE) and all(isinstance(value, float) for value in values)
    }


def show_result(result: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    """The samples; the figures before and after but the signs of a reward that is fooled and single rules, seconds
    and memory; a verdict."""
    console = Output()
    if samples:
        console.print(reports.samples_table(samples))
    after = result["after"]
    for key, (then, now) in figures_shown(result).items():
        console.print(f"{key:>16}  {then:10.4f} → {now:.4f}", highlight=False)
    if rules := sum(key.startswith(PER_RULE) for key in after):
        console.print(f"{PER_RULE + '…':>16}  of {rules} rules: in result.json", highlight=False)
    low_high = after.get("accuracy_ci")
    if low_high:
        console.print(f"{'accuracy_ci':>16}  {low_high[0]:.4f} – {low_high[1]:.4f} (95 %)", highlight=False)
    memory = reports.memory_in_words(result["peak_memory_gb"])
    console.print(f"{result['stage']} took {result['seconds']:.0f} s; peak memory: {memory}", highlight=False)
    if said := reports.verdict(result, samples):
        say(said)
