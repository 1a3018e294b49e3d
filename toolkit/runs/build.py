"""From a recipe to a trainer: base, roles, data and configuration put together."""

import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, set_seed
from transformers.utils import is_torch_tf32_available

from toolkit import phases, processes
from toolkit.data import Kind, PromptEncoder, RatedResponses, Task
from toolkit.errors import Problem, RecipeError, RewardError, within
from toolkit.models import (
    ROLE_FILE,
    SharedBase,
    default_device,
    fast_precision,
    finds_no_gpu,
    level_of,
    load_model,
    scores_for,
    slow_here,
)
from toolkit.reports import METRICS_FILE, SCORES_FILE, MetricsFile, of_responses, read_jsonl
from toolkit.rewards import Prompts, Reward, ScorerContext
from toolkit.spec.plan import adapter_roles, at, section
from toolkit.spec.recipe import Recipe
from toolkit.spec.sources import Saved, Site, Trained
from toolkit.trainers.common import made_by_trl, precision
from toolkit.trainers.ppo import PPOTrainer
from toolkit.trainers.q_learning import QTrainer
from toolkit.trainers.reward import reward_trainer
from toolkit.trainers.rollouts import QRollouts, Rollouts
from toolkit.trainers.self_checks import check_device_records
from toolkit.trainers.sft import sft_trainer
from toolkit.trainers.stock_ppo import stock_ppo_trainer

Callbacks = Sequence[TrainerCallback]

_HOW_LONG = ("max_steps", "total_episodes", "num_train_epochs")  # the first that is given counts, as in transformers


def _named(recipe: Recipe, stage: str, callbacks: Callbacks) -> dict[str, Any]:
    """What every trainer of ours is told: the base that its adapters are of, and where its metrics go."""
    metrics = [MetricsFile(recipe.stage_folder(stage) / METRICS_FILE)] if processes.is_main() else []
    return {"base_name": recipe.base_path, "callbacks": [*metrics, *callbacks]}


def stage_dataset(recipe: Recipe, stage: str, kind: Kind, split: str) -> Any:
    task = recipe.task_of(stage)
    with within(recipe.data_section(stage)):
        _check_vocabulary(recipe, task)
        return task.dataset(kind, split)


def _check_vocabulary(recipe: Recipe, task: Task) -> None:
    """Raises: RecipeError: a task makes ids of a vocabulary that is not the checkpoint's."""
    own, of_base = task.tokenizer, recipe.tokenizer
    if own is not of_base and own.get_vocab() != of_base.get_vocab():
        wrong = f"{task.task} has a vocabulary of its own, and {recipe.base.model} has another."
        raise RecipeError(wrong, field="task", remedy="Take a task that reads text, or a checkpoint of this one.")


OF_TRAINING, HELD_OUT = ("train", "validation"), ("validation",)  # splits whose responses are scored


def scored_prompts(recipe: Recipe, splits: Sequence[str]) -> list[Prompts]:
    """The prompts whose responses a reward scores."""
    found = []
    for split in splits:
        rows = stage_dataset(recipe, "ppo", "prompts", split)
        places = recipe.task.prompt_places(split)  # none of those that a task makes, or Python has given
        found.append(Prompts(rows, places or [f"prompt {number} of {split}" for number in range(1, len(rows) + 1)]))
    return found


def about_stage(recipe: Recipe, stage: str) -> Iterator[str]:
    """Sentences on a stage before it runs: which of two settings says how long; why its precision is this one where the
    recipe leaves it open; that it is slow, or that torch finds no GPU."""
    given = section(recipe.values, stage)
    first, *others = [name for name in _HOW_LONG if given.get(name) not in (None, -1)] or [""]
    if others:  # one: max_steps and total_episodes together are refused
        yield f"{stage}.{first} ({given[first]}) says how long it trains: {others[0]} has no effect."
    precision, key = recipe.precision(stage), f"{recipe.plan.stages[stage].model}.dtype"
    if precision.why:
        yield f"{key} is {precision}."
    if slow := about_slow(precision.dtype, key):
        yield slow
    elif given.get("bf16") and (slow := slow_here("bfloat16")):
        yield f"{stage}.bf16 is true: {slow} Without it passes are in {precision.dtype}."
    if finds_no_gpu():
        wrong = f"torch, built for CUDA {torch.version.cuda}, finds no GPU that it can use: {stage} runs on the CPU. "
        wrong += "If there is one, see nvidia-smi: its driver may be too old for this build (docs/running.md). "
        yield f"{wrong}CUDA_VISIBLE_DEVICES='' says that the CPU is meant."


def about_slow(dtype: str, key: str) -> str:
    """A sentence where a precision is slow on this machine, else nothing."""
    slow = slow_here(dtype)
    return slow and f"{key} is {dtype}: {slow} {key}=auto takes {fast_precision().dtype}."


def trainer_config(recipe: Recipe, stage: str) -> Any:
    config = recipe.stage_config(stage)
    if config.use_cpu and torch.cuda.is_available():
        wrong = "true does not keep a run off the GPU: base and inputs go there."
        remedy = "Hide the GPU with CUDA_VISIBLE_DEVICES='', or take it out."
        raise RecipeError(wrong, field=f"{stage}.use_cpu", remedy=remedy)
    if config.fp16 and not torch.cuda.is_available():
        wrong = "float16 training needs a GPU, and none is here."
        asked = recipe.values[stage].get("fp16")
        remedy = "Take it out." if asked else "Set base.dtype to auto, bfloat16 or float32."
        raise RecipeError(wrong, field=f"{stage}.fp16" if asked else "", remedy=remedy)
    if stage == "ppo" and config.decoding["graphs"]:  # before earlier stages have run
        with within(stage):
            check_device_records(default_device())
    return config


_OF_THE_PROCESS: list[str] = []  # the precision of products in float32 before a stage set its own


def _for_training(recipe: Recipe, stage: str) -> Any:
    """Its settings, with the precision of products in float32 as they say, which torch keeps for the whole process:
    where they say nothing, as it was before another stage's did."""
    config = trainer_config(recipe, stage)
    if _OF_THE_PROCESS:
        torch.backends.fp32_precision = _OF_THE_PROCESS.pop()  # type: ignore[attr-defined]
    if is_torch_tf32_available() and (tf32 := _tf32(config)) is not None:
        _OF_THE_PROCESS.append(torch.backends.fp32_precision)  # type: ignore[attr-defined]
        torch.backends.fp32_precision = "tf32" if tf32 else "ieee"  # type: ignore[attr-defined]
    return config


def _tf32(config: Any) -> bool | None:
    """As transformers has it of the arguments, whose own function for it does nothing when called a second time."""
    compiled = config.torch_compile and (config.bf16 or not config.fp16)
    return True if config.tf32 is None and compiled else config.tf32


def _supervised(recipe: Recipe, stage: str, trainer: Callable[..., Any], model: Any, callbacks: Callbacks) -> Any:
    kind = recipe.plan.stages[stage].rows
    config = _for_training(recipe, stage)
    train, held_out = (stage_dataset(recipe, stage, kind, split) for split in ("train", "validation"))
    with within(stage), made_by_trl():
        return trainer(config, recipe.tokenizer, model, train, held_out, **_named(recipe, stage, callbacks))


def make_sft_trainer(recipe: Recipe, *, callbacks: Callbacks = ()) -> Any:
    """The sft stage: all weights of a random base, or the policy's adapter on a checkpoint."""
    if recipe.base.model is not None:
        return _supervised(recipe, "sft", sft_trainer, placed_roles(recipe, "sft")[0], callbacks)
    with within("base"):
        model = load_model(recipe.base.model_spec(), tokenizer=recipe.tokenizer)
    return _supervised(recipe, "sft", sft_trainer, model, callbacks)


def make_reward_trainer(recipe: Recipe, *, callbacks: Callbacks = ()) -> Any:
    """The reward stage: pairs for a head of one output, labelled sequences for classes."""
    own = recipe.plan.stages["reward"].own
    model = placed_roles(recipe, "reward")[0] if own is None else own.classifier(site(recipe))
    return _supervised(recipe, "reward", reward_trainer, model, callbacks)


def site(recipe: Recipe) -> Site:
    """Where the sources of a recipe's roles are placed, once the stages that they need have run."""
    return Site(recipe.tokenizer, recipe.stage_folder)


def placed_roles(
    recipe: Recipe, stage: str, *, trained: Path | None = None, wanted: Container[str] | None = None
) -> tuple[SharedBase, dict[str, int]]:
    """The shared base with the roles of a stage, and the pad tokens of those that score.

    With `trained`, the folder of what the stage has trained, in place of what it starts with; of all its roles those
    alone that are `wanted`, if that is given.
    """
    with within("base"):
        base = load_model(recipe.base.model_spec(model=recipe.base_path)).requires_grad_(False)
        roles = SharedBase(base, pack_rows=recipe.base.pack_rows)
    own = int(recipe.tokenizer.pad_token_id)
    pad_tokens: dict[str, int] = {}
    for source in recipe.plan.stages[stage].roles:
        if source.role in ("policy", "q") and trained is not None:
            source = Saved(source.role, stage, str(trained))
        if wanted is None or source.role in wanted:
            with within(source.key):
                placed = source.place(roles, site(recipe))
            if scores_for(source.role):
                pad_tokens[source.role] = _pad_token_of(placed.about, recipe, own)
    if trained is None and (about := end_without_stop(recipe, stage, roles)):
        phases.tell(about.text())
    return roles, pad_tokens


def end_without_stop(recipe: Recipe, stage: str, roles: SharedBase) -> Problem | None:
    """That the chat template ends a turn with a token at which no response ends, where another tool may have taught
    the policy of a stage to end so: an sft stage of ours teaches the end of sequence."""
    start = recipe.plan.stages[stage].source("reference")
    ours = isinstance(start, Saved) and Path(start.folder).expanduser().joinpath(ROLE_FILE).is_file()
    ours = ours or isinstance(start, Trained)
    if start is None or ours or recipe.base.model is None or not recipe.task.chats:
        return None
    tokenizer, stops = recipe.tokenizer, roles.stop_token_ids(recipe.tokenizer)
    end = PromptEncoder(tokenizer).ends[-1]
    token = tokenizer.convert_tokens_to_ids(end)
    if token in stops:
        return None
    wrong = f'no response ends at "{end}" (id {token}), with which the chat template ends a turn: a policy that was '
    wrong += "taught elsewhere to end so goes on to response_length."
    remedy = f'If it was, write "eos_token_id": {[*stops, token]} into the generation_config.json of the checkpoint, '
    return Problem(wrong, "base.model", f"{remedy}of a hub id into that of a downloaded copy, and name its folder.")


def _pad_token_of(about: Mapping[str, Any], recipe: Recipe, own: int) -> int:
    """The id that a saved head was padded with; the policy's own where nothing says."""
    token = about.get("pad_token")  # as TRL saves a tokenizer beside an adapter
    return int(about.get("pad_token_id", own if token is None else recipe.tokenizer.get_vocab().get(token, own)))


def make_reward(
    recipe: Recipe,
    roles: SharedBase,
    pad_tokens: dict[str, int],
    batch_size: int,
    *,
    role: str = "reward",
    splits: Sequence[str] = OF_TRAINING,
) -> Reward:
    """The reward callback of a recipe, or, as the role "judge", that of its judge; `batch_size` is that of an adapter.
    Of the prompts of these `splits` it is checked that they have what it reads; of a judge those held out alone.

    Raises:
        RewardError: what the section `scorer`, or `judge`, names cannot be used.
    """
    section, scorer = ("judge", recipe.judge) if role == "judge" else ("scorer", recipe.scorer)
    assert scorer is not None
    own = recipe.plan.scored_by if role == "reward" else None
    context = ScorerContext(
        roles=roles,
        tokenizer=recipe.tokenizer,
        prompts=lambda: scored_prompts(recipe, HELD_OUT if role == "judge" else splits),
        chats=recipe.task.chats,
        pad_tokens=pad_tokens,
        batch_size=batch_size,
        role=role,
        adapters=adapter_roles(recipe.values, section),
        reward_model=None if own is None else own.trained_classifier(site(recipe)),
        level={} if own is None else level_of(_held_out_scores(recipe)),
    )
    with within(section):
        if problems := scorer.check(context):
            raise RewardError(recipe.name, problems=problems)
        return scorer.build(context)


def _held_out_scores(recipe: Recipe) -> list[float]:
    """What the reward that this run has trained gave the responses of held-out pairs, as its stage has written them."""
    path = recipe.stage_folder("reward") / SCORES_FILE
    return of_responses(read_jsonl(path)) if path.is_file() else []


def measures(
    recipe: Recipe,
    roles: SharedBase,
    pad_tokens: dict[str, int],
    batch_size: int,
    *,
    reward: Reward | None = None,
    judge: Reward | None = None,
    splits: Sequence[str] = OF_TRAINING,
) -> dict[str, Any]:
    """What responses are measured by, as trainers and evaluators name it: `reward`, `metrics` and `judge`.

    A reward and a judge that are given come before what the recipe says. For the others and errors see `make_reward`.
    """
    if reward is None:
        reward = make_reward(recipe, roles, pad_tokens, batch_size, splits=splits)
    if judge is None and recipe.judge is not None:
        judge = make_reward(recipe, roles, pad_tokens, batch_size, role="judge")
    return {"reward": reward, "metrics": recipe.task.metrics, "judge": judge}


def make_ppo_trainer(
    recipe: Recipe,
    *,
    reward: Reward | None = None,
    judge: Reward | None = None,
    trainer_class: type[PPOTrainer] = PPOTrainer,
    callbacks: Callbacks = (),
) -> Any:
    """The ppo stage, by our loop or by TRL's own; a reward and a judge that are given come before the recipe's."""
    config = _for_training(recipe, "ppo")
    roles, pad_tokens = placed_roles(recipe, "ppo")
    prompts = stage_dataset(recipe, "ppo", "prompts", "train")
    named = _named(recipe, "ppo", callbacks)
    if config.loop == "trl":
        with within("ppo"):
            return stock_ppo_trainer(config, recipe.tokenizer, roles, prompts, pad_tokens=pad_tokens, **named)
    named |= measures(recipe, roles, pad_tokens, config.local_rollout_forward_batch_size, reward=reward, judge=judge)
    held_out = stage_dataset(recipe, "ppo", "prompts", "validation")
    with within("ppo"):
        return trainer_class(config, recipe.tokenizer, roles, named.pop("reward"), prompts, held_out, **named)


def make_rollouts(recipe: Recipe, roles: SharedBase, stage: str = "ppo") -> Any:
    """What makes and measures rollouts as the ppo or the q stage does, without a trainer."""
    config, kind = _for_training(recipe, stage), QRollouts if stage == "q" else Rollouts
    return kind(config, recipe.tokenizer, roles, precision(config, roles))


RESPONSES_FILE = "responses.jsonl"  # of the collect stage


def rated_dataset(recipe: Recipe) -> Any:
    """The rated responses that the q stage learns from: those that the recipe names, or those that were collected."""
    if "q_data" in recipe.values:
        return stage_dataset(recipe, "q", "rated", "train")
    collected = str(recipe.stage_folder("collect") / RESPONSES_FILE)
    unlimited = 2**31  # whatever was collected is used: its lengths were limited when it was
    task = RatedResponses(recipe.tokenizer, collected, max_prompt_length=unlimited, max_response_length=unlimited)
    rated = task.rated("train")
    if any(task.left_out.values()):
        phases.tell(f"{collected}: {task.report()}")
    return rated


def make_q_trainer(recipe: Recipe, *, callbacks: Callbacks = ()) -> QTrainer:
    """The q stage: rated responses to train on, and the recipe's prompts and scorer to measure responses with."""
    config = _for_training(recipe, "q")
    dataset = rated_dataset(recipe)
    roles, pad_tokens = placed_roles(recipe, "q")
    named = measures(recipe, roles, pad_tokens, config.per_device_eval_batch_size) | _named(recipe, "q", callbacks)
    held_out = stage_dataset(recipe, "collect", "prompts", "validation")
    with within("q"):
        return QTrainer(config, recipe.tokenizer, roles, dataset, held_out, **named)


MAKERS: dict[str, Callable[..., Any]] = {
    "sft": make_sft_trainer,
    "reward": make_reward_trainer,
    "ppo": make_ppo_trainer,
    "q": make_q_trainer,
}


def make_trainer(recipe: Recipe, stage: str, **named: Any) -> Any:
    """The stage's trainer; `named` is what its maker takes."""
    if at(recipe.values, f"{stage}.full_determinism"):  # which cuBLAS reads once, at its first product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    set_seed(recipe.seed)
    return MAKERS[stage](recipe, **named)
