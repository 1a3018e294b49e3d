"""What can be done where a card fails in a stage, or its memory runs out."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from toolkit.checkpoints import checkpoints_in
from toolkit.data import TASKS
from toolkit.errors import ToolkitError
from toolkit.models import raise_of_the_card
from toolkit.portion import at_one_row, ran_out
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


@contextmanager
def card_holds(recipe: Recipe, stage: str) -> Iterator[None]:
    """A stage runs inside.

    Raises: ToolkitError: the card has failed, or its memory has run out; with what can be done then.
    """
    try:
        yield
    except ToolkitError:  # which says itself what can be done
        raise
    except RuntimeError as error:
        if ran_out(error):
            raise out_of_memory(recipe, stage, one_row=at_one_row(error)) from error
        try:
            raise_of_the_card(error)
        except ToolkitError as failed:
            failed.add_remedy(f"Then {_way_on(recipe, stage)}.")
            raise
        raise


def _way_on(recipe: Recipe, stage: str) -> str:
    if stage == "collect" or checkpoints_in(recipe.stage_folder(stage)):
        return "go on with $resume"
    return "run it again: nothing had been saved yet"


def out_of_memory(recipe: Recipe, stage: str, *, one_row: bool) -> ToolkitError:
    """What helps where the rows of a pass have been halved down to `one_row`, or memory ran out where rows are not
    halved."""
    if stage == "collect":
        again = "with $overwrite if responses had been saved: each batch draws by a seed of its own"
        fewer = "" if one_row else "Lower collect.batch_size, or s"
        remedy = f"{fewer or 'S'}horten collect.response_length or the prompts, and run it again, {again}."
        rows = ", with one row at a time" if one_row else ""
        return ToolkitError(f"collect ran out of GPU memory{rows}.", remedy=remedy)
    args, ways, trls = recipe.stage_config(stage), [], stage == "ppo" and by_trl(recipe.values)
    if not args.gradient_checkpointing and not trls:  # TRL's loop has none
        ways.append(f"set {stage}.gradient_checkpointing=true")
    if trls:
        ways.append("halve ppo.per_device_train_batch_size or ppo.local_rollout_forward_batch_size")
    elif stage in _CHUNKS:
        ways.append(f"halve {_CHUNKS[stage]}")
    as_they_are = not one_row or (stage == "sft" and args.packing)  # whose rows of a micro-batch are one
    if as_they_are and not trls and args.per_device_train_batch_size > 1:
        fewer = f"halve {stage}.per_device_train_batch_size, with {stage}.gradient_accumulation_steps doubled"
        ways.insert(0, fewer)
    anew = []
    if stage == "ppo" and args.decoding["merged"]:
        anew.append(f"ppo.generation={WITHOUT_COPY[args.generation]}")
    anew.append(f"shorter rows ({', '.join(_limits(recipe, stage))})")
    goes_on = f"{_one_of(ways)[:-1]}, and {_way_on(recipe, stage)}. " if ways else ""
    planned = "; toolkit plan says what fits" if "ppo" in recipe.plan.stages and not by_trl(recipe.values) else ""
    remedy = f"{goes_on}A run that begins anew can have {' or '.join(anew)}{planned}."
    rows = ", with as few rows at a time as there can be" if one_row else ""
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
