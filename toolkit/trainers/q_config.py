"""The configuration of the q stage: transformers', with what Q-learning needs, less what would be ignored."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import TrainingArguments

# Fields of TrainingArguments that have no effect here, each with the reason.
IGNORED = {
    "label_smoothing_factor": "the loss is that of Q-learning",
    "label_names": "the loss is that of Q-learning",
    "neftune_noise_alpha": "states and targets have to be those of decoding",
    "remove_unused_columns": "the collator takes the columns that it needs",
    "prediction_loss_only": "evaluation decodes the held-out prompts",
    "eval_accumulation_steps": "evaluation decodes the held-out prompts",
    "eval_do_concat_batches": "evaluation decodes the held-out prompts",
    "batch_eval_metrics": "evaluation decodes the held-out prompts",
    "include_for_metrics": "evaluation decodes the held-out prompts",
    "include_num_input_tokens_seen": "a batch has response tokens, which are what the loss is a mean of",
    "average_tokens_across_devices": "training runs in one process",
    "resume_from_checkpoint": "to resume is no part of a recipe: give RESUME=1 (--resume)",
}

_RANGES: dict[str, tuple[Callable[[Any], bool], tuple[str, ...]]] = {
    "from 0 to 1": (lambda x: 0.0 <= x <= 1.0, ("gamma", "target_decay")),
    "0 or more": (lambda x: x >= 0.0, ("conservative_coef",)),
    "positive": (lambda x: x > 0.0, ("decoding_temperature",)),
    "a whole number from 1": (lambda x: x >= 1, ("n_steps", "response_length", "q_chunk_size")),
}


@dataclass
class QConfig(TrainingArguments):
    """transformers' `TrainingArguments` and what Q-learning needs.

    A step takes `per_device_train_batch_size × gradient_accumulation_steps` rated responses, and its losses are means
    over the response tokens of all of them. Held-out prompts are answered by Q where `eval_strategy` asks for it.
    """

    gamma: float = field(
        default=0.998,
        metadata={
            "help": "Discount of what comes after a reward. Tokens without a reward are not discounted: they are parts "
            "of one action."
        },
    )
    target_decay: float = field(
        default=0.99, metadata={"help": "Of the target network, a moving average of the q adapter, at each step."}
    )
    n_steps: int = field(
        default=1, metadata={"help": "Tokens of the data that are followed before the largest Q is taken."}
    )
    monte_carlo_bound: bool = field(
        default=True, metadata={"help": "Whether a target is at least what the response went on to get."}
    )
    conservative_coef: float = field(
        default=1.0,
        metadata={
            "help": "Weight of the term that draws Q of tokens that were not taken to lowest_return; 0 for none."
        },
    )
    lowest_return: float = field(
        default=0.0,
        metadata={"help": "The lowest return that a response can have, to which unseen tokens are drawn."},
    )
    highest_return: float = field(
        default=1.0, metadata={"help": "The highest return that a response can have; with bound: sigmoid."}
    )
    bound: Literal["none", "sigmoid"] = field(
        default="none",
        metadata={
            "help": "Whether Q is the logit itself, or a sigmoid of it with a learned scale and bias, between "
            "lowest_return and highest_return."
        },
    )
    bound_scale: float = field(
        default=0.2, metadata={"help": "With bound: sigmoid, the scale of the logits at first; it is learned."}
    )
    bound_bias: float = field(
        default=-5.0,
        metadata={
            "help": "With bound: sigmoid, the bias at first; it is learned. A negative one begins with low Q-values."
        },
    )
    truncated_as: Literal["terminal", "bootstrap"] = field(
        default="terminal",
        metadata={
            "help": "Whether a response that the length limit cut is over, or goes on with the largest Q of the state "
            "after it."
        },
    )
    decoding: Literal["greedy", "sample"] = field(
        default="greedy",
        metadata={
            "help": "How evaluation answers: the token of the largest Q, or a sample of the reference weighted by "
            "exp((Q - V) / decoding_temperature)."
        },
    )
    decoding_temperature: float = field(
        default=1.0, metadata={"help": "With decoding: sample. Small values follow Q, large ones the reference."}
    )
    response_length: int = field(default=53, metadata={"help": "Tokens of an answer in evaluation, its end included."})
    q_chunk_size: int = field(
        default=128, metadata={"help": "Response tokens for which Q of the whole vocabulary exists at a time."}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "The collator takes what it needs."})

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        for rule, (holds, names) in _RANGES.items():
            for name in names:
                if not holds(getattr(self, name)):
                    problems.append(f"{name} must be {rule}, got {getattr(self, name)!r}")
        for name, words in (
            ("bound", ("none", "sigmoid")),
            ("truncated_as", ("terminal", "bootstrap")),
            ("decoding", ("greedy", "sample")),
        ):
            if getattr(self, name) not in words:
                problems.append(f"{name} must be one of {', '.join(words)}, got {getattr(self, name)!r}")
        if self.bound == "sigmoid" and not self.lowest_return < self.highest_return:
            problems.append(
                f"lowest_return ({self.lowest_return}) must be below highest_return ({self.highest_return})"
            )
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def temperature(self) -> float | None:
        """τ of decoding, None for greedy."""
        return self.decoding_temperature if self.decoding == "sample" else None
