"""The public face of recipes, for notebooks.

    recipe = recipes.load("doubling", "ppo.kl_coef=0.1")
    trainer = recipe.ppo_trainer()

What a recipe says is in `toolkit.spec`, what a run of it does in `toolkit.runs`, what a trained run is used for in
`toolkit.inference`.
"""

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from traceback import walk_tb
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from toolkit.errors import ConfigError, RecipeError, RunInterrupted, ToolkitError
from toolkit.rewards import Reward, check_reward
from toolkit.rewards.base import of_a_library
from toolkit.runs import stages
from toolkit.runs.check import check
from toolkit.runs.plan import plan
from toolkit.spec.load import load as load_spec
from toolkit.spec.plan import by_trl
from toolkit.spec.recipe import Recipe as WhatItSays
from toolkit.spec.shipped import names
from toolkit.spec.show import show
from toolkit.spec.validate import check_recipe
from toolkit.trainers.ppo import PPOTrainer

__all__ = ["Recipe", "check", "load", "names", "plan", "show"]


def _trainer_of(stage: str, what: str) -> Callable[..., Trainer]:
    """The method that makes a stage's trainer; `what` is the beginning of its docstring."""

    def trainer(
        self: "Recipe",
        *,
        callbacks: Sequence[TrainerCallback] = (),
        resume: bool = False,
        overwrite: bool = False,
        from_run: str | None = None,
    ) -> Trainer:
        return stages.prepared(self, stage, callbacks=callbacks, resume=resume, overwrite=overwrite, from_run=from_run)

    trainer.__name__ = trainer.__qualname__ = f"{stage}_trainer"
    trainer.__doc__ = f"{what} For the arguments see `ppo_trainer`."
    return trainer


class Recipe(WhatItSays):
    """A resolved recipe, bound to a run folder, that makes trainers. Made by `load`; for the arguments see there."""

    sft_trainer = _trainer_of("sft", "A TRL `SFTTrainer`.")
    reward_trainer = _trainer_of("reward", "A TRL `RewardTrainer`, or transformers' `Trainer` for classes.")
    q_trainer = _trainer_of("q", "A `QTrainer`, which is transformers' `Trainer`.")

    def ppo_trainer(
        self,
        reward: Reward | None = None,
        *,
        judge: Reward | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        trainer_class: type[Trainer] | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        resume: bool = False,
        overwrite: bool = False,
        from_run: str | None = None,
    ) -> Trainer:
        """Our PPO trainer, or with `ppo.loop: trl` TRL's unmodified one; prerequisites are run first.

        Args:
            reward: scores a rollout, in place of what the section `scorer` says; a reward stage is then not needed.
            judge: scores the responses of each evaluation, in place of what the section `judge` says; nothing is
                trained on it.
            train_dataset: prompts, in place of what the section `data` trains on: texts, rows with the columns of a
                file of prompts, or a `datasets.Dataset` with `input_ids`.
            eval_dataset: held-out prompts, in place of the section's, likewise. Those of the section may lack columns
                that a reward of `train_dataset` reads.
            trainer_class: a subclass of `toolkit.trainers.ppo.PPOTrainer`, for advantages or a loss of your own. A
                stage that a command goes on with has the toolkit's.
            callbacks: of transformers, beside those that show and record the run.
            resume: keep the checkpoints of an earlier try in the run folder, for
                `trainer.train(resume_from_checkpoint=True)`.
            overwrite: replace them; they stay in the run folder until the new model is saved.
            from_run: name of another run, to take finished stages from where their settings and data agree.

        Raises:
            RewardError: a reward or judge cannot be called with a rollout.
            RecipeError: the recipe cannot do with another reward or a judge, the run folder holds an earlier try, or
                the other run has nothing to take.
        """
        if eval_dataset is not None and by_trl(self.values):
            wrong = "trl is TRL's own loop, which evaluates nothing, so that eval_dataset has no effect."
            raise RecipeError(wrong, field="ppo.loop", remedy="Take toolkit, or run_stage, which measures it itself.")
        if trainer_class is not None and by_trl(self.values):
            wrong = "trl is TRL's own loop, so that trainer_class has no effect."
            raise RecipeError(wrong, field="ppo.loop", remedy="Take toolkit.")
        ours = isinstance(trainer_class, type) and issubclass(trainer_class, PPOTrainer)
        if trainer_class is not None and not ours:
            wrong = f"a subclass of toolkit.trainers.ppo.PPOTrainer is needed, got {trainer_class!r}."
            raise ConfigError(wrong, field="trainer_class")
        way: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "from_run": from_run, "callbacks": callbacks}
        given = {"reward": reward, "judge": judge, "train_dataset": train_dataset, "eval_dataset": eval_dataset}
        given["trainer_class"] = trainer_class
        return stages.prepared(self._scored_by(scorer=reward, judge=judge), "ppo", given=given, **way)

    def run_stage(
        self,
        stage: str,
        reward: Reward | None = None,
        *,
        judge: Reward | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        callbacks: Sequence[TrainerCallback] = (),
        resume: bool = False,
        overwrite: bool = False,
        from_run: str | None = None,
    ) -> dict[str, Any]:
        """Run a stage from beginning to end, as its command does; what stands in its `result.json`.

        What comes before it is run first. It is measured before and after, reported on and finished, so that later
        stages and `toolkit chat`, `eval` and `export` take it. A stage that is finished is not repeated.

        Args:
            stage: "sft", "reward", "ppo", "collect" or "q".
            resume: go on from the newest checkpoint, with the same prompts.
            overwrite: repeat a finished stage, which stays in the run folder until the new one has finished.

        The others are those of `ppo_trainer`; reward, judge and prompts are for the stage ppo alone.

        Raises:
            RunInterrupted: a signal asked to stop, as Ctrl-C does or a notebook's stop button, and the stage was saved.
            ToolkitError: those of `ppo_trainer`, and whatever else a user can mend.
        """
        given = {"reward": reward, "judge": judge, "train_dataset": train_dataset, "eval_dataset": eval_dataset}
        if stage == "collect" and callbacks:
            raise RecipeError("callbacks would have no effect on the stage collect.", remedy="Leave them out.")
        if stage != "ppo" and (others := [name for name, value in given.items() if value is not None]):
            wrong = f"{' and '.join(others)} would have no effect on the stage {stage}: only ppo takes them."
            raise RecipeError(wrong, remedy="Leave them out.")
        way: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "from_run": from_run, "callbacks": callbacks}
        try:
            return stages.run(self._scored_by(scorer=reward, judge=judge), stage, given=given, **way)
        except (ToolkitError, KeyboardInterrupt, MemoryError) as error:  # which a notebook keeps
            if isinstance(error, RunInterrupted) and getattr(error, "way_on", "") == "resume":
                error.add_remedy("Go on with $resume.")
            _let_go(error)
            raise
        finally:
            gc.collect()  # a trainer and its callbacks hold each other
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _scored_by(self, **given: Reward | None) -> "Recipe":
        """The same recipe with a scorer, a judge or both of kind "function"; the run records the functions' names."""
        if given.get("judge") is not None and by_trl(self.values):
            wrong = "trl is TRL's own loop, which evaluates nothing, so that a judge has no effect."
            raise RecipeError(wrong, field="ppo.loop", remedy="Take toolkit.")
        for name, reward in given.items():
            if reward is not None:
                check_reward(reward, {"scorer": "reward"}.get(name, name))
        named = {section: _function(reward) for section, reward in given.items() if reward is not None}
        values = {**self.values, **named}
        if "judge" in named and "start" in values:  # whose adapter was for the judge that is replaced
            values["start"] = {key: value for key, value in values["start"].items() if key != "judge"}
        problems = check_recipe(values) if named else []
        if problems:
            raise RecipeError(f"{self.name}, with a {' and a '.join(named)} of its own,", problems=problems)
        return replace(self, values=values)


def _let_go(error: BaseException | None) -> None:
    """Clear the frames of an error, but a user's own: they hold the base, and a notebook keeps the error."""
    while error is not None:
        for frame, _ in walk_tb(error.__traceback__):
            if of_a_library(frame.f_code.co_filename):
                with suppress(RuntimeError):  # of one that is at work
                    frame.clear()
        error = error.__cause__ or error.__context__


def _function(reward: Reward) -> dict[str, str]:
    """A function or callable of Python as the settings of a scorer: by its name, and an object, which has none, by its
    class's as `<RewardModel>`."""
    owner = reward if hasattr(reward, "__qualname__") else type(reward)
    name = owner.__qualname__ if owner is reward else f"<{owner.__qualname__}>"
    return {"kind": "function", "function": f"{owner.__module__}:{name}"}


def load(
    name: str | os.PathLike[str] | Mapping[str, Any],
    *overrides: str,
    run: str | None = None,
    runs_dir: str | os.PathLike[str] = "runs",
    **sections: Any,
) -> Recipe:
    """Read a recipe, apply overrides, check every key and value. Nothing is loaded yet.

    Args:
        name: of a shipped recipe, the path of a YAML file, or the recipe itself as a mapping.
        overrides: "section.key=value", the value read as YAML; "section=null" and "adapters.role=null" take a section
            or an adapter away. A file or folder in place of a hub id takes the `subset`, `name` and `split` of that id
            away.
        run: names the run; the recipe's name if None, and that of the run for the recipe that a run keeps. A mapping
            has none, and needs it.
        runs_dir: folder of all runs.
        sections: values by key, or sections of them, merged into the recipe before the overrides.

    Raises:
        RecipeError: no such recipe, or anything wrong in it: all problems in one message.

    Example:
        >>> load("doubling", "ppo.kl_coef=0.1", "seed=1").values["seed"]
        1
        >>> load("doubling", ppo={"kl_coef": 0.1}, seed=1).values["ppo"]["kl_coef"]
        0.1
    """
    found = load_spec(name, *overrides, run=run, runs_dir=runs_dir, sections=sections)
    return Recipe(found.name, found.values, found.run, found.runs_dir)
