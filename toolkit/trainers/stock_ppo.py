"""The unmodified PPOTrainer of TRL 1.12 on the shared base: parity oracle, and for those who want exactly TRL."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback

from toolkit.data import PromptCollator, PromptEncoder
from toolkit.errors import ConfigError, Problem
from toolkit.models import ROLE_FILE, PolicyView, SharedBase, TokenScoreView, save_role
from toolkit.trainers.common import in_place_of_progress, no_upload, precision
from toolkit.trainers.model_card import write_model_card
from toolkit.trainers.ppo_config import PPOConfig
from toolkit.trainers.rollouts import Rollouts
from toolkit.trainers.self_checks import check_dataset, check_tokenizer
from toolkit.trainers.trainer_internals import StateOfAccelerate
from toolkit.trainers.trl_compat import TRLPPOConfig, TRLPPOTrainer


def trl_config(args: PPOConfig, rows: int) -> TRLPPOConfig:
    """Ours as TRL's own class, for a data set of so many rows, with the settings that TRL needs spelt out."""
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
    """TRL's loop can do what is asked for. Nothing is computed, so that a base on the meta device will do.

    Raises:
        ConfigError: it cannot, with all reasons.
    """
    one_token = processing_class.pad_token_id == processing_class.eos_token_id
    no_score = "reward" not in roles.roles or roles.head("reward").out_features != 1
    end = processing_class.eos_token_id
    closing = PromptEncoder(processing_class).closing() if processing_class.chat_template else []
    beyond = not no_score and roles.head("reward").elsewhere and closing not in ([], [end])
    reasons = [
        (beyond, "loop", "TRL's loop reads a score at the end of a response, and this reward was taught beyond it."),
        (one_token, "loop", "the tokenizer's pad and eos are one token, which TRL's loop takes for padding."),
        (no_score, "loop", "TRL's loop scores with a reward adapter of one output, nothing else."),
        (roles.shares_value, "value", "TRL's loop runs policy and value one after the other: it must be separate."),
        (args.fp16, "fp16", "TRL's loop has no loss scaler, without which small gradients are 0 in float16."),
        (args.gradient_checkpointing, "gradient_checkpointing", "TRL's loop does not switch it on: it must be false."),
    ]
    if problems := [Problem(wrong, field, "Or use loop: toolkit.") for holds, field, wrong in reasons if holds]:
        raise ConfigError("loop: trl", problems=problems)


_LEARNT = ("policy", "value")


@contextmanager
def _without_dropout(roles: SharedBase) -> Iterator[None]:
    """As TRL trains, which would leave the shared base without any for good."""
    rates = [(one, one.p) for one in roles.modules() if isinstance(one, nn.Dropout)]
    try:
        for one, _ in rates:
            one.p = 0.0
        yield
    finally:
        for one, rate in rates:
            one.p = rate


class StockPPOTrainer(TRLPPOTrainer):
    """TRL's PPOTrainer as it is, with its own loop, between the models of one shared base."""

    toolkit_args: PPOConfig
    toolkit_pad_tokens: Mapping[str, int]
    base_name = ""
    last_saved: list[str]
    state_of_accelerate: StateOfAccelerate

    def train(self) -> None:
        """As TRL's, whatever trainers were made since this one: by theirs the loss would be divided, steps be taken,
        and other roles be trained."""
        roles = stock_rollouts(self).roles
        roles.train_roles(*_LEARNT)
        with self.state_of_accelerate.here(), _without_dropout(roles):
            super().train()

    def push_to_hub(self, *arguments: Any, **named: Any) -> Any:
        """As of our trainers: refused."""
        raise no_upload(self.last_saved)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save what was trained as our trainer would: a PEFT folder a role, and the model card. TRL's own would write
        the base and all of its adapters into one file, or fail at tied weights."""
        folder = Path(output_dir or self.args.output_dir)
        roles, pad_token_id = stock_rollouts(self).roles, self.processing_class.pad_token_id
        for role in _LEARNT:
            save_role(roles, role, folder / role, pad_token_id=pad_token_id, base_name=self.base_name)
        write_model_card(folder, roles, base_name=self.base_name)


def stock_rollouts(trainer: StockPPOTrainer) -> Rollouts:
    """What measures the roles of a trainer from `stock_ppo_trainer` in the same way as ours."""
    roles = trainer.accelerator.unwrap_model(trainer.model).policy.base
    # Arguments that were made now would take the state of the trainer's accelerator from it.
    args = trainer.toolkit_args
    return Rollouts(args, trainer.processing_class, roles, precision(args, roles))


_OUR_NAMES = {
    "objective/scores": "score",
    "objective/kl": "kl",
    "objective/entropy": "entropy",
    "objective/rlhf_reward": "rlhf_reward",
    "loss/policy_avg": "policy_loss",
    "loss/value_avg": "value_loss",
    "policy/approxkl_avg": "approx_kl",
    "policy/clipfrac_avg": "clip_fraction",
    "val/clipfrac_avg": "value_clip_fraction",
    "val/ratio": "ratio",
    "lr": "learning_rate",
}


class _InOurNames(TrainerCallback):
    """What TRL's loop logs has our names too, by which it is shown and drawn. It comes before those that write it."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        found = {ours: logs[theirs] for theirs, ours in _OUR_NAMES.items() if theirs in logs}
        if args.missing_eos_penalty and "score" in found:  # TRL takes it from the scores before it logs them
            found["shaped_score"] = found.pop("score")
        logs |= found


def stock_ppo_trainer(
    args: PPOConfig,
    processing_class: PreTrainedTokenizerBase,
    roles: SharedBase,
    train_dataset: Dataset,
    *,
    pad_tokens: Mapping[str, int] | None = None,
    base_name: str = "",
    callbacks: list[TrainerCallback] | None = None,
) -> StockPPOTrainer:
    """TRL's PPOTrainer with a view for each role of one base; its `save_model` saves a PEFT folder a role.

    Args:
        roles: carries policy, value, reward and reference.
        train_dataset: prompts with a column `input_ids`.
        pad_tokens: by role the padding token that it was trained with, for whoever measures.

    Raises:
        ConfigError: a setting that TRL's loop cannot honour.
    """
    check_trl_loop(args, processing_class, roles)
    check_dataset(train_dataset, args.rollout_batch_size)
    check_tokenizer(processing_class, roles)
    roles.train_roles(*_LEARNT)
    with _without_dropout(roles):
        trainer = StockPPOTrainer(
            args=trl_config(args, len(train_dataset)),
            processing_class=processing_class,
            model=PolicyView(roles, "policy"),
            ref_model=PolicyView(roles, "reference"),
            reward_model=TokenScoreView(roles, "reward"),
            value_model=TokenScoreView(roles, "value"),
            train_dataset=train_dataset,
            # TRL builds a loader over the evaluation set even where it is never read, and None has no length.
            eval_dataset=train_dataset,
            data_collator=PromptCollator(processing_class.pad_token_id),
            callbacks=[_InOurNames(), *(callbacks or ())],
        )
    trainer.toolkit_args, trainer.base_name, trainer.state_of_accelerate = args, base_name, StateOfAccelerate()
    trainer.toolkit_pad_tokens = pad_tokens or {}
    trainer.last_saved = [f"{role}/{ROLE_FILE}" for role in _LEARNT]
    in_place_of_progress(trainer, callbacks)
    return trainer
