"""Recipes: YAML to the owners' own configuration objects to a run.

    recipe = recipes.load("doubling", "ppo.kl_coef=0.1")
    trainer = recipe.ppo_trainer()

`schema` says what a recipe may hold, `loading` reads and checks one, `recipe` is the result, `assemble` makes
trainers from it and `stages` runs them in a run folder.
"""

from toolkit.recipes.loading import find, load, names
from toolkit.recipes.recipe import Recipe

__all__ = ["Recipe", "find", "load", "names"]
