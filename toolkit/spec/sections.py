"""The sections of a recipe: those of the toolkit's own, and whose class owns each of the others."""

from dataclasses import dataclass, fields
from typing import Any

from trl import SFTConfig

from toolkit.models import AUTO, Dtype, HeadInit, ModelSpec, Precision, fast_precision, quantization_config
from toolkit.settings import A_TEMPERATURE, AT_LEAST_1, setting
from toolkit.trainers.ppo_config import PPOConfig
from toolkit.trainers.q_config import QConfig
from toolkit.trainers.reward import RewardConfig


@dataclass(frozen=True)
class ModelSection:
    """A model and the form that it is loaded in."""

    model: str | None = setting(None, "Hub id or local folder.")
    config: dict[str, Any] | None = setting(
        None, "In place of `model`, for random weights: `model_type` and its configuration's arguments."
    )
    quantization: dict[str, Any] | None = setting(
        None,
        "Arguments of transformers' `BitsAndBytesConfig`; `bnb_4bit_compute_dtype` is `dtype` where none is given.",
    )
    dtype: Dtype = setting(
        AUTO,
        "Dtype of the weights that are not quantised. auto picks by hardware: bfloat16 where it is fast, else "
        "float16 on a GPU and float32 on a CPU; float32 where all weights train.",
    )
    revision: str | None = setting(None, "Branch, tag or commit of a hub id; a folder has none.")
    attn_implementation: str | None = setting(None, "As in transformers.")
    trust_remote_code: bool = setting(False, "Run code that comes with the checkpoint.")

    def model_spec(self, **changes: Any) -> ModelSpec:
        """What is to be loaded, with fields in place of the section's own."""
        given = self.quantization
        quantization = None if given is None else quantization_config(given, self.dtype)
        named = {one.name: getattr(self, one.name) for one in fields(ModelSpec)}
        return ModelSpec(**{**named, "quantization": quantization, **changes})


@dataclass(frozen=True)
class BaseSection(ModelSection):
    """Section `base`: the model that all roles share. With `config`, which the sft stage pretrains."""

    chat_template: str | None = setting(
        None,
        "In place of the checkpoint's own: a file with a Jinja template, or a folder with a `chat_template.jinja`, as "
        "one of a trained adapter may be. The recipe of a run has its text.",
    )
    pack_rows: bool | None = setting(
        None,
        "Whether the rows of a pass, and the prompts of a rollout, are packed end to end, without padding. null packs "
        "them on a CPU if the base and `value_model` support it; true is refused if one of them does not.",
    )


def precision_of(values: dict[str, Any], *, whole: bool) -> Precision:
    """The dtype of a section's model on this machine, and why; `whole` where all weights train."""
    given = values.get("dtype", AUTO)
    if isinstance(given, str) and given != AUTO:  # anything else is a problem of its own
        return Precision(given)
    return Precision("float32", "all its weights train") if whole else fast_precision()


def not_whole(values: dict[str, Any]) -> str:
    """Why all weights of a section's model cannot train in its dtype; nothing where they can."""
    if (dtype := precision_of(values, whole=True).dtype) == "float32":
        return ""
    return f"float32 is needed where all weights are trained, got {dtype}: small steps would round to nothing."


@dataclass(frozen=True)
class RewardModelSection(ModelSection):
    """Section `reward_model`: a base of its own for the reward, of the same tokens as the policy's.

    The reward stage trains it as a sequence classifier: all its weights, which then have to be float32, or with
    `adapters.reward` that adapter and the head.
    """


@dataclass(frozen=True)
class ValueModelSection(ModelSection):
    """Section `value_model`: a base of its own for the value role, of the same tokens as the policy's.

    It is a language model or a reward model. With `adapters.value` it is frozen under that adapter; without, all its
    weights are trained, and have to be float32.
    """


@dataclass(frozen=True)
class StartSection:
    """Section `start`: trained adapters to start from, in place of fresh ones."""

    policy: str | None = setting(None, "PEFT folder. The reference is then a frozen copy of it.")
    reward: str | None = setting(None, "PEFT folder with a score head: the reward stage is not needed.")
    value: str | None = setting(None, 'PEFT folder with a score head, or "reward" for a copy of the reward role.')
    judge: str | None = setting(
        None, "PEFT folder with a score head, for a `judge` of kind adapter: what another run's reward stage has left."
    )


@dataclass(frozen=True)
class RewardHeadSection:
    """Section `reward_head`."""

    num_labels: int = setting(1, "Outputs: 1 for a score, more for classes.", AT_LEAST_1)


@dataclass(frozen=True)
class ValueHeadSection:
    """Section `value_head`: how a fresh head of the value role starts."""

    init: HeadInit = setting("normal", "Weights drawn with standard deviation 0.02, orthogonal with gain √2, or 0.")
    bias: bool = setting(False, "Whether it has a bias, starting at 0.")


@dataclass(frozen=True)
class CollectSection:
    """Section `collect`: responses to the training prompts, sampled where the policy starts and scored by `scorer`."""

    samples_per_prompt: int = setting(1, "Responses to each prompt.", AT_LEAST_1)
    max_prompts: int | None = setting(None, "The first so many prompts; null for all.", AT_LEAST_1)
    temperature: float = setting(1.0, "Sampling temperature.", A_TEMPERATURE)
    response_length: int = setting(53, "Tokens of a response, its end included.", AT_LEAST_1)
    batch_size: int = setting(64, "Responses sampled at a time.", AT_LEAST_1)


STAGE_CLASSES: dict[str, type] = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig, "q": QConfig}
PLAIN_SECTIONS: dict[str, type] = {
    "base": BaseSection,
    "start": StartSection,
    "reward_head": RewardHeadSection,
    "reward_model": RewardModelSection,
    "value_head": ValueHeadSection,
    "value_model": ValueModelSection,
    "collect": CollectSection,
}
MODEL_SECTIONS = ("base", "reward_model", "value_model")
ADAPTER_ROLES = ("policy", "value", "reward", "q")
# `data` is for all stages; the others, for one stage each, come before it.
DATA_SECTIONS = ("data", "sft_data", "reward_data", "q_data")
DEFAULT_SEED = 0
SCORER_SECTIONS = ("scorer", "judge")
TOP_LEVEL = ("about", "seed", *DATA_SECTIONS, "adapters", *SCORER_SECTIONS, *PLAIN_SECTIONS, *STAGE_CLASSES)
