"""What can be done where a card's memory runs out in a stage."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from toolkit.checkpoints import checkpoints_in
from toolkit.errors import ToolkitError
from toolkit.spec.plan import by_trl
from toolkit.spec.recipe import Recipe

_CHUNKS = {"ppo": "ppo.logprob_chunk_size", "q": "q.q_chunk_size"}


@contextmanager
def weights_fit(recipe: Recipe) -> Iterator[None]:
    """Models are loaded inside.

    Raises: ToolkitError: a card's memory has run out, where no smaller batch would help.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        ways = ["name a smaller checkpoint", "ask toolkit plan which card holds this one"]
        if not recipe.base.quantization:
            ways.insert(0, "load the base in 4 bits (base.quantization)")
        if {"scorer", "judge", "reward_model", "value_model"} & recipe.values.keys():
            ways.append("load fewer models beside the base, or these in 4 bits (their quantization)")
        wrong = "the weights of the models do not fit into the card's memory beside what others have there."
        raise ToolkitError(wrong, field="base", remedy=_one_of(ways)) from error


def out_of_memory(recipe: Recipe, stage: str) -> ToolkitError:
    """What helps where the rows of a pass have been halved down to one, or are no smaller by themselves."""
    folder = recipe.stage_folder(stage)
    if stage == "collect":
        again = "with $overwrite if responses had been saved: each batch draws by a seed of its own"
        remedy = f"Shorten collect.response_length or the prompts, and run it again, {again}."
        return ToolkitError("collect ran out of GPU memory, with one row at a time.", remedy=remedy)
    args, ways = recipe.stage_config(stage), []
    if not args.gradient_checkpointing:
        ways.append(f"set {stage}.gradient_checkpointing=true")
    if stage == "ppo" and by_trl(recipe.values):
        ways.append("halve ppo.per_device_train_batch_size or ppo.local_rollout_forward_batch_size")
    elif stage in _CHUNKS:
        ways.append(f"halve {_CHUNKS[stage]}")
    if stage == "sft" and args.packing:  # the rows of a micro-batch are one
        ways.append("halve sft.per_device_train_batch_size, with sft.gradient_accumulation_steps doubled")
    then = "go on with $resume" if checkpoints_in(folder) else "run it again: nothing had been saved yet"
    shorter = {"ppo": "ppo.response_length", "sft": "sft.max_length"}.get(stage, f"{recipe.data_section(stage)}.max_…")
    anew = ["ppo.generation=eager"] if stage == "ppo" and args.generation == "merged" else []
    anew.append(f"shorter rows ({shorter}, {recipe.data_section(stage)}.max_prompt_length)")
    goes_on = f"{_one_of(ways)[:-1]}, and {then}. " if ways else ""
    remedy = f"{goes_on}A run that begins anew can have {' or '.join(anew)}; toolkit plan says what fits."
    return ToolkitError(f"{stage} ran out of GPU memory, with as few rows at a time as there can be.", remedy=remedy)


def _one_of(ways: list[str]) -> str:
    text = f"{', '.join(ways[:-1])}{', or ' if len(ways) > 1 else ''}{ways[-1]}."
    return text[0].upper() + text[1:]
