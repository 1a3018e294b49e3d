"""The base and the roles of a recipe, on the meta device, where a model has names and shapes and no numbers.

The sources that put the roles on a real base put them here, so that what passes fits there. Of saved adapters the
headers are read.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from transformers import GenerationConfig, PreTrainedTokenizerBase

from toolkit import models
from toolkit.costs import pack, weight_bytes_of
from toolkit.data.chat_template import render
from toolkit.errors import Problem, ToolkitError
from toolkit.models import (
    META,
    SharedBase,
    about_other_bits,
    check_reads_tokens,
    head_name,
    load_model,
    positions_of,
)
from toolkit.runs import build
from toolkit.runs.check_report import BaseFacts, Findings, RoleFacts
from toolkit.runs.folder import finished
from toolkit.spec.chat_template import template_in
from toolkit.spec.conflicts import renders_nothing
from toolkit.spec.plan import STAGES, StagePlan, at
from toolkit.spec.recipe import Recipe
from toolkit.spec.sections import ModelSection
from toolkit.spec.sources import BaseItself, Fresh, OwnBase, Saved, Site, lora_config
from toolkit.trainers.self_checks import check_tokenizer

_TRAINED_BY = {"policy": ("ppo", "sft"), "value": ("ppo",), "reward": ("reward",), "q": ("q",)}
_THINKS = Problem(
    "with its chat template the model thinks before it answers, unless enable_thinking is false: response_length has "
    "to hold the thoughts, too.",
    remedy="For responses without them write {%- set enable_thinking = false %} as the first line of a copy of its "
    "chat template, and name that file as base.chat_template.",
)
_SHOWN_ROLES = ("policy", "reward", "judge", "value", "q", "q_target", "reference")  # in the order of the report


def _shown_at(role: str) -> tuple[int, int]:
    """Where a role stands in the report: further ones behind the one for which they score."""
    further = role not in _SHOWN_ROLES
    return _SHOWN_ROLES.index(models.scores_for(role) or role), int(role.rpartition("_")[2]) if further else 0


def _thinks(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether its chat template opens a response in another way where enable_thinking is false."""
    if tokenizer is None or tokenizer.chat_template is None:
        return False
    try:
        asks = partial(render, tokenizer, [{"role": "user", "content": "?"}], add_generation_prompt=True)
        return asks() != asks(enable_thinking=False)
    except Exception:  # of a template, whatever it raises: the data will say
        return False


class RolesCheck:
    """The base and the roles of some stages of a recipe, as far as a configuration and names tell."""

    def __init__(self, recipe: Recipe, plans: Sequence[StagePlan], findings: Findings):
        self.recipe, self.plans, self.findings = recipe, plans, findings
        self.base: BaseFacts | None = None
        self.roles: SharedBase | None = None
        self.starts: dict[str, str] = {}
        self.untrained: set[str] = set()
        self.own_reward: Any = None
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self._check_base()
        if self.roles is not None:
            self._check_roles(self.roles)
        trained = recipe.plan.stages.get("reward")
        if trained is not None and trained.own is not None and self.tokenizer is not None:
            self._check_reward_model(trained.own)

    def facts(self) -> Iterator[RoleFacts]:
        """The roles that could be placed."""
        if self.roles is not None:
            yield from self._role_facts(self.roles)
        if self.own_reward is not None:
            yield self._classifier_facts(self.own_reward)

    def trained(self, stage: str) -> Iterator[Any]:
        """The models whose layers a stage has gradients in, as far as they could be made."""
        if self.recipe.plan.stages[stage].own is not None:
            yield from [] if self.own_reward is None else [self.own_reward]
        elif self.roles is not None:
            yield self.roles.causal_lm
            if stage == "ppo" and self.roles.value_model is not None:
                yield self.roles.value_model.classifier

    def positions(self, stage: str) -> tuple[int | None, str]:
        """The longest sequence that the model of a stage takes, where its configuration says so; and whose it is."""
        own = None if self.own_reward is None else positions_of(self.own_reward.config)
        if self.recipe.plan.stages[stage].own is not None:
            return own, "reward_model"
        if self.roles is None:
            return None, "the base"
        positions, whose = self.roles.positions if stage == "ppo" else (positions_of(self.roles.config), "the base")
        if stage == "ppo" and own is not None and (positions is None or own < positions):
            return own, "reward_model"
        return positions, whose

    def _check_base(self) -> None:
        base, recipe = self.recipe.base, self.recipe
        place = "config" if base.model is None else "model"
        self._check_files(base, "base")
        with self.findings.at(key=f"base.{place}"):
            self.tokenizer = recipe.tokenizer
        if base.model is None and self.tokenizer is None:
            return  # random weights are as many as its tokens
        with self.findings.at("base", place):
            # Random weights are as many as the tokenizer says.
            tokenizer = self.tokenizer if base.model is None else None
            drawn, counted = (load_model(base.model_spec(), tokenizer=tokenizer, device=META) for _ in range(2))
            config = drawn.config
            if base.model is not None:
                with suppress(OSError):  # not every checkpoint has one
                    drawn.generation_config = GenerationConfig.from_pretrained(base.model, revision=base.revision)
            quantization = models.own_quantization(config) or recipe.quantization()
            models.check_bits(quantization)
            self.roles = SharedBase(drawn)
            if about := about_other_bits(drawn):
                self.findings.notes.append(Problem(about, f"base.{place}"))
            if at(self.recipe.values, "data.chat") is not False and _thinks(self.tokenizer):
                self.findings.notes.append(_THINKS.within(f"base.{place}"))
            precision: str = base.dtype
            if quantization is not None:
                pack(counted)
                double = " with double quantisation" if quantization.bnb_4bit_use_double_quant else ""
                precision = f"{quantization.bnb_4bit_quant_type}{double} and {base.dtype}"
            self.base = BaseFacts(
                config.model_type,
                base.model or "random weights",
                sum(parameter.numel() for parameter in self.roles.parameters()),
                precision,
                weight_bytes_of(counted) / 1e9,
                positions_of(config),
                str(chosen) if (chosen := recipe.base_precision).why else "",
            )
        with self.findings.at("base", "model"):
            if self.tokenizer is not None and self.roles is not None:
                check_tokenizer(self.tokenizer, self.roles)

    def _check_roles(self, roles: SharedBase) -> None:
        """Place the roles of all stages on the base as the stages do, those of saved adapters from their files."""
        recipe = self.recipe
        sources = {source.role: source for plan in self.plans for source in plan.roles}
        done = {stage for stage in STAGES if finished(recipe, stage) is not None}
        site = Site(self.tokenizer, lambda stage: recipe.stage_folder(stage) if stage in done else None)
        with torch.device("meta"):
            for role, planned in sources.items():
                source = planned.as_of(site)
                missing = source.stands_on is not None and source.stands_on not in roles.roles
                if missing or (self.tokenizer is None and isinstance(source, OwnBase)):
                    continue  # noted already
                if isinstance(planned, OwnBase) and planned.section == "value_model":
                    self._check_files(planned.base, planned.section)
                with self.findings.at(source.key):
                    self.starts[role] = source.place(roles, site).start
                    if isinstance(source, Saved):
                        self._compare_adapter(source, roles)
                    self.untrained |= {role} if isinstance(source, Fresh) else set()
                    if source is not planned and planned.stage != role:
                        self.starts[role] = f"fresh; the {planned.stage} stage comes first"
        for stage in (plan.stage for plan in self.plans if self.tokenizer is not None):
            with suppress(ToolkitError):  # of data, which are read later
                about = build.end_without_stop(recipe, stage, roles)
                self.findings.notes += [about] if about is not None and about not in self.findings.notes else []
        if "q" in self.starts:
            self.starts["q_target"] = "a moving average of q"
        if "reference" in sources and not isinstance(sources["reference"], BaseItself):
            self.starts["reference"] = "a frozen copy of where the policy starts"

    def _compare_adapter(self, source: Saved, roles: SharedBase) -> None:
        """Note the keys of a role's section in `adapters` that a saved adapter, which is taken as it is, has not."""
        asked = at(self.recipe.values, f"adapters.{source.role}") or {}
        has = roles.adapter_config(source.role).to_dict()
        # PEFT resolves all-linear and patterns to the names of modules; how weights began is of no effect any more.
        compared = [key for key in asked if key != "init_lora_weights" and not isinstance(has.get(key), set | list)]
        differ = [key for key in compared if has.get(key) != asked[key]]
        if differ:
            told = "; ".join(f"{key} {asked[key]}, there {has.get(key)}" for key in differ)
            wrong = f"the adapter in {source.folder} is taken as it is ({told})."
            self.findings.notes.append(Problem(wrong, f"adapters.{source.role}"))
        if source.role != "policy" or self.tokenizer is None or renders_nothing(self.recipe.values):
            return
        try:
            template = template_in(Path(source.folder).expanduser())
        except (OSError, ValueError, ToolkitError):  # nothing but this note would read it
            return
        ours = self.tokenizer.chat_template
        ours = ours.get("default") if isinstance(ours, dict) else ours
        if template is not None and template.strip() != (ours or "").strip():
            wrong = f"{source.folder} was trained with another chat template than that of the base, which is used."
            remedy = f"base.chat_template={source.folder} takes that of the adapter."
            self.findings.notes.append(Problem(wrong, source.key, remedy))

    def _check_reward_model(self, own: OwnBase) -> None:
        with self.findings.at(own.key):
            model = own.classifier(build.site(self.recipe), device=META)
            if at(self.recipe.values, "reward.loss") == "token_level":
                check_reads_tokens(model)
            self.own_reward = model
        self._check_files(own.base, own.key)

    def _check_files(self, base: ModelSection, section: str) -> None:
        if base.model is not None and Path(base.model, "config.json").is_file():
            for problem in models.weight_file_problems(Path(base.model)):
                self.findings.note(Problem(problem, f"{section}.model"))

    def _role_facts(self, roles: SharedBase) -> Iterator[RoleFacts]:
        stages = {plan.stage for plan in self.plans}
        for role in sorted(self.starts.keys() & set(roles.roles), key=_shown_at):
            trained_by = next((stage for stage in _TRAINED_BY.get(role, ()) if stage in stages), None)
            if role == "reference":
                yield RoleFacts(role, self.starts[role])
                continue
            own, own_base = roles.parameters_of(role), roles.value_model if role == "value" else None
            head = sum(p.numel() for p in roles.heads[role].parameters()) if role in roles.heads else 0
            adapter = sum(p.numel() for p in own) - head
            layers = [m for m in (own_base or roles.model).modules() if isinstance(m, LoraLayer)]
            whole = own_base is not None and own_base.lora is None
            saved = role == "reward" and at(self.recipe.values, "start.reward")
            yield RoleFacts(
                role,
                self.starts[role],
                roles.adapter_config(role).r if adapter and not whole else None,
                sum(role in layer.r for layer in layers),
                adapter,
                head,
                ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in own})),
                None if saved else trained_by,
            )

    def _classifier_facts(self, model: Any) -> RoleFacts:
        own, folder = self.recipe.plan.stages["reward"].own, self.recipe.stage_folder("reward") / "model"
        assert own is not None
        trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        in_head = sum(number for name, number in trained.items() if f".{head_name(model)}." in f".{name}")
        start = f"a {model.config.model_type} of its own, {own.base.model or 'random weights'}"
        return RoleFacts(
            "reward",
            start + (f", trained in {folder}" if folder.is_dir() else ""),
            None if own.lora is None else lora_config(own.lora).r,
            sum(isinstance(layer, LoraLayer) for layer in model.modules()),
            sum(trained.values()) - in_head,
            in_head,
            "float32",
            "reward",
        )
