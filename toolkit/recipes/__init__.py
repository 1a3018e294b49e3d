"""Recipes: YAML to the owners' own configuration objects to a run.

    recipe = recipes.load("doubling", "ppo.kl_coef=0.1")
    trainer = recipe.ppo_trainer()

`schema` says what a recipe may hold (its `sections`, their `keys`, what they say `together`), `loading` reads and
checks one, `recipe` is the result, `assemble` makes trainers from it and `stages` runs them in a run folder. `check`,
`show` and `reference` tell about recipes; `finished` and `talk` are for a run whose policy is trained.
"""

from toolkit.recipes.check import check
from toolkit.recipes.loading import find, load, names
from toolkit.recipes.recipe import Recipe
from toolkit.recipes.show import show

__all__ = ["Recipe", "check", "find", "load", "names", "show"]
