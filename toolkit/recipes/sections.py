"""The sections of a recipe: those of the toolkit's own, and whose class owns each of the others."""

from dataclasses import dataclass
from typing import Any, Literal

from trl import SFTConfig

from toolkit.rewards import ScorerSection
from toolkit.trainers.ppo_config import PPOConfig
from toolkit.trainers.q_config import QConfig
from toolkit.trainers.reward_config import RewardConfig


@dataclass(frozen=True)
class BaseSection:
    """Section `base`: the model that all roles share.

    Args:
        model: hub id or local folder.
        config: in place of `model`, `model_type` and that configuration's arguments: a model with random
            weights, which the sft stage pretrains.
        quantization: arguments of transformers' `BitsAndBytesConfig`.
        dtype: of the weights that are not quantised.
        revision: of a hub id.
        attn_implementation: as in transformers.
        trust_remote_code: run code that comes with the checkpoint.
    """

    model: str | None = None
    config: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    revision: str | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class RewardModelSection(BaseSection):
    """Section `reward_model`: a base of its own for the reward, of the same tokens as the policy's.

    The reward stage trains it as a sequence classifier: all its weights, or with `adapters.reward` that adapter and the
    head.

    Args:
        model: hub id or local folder.
        config: in place of `model`, `model_type` and that configuration's arguments: random weights.
        quantization: arguments of transformers' `BitsAndBytesConfig`.
        dtype: of the weights that are not quantised; float32 where all are trained.
        revision: of a hub id.
        attn_implementation: as in transformers.
        trust_remote_code: run code that comes with the checkpoint.
    """


@dataclass(frozen=True)
class StartSection:
    """Section `start`: trained adapters to start from, in place of fresh ones.

    Args:
        policy: PEFT folder. The reference is then a frozen copy of it.
        reward: PEFT folder with a score head: the reward stage is not needed.
        value: PEFT folder with a score head, or "reward" for a copy of the reward role.
    """

    policy: str | None = None
    reward: str | None = None
    value: str | None = None


@dataclass(frozen=True)
class RewardHeadSection:
    """Section `reward_head`.

    Args:
        num_labels: outputs: 1 for a score, more for classes.
    """

    num_labels: int = 1


@dataclass(frozen=True)
class ValueHeadSection:
    """Section `value_head`: how a fresh head of the value role starts.

    Args:
        init: weights drawn with standard deviation 0.02, or orthogonal with gain √2.
        bias: whether it has a bias, starting at 0.
    """

    init: Literal["normal", "orthogonal"] = "normal"
    bias: bool = False


@dataclass(frozen=True)
class ValueModelSection(BaseSection):
    """Section `value_model`: a base of its own for the value role, of the same tokens as the policy's.

    With `adapters.value` it is frozen under that adapter; without, all its weights are trained.

    Args:
        model: hub id or local folder, of a language model or of a reward model.
        config: in place of `model`, `model_type` and that configuration's arguments: random weights.
        quantization: arguments of transformers' `BitsAndBytesConfig`.
        dtype: of the weights that are not quantised; float32 where all are trained.
        revision: of a hub id.
        attn_implementation: as in transformers.
        trust_remote_code: run code that comes with the checkpoint.
    """


@dataclass(frozen=True)
class CollectSection:
    """Section `collect`: responses to the training prompts, sampled where the policy starts and scored by `scorer`.

    Args:
        samples_per_prompt: responses to each prompt.
        max_prompts: the first so many prompts; null for all.
        temperature: of sampling.
        response_length: tokens of a response, its end included.
        batch_size: responses sampled at a time.
    """

    samples_per_prompt: int = 1
    max_prompts: int | None = None
    temperature: float = 1.0
    response_length: int = 53
    batch_size: int = 64


STAGE_CLASSES: dict[str, type] = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig, "q": QConfig}
PLAIN_SECTIONS: dict[str, type] = {
    "base": BaseSection,
    "scorer": ScorerSection,
    "start": StartSection,
    "reward_head": RewardHeadSection,
    "reward_model": RewardModelSection,
    "value_head": ValueHeadSection,
    "value_model": ValueModelSection,
    "collect": CollectSection,
}
ADAPTER_ROLES = ("policy", "value", "reward", "q")
# `data` is for all stages; the others, for one stage each, come before it.
DATA_SECTIONS = ("data", "sft_data", "reward_data", "q_data")
TOP_LEVEL = ("about", "seed", *DATA_SECTIONS, "adapters", *PLAIN_SECTIONS, *STAGE_CLASSES)
