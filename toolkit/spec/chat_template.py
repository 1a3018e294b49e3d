"""The text of `base.chat_template`: a recipe may name a file or a folder that has it."""

from pathlib import Path
from typing import Any

from toolkit.data.files import shown
from toolkit.disk import read_object, read_text
from toolkit.errors import RecipeError, ToolkitError
from toolkit.spec.plan import at

FILE = "chat_template.jinja"
_OF_TOKENIZER = "tokenizer_config.json"
_SIGNS = ("{{", "{%")  # in every template that writes what a message says, and in no name


def with_template(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The recipe with the template itself in the place of its file's name, so that its run does not need the file.

    Args:
        folder: the recipe's own, where a file is looked for that the current one does not have.

    Raises:
        RecipeError: there is no such file, or no template in it.
    """
    given = at(values, "base.chat_template")
    if not isinstance(given, str) or any(sign in given for sign in _SIGNS):
        return values
    try:
        own = Path(given).expanduser()
        place = own if own.exists() else folder / given
        template = template_in(place) if place.is_dir() else read_text(place)
    except (OSError, ValueError, RuntimeError, ToolkitError) as error:  # the name, too, may be none of a file
        wrong = f'"{shown(given)}" cannot be read: {str(error).rstrip(".")}.'
        raise RecipeError(wrong, field="base.chat_template", remedy="Name a file with a Jinja template.") from error
    if not template or not any(sign in template for sign in _SIGNS):
        wrong = f'there is no chat template in "{given}".'
        raise RecipeError(wrong, field="base.chat_template", remedy=f"Name a file like a checkpoint's {FILE}.")
    if "${" in template:
        wrong = f'the chat template in "{given}" has a "${{", which in a recipe stands for the value of a key.'
        raise RecipeError(wrong, field="base.chat_template", remedy="Write it otherwise, as '$' ~ '{'.")
    return {**values, "base": {**values["base"], "chat_template": template}}


def template_in(folder: Path) -> str | None:
    """The chat template beside a saved adapter or checkpoint; None where it has none, or several by name.

    Raises: ToolkitError: its tokenizer's configuration is damaged. OSError, ValueError: a file cannot be read.
    """
    if (folder / FILE).is_file():
        return read_text(folder / FILE)
    written = (read_object(folder / _OF_TOKENIZER) or {}).get("chat_template")
    return written if isinstance(written, str) else None
