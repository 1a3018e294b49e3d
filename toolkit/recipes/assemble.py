"""From a recipe to a trainer: base, roles, data and configuration put together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel, TrainerCallback, set_seed

from toolkit.data import RatedResponses
from toolkit.errors import RecipeError
from toolkit.models import (
    QBound,
    SharedBase,
    add_q_roles,
    build_base,
    check_same_tokenizer,
    load_base,
    load_role,
)
from toolkit.recipes.own_model import trained_reward_model, untrained_reward_model
from toolkit.recipes.own_value import has_own_value, place_value_model
from toolkit.recipes.recipe import Recipe
from toolkit.recipes.sections import DATA_SECTIONS
from toolkit.reports import MetricsFile, ProgressBar
from toolkit.rewards import (
    RemoteReward,
    Reward,
    RewardAdapter,
    RewardModel,
    ScorerSection,
    WeightedSum,
    load_function,
)
from toolkit.rewards.model import PROMPT_COLUMNS
from toolkit.trainers.ppo import PPOTrainer
from toolkit.trainers.q_learning import QTrainer
from toolkit.trainers.reward import reward_trainer
from toolkit.trainers.reward_model import reward_model_trainer
from toolkit.trainers.sft import sft_trainer
from toolkit.trainers.stock_ppo import stock_ppo_trainer


def _callbacks(recipe: Recipe, stage: str) -> list[TrainerCallback]:
    return [
        MetricsFile(recipe.stage_folder(stage) / "metrics.jsonl"),
        ProgressBar(f"{recipe.run} {stage}"),
    ]


def stage_dataset(recipe: Recipe, stage: str, kind: str, split: str) -> Any:
    section = recipe.data_section(stage)
    make = getattr(recipe.task_of(stage), kind, None)
    if make is None:
        task = recipe.values[section]["task"]
        own = f"{stage}_data"
        ways = f" Give the stage data of its own in the section {own}." if own in DATA_SECTIONS else ""
        raise RecipeError(f'{section}.task: "{task}" has no {kind} data, which the {stage} stage needs.{ways}')
    with recipe.naming(section):
        return make(split)


def trainer_config(recipe: Recipe, stage: str, **changes: Any) -> Any:
    config = recipe.stage_config(stage, **changes)
    if config.fp16 and not torch.cuda.is_available():
        raise RecipeError(
            f"{stage}: float16 training needs a GPU, and none is here. Set base.dtype to bfloat16 or float32."
        )
    return config


def base_model(recipe: Recipe) -> PreTrainedModel:
    """The frozen base of a recipe, quantised if it says so."""
    base = recipe.base
    return load_base(
        recipe.base_path,
        quantization=recipe.quantization(),
        dtype=base.dtype,
        revision=base.revision,
        attn_implementation=base.attn_implementation,
        trust_remote_code=base.trust_remote_code,
    )


def _policy_folder(recipe: Recipe) -> Path | None:
    """Where the policy starts: a named adapter, that of the sft stage, or (None) fresh."""
    if recipe.start.policy:
        return Path(recipe.start.policy)
    if recipe.base.model is not None and "sft" in recipe.values:
        return recipe.stage_folder("sft") / "policy"
    return None


def make_sft_trainer(recipe: Recipe) -> Any:
    """The sft stage: all weights of a random base, or the policy's adapter on a checkpoint."""
    set_seed(recipe.seed)
    model: PreTrainedModel | SharedBase
    if recipe.base.model is None:
        model = build_base(dict(recipe.base.config or {}), recipe.tokenizer, dtype=recipe.base.dtype)
    else:
        model = SharedBase(base_model(recipe))
        model.add_role("policy", recipe.adapter("policy"))
    return sft_trainer(
        trainer_config(recipe, "sft"),
        recipe.tokenizer,
        model,
        stage_dataset(recipe, "sft", "demonstrations", "train"),
        stage_dataset(recipe, "sft", "demonstrations", "validation"),
        base_name=recipe.base_path,
        callbacks=_callbacks(recipe, "sft"),
    )


def make_reward_trainer(recipe: Recipe) -> Any:
    """The reward stage: pairs for a head of one output, labelled sequences for classes."""
    set_seed(recipe.seed)
    kind = "pairs" if recipe.reward_head.num_labels == 1 else "labelled"
    if "reward_model" in recipe.values:
        return reward_model_trainer(
            trainer_config(recipe, "reward"),
            recipe.tokenizer,
            untrained_reward_model(recipe),
            stage_dataset(recipe, "reward", kind, "train"),
            stage_dataset(recipe, "reward", kind, "validation"),
            callbacks=_callbacks(recipe, "reward"),
        )
    roles = SharedBase(base_model(recipe))
    roles.add_role("reward", recipe.adapter("reward"), num_labels=recipe.reward_head.num_labels)
    return reward_trainer(
        trainer_config(recipe, "reward"),
        recipe.tokenizer,
        roles,
        stage_dataset(recipe, "reward", kind, "train"),
        stage_dataset(recipe, "reward", kind, "validation"),
        base_name=recipe.base_path,
        callbacks=_callbacks(recipe, "reward"),
    )


def add_reference(recipe: Recipe, roles: SharedBase) -> None:
    """The reference is where the policy started: the base itself, or a frozen copy of the adapter it started from."""
    start = _policy_folder(recipe)
    if start is None:
        roles.add_role("reference")
    else:
        load_role(roles, "reference", start)


def add_scoring_role(recipe: Recipe, roles: SharedBase) -> int:
    """The reward role, where the scorer reads it; and the pad token that its head reads with."""
    pad_token_id = int(recipe.tokenizer.pad_token_id)
    if recipe.scorer.needs_reward_role:
        about = load_role(roles, "reward", recipe.start.reward or recipe.stage_folder("reward") / "reward")
        pad_token_id = about.get("pad_token_id", pad_token_id)
    return pad_token_id


def ppo_roles(recipe: Recipe) -> tuple[SharedBase, int]:
    """The shared base with all roles of the ppo stage, and the pad token that the reward head reads with."""
    roles = SharedBase(base_model(recipe))
    start = _policy_folder(recipe)
    if start is None:
        roles.add_role("policy", recipe.adapter("policy"))
    else:
        load_role(roles, "policy", start)
    add_reference(recipe, roles)
    pad_token_id = add_scoring_role(recipe, roles)
    _add_value(recipe, roles)
    return roles, pad_token_id


def _add_value(recipe: Recipe, roles: SharedBase) -> None:
    """The value role: a head on the policy's adapter, an adapter of its own, or a base of its own."""
    start = recipe.start.value
    head: dict[str, Any] = {"head_init": recipe.value_head.init, "head_bias": recipe.value_head.bias}
    if has_own_value(recipe):
        place_value_model(recipe, roles)
    elif recipe.values["ppo"].get("value", "separate") == "shared":
        roles.add_role("value", **head)
    elif start not in (None, "reward"):
        load_role(roles, "value", Path(str(start)))
    else:
        config = roles.adapter_config("reward") if "value" not in recipe.values["adapters"] else recipe.adapter("value")
        roles.add_role("value", config, **head)
        if start == "reward":
            roles.copy_adapter("reward", "value")


def make_reward(recipe: Recipe, roles: SharedBase, pad_token_id: int, batch_size: int) -> Reward:
    """The reward callback of a recipe; `batch_size` is that of the reward adapter."""

    def made(scorer: ScorerSection) -> Reward:
        if scorer.kind == "sum":
            parts = scorer.part_sections
            return WeightedSum(
                {name: made(part) for name, part in parts.items()}, {name: part.weight for name, part in parts.items()}
            )
        if scorer.kind == "function":
            return load_function(str(scorer.function))
        if scorer.kind == "model":
            return _reward_model(recipe, scorer)
        if scorer.kind == "remote":
            return RemoteReward(
                str(scorer.url),
                batch_size=scorer.batch_size,
                timeout=scorer.timeout,
                retries=scorer.retries,
                token_variable=scorer.token_variable,
            )
        return RewardAdapter(
            roles,
            pad_token_id=pad_token_id,
            class_column=scorer.class_column,
            class_score=scorer.class_score,
            batch_size=batch_size,
        )

    return made(recipe.scorer)


def _reward_model(recipe: Recipe, scorer: ScorerSection) -> RewardModel:
    if scorer.model is None:
        return RewardModel(
            trained_reward_model(recipe),
            recipe.tokenizer,
            reads="tokens",
            class_column=scorer.class_column,
            class_score=scorer.class_score,
            max_length=scorer.max_length,
            batch_size=scorer.batch_size,
        )
    if scorer.reads == "tokens":
        code = {"revision": scorer.revision, "trust_remote_code": scorer.trust_remote_code}
        check_same_tokenizer(scorer.model, recipe.tokenizer, place="scorer", **code)
    check_prompt_column(recipe, scorer, stage_dataset(recipe, "ppo", "prompts", "train").column_names)
    quantization = None if scorer.quantization is None else BitsAndBytesConfig(**scorer.quantization)
    return RewardModel.load(
        str(scorer.model),
        quantization=quantization,
        dtype=scorer.dtype,
        revision=scorer.revision,
        trust_remote_code=scorer.trust_remote_code,
        reads=scorer.reads,
        prompt_column=scorer.prompt_column,
        class_column=scorer.class_column,
        class_score=scorer.class_score,
        max_length=scorer.max_length,
        batch_size=scorer.batch_size,
    )


def check_prompt_column(recipe: Recipe, scorer: ScorerSection, columns: list[str]) -> None:
    """The prompts have text for another model to read, without the template of the base around it.

    Raises:
        RecipeError: they do not.
    """
    if scorer.reads in ("response", "tokens"):
        return
    wanted = PROMPT_COLUMNS if scorer.prompt_column is None else (scorer.prompt_column,)
    column = next((name for name in wanted if name in columns), None)
    problem = f"the prompts have no column {' or '.join(wanted)}; present: {', '.join(columns)}"
    if scorer.prompt_column is None and column == "prompt" and getattr(recipe.task, "chats", False):
        problem = "the column prompt has the chat template of the base around it, and another model has another"
    elif column is not None:
        return
    raise RecipeError(
        f"scorer.prompt_column: {problem}. Name the column with the prompt as text or messages, or set "
        "scorer.reads=response."
    )


def make_ppo_trainer(recipe: Recipe, *, reward: Reward | None = None) -> Any:
    """The ppo stage, by our loop or by TRL's own; `reward` comes before the recipe's scorer."""
    set_seed(recipe.seed)
    config = trainer_config(recipe, "ppo")
    roles, pad_token_id = ppo_roles(recipe)
    prompts = stage_dataset(recipe, "ppo", "prompts", "train")
    callbacks = _callbacks(recipe, "ppo")
    if config.loop == "trl":
        return stock_ppo_trainer(config, recipe.tokenizer, roles, prompts, callbacks=callbacks)
    return PPOTrainer(
        config,
        recipe.tokenizer,
        roles,
        reward or make_reward(recipe, roles, pad_token_id, config.local_rollout_forward_batch_size),
        prompts,
        stage_dataset(recipe, "ppo", "prompts", "validation"),
        metrics=recipe.task.metrics,
        base_name=recipe.base_path,
        callbacks=callbacks,
    )


def make_meter(recipe: Recipe, roles: SharedBase, pad_token_id: int, *, output_dir: Path) -> PPOTrainer:
    """A PPO trainer of ours that is never trained: it measures the roles on the recipe's prompts."""
    config = trainer_config(recipe, "ppo", output_dir=output_dir, loop="toolkit")
    return PPOTrainer(
        config,
        recipe.tokenizer,
        roles,
        make_reward(recipe, roles, pad_token_id, config.local_rollout_forward_batch_size),
        stage_dataset(recipe, "ppo", "prompts", "train"),
        stage_dataset(recipe, "ppo", "prompts", "validation"),
        metrics=recipe.task.metrics,
        base_name=recipe.base_path,
        callbacks=[],
    )


RESPONSES_FILE = "responses.jsonl"  # of the collect stage


def rated_dataset(recipe: Recipe) -> Any:
    """The rated responses that the q stage learns from: those that the recipe names, or those that were collected."""
    if "q_data" in recipe.values:
        return stage_dataset(recipe, "q", "rated", "train")
    collected = recipe.stage_folder("collect") / RESPONSES_FILE
    # Whatever was collected is used: its lengths were limited when it was.
    unlimited = 2**31
    task = RatedResponses(recipe.tokenizer, str(collected), max_prompt_length=unlimited, max_response_length=unlimited)
    return task.rated("train")


def make_q_trainer(recipe: Recipe, *, output_dir: Path | None = None) -> QTrainer:
    """The q stage: rated responses to train on, and the recipe's prompts and scorer to measure answers with.

    With an output folder it is one that only measures, and leaves the stage's own files as they are.
    """
    set_seed(recipe.seed)
    config = trainer_config(recipe, "q", **({} if output_dir is None else {"output_dir": output_dir}))
    dataset = rated_dataset(recipe)
    roles = SharedBase(base_model(recipe))
    bound = QBound(
        lowest=config.lowest_return,
        highest=config.highest_return,
        scale=config.bound_scale,
        bias=config.bound_bias,
    )
    add_q_roles(roles, recipe.adapter("q"), bound=bound if config.bound == "sigmoid" else None)
    add_reference(recipe, roles)
    pad_token_id = add_scoring_role(recipe, roles)
    return QTrainer(
        config,
        recipe.tokenizer,
        roles,
        dataset,
        stage_dataset(recipe, "collect", "prompts", "validation"),
        reward=make_reward(recipe, roles, pad_token_id, config.per_device_eval_batch_size),
        metrics=recipe.task.metrics,
        base_name=recipe.base_path,
        callbacks=_callbacks(recipe, "q") if output_dir is None else [],
    )


MAKERS: dict[str, Callable[..., Any]] = {
    "sft": make_sft_trainer,
    "reward": make_reward_trainer,
    "ppo": make_ppo_trainer,
    "q": make_q_trainer,
}
