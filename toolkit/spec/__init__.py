"""What a recipe says: read (`load`), validated (`validate`), resolved (`recipe`), shown (`show`, `reference`)."""

from toolkit.spec.load import load
from toolkit.spec.recipe import Recipe

__all__ = ["Recipe", "load"]
