"""A checked recipe and what can be made from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

from transformers import BitsAndBytesConfig, PreTrainedTokenizerBase

from toolkit.data import TASKS, GivenPrompts, Task
from toolkit.errors import within
from toolkit.models import Precision, load_tokenizer
from toolkit.rewards import Scorer, scorer_of
from toolkit.spec.as_text import to_yaml
from toolkit.spec.keys import owner_fields
from toolkit.spec.plan import Plan, base_precision
from toolkit.spec.resolve import resolve
from toolkit.spec.sections import DEFAULT_SEED, BaseSection, CollectSection
from toolkit.spec.stage import stage_config


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe, bound to a run folder. Made by `toolkit.recipes.load`.

    Args:
        name: of the recipe.
        values: the recipe, resolved and checked.
        run: name of the run.
        runs_dir: folder of all runs.
        prompts: of ppo, in place of those of its data; made by `with_prompts`.
        checkpoint: of a trained run that is used, the step of the one whose policy is meant; None for its end.
    """

    name: str
    values: dict[str, Any]
    run: str
    runs_dir: Path
    prompts: GivenPrompts | None = field(default=None, compare=False, repr=False)
    checkpoint: int | None = None

    def with_prompts(self, given: Mapping[str, Any]) -> Self:
        """The same recipe with prompts of ppo that are given in Python: `train_dataset`, `eval_dataset`."""
        return replace(self, prompts=GivenPrompts(self.task, given))

    def given(self, stage: str) -> dict[str, str]:
        """SHA-256 of the prompts of a stage that were given in Python, by their argument's name."""
        return self.prompts.digests if stage == "ppo" and self.prompts is not None else {}

    @property
    def seed(self) -> int:
        return int(self.values.get("seed", DEFAULT_SEED))

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.runs_dir / self.run

    def stage_folder(self, stage: str) -> Path:
        return self.folder / stage

    @cached_property
    def plan(self) -> Plan:
        """Where each role of each stage comes from."""
        return resolve(self.values)

    def to_yaml(self) -> str:
        """The resolved recipe."""
        return self._yaml

    @cached_property
    def _yaml(self) -> str:
        return to_yaml(self.values, width=100)

    @property
    def base(self) -> BaseSection:
        """The section, `auto` in it replaced by the dtype of this machine."""
        return BaseSection(**{**self.values["base"], "dtype": self.base_precision.dtype})

    @property
    def base_precision(self) -> Precision:
        """The dtype of the base on this machine, and why."""
        return base_precision(self.values)

    @property
    def scorer(self) -> Scorer:
        return scorer_of(self.values.get("scorer", {}))

    @property
    def judge(self) -> Scorer | None:
        """A second reward, which nothing is trained on."""
        return scorer_of(self.values["judge"]) if "judge" in self.values else None

    def precision(self, stage: str) -> Precision:
        """What a stage follows: that of the base, or of the model that it trains on a base of its own."""
        planned = self.plan.stages.get(stage)  # an evaluation is none of the recipe's
        return self.base_precision if planned is None else planned.precision(self.values)

    @property
    def collect(self) -> CollectSection:
        return CollectSection(**self.values.get("collect", {}))

    def quantization(self) -> BitsAndBytesConfig | None:
        return self.base.model_spec().quantization

    def stage_config(self, stage: str, **changes: Any) -> Any:
        """The stage's configuration, an object of its owner's class; `changes` come before what the recipe says."""
        values, folder = {**self.values[stage], **changes}, str(self.stage_folder(stage))
        precision = self.precision(stage)
        return stage_config(stage, values, output_dir=folder, seed=self.seed, precision=precision, run=self.run)

    @property
    def base_path(self) -> str:
        """The checkpoint that the roles share: `base.model`, or what the sft stage pretrained."""
        return self.base.model or str(self.stage_folder("sft") / "model")

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        base = self.base
        if base.model is None:
            return self.task.tokenizer
        with within("base"):
            tokenizer = load_tokenizer(base.model, revision=base.revision, trust_remote_code=base.trust_remote_code)
        if base.chat_template is not None:
            tokenizer.chat_template = base.chat_template
        return tokenizer

    def data_section(self, stage: str) -> str:
        """Name of the section with a stage's data: its own, or `data`."""
        return f"{stage}_data" if f"{stage}_data" in self.values else "data"

    @property
    def task(self) -> Task:
        """The data sets of section `data`, and their metrics."""
        return self.task_of("ppo")

    @cached_property
    def _tasks(self) -> dict[str, Task]:
        return {}

    def tasks_of(self, stage: str) -> dict[str, Task]:
        """By section the data sets that a stage reads: its own first, and of q the prompts that it is measured with."""
        return {self.data_section(one): self.task_of(one) for one in ((stage, "ppo") if stage == "q" else (stage,))}

    def task_of(self, stage: str) -> Task:
        """The data sets of a stage."""
        if stage == "ppo" and self.prompts is not None:
            return cast(Task, self.prompts)
        section = self.data_section(stage)
        if section not in self._tasks:
            arguments = {**self.values[section]}
            kind = TASKS[arguments.pop("task")]
            if "tokenizer" in owner_fields(kind):
                arguments["tokenizer"] = self.tokenizer
            with within(section):
                self._tasks[section] = kind(**arguments)
        return self._tasks[section]
