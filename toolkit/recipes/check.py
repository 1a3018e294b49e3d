"""Check a recipe without loading weights: files, columns and adapters, and what its batches come to.

    report = check(recipes.load("smollm2_135m_lora"))
    print(report)
    report.raise_problems()

The base is built on the meta device, where a model has names and shapes and no numbers. The roles are put on it by the
code that puts them on a real base, so that what passes here fits there. Of saved adapters the headers are read.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from transformers import GenerationConfig

from toolkit.data import check_rated
from toolkit.errors import ToolkitError
from toolkit.models import QBound, SharedBase, add_q_roles, check_same_tokenizer, load_role
from toolkit.models.base import load_config, outline, random_config, weight_bytes
from toolkit.recipes import assemble, stages
from toolkit.recipes.arithmetic import batch_figures, counted_rows, longest_row
from toolkit.recipes.checkpoint_files import (
    check_logit_settings,
    own_quantization,
    precision_name,
    weight_file_problems,
)
from toolkit.recipes.facts import BaseFacts, Report, RoleFacts, StageFacts
from toolkit.recipes.own_model import OwnModelFacts, own_model_facts
from toolkit.recipes.own_value import has_own_value, place_value_model
from toolkit.recipes.recipe import Recipe
from toolkit.recipes.run_folder import conflict, finished
from toolkit.recipes.schema import model_section
from toolkit.recipes.sections import STAGE_CLASSES, TOP_LEVEL
from toolkit.rewards import RewardAdapter, ScorerSection
from toolkit.rewards.classes import check_outputs
from toolkit.rewards.function import check_function
from toolkit.rewards.model import checked_length, checked_reads, read_checkpoint
from toolkit.rewards.remote import read_token
from toolkit.trainers.ppo_config import GREEDY_ROLLOUTS
from toolkit.trainers.q_learning import check_returns
from toolkit.trainers.self_checks import check_dataset, check_room, check_tokenizer
from toolkit.trainers.stock_ppo import check_trl_loop

_TRAINED_BY = {"policy": "ppo", "value": "ppo", "reward": "reward", "q": "q"}
_NOT_NEEDED = "not needed for ppo"
_READ_LOGITS = {"reward", "ppo", "collect", "q"}  # sections whose stages need the base's logits


def _trained_on(folder: Path) -> str:
    """The base that an adapter names as its own: one of the same shape would be taken without a word."""
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f", trained on {base}" if base else ""


class _Outline(SharedBase):
    """Roles on the meta device."""

    def _check_logits(self) -> None:
        """There are none to compare without weights: `check_logit_settings` reads the configuration instead."""


def check(recipe: Recipe) -> Report:
    """Check all that can be checked without weights. Problems are collected, not raised.

    Data is read and tokenised, the function of the scorer is imported, and the model takes no memory.
    """
    return _Check(recipe, None).report(scorer=True)


def check_for(recipe: Recipe, stage: str, *, scorer: bool = True) -> Report:
    """As `check`, of what a stage and those before it need.

    Args:
        recipe: the recipe.
        stage: its name.
        scorer: whether to look for what the section `scorer` names. A function that Python has handed over may have
            no name by which it could be found.
    """
    return _Check(recipe, stage).report(scorer=scorer)


class _Check:
    """One check in progress."""

    def __init__(self, recipe: Recipe, stage: str | None):
        self.recipe = recipe
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.base: BaseFacts | None = None
        self.roles: _Outline | None = None
        self.starts: dict[str, str] = {}
        self.own_reward: OwnModelFacts | None = None
        self.has_tokenizer = False
        wanted = STAGE_CLASSES if stage is None else {*self._prerequisites(stage), stage}
        self.stages = [name for name in STAGE_CLASSES if name in recipe.values and name in wanted]

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """What a user can mend is noted, with its place in the recipe, and the check goes on."""
        try:
            yield
        except ToolkitError as error:
            self.note(place, str(error))

    def note(self, place: str, problem: str) -> None:
        own = re.match(r"(\w+)(\.\w+)*: ", problem)
        if own and own.group(1) in TOP_LEVEL:  # the message says where by itself
            place, problem = own.group().removesuffix(": "), problem[own.end() :]
        line = f"{place} — {problem}"
        if line not in self.problems:  # two stages may read one file
            self.problems.append(line)

    @contextmanager
    def at_scorer(self, place: str, key: str) -> Iterator[None]:
        """As `at`, for messages that call every part of a sum the scorer."""
        try:
            yield
        except ToolkitError as error:
            own = re.match(r"scorer\.(\w+): ", str(error))
            self.note(f"{place}.{own.group(1) if own else key}", str(error)[own.end() if own else 0 :])

    def report(self, *, scorer: bool) -> Report:
        values = self.recipe.values
        self._check_base()
        if self.roles is not None:
            with torch.device("meta"):
                self._add_roles(self.roles)
        if "reward_model" in values and self.has_tokenizer:
            self._check_reward_model()
        for place, part in self._scorers() if scorer else ():
            self._check_scorer_alone(place, part)
        # Without a tokenizer each data section would ask the hub for it again.
        found = [self._noted(stage) for stage in self.stages if self.has_tokenizer]
        data = tuple(self._data_lines()) if self.has_tokenizer else ()
        return Report(
            self.recipe.name,
            self.base,
            tuple(self._role_facts(self.roles) if self.roles is not None else ())
            + ((self.own_reward.role,) if self.own_reward else ()),
            data,
            tuple(facts for facts in found if facts is not None),
            (*self.notes, *self._notes()),
            tuple(self.problems),
        )

    # ------------------------------------------------------------------ base

    def _check_base(self) -> None:
        base, recipe = self.recipe.base, self.recipe
        with self.at("base.config" if base.model is None else "base.model"):
            if base.model is None:
                config = random_config(dict(base.config or {}), recipe.tokenizer)
            else:
                config = load_config(base.model, revision=base.revision, trust_remote_code=base.trust_remote_code)
            arguments: dict[str, Any] = {
                "dtype": base.dtype,
                "attn_implementation": base.attn_implementation,
                "trust_remote_code": base.trust_remote_code,
            }
            drawn = outline(config, **arguments)
            if base.model is not None:
                with suppress(OSError):  # not every checkpoint has one
                    drawn.generation_config = GenerationConfig.from_pretrained(base.model, revision=base.revision)
            self.roles = _Outline(drawn)
            quantization = recipe.quantization() or own_quantization(config)
            self.base = BaseFacts(
                config.model_type,
                base.model or "random weights",
                sum(parameter.numel() for parameter in self.roles.parameters()),
                precision_name(quantization, base.dtype),
                weight_bytes(outline(config, **arguments), quantization) / 1e9,
                getattr(config, "max_position_embeddings", None),
            )
            # Roles need the logits; pretraining alone does not.
            if base.model is not None or _READ_LOGITS & recipe.values.keys():
                check_logit_settings(config)
        if base.model is not None and Path(base.model, "config.json").is_file():
            for problem in weight_file_problems(Path(base.model)):
                self.note("base.model", problem)
        with self.at("base.model"):
            tokenizer = recipe.tokenizer
            self.has_tokenizer = True
            if self.roles is not None:
                check_tokenizer(tokenizer, self.roles)

    # ------------------------------------------------------------------ roles

    def _add_roles(self, roles: SharedBase) -> None:
        """Put the roles on the base as the stages do, those of saved adapters from their files."""
        recipe = self.recipe
        ppo, start = recipe.values.get("ppo"), recipe.start
        sft_of_checkpoint = "sft" in recipe.values and recipe.base.model is not None
        if ppo is not None or sft_of_checkpoint:
            self._add(roles, "policy", start.policy, "sft" if sft_of_checkpoint else None)
        trains_role = "reward" in recipe.values and "reward_model" not in recipe.values
        answers = {"ppo", "collect", "q"} & recipe.values.keys()
        if trains_role or (answers and recipe.scorer.needs_reward_role):
            self._add(roles, "reward", start.reward, "reward", num_labels=recipe.reward_head.num_labels)
            self._check_adapter_scorers(roles)
        if ppo is not None:
            self._add_value(roles, shared=ppo.get("value", "separate") == "shared")
        if "q" in recipe.values and "q" in recipe.values.get("adapters", {}):
            with self.at("adapters.q"):
                bounded = recipe.values["q"].get("bound") == "sigmoid"
                add_q_roles(roles, recipe.adapter("q"), bound=QBound() if bounded else None)
                self.starts |= {"q": "fresh", "q_target": "a moving average of q"}

    def _add(
        self, roles: SharedBase, role: str, named: str | None, stage: str | None, *, num_labels: int | None = None
    ) -> None:
        """Add a role from the folder that the recipe names, from a finished stage, or fresh."""
        if named or (stage is not None and finished(self.recipe, stage) is not None):
            folder = Path(named) if named else self.recipe.stage_folder(str(stage)) / role
            with self.at(f"start.{role}" if named else str(stage)):
                load_role(roles, role, folder)
            self.starts[role] = f"from {folder}{_trained_on(folder) if named else ''}"
        elif role in self.recipe.values.get("adapters", {}):
            self._add_fresh(roles, role, self.recipe.adapter(role), num_labels)
            self.starts[role] = f"fresh; the {stage} stage comes first" if stage and stage != role else "fresh"

    def _add_fresh(self, roles: SharedBase, role: str, config: LoraConfig, num_labels: int | None = None) -> None:
        bias = role == "value" and self.recipe.value_head.bias
        with self.at(f"adapters.{role}"):
            roles.add_role(role, config, num_labels=num_labels, head_bias=bias)

    def _add_value(self, roles: SharedBase, *, shared: bool) -> None:
        start, adapters = self.recipe.start.value, self.recipe.values.get("adapters", {})
        if has_own_value(self.recipe):
            with self.at("start.value" if start is not None else "value_model"):
                self.starts["value"] = place_value_model(self.recipe, roles)
        elif shared:
            if "policy" in roles.roles:
                roles.add_role("value", head_bias=self.recipe.value_head.bias)
            self.starts["value"] = "a head on the policy's adapter"
        elif start != "reward":
            self._add(roles, "value", start, None)
        elif "reward" in roles.roles:
            config = self.recipe.adapter("value") if "value" in adapters else roles.adapter_config("reward")
            self._add_fresh(roles, "value", config)
            self.starts["value"] = "a copy of the reward role"
            if "value" in roles.roles:
                with self.at("start.value"):
                    roles.copy_adapter("reward", "value")

    def _scorers(self) -> Iterator[tuple[str, ScorerSection]]:
        """The scorer, or the parts of a sum, each with its place in the recipe."""
        scorer = self.recipe.scorer
        parts = {f"scorer.parts.{name}": part for name, part in scorer.part_sections.items()}
        yield from parts.items() if scorer.kind == "sum" else [("scorer", scorer)]

    def _check_adapter_scorers(self, roles: SharedBase) -> None:
        for place, scorer in self._scorers():
            if "ppo" in self.recipe.values and scorer.kind == "adapter" and "reward" in roles.roles:
                with self.at(f"{place}.class_column"):
                    RewardAdapter(roles, pad_token_id=0, class_column=scorer.class_column)

    def _check_scorer_alone(self, place: str, scorer: ScorerSection) -> None:
        """What a scorer needs beside the base. No server is asked and no file run."""
        if scorer.function is not None:
            with self.at_scorer(place, "function"):
                check_function(scorer.function)
        if scorer.token_variable is not None:
            with self.at_scorer(place, "token_variable"):
                read_token(scorer.token_variable)
        if scorer.model is not None:
            with self.at_scorer(place, "model"):
                config, tokenizer = read_checkpoint(
                    scorer.model,
                    revision=scorer.revision,
                    trust_remote_code=scorer.trust_remote_code,
                    class_column=scorer.class_column,
                )
                checked_reads(tokenizer, scorer.reads)
                checked_length(config, tokenizer, scorer.max_length)
                if scorer.reads == "tokens":
                    check_same_tokenizer(
                        scorer.model,
                        self.recipe.tokenizer,
                        place="scorer",
                        revision=scorer.revision,
                        trust_remote_code=scorer.trust_remote_code,
                    )
                if Path(scorer.model).is_dir():
                    for problem in weight_file_problems(Path(scorer.model)):
                        self.note(f"{place}.model", problem)

    def _check_reward_model(self) -> None:
        """The model that the reward stage trains on a base of its own, as far as a configuration and names tell."""
        section = self.recipe.reward_model
        with self.at("reward_model"):
            self.own_reward = own_model_facts(self.recipe)
        if section.model is not None and Path(section.model).is_dir():
            for problem in weight_file_problems(Path(section.model)):
                self.note("reward_model.model", problem)
        for place, scorer in self._scorers():
            if scorer.kind == "model" and scorer.model is None:
                with self.at(f"{place}.class_column"):
                    outputs = self.recipe.reward_head.num_labels
                    check_outputs(outputs, scorer.class_column, whose="the model of section reward_model")

    def _role_facts(self, roles: SharedBase) -> Iterator[RoleFacts]:
        for role in roles.roles:
            own = roles.parameters_of(role)
            head = sum(p.numel() for p in roles.heads[role].parameters()) if role in roles.heads else 0
            adapter = sum(p.numel() for p in own) - head
            saved = role == "reward" and self.recipe.start.reward
            own_base = roles.value_model if role == "value" else None
            layers = [m for m in (own_base or roles.model).modules() if isinstance(m, LoraLayer)]
            whole = own_base is not None and own_base.lora is None
            yield RoleFacts(
                role,
                self.starts[role],
                roles.adapter_config(role).r if adapter and not whole else None,
                sum(role in layer.r for layer in layers),
                adapter,
                head,
                ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in own})),
                None if saved else _TRAINED_BY.get(role),
            )
        if {"ppo", "q"} & self.recipe.values.keys():
            adapted = self.recipe.start.policy or ("sft" in self.recipe.values and self.recipe.base.model is not None)
            yield RoleFacts("reference", "a frozen copy of where the policy starts" if adapted else "the base itself")

    # ------------------------------------------------------------------ data and batches

    def _noted(self, stage: str) -> StageFacts | None:
        """As `_stage`; what is wrong with the data of a stage that PPO does not need hinders nothing."""
        so_far = len(self.problems)
        facts = self._stage(stage)
        if self._state(stage) == _NOT_NEEDED:
            self.notes += [f"{stage} could not run: {problem}" for problem in self.problems[so_far:]]
            del self.problems[so_far:]
        return facts

    def _stage(self, stage: str) -> StageFacts | None:
        """Read the stage's data and work out its batches; None where a problem is in the way."""
        recipe = self.recipe
        if stage == "q":
            return self._q_stage()
        section, kind = recipe.data_section(stage), {"sft": "demonstrations", "ppo": "prompts"}.get(stage)
        kind = kind or ("pairs" if recipe.reward_head.num_labels == 1 else "labelled")
        state = self._state(stage)
        with self.at(section):
            train, held_out = (assemble.stage_dataset(recipe, stage, kind, split) for split in ("train", "validation"))
            longest = max(longest_row(train), longest_row(held_out))
            with self.at(stage):
                config = assemble.trainer_config(recipe, stage)
                prepared = counted_rows(train, config) if stage == "sft" else train
                facts = batch_figures(stage, config, len(prepared))
                if stage == "ppo":
                    self._check_loop(config)
                    self._check_prompts(train, config.rollout_batch_size)
                    longest = self._longest_answered(max(longest, longest_row(recipe.task.prompts("test"))), config)
                elif stage == "sft":
                    facts["prepared"] = len(prepared)
                    # Positions go on over the rows that are wrapped into one.
                    wrapped = config.packing and config.packing_strategy == "wrapped"
                    longest = longest_row(prepared) if wrapped else min(longest, config.max_length or longest)
                self._check_length(stage, longest)
                return StageFacts(stage, state, len(train), len(held_out), longest, **facts)
        return None

    def _q_stage(self) -> StageFacts | None:
        """The rated responses that are there, or as many as will be collected."""
        recipe, state = self.recipe, self._state("q")
        with self.at("data"):
            held_out = assemble.stage_dataset(recipe, "collect", "prompts", "validation")
            prompts = assemble.stage_dataset(recipe, "collect", "prompts", "train")
            longest = max(longest_row(held_out), longest_row(recipe.task.prompts("test")))
            with self.at("q_data" if "q_data" in recipe.values else "q"):
                config = assemble.trainer_config(recipe, "q")
                longest += config.response_length
                if "q_data" in recipe.values or finished(recipe, "collect") is not None:
                    rated = assemble.rated_dataset(recipe)
                    check_rated(rated)
                    check_returns(rated, config)
                    rows = len(rated)
                    longest = max(longest, *(len(p) + len(r) for p, r in zip(
                        rated["prompt_ids"], rated["response_ids"], strict=True)))  # fmt: skip
                else:
                    settings = recipe.collect
                    used = min(len(prompts), settings.max_prompts or len(prompts))
                    rows = used * settings.samples_per_prompt
                    longest = max(longest, longest_row(prompts) + settings.response_length)
                self._check_length("q", longest)
                return StageFacts("q", state, rows, len(held_out), longest, **batch_figures("q", config, rows))
        return None

    def _state(self, stage: str) -> str:
        """Whether the stage is finished, and which come before it."""
        if finished(self.recipe, stage) is not None:
            return f"finished in {self.recipe.stage_folder(stage)}"
        needs = self._prerequisites(stage)
        first = [earlier for earlier in needs if finished(self.recipe, earlier) is None]
        if stage != "ppo" and "ppo" in self.recipe.values and stage not in self._prerequisites("ppo"):
            return _NOT_NEEDED
        return f"to be run, after {' and '.join(first)}" if first else "to be run"

    def _prerequisites(self, stage: str) -> list[str]:
        with self.at(stage):
            return stages.prerequisites(self.recipe, stage)
        return []

    def _check_loop(self, config: Any) -> None:
        # Without the reward role that the recipe asks for there is another problem, noted already.
        if config.loop != "trl" or self.roles is None:
            return
        if "reward" in self.roles.roles or not self.recipe.scorer.needs_reward_role:
            with self.at("ppo.loop"):
                check_trl_loop(config, self.recipe.tokenizer, self.roles)

    def _check_prompts(self, prompts: Any, batch_size: int) -> None:
        with self.at(self.recipe.data_section("ppo")):
            check_dataset(prompts, batch_size)
        for place, scorer in self._scorers():
            column = scorer.class_column
            if column is not None and column not in prompts.column_names:
                there = ", ".join(prompts.column_names)
                self.note(f"{place}.class_column", f'the prompts have no column "{column}"; present: {there}.')
            if scorer.model is not None:
                with self.at_scorer(place, "prompt_column"):
                    assemble.check_prompt_column(self.recipe, scorer, prompts.column_names)

    def _longest_answered(self, prompt: int, config: Any) -> int:
        """Tokens of the longest prompt with its response."""
        with self.at("ppo.max_length"):
            check_room([prompt], config.max_length)
        longest = prompt + config.response_length
        return longest if config.max_length is None else min(longest, config.max_length)

    def _check_length(self, stage: str, longest: int) -> None:
        positions, whose = (self.base.positions if self.base else None), "the base"
        if model_section(stage, self.recipe.values) == "reward_model":
            positions, whose = (self.own_reward.positions if self.own_reward else None), "reward_model"
        if positions is not None and longest > positions:
            what = "the longest prompt with ppo.response_length" if stage == "ppo" else "the longest row"
            self.note(
                stage,
                f"{what} comes to {longest} tokens, and {whose} has positions for {positions} "
                "(max_position_embeddings). Shorten the limits of the data section"
                + (" or ppo.response_length." if stage == "ppo" else "."),
            )

    def _data_lines(self) -> Iterator[str]:
        """What tasks that read files say about their rows."""
        for stage in self.stages:
            section = self.recipe.data_section(stage)
            if self._state(stage) != _NOT_NEEDED and (stage in ("ppo", "q") or section != "data"):
                with self.at(section), self.recipe.naming(section):
                    task = self.recipe.task_of(stage)
                    if hasattr(task, "report"):
                        yield f"{section}: {task.report()}"

    def _notes(self) -> Iterator[str]:
        if self.recipe.values.get("ppo", {}).get("rollout_do_sample") is False:
            yield GREEDY_ROLLOUTS
        problem = conflict(self.recipe)
        if problem is not None:
            yield problem
