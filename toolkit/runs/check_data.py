"""The data of a recipe's stages, and what their batches come to."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from trl import pack_dataset

from toolkit.data import Rollout, check_rated, values_of
from toolkit.errors import ConfigError, Problem, ToolkitError
from toolkit.models import check_checkpointing
from toolkit.runs import build
from toolkit.runs.check_report import Findings, StageFacts, UpdateFacts
from toolkit.runs.check_roles import RolesCheck
from toolkit.runs.folder import finished
from toolkit.sampling import check_room
from toolkit.spec.plan import at, by_trl
from toolkit.spec.recipe import Recipe
from toolkit.trainers.q_learning import check_returns
from toolkit.trainers.reward import check_labels
from toolkit.trainers.self_checks import check_batch, check_can_merge, check_dataset, check_graphs
from toolkit.trainers.sft import with_loss
from toolkit.trainers.stock_ppo import check_trl_loop
from toolkit.trainers.transformers_loop import steps_of_a_pass

_NOT_NEEDED = "not needed for ppo"
_IDS_SHOWN, _TEXT_SHOWN = 12, 200  # of an example


def counted_rows(dataset: Any, config: Any) -> Any:
    """The rows of the sft stage as TRL's trainer counts them: packed, or without those cut before their response."""
    if not config.packing:
        return with_loss(dataset, config)
    if config.packing_strategy == "bfd":
        dataset = with_loss(dataset, config)
    dataset = dataset.select_columns(["input_ids"])
    if config.shuffle_dataset:
        dataset = dataset.shuffle(seed=config.seed)
    return pack_dataset(dataset, config.max_length, config.packing_strategy, {"num_proc": config.dataset_num_proc})


def longest_row(dataset: Any) -> int:
    """Tokens of the longest row in any column of ids."""
    columns = [name for name in ("input_ids", "chosen_ids", "rejected_ids") if name in dataset.column_names]
    return max((len(row) for name in columns for row in values_of(dataset, name)), default=0)


def batch_figures(stage: str, config: Any, rows: int) -> dict[str, Any]:
    """Fields of `StageFacts`: batch, batches, steps and update."""
    batch = config.per_device_train_batch_size * config.gradient_accumulation_steps
    if stage != "ppo":
        each = steps_of_a_pass(config, rows)
        by_epochs = math.ceil(config.num_train_epochs * each)
        steps = config.max_steps if config.max_steps > 0 else by_epochs
        return {"batch": batch, "batches": steps, "steps": steps, "of_a_pass": each}
    rollout, batch = batch, config.update_batch_size
    updates, mini_batch = config.number_of_updates(rows), batch // config.num_mini_batches
    micro_batches = math.ceil(mini_batch / config.per_device_train_batch_size)
    steps = config.num_ppo_epochs * config.num_mini_batches
    if config.loop == "trl":  # a step of its own loop is of so many micro-batches (huggingface/trl#5645)
        steps = steps * micro_batches // config.gradient_accumulation_steps
    update = UpdateFacts(config.num_ppo_epochs, config.num_mini_batches, mini_batch, micro_batches, steps, rollout)
    return {"batch": batch, "batches": updates, "steps": updates * steps, "update": update}


def check_best(recipe: Recipe, config: Any, held_out: Any) -> None:
    """Raises: ConfigError: what is to decide which checkpoint is the best is not measured of these held-out prompts."""
    name, task = (config.metric_for_best_model or "").removeprefix("eval_"), recipe.task
    if config.eval_strategy == "no" or name not in task.metric_names:
        return
    nothing, columns = [""] * len(held_out), {column: held_out[column] for column in held_out.column_names}
    ids: list[list[int]] = [[] for _ in nothing]
    measured = task.metrics(Rollout(nothing, nothing, ids, ids, [False] * len(nothing), columns))
    if name not in measured:
        wrong = f"{name!r} is not measured: none of the {len(held_out)} validation prompts asks for it."
        remedy = f"Take {next(iter(measured))}, or more prompts: raise data.validation_size."
        raise ConfigError(wrong, field="metric_for_best_model", remedy=remedy)


class DataCheck:
    """The data of some stages of a recipe."""

    def __init__(
        self,
        recipe: Recipe,
        stages: Sequence[str],
        findings: Findings,
        roles: RolesCheck,
    ):
        self.recipe, self.stages, self.findings, self.roles = recipe, stages, findings, roles
        self.prompts_read = False

    def facts(self) -> tuple[StageFacts, ...]:
        """The stages whose data could be read. Beside PPO what is wrong with one that it does not need is a note."""
        found, problems = [], self.findings.problems
        for stage in self.stages:
            so_far = len(problems)
            read = {"q": self._q_stage, "collect": self._collect_stage}.get(stage, partial(self._stage, stage))
            found.append(read())
            if self._state(stage) == _NOT_NEEDED:
                what = f"{stage}, which ppo does not need, could not run"
                self.findings.notes += [Problem(f"{what}: {problem.text()}") for problem in problems[so_far:]]
                del problems[so_far:]
        return tuple(facts for facts in found if facts is not None)

    def _stage(self, stage: str) -> StageFacts | None:
        """Read the stage's data and work out its batches; None where a problem is in the way."""
        recipe = self.recipe
        section, kind = recipe.data_section(stage), recipe.plan.stages[stage].rows
        state = self._state(stage)
        with self.findings.at(key=section):
            train, held_out = (build.stage_dataset(recipe, stage, kind, split) for split in ("train", "validation"))
            longest, response = max(longest_row(train), longest_row(held_out)), 0
            with self.findings.at(key=stage):
                config = self._config(stage)
                prepared = counted_rows(train, config) if stage == "sft" else train
                with self.findings.at(stage):
                    check_batch(config, len(prepared))
                facts = batch_figures(stage, config, len(prepared))
                if kind == "labelled":
                    check_labels(int(at(recipe.values, "reward_head.num_labels")), train, held_out)
                if stage == "ppo":
                    self.prompts_read = True
                    longest = max(longest, longest_row(recipe.task.prompts("test")))
                    self._check_ppo(config, train, longest)
                    with self.findings.at("ppo"):
                        check_best(recipe, config, held_out)
                    response = max(0, min(config.response_length, (config.max_length or math.inf) - longest))
                elif stage == "sft":
                    facts["prepared"] = len(prepared)
                    # Positions go on over the rows that are wrapped into one.
                    wrapped = config.packing and config.packing_strategy == "wrapped"
                    longest = longest_row(prepared) if wrapped else min(longest, config.max_length or longest)
                self._check_length(stage, longest, response, "ppo.response_length")
                return StageFacts(stage, state, len(train), len(held_out), longest + response, **facts)
        return None

    def _q_stage(self) -> StageFacts | None:
        """The rated responses that are there, or as many as will be collected."""
        recipe, state = self.recipe, self._state("q")
        with self.findings.at(key="data"):
            prompts, held_out = (
                build.stage_dataset(recipe, "collect", "prompts", split) for split in ("train", "validation")
            )
            self.prompts_read = True
            longest = max(longest_row(held_out), longest_row(recipe.task.prompts("test")))
            with self.findings.at("q"):
                config = self._config("q")
                with self.findings.at("q"):
                    check_best(recipe, config, held_out)
                lengths = {"q.response_length": (longest, config.response_length)}
                if "q_data" in recipe.values or finished(recipe, "collect") is not None:
                    rated = None
                    with self.findings.at("q_data" if "q_data" in recipe.values else "q"):
                        rated = build.rated_dataset(recipe)
                        check_rated(rated)
                    if rated is None:
                        return None
                    check_returns(rated, config)
                    rows = len(rated)
                    both = zip(rated["prompt_ids"], rated["response_ids"], strict=True)
                    lengths[""] = max(len(prompt) + len(response) for prompt, response in both), 0
                else:
                    settings = recipe.collect
                    used = min(len(prompts), settings.max_prompts or len(prompts))
                    rows = used * settings.samples_per_prompt
                    lengths["collect.response_length"] = longest_row(prompts), settings.response_length
                check_batch(config, rows)
                for limit, (longest, response) in lengths.items():
                    self._check_length("q", longest, response, limit)
                longest, figures = max(map(sum, lengths.values())), batch_figures("q", config, rows)
                return StageFacts("q", state, rows, len(held_out), longest, **figures)
        return None

    def _collect_stage(self) -> None:
        """Read the prompts that are answered: nothing is trained, and there are no batches to work out."""
        recipe = self.recipe
        with self.findings.at(key=recipe.data_section("collect")):
            prompts = build.stage_dataset(recipe, "collect", "prompts", "train")
            self.prompts_read = True
            self._check_length(
                "collect", longest_row(prompts), recipe.collect.response_length, "collect.response_length"
            )

    def _state(self, stage: str) -> str:
        """Whether the stage is finished, and which come before it."""
        if finished(self.recipe, stage) is not None:
            return f"finished in {self.recipe.stage_folder(stage)}"
        plans = self.recipe.plan.stages
        first = [earlier for earlier in plans[stage].needs if finished(self.recipe, earlier) is None]
        # Where PPO is not checked, the stages are those that a command for another one is about to run.
        if stage != "ppo" and "ppo" in self.stages and stage not in plans["ppo"].needs:
            return _NOT_NEEDED
        return f"to be run, after {' and '.join(first)}" if first else "to be run"

    def _config(self, stage: str) -> Any:
        """The stage's settings; what it trains has gradient checkpointing where they ask for it."""
        config = build.trainer_config(self.recipe, stage)
        for model in self.roles.trained(stage) if config.gradient_checkpointing else ():
            with self.findings.at(stage):
                check_checkpointing(model)
        return config

    def _check_ppo(self, config: Any, prompts: Any, longest: int) -> None:
        roles, problems, reward = self.roles.roles, self.findings, self.recipe.plan.stages["ppo"].source("reward")
        # Without the reward role that the recipe asks for there is another problem, noted already.
        if config.loop == "trl" and roles and ("reward" in roles.roles or reward is None):
            with problems.at("ppo"):
                check_trl_loop(config, self.recipe.tokenizer, roles)
        with problems.at("ppo"):
            check_dataset(prompts, config.rollout_batch_size)
        with problems.at("ppo"):
            check_room([longest], config.max_length, config.min_response_length)
        if roles:
            with problems.at("ppo"):
                if "policy" in roles.roles:  # else there is another problem, noted already
                    check_can_merge(roles, config)
            with problems.at("ppo"):
                check_graphs(roles, config, longest)

    def _check_length(self, stage: str, longest: int, response: int, limit: str) -> None:
        """Tokens of the longest row, or of the longest prompt of section data with a `response` of up to as many as the
        key `limit` says; 0 where rows are whole. In a loop of ours a response ends where the base has no position
        left."""
        positions, whose = self.roles.positions(stage)
        if positions is None or longest + response <= positions:
            return
        what, limits = "the longest row", f"the limits of the section {self.recipe.data_section(stage)}"
        if response:
            what, limits = f"the longest prompt with {limit}", "the limits of the section data"
            limits += f" or {limit}" if longest < positions else ""
        wrong = f"{what} comes to {longest + response} tokens, and {whose} has positions for {positions}"
        ends_there = not (whose == "reward_model" or (stage == "ppo" and by_trl(self.recipe.values)))
        if response and longest < positions and ends_there:
            about = f"{wrong}: its response can have {positions - longest}."
            self.findings.notes.append(Problem(about, stage))
        else:
            self.findings.note(Problem(f"{wrong}.", stage, f"Shorten {limits}."))

    def lines(self) -> Iterator[str]:
        """What tasks that read files say about their rows."""
        needed = [stage for stage in self.stages if self._state(stage) != _NOT_NEEDED]
        last = {section: stage for stage in needed for section in self._sections(stage)}  # each section once
        for stage in needed:
            for section in self._sections(stage):
                with suppress(ToolkitError):  # which has been found already
                    if last[section] == stage and (rows := self.recipe.tasks_of(stage)[section].report()) is not None:
                        yield f"{section}: {rows}"
        for stage in needed[-1:]:
            with suppress(ToolkitError):
                yield self._example(stage)

    def _sections(self, stage: str) -> tuple[str, ...]:
        with suppress(ToolkitError):  # which has been found already
            return tuple(self.recipe.tasks_of(stage))
        return ()

    def _example(self, stage: str) -> str:
        """The first row as the stage reads it, and the tokens that fill and end one."""
        tokenizer, kind = self.recipe.tokenizer, self.recipe.plan.stages[stage].rows
        if kind == "rated" and "q_data" not in self.recipe.values:  # they are not collected yet
            kind, of = "prompts", "collect"
        else:
            of = stage
        row = build.stage_dataset(self.recipe, of, kind, "train")[0]
        ids = row.get("input_ids") or row.get("chosen_ids") or [*row["prompt_ids"], *row["response_ids"]]
        stops = [tokenizer.eos_token_id]
        if self.roles.roles is not None:
            stops = list(self.roles.roles.stop_token_ids(tokenizer))
        first = " ".join(map(str, ids[:_IDS_SHOWN])) + (" …" if len(ids) > _IDS_SHOWN else "")
        pad, *ends = (
            f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in (tokenizer.pad_token_id, *stops)
        )
        text = textwrap.shorten(repr(tokenizer.decode(ids)), _TEXT_SHOWN, placeholder=" …'")
        return (
            f"first row of {stage}: {text}, {len(ids)} tokens: {first}; pad {pad}, a response ends at {', '.join(ends)}"
        )
