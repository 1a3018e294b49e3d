"""What TRL has in one version and not in another; no other module asks which one is installed.

1.12 is the last release with PPO (huggingface/trl#7020). After it our trainer stands on transformers' `Trainer`, with
the fields of that release's `PPOConfig` that it reads; `loop: trl` alone needs the release itself.
"""

from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Literal

from packaging.version import Version
from transformers import Trainer, TrainingArguments

from toolkit.errors import Problem


@dataclass
class PPOFields(TrainingArguments):
    """The fields of TRL 1.12's `PPOConfig` that ours reads, with their defaults."""

    logging_steps: float = 10
    gradient_checkpointing: bool = True
    bf16: bool | None = None
    lr_scheduler_kwargs: dict | str | None = None
    learning_rate: float = 3e-6
    num_mini_batches: int = 1
    total_episodes: int | None = None
    local_rollout_forward_batch_size: int = 64
    response_length: int = 53
    temperature: float = 0.7
    missing_eos_penalty: float | None = None
    num_ppo_epochs: int = 4
    whiten_rewards: bool = False
    kl_coef: float = 0.05
    kl_estimator: Literal["k1", "k3"] = "k1"
    cliprange: float = 0.2
    vf_coef: float = 0.1
    cliprange_value: float = 0.2
    gamma: float = 1.0
    lam: float = 0.95

    def __post_init__(self) -> None:
        self.bf16 = not self.fp16 if self.bf16 is None else self.bf16
        super().__post_init__()


HAS_PPO = find_spec("trl.experimental.ppo") is not None
BALANCE_BY_PARTS = Version(version("trl")) >= Version("1.15")
"""Whether sft adds the term that balances a mixture's experts by a micro-batch's share of the step, as all else."""
NO_TRL_LOOP = Problem(
    f"trl is the loop of TRL 1.12, the last release that has one, and {version('trl')} is installed.",
    "loop",
    'Take toolkit, or install "trl>=1.12,<1.13".',
)

if HAS_PPO:
    from trl.experimental.ppo import PPOConfig as TRLPPOConfig
    from trl.experimental.ppo import PPOTrainer as TRLPPOTrainer
else:
    TRLPPOConfig, TRLPPOTrainer = PPOFields, Trainer
