"""A checked recipe and what can be made from it."""

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from peft import LoraConfig
from transformers import BitsAndBytesConfig, PreTrainedTokenizerBase

from toolkit.data import TASKS
from toolkit.models import load_tokenizer
from toolkit.recipes.schema import BaseSection, RewardHeadSection, ScorerSection, StartSection, stage_config

if TYPE_CHECKING:
    from transformers import Trainer
    from trl.experimental.ppo import PPOTrainer


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe, bound to a run folder. Made by `toolkit.recipes.load`.

    Args:
        name: of the recipe.
        values: the recipe, resolved and checked.
        run: name of the run.
        runs_dir: folder of all runs.
    """

    name: str
    values: dict[str, Any]
    run: str
    runs_dir: Path

    @property
    def seed(self) -> int:
        return int(self.values.get("seed", 0))

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.runs_dir / self.run

    def stage_folder(self, stage: str) -> Path:
        return self.folder / stage

    def to_yaml(self) -> str:
        """The resolved recipe."""
        return yaml.safe_dump(self.values, sort_keys=False, allow_unicode=True, width=100)

    # ------------------------------------------------------------------ sections as their owners' objects

    @property
    def base(self) -> BaseSection:
        return BaseSection(**self.values["base"])

    @property
    def scorer(self) -> ScorerSection:
        return ScorerSection(**self.values.get("scorer", {}))

    @property
    def start(self) -> StartSection:
        return StartSection(**self.values.get("start", {}))

    @property
    def reward_head(self) -> RewardHeadSection:
        return RewardHeadSection(**self.values.get("reward_head", {}))

    def quantization(self) -> BitsAndBytesConfig | None:
        arguments = self.base.quantization
        return None if arguments is None else BitsAndBytesConfig(**arguments)

    def adapter(self, role: str) -> LoraConfig:
        """The LoRA configuration of a role."""
        return LoraConfig(**{"task_type": "CAUSAL_LM", **self.values["adapters"][role]})

    def stage_config(self, stage: str) -> Any:
        """The stage's configuration, an object of TRL's class."""
        return stage_config(stage, self.values[stage], output_dir=str(self.stage_folder(stage)), seed=self.seed)

    # ------------------------------------------------------------------ tokenizer and data

    @property
    def base_path(self) -> str:
        """The checkpoint that the roles share: `base.model`, or what the sft stage pretrained."""
        return self.base.model or str(self.stage_folder("sft") / "model")

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self.base.model is None:
            return self.task.tokenizer
        return load_tokenizer(
            self.base.model, revision=self.base.revision, trust_remote_code=self.base.trust_remote_code
        )

    @cached_property
    def task(self) -> Any:
        """The data sets of the recipe, and its metrics."""
        arguments = {key: value for key, value in self.values["data"].items() if key != "task"}
        kind = TASKS[self.values["data"]["task"]]
        if "tokenizer" in {field.name for field in fields(kind)}:
            arguments["tokenizer"] = self.tokenizer
        return kind(**arguments)

    # ------------------------------------------------------------------ trainers

    def sft_trainer(self) -> "Trainer":
        """A TRL `SFTTrainer`; prerequisites are run first."""
        from toolkit.recipes import stages

        return stages.prepared(self, "sft")

    def reward_trainer(self) -> "Trainer":
        """A TRL `RewardTrainer`, or transformers' `Trainer` for classes; prerequisites are run first."""
        from toolkit.recipes import stages

        return stages.prepared(self, "reward")

    def ppo_trainer(self) -> "PPOTrainer":
        """A TRL `PPOTrainer`: ours, or with `ppo.loop: trl` the unmodified one; prerequisites are run first."""
        from toolkit.recipes import stages

        return stages.prepared(self, "ppo")
