"""The unmodified PPOTrainer of TRL 1.12 on the shared base: parity oracle, and for those who want exactly TRL."""

from dataclasses import fields

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from trl.experimental.ppo import PPOConfig as TRLPPOConfig
from trl.experimental.ppo import PPOTrainer as TRLPPOTrainer

from toolkit.data import pad_rows
from toolkit.errors import RecipeError
from toolkit.models import PolicyView, SharedBase, TokenScoreView
from toolkit.trainers.ppo_config import PPOConfig
from toolkit.trainers.self_checks import check_dataset, check_tokenizer


def trl_config(args: PPOConfig, rows: int) -> TRLPPOConfig:
    """Ours as TRL's own class, with the settings that TRL needs spelt out.

    Args:
        args: ours.
        rows: prompts in the data set.
    """
    named = {f.name for f in fields(TRLPPOConfig) if f.init} - {"max_steps", "save_strategy", "eval_strategy"}
    ours = {name: getattr(args, name) for name in named}
    ours |= {
        "save_strategy": "no",  # TRL cannot go on from a checkpoint, and writes pickles into it
        "stop_token": "eos",  # TRL's default never stops
        "stop_token_id": None,
        "total_episodes": args.number_of_updates(rows) * args.rollout_batch_size,
        "num_sample_generations": 0,
        "load_best_model_at_end": False,
        "report_to": args.report_to or "none",
    }
    return TRLPPOConfig(**ours)


def check_trl_loop(args: PPOConfig, processing_class: PreTrainedTokenizerBase, roles: SharedBase) -> None:
    """TRL's loop can honour the recipe. Nothing is computed, so that a base on the meta device will do.

    Raises:
        RecipeError: it cannot, with all reasons.
    """
    problems = []
    if processing_class.pad_token_id == processing_class.eos_token_id:
        problems.append(
            "the tokenizer's pad and eos are one token, which TRL's loop takes for padding: it would never train eos"
        )
    if "reward" not in roles.roles or roles.head("reward").out_features != 1:
        problems.append("TRL's loop scores with a reward adapter of one output, nothing else (scorer.kind: adapter)")
    if roles.shares_value:
        problems.append("TRL's loop runs policy and value one after the other: ppo.value must be separate")
    if args.gradient_checkpointing:
        problems.append("TRL's loop does not switch checkpointing on: ppo.gradient_checkpointing must be false")
    if problems:
        raise RecipeError("ppo.loop: trl cannot run this recipe: " + "; ".join(problems) + ". Use ppo.loop: toolkit.")


def stock_ppo_trainer(
    args: PPOConfig,
    processing_class: PreTrainedTokenizerBase,
    roles: SharedBase,
    train_dataset: Dataset,
    *,
    callbacks: list[TrainerCallback] | None = None,
) -> TRLPPOTrainer:
    """TRL's PPOTrainer with a view for each role of one base.

    TRL makes masks from pad ids, so that pad and end-of-sequence must be two tokens, and scores with a
    scalar reward head only. Its value model is always separate.

    Args:
        args: the configuration; `loop` is "trl".
        processing_class: tokenizer.
        roles: carries policy, value, reward and reference.
        train_dataset: prompts with a column `input_ids`.
        callbacks: added to TRL's.

    Raises:
        RecipeError: a setting that TRL's loop cannot honour.
    """
    check_trl_loop(args, processing_class, roles)
    check_dataset(train_dataset, args.rollout_batch_size)
    check_tokenizer(processing_class, roles)
    roles.train_roles("policy", "value")
    pad_token_id = processing_class.pad_token_id

    def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
        ids, mask = pad_rows([row["input_ids"] for row in rows], pad_token_id=pad_token_id, side="left")
        return {"input_ids": ids, "attention_mask": mask}

    trainer = TRLPPOTrainer(
        args=trl_config(args, len(train_dataset)),
        processing_class=processing_class,
        model=PolicyView(roles, "policy"),
        ref_model=PolicyView(roles, "reference"),
        reward_model=TokenScoreView(roles, "reward"),
        value_model=TokenScoreView(roles, "value"),
        train_dataset=train_dataset,
        # TRL builds a loader over the evaluation set even where it is never read, and None has no length.
        eval_dataset=train_dataset,
        data_collator=collate,
        callbacks=callbacks,
    )
    if callbacks:
        trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)
    return trainer
