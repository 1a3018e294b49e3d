"""What can be done where a card's memory runs out in a stage."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from toolkit.checkpoints import checkpoints_in
from toolkit.data import TASKS
from toolkit.errors import ToolkitError
from toolkit.spec.keys import owner_fields
from toolkit.spec.plan import by_trl
from toolkit.spec.recipe import Recipe
from toolkit.trainers.ppo_config import WITHOUT_COPY

_CHUNKS = {"ppo": "ppo.logprob_chunk_size", "q": "q.q_chunk_size"}


@contextmanager
def weights_fit(recipe: Recipe) -> Iterator[None]:
    """Models are loaded inside.

    Raises: ToolkitError: a card's memory has run out, where no smaller batch would help.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        ways = ["name a smaller checkpoint", "ask toolkit plan which GPU holds this one"]
        if not recipe.base.quantization:
            ways.insert(0, "load the base in 4 bits (base.quantization), if it is not in them already")
        if {"scorer", "judge", "reward_model", "value_model"} & recipe.values.keys():
            ways.append("load fewer models beside the base, or these in 4 bits (their quantization)")
        wrong = "the weights of the models do not fit into the GPU memory that other processes leave."
        raise ToolkitError(wrong, field="base", remedy=_one_of(ways)) from error


def out_of_memory(recipe: Recipe, stage: str) -> ToolkitError:
    """What helps where the rows of a pass have been halved down to one, or are no smaller by themselves."""
    folder = recipe.stage_folder(stage)
    if stage == "collect":
        again = "with $overwrite if responses had been saved: each batch draws by a seed of its own"
        remedy = f"Shorten collect.response_length or the prompts, and run it again, {again}."
        return ToolkitError("collect ran out of GPU memory, with one row at a time.", remedy=remedy)
    args, ways, trls = recipe.stage_config(stage), [], stage == "ppo" and by_trl(recipe.values)
    if not args.gradient_checkpointing and not trls:  # TRL's loop has none
        ways.append(f"set {stage}.gradient_checkpointing=true")
    if trls:
        ways.append("halve ppo.per_device_train_batch_size or ppo.local_rollout_forward_batch_size")
    elif stage in _CHUNKS:
        ways.append(f"halve {_CHUNKS[stage]}")
    if stage == "sft" and args.packing:  # the rows of a micro-batch are one
        ways.append("halve sft.per_device_train_batch_size, with sft.gradient_accumulation_steps doubled")
    then = "go on with $resume" if checkpoints_in(folder) else "run it again: nothing had been saved yet"
    anew = []
    if stage == "ppo" and args.decoding["merged"]:
        anew.append(f"ppo.generation={WITHOUT_COPY[args.generation]}")
    anew.append(f"shorter rows ({', '.join(_limits(recipe, stage))})")
    goes_on = f"{_one_of(ways)[:-1]}, and {then}. " if ways else ""
    planned = "; toolkit plan says what fits" if "ppo" in recipe.plan.stages and not by_trl(recipe.values) else ""
    remedy = f"{goes_on}A run that begins anew can have {' or '.join(anew)}{planned}."
    rows = "" if trls else ", with as few rows at a time as there can be"
    return ToolkitError(f"{stage} ran out of GPU memory{rows}.", remedy=remedy)


def _limits(recipe: Recipe, stage: str) -> list[str]:
    """The keys that say how long the rows of a stage may be."""
    own = {"ppo": ["ppo.response_length"], "sft": ["sft.max_length"]}.get(stage, [])
    section = recipe.data_section(stage)
    if stage == "q" and section == "data":
        return ["collect.response_length"]
    known = owner_fields(TASKS[recipe.values[section]["task"]])
    limits = ["max_prompt_length"] if stage == "ppo" else ["max_prompt_length", "max_response_length", "max_length"]
    return own + [f"{section}.{name}" for name in limits if name in known] or ["those of the data"]


def _one_of(ways: list[str]) -> str:
    text = f"{', '.join(ways[:-1])}{', or ' if len(ways) > 1 else ''}{ways[-1]}."
    return text[0].upper() + text[1:]
