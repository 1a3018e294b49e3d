"""A checked recipe and what can be made from it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from peft import LoraConfig
from transformers import BitsAndBytesConfig, PreTrainedTokenizerBase

from toolkit.data import TASKS
from toolkit.errors import DataError, RecipeError
from toolkit.models import load_tokenizer
from toolkit.recipes.schema import check_recipe, model_section, stage_config
from toolkit.recipes.sections import (
    BaseSection,
    CollectSection,
    RewardHeadSection,
    RewardModelSection,
    StartSection,
    ValueHeadSection,
    ValueModelSection,
)
from toolkit.rewards import Reward, ScorerSection

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

    @property
    def reward_model(self) -> RewardModelSection:
        """Of a recipe that has the section."""
        return RewardModelSection(**self.values["reward_model"])

    def stage_dtype(self, stage: str) -> str:
        """The precision that a stage follows: of the base, or of the model that it trains on a base of its own."""
        return self.reward_model.dtype if model_section(stage, self.values) == "reward_model" else self.base.dtype

    @property
    def value_head(self) -> ValueHeadSection:
        return ValueHeadSection(**self.values.get("value_head", {}))

    @property
    def value_model(self) -> ValueModelSection | None:
        """The value role's own base; None where it has none."""
        section = self.values.get("value_model")
        return None if section is None else ValueModelSection(**section)

    @property
    def collect(self) -> CollectSection:
        return CollectSection(**self.values.get("collect", {}))

    def quantization(self) -> BitsAndBytesConfig | None:
        arguments = self.base.quantization
        return None if arguments is None else BitsAndBytesConfig(**arguments)

    def adapter(self, role: str) -> LoraConfig:
        """The LoRA configuration of a role."""
        return LoraConfig(**{"task_type": "CAUSAL_LM", **self.values["adapters"][role]})

    def stage_config(self, stage: str, *, output_dir: Path | None = None, **changes: Any) -> Any:
        """The stage's configuration, an object of TRL's class.

        Args:
            stage: its name.
            output_dir: in place of the stage's own folder.
            changes: fields in place of what the recipe says.
        """
        values, folder = {**self.values[stage], **changes}, output_dir or self.stage_folder(stage)
        return stage_config(stage, values, output_dir=str(folder), seed=self.seed, base_dtype=self.stage_dtype(stage))

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

    def data_section(self, stage: str) -> str:
        """Name of the section with a stage's data: its own, or `data`."""
        return f"{stage}_data" if f"{stage}_data" in self.values else "data"

    def _make_task(self, section: str) -> Any:
        arguments = {key: value for key, value in self.values[section].items() if key != "task"}
        kind = TASKS[self.values[section]["task"]]
        if "tokenizer" in {field.name for field in fields(kind)}:
            arguments["tokenizer"] = self.tokenizer
        with self.naming(section):
            return kind(**arguments)

    @contextmanager
    def naming(self, section: str) -> Iterator[None]:
        """Errors within name the keys of this data section. A task does not know where it stands, and says `data`."""
        try:
            yield
        except DataError as error:
            names = "|".join(field.name for field in fields(TASKS[self.values[section]["task"]]))
            raise DataError(re.sub(rf"\bdata\.(?=({names})\b)", f"{section}.", str(error))) from error

    @cached_property
    def task(self) -> Any:
        """The data sets of section `data`, and their metrics."""
        return self._make_task("data")

    def task_of(self, stage: str) -> Any:
        """The data sets of a stage."""
        section = self.data_section(stage)
        if section == "data":
            return self.task
        if section not in self._stage_tasks:
            self._stage_tasks[section] = self._make_task(section)
        return self._stage_tasks[section]

    @cached_property
    def _stage_tasks(self) -> dict[str, Any]:
        return {}

    # ------------------------------------------------------------------ trainers

    def sft_trainer(self, *, resume: bool = False, overwrite: bool = False, from_run: str | None = None) -> "Trainer":
        """A TRL `SFTTrainer`; prerequisites are run first. For the arguments see `ppo_trainer`."""
        from toolkit.recipes import stages

        return stages.prepared(self, "sft", resume=resume, overwrite=overwrite, from_run=from_run)

    def reward_trainer(
        self, *, resume: bool = False, overwrite: bool = False, from_run: str | None = None
    ) -> "Trainer":
        """A TRL `RewardTrainer`, or transformers' `Trainer` for classes; prerequisites are run first.

        For the arguments see `ppo_trainer`.
        """
        from toolkit.recipes import stages

        return stages.prepared(self, "reward", resume=resume, overwrite=overwrite, from_run=from_run)

    def ppo_trainer(
        self,
        reward: Reward | None = None,
        *,
        resume: bool = False,
        overwrite: bool = False,
        from_run: str | None = None,
    ) -> "PPOTrainer":
        """A TRL `PPOTrainer`: ours, or with `ppo.loop: trl` the unmodified one; prerequisites are run first.

        Args:
            reward: scores a rollout, in place of what the section `scorer` says; a reward stage is then not needed.
            resume: keep the checkpoints of an earlier try in the run folder, for
                `trainer.train(resume_from_checkpoint=True)`.
            overwrite: delete them.
            from_run: name of another run, to take finished stages from where their settings agree.

        Raises:
            RecipeError: the recipe cannot do with another reward, the run folder holds an earlier try, or the other
                run has nothing to take.
        """
        from toolkit.recipes import stages

        made_for = self if reward is None else self._scored_by(reward)
        return stages.prepared(made_for, "ppo", resume=resume, overwrite=overwrite, from_run=from_run, reward=reward)

    def q_trainer(self, *, resume: bool = False, overwrite: bool = False, from_run: str | None = None) -> "Trainer":
        """A `QTrainer`, which is transformers' `Trainer`; prerequisites are run first.

        For the arguments see `ppo_trainer`.
        """
        from toolkit.recipes import stages

        return stages.prepared(self, "q", resume=resume, overwrite=overwrite, from_run=from_run)

    def _scored_by(self, reward: Reward) -> "Recipe":
        """The same recipe with a scorer of kind "function"; the run records the function's name."""
        owner = reward if hasattr(reward, "__qualname__") else type(reward)
        scorer = {"kind": "function", "function": f"{owner.__module__}:{getattr(owner, '__qualname__', '')}"}
        values = {**self.values, "scorer": scorer}
        problems = check_recipe(values)
        if problems:
            raise RecipeError(f"{self.name} cannot be scored by a function of its own: {' '.join(problems)}")
        return replace(self, values=values)
