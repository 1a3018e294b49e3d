"""The recipes that are shipped, and the example data beside them; without a library, so that TAB completes at once."""

from importlib.resources import files
from pathlib import Path
from typing import Any

_IN_A_PACKAGE = ("toolkit", "spec", "data")  # the end of where an installed package has the example data


def recipe_folder() -> Path:
    """Where the shipped recipes are: in the package if it was installed, in the repository if it runs from there."""
    installed = Path(str(files("toolkit.spec"))) / "files"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "recipes"


def names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in recipe_folder().rglob("*.yaml"))


def as_shipped(name: Any) -> Any:
    """Example data by the name that a shipped recipe has for it, wherever this or another environment has it; any
    other value as it is."""
    if isinstance(name, list):
        return [as_shipped(one) for one in name]
    path = Path(name) if isinstance(name, str) else Path()
    here = path.is_absolute() and path.parent == recipe_folder().resolve().parent / "data"
    return f"data/{path.name}" if here or path.parts[-4:-1] == _IN_A_PACKAGE else name
