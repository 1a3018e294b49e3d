"""The public face of recipes, for notebooks.

    recipe = recipes.load("doubling", "ppo.kl_coef=0.1")
    trainer = recipe.ppo_trainer()

What a recipe says is in `toolkit.spec`, what a run of it does in `toolkit.runs`, what a trained run is used for in
`toolkit.inference`.
"""

import os
from dataclasses import replace

from transformers import Trainer

from toolkit import spec
from toolkit.errors import RecipeError
from toolkit.rewards import Reward
from toolkit.runs import stages
from toolkit.runs.check import check
from toolkit.spec.load import find, names
from toolkit.spec.load import load as load_spec
from toolkit.spec.show import show
from toolkit.spec.validate import check_recipe

__all__ = ["Recipe", "check", "find", "load", "names", "show"]


class Recipe(spec.Recipe):
    """A resolved recipe, bound to a run folder, that makes trainers. Made by `load`; for the arguments see there."""

    def sft_trainer(self, *, resume: bool = False, overwrite: bool = False, from_run: str | None = None) -> Trainer:
        """A TRL `SFTTrainer`. For the arguments see `ppo_trainer`."""
        return stages.prepared(self, "sft", resume=resume, overwrite=overwrite, from_run=from_run)

    def reward_trainer(self, *, resume: bool = False, overwrite: bool = False, from_run: str | None = None) -> Trainer:
        """A TRL `RewardTrainer`, or transformers' `Trainer` for classes. For the arguments see `ppo_trainer`."""
        return stages.prepared(self, "reward", resume=resume, overwrite=overwrite, from_run=from_run)

    def ppo_trainer(
        self,
        reward: Reward | None = None,
        *,
        resume: bool = False,
        overwrite: bool = False,
        from_run: str | None = None,
    ) -> Trainer:
        """Our PPO trainer, or with `ppo.loop: trl` TRL's unmodified one; prerequisites are run first.

        Args:
            reward: scores a rollout, in place of what the section `scorer` says; a reward stage is then not needed.
            resume: keep the checkpoints of an earlier try in the run folder, for
                `trainer.train(resume_from_checkpoint=True)`.
            overwrite: replace them; they stay in the run folder until the new model is saved.
            from_run: name of another run, to take finished stages from where their settings agree.

        Raises:
            RecipeError: the recipe cannot do with another reward, the run folder holds an earlier try, or the other
                run has nothing to take.
        """
        made_for = self if reward is None else self._scored_by(reward)
        return stages.prepared(made_for, "ppo", resume=resume, overwrite=overwrite, from_run=from_run, reward=reward)

    def q_trainer(self, *, resume: bool = False, overwrite: bool = False, from_run: str | None = None) -> Trainer:
        """A `QTrainer`, which is transformers' `Trainer`. For the arguments see `ppo_trainer`."""
        return stages.prepared(self, "q", resume=resume, overwrite=overwrite, from_run=from_run)

    def _scored_by(self, reward: Reward) -> "Recipe":
        """The same recipe with a scorer of kind "function"; the run records the function's name."""
        owner = reward if hasattr(reward, "__qualname__") else type(reward)
        scorer = {"kind": "function", "function": f"{owner.__module__}:{getattr(owner, '__qualname__', '')}"}
        values = {**self.values, "scorer": scorer}
        problems = check_recipe(values)
        if problems:
            raise RecipeError(f"{self.name}, scored by a function of its own,", problems=problems)
        return replace(self, values=values)


def load(
    name: str | os.PathLike[str], *overrides: str, run: str | None = None, runs_dir: str | os.PathLike[str] = "runs"
) -> Recipe:
    """Read a recipe, apply overrides, check every key and value. Nothing is loaded yet.

    Args:
        name: of a shipped recipe, or the path of a YAML file.
        overrides: "section.key=value", the value read as YAML; "section=null" and "adapters.role=null" take a section
            or an adapter away. A file or folder in place of a hub id takes the `subset` and `name` of that id away.
        run: names the run; the recipe's name if None, and that of the run for the recipe that a run keeps.
        runs_dir: folder of all runs.

    Raises:
        RecipeError: no such recipe, or anything wrong in it: all problems in one message.

    Example:
        >>> load("doubling", "ppo.kl_coef=0.1", "seed=1").values["seed"]
        1
    """
    found = load_spec(name, *overrides, run=run, runs_dir=runs_dir)
    return Recipe(found.name, found.values, found.run, found.runs_dir)
