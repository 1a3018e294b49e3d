"""The configuration of the q stage: transformers', with what Q-learning needs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from transformers import TrainingArguments

from toolkit.errors import Problem
from toolkit.settings import A_TEMPERATURE, AT_LEAST_1, NOT_NEGATIVE, UP_TO_1, check, setting
from toolkit.trainers.unread import UNREAD_BY_Q, given_in_vain


@dataclass
class QConfig(TrainingArguments):
    """transformers' `TrainingArguments` and what Q-learning needs.

    A step takes `per_device_train_batch_size × gradient_accumulation_steps` rated responses, and its losses are means
    over the response tokens of all of them. Held-out prompts are decoded by Q where `eval_strategy` asks for it.
    """

    gamma: float = setting(
        0.998,
        "Discount factor, applied after each reward; tokens without one, parts of an action, are not discounted.",
        UP_TO_1,
    )
    target_decay: float = setting(0.99, "Decay of the target network, a moving average of the q adapter.", UP_TO_1)
    n_steps: int = setting(1, "Steps of n-step returns: tokens of the data followed before max Q is taken.", AT_LEAST_1)
    monte_carlo_bound: bool = setting(True, "Whether targets are at least the Monte Carlo return from that token on.")
    conservative_coef: float = setting(
        1.0, "Weight of the term that pulls Q of all tokens not taken towards lowest_return; 0 for none.", NOT_NEGATIVE
    )
    lowest_return: float = setting(0.0, "The lowest return a response can have; Q of tokens not taken is pulled to it.")
    highest_return: float = setting(1.0, "The highest return that a response can have.", only_with={"bound": "sigmoid"})
    bound: Literal["none", "sigmoid"] = setting(
        "none",
        "Whether Q is the logit itself, or a sigmoid of it with a learned scale and bias, between lowest_return and "
        "highest_return.",
    )
    bound_scale: float = setting(0.2, "The scale of the logits at first; learned.", only_with={"bound": "sigmoid"})
    bound_bias: float = setting(
        -5.0, "The bias at first; learned. A negative one begins with low Q-values.", only_with={"bound": "sigmoid"}
    )
    truncated_as: Literal["terminal", "bootstrap"] = setting(
        "terminal",
        "Whether a response that the length limit cut is over, or goes on with the largest Q of the state after it.",
    )
    decoding: Literal["greedy", "sample"] = setting(
        "greedy",
        "How evaluation decodes: the token of the largest Q, or a sample of the reference weighted by exp((Q - V) / "
        "decoding_temperature).",
    )
    decoding_temperature: float = setting(
        1.0, "Small values follow Q, large ones the reference.", A_TEMPERATURE, only_with={"decoding": "sample"}
    )
    response_length: int = setting(53, "Tokens of a response in evaluation, its end included.", AT_LEAST_1)
    q_chunk_size: int = setting(128, "Response tokens for which Q of all tokens exists at a time.", AT_LEAST_1)
    remove_unused_columns: bool = setting(False, "The collator takes what it needs.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, self._conflicts)

    def _conflicts(self) -> Iterator[Problem]:
        yield from given_in_vain(self, UNREAD_BY_Q)
        if self.bound == "sigmoid" and not self.lowest_return < self.highest_return:
            wrong = f"{self.lowest_return} has to be below highest_return, which is {self.highest_return}."
            yield Problem(wrong, "lowest_return")
        if self.bound == "none" and not self.conservative_coef and self.lowest_return != QConfig.lowest_return:
            yield Problem(
                "would have no effect without conservative_coef, and without bound: sigmoid.", "lowest_return"
            )

    @property
    def temperature(self) -> float | None:
        """τ of decoding, None for greedy."""
        return self.decoding_temperature if self.decoding == "sample" else None
