"""`toolkit generate --num-samples N`: several answers to each prompt, and the best by the run's own reward."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import set_seed

from toolkit.data import messages_of_row, read_rows
from toolkit.functional import best_of_kl_bound, expected_best
from toolkit.models import load_weights
from toolkit.recipes import assemble
from toolkit.recipes.finished import policy_folder
from toolkit.recipes.recipe import Recipe
from toolkit.reports import write_jsonl
from toolkit.trainers.ppo import PPOTrainer


def _rows(recipe: Recipe, texts: Sequence[str], file: Path | None, number: int) -> list[dict[str, Any]]:
    """Rows with `input_ids`: of the texts and the file, or the first held-out prompts with all their columns."""
    conversations = [[{"role": "user", "content": text}] for text in texts]
    if file is not None:
        conversations += [messages_of_row(place, row) for place, row in read_rows(str(file), setting="--file")]
    if conversations:
        return [{"input_ids": list(recipe.task.prompt_ids(messages))} for messages in conversations]
    held_out = recipe.task.prompts("test")
    return [held_out[i] for i in range(min(number, len(held_out)))]


def _trained(recipe: Recipe, folder: str) -> PPOTrainer:
    roles, pad_token_id = assemble.ppo_roles(recipe)
    load_weights(roles, "policy", policy_folder(recipe))
    return assemble.make_meter(recipe, roles, pad_token_id, output_dir=Path(folder))


def answer_best(
    recipe: Recipe,
    *,
    num_samples: int,
    texts: Sequence[str] = (),
    file: Path | None = None,
    number: int = 5,
    seed: int = 0,
    output: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Sample several answers to each prompt, score all by the run's reward, and show the best.

    Below the answers stands how the mean score grows with the number of samples, beside the KL that it costs at most.

    Args:
        recipe: of a finished run; samples at its `ppo.temperature`.
        num_samples: answers to each prompt.
        texts: prompts.
        file: more prompts, in any format of the data section.
        number: held-out prompts, where neither is given.
        seed: of sampling.
        output: JSON Lines file to write, with all candidates.
        console: for what a person reads; standard output if None.

    Returns:
        A row a prompt: `prompt`, `policy` (the best answer), `score`, and `candidates` with their scores.

    Raises:
        RewardError: the reward needs a column that given prompts do not have.
    """
    console = console or Console()
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trained(recipe, folder)
        set_seed(seed)
        found = trainer.best_of(_rows(recipe, texts, file, number), num_samples)
    rows = []
    for i, prompt in enumerate(found.best.prompts):
        of_prompt = slice(i * num_samples, (i + 1) * num_samples)
        scores = found.scores[i].tolist()
        candidates = [
            {"response": response, "score": score}
            for response, score in zip(found.candidates.responses[of_prompt], scores, strict=True)
        ]
        rows.append(
            {"prompt": prompt, "policy": found.best.responses[i], "score": max(scores), "candidates": candidates}
        )
    table = Table(title=f"the best of {num_samples}", show_lines=True)
    for name in ("prompt", "policy"):
        table.add_column(name, overflow="fold", ratio=1)
    table.add_column("score: best, mean", justify="right", no_wrap=True)
    for row, scores in zip(rows, found.scores, strict=True):
        table.add_row(Text(row["prompt"]), Text(row["policy"]), f"{row['score']:.3f}, {float(scores.mean()):.3f}")
    console.print(table)
    growth = Table(title=f"mean score of the best of N, over {len(rows)} prompts")
    for name in ("N", "score", "KL at most"):
        growth.add_column(name, justify="right")
    for n, score in enumerate(expected_best(found.scores).tolist(), 1):
        growth.add_row(str(n), f"{score:.4f}", f"{best_of_kl_bound(n):.4f}")
    console.print(growth)
    if output is not None:
        write_jsonl(output, rows)
    return rows
