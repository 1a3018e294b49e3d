"""What is said before a stage begins: where it runs, what it trains, where it goes."""

from collections.abc import Iterator
from typing import Any

from toolkit import processes
from toolkit.reports import device_in_words
from toolkit.spec.recipe import Recipe
from toolkit.trainers.stock_ppo import stock_rollouts


def banner(recipe: Recipe, stage: str, trainer: Any) -> Iterator[str]:
    """Lines about a stage whose trainer has been made."""
    args, together = trainer.args, f" × {processes.count()} processes" if processes.count() > 1 else ""
    precision = "bfloat16" if args.bf16 else "float16" if args.fp16 else recipe.precision(stage).dtype
    bits = recipe.base.quantization
    base = f", base in {'4' if bits.get('load_in_4bit') else '8'} bits" if bits else ""
    yield f"{recipe.run} {stage}: {device_in_words(args.device)}{together}; {precision}{base}"
    yield f"trains {_trained(trainer)}; writes to {recipe.stage_folder(stage)}"


def _trained(trainer: Any) -> str:
    roles = trainer.roles if hasattr(trainer, "roles") else stock_rollouts(trainer).roles
    if roles is None:
        return f"{_number(trainer.model.parameters()):,} of the model's own weights"
    return " and ".join(f"{role} ({_number(roles.parameters_of(role)):,} weights)" for role in roles.trained_roles)


def _number(parameters: Any) -> int:
    return sum(p.numel() for p in parameters if p.requires_grad)
