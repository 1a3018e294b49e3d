"""What a source's name stands for: a file, a folder of `save_to_disk` or of `hf download`, or a hub id. No row is read.

Which of a task's settings select a part of it is decided here, too.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

from toolkit.data.files import READERS, shown
from toolkit.errors import DataError

Source = str | list[str]
PART_SETTINGS = ("subset", "name", "split", "validation_split")
"""What selects a part of a source. A file has none of them, and a saved `DatasetDict` splits alone."""
SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")  # of save_to_disk
# The last are of a hub's older data sets, and of a model; datasets passes over them, too.
_WITHOUT_ROWS = (*SAVED, "dataset_infos.json", "config.json")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def path_of(source: str) -> Path:
    """The path of a source; `~` of nobody stays as it is."""
    return Path(os.path.expanduser(source))


def mode_of(path: Path) -> int | None:
    """What kind of file a path is, as `stat` has it; None where there is nothing."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # a name that is too long or has a zero in it, a folder that may not be read
        why = error.strerror if isinstance(error, OSError) else error
        wrong = f"{shown(str(path))}: cannot be opened ({why})."
        raise DataError(wrong, remedy="Check its name and permissions.") from error


def check_regular(path: Path) -> None:
    """Raises DataError for a pipe or a device, which would be waited for without end."""
    mode = mode_of(path)
    if mode is not None and not S_ISREG(mode) and not S_ISDIR(mode):
        raise DataError(f"{path}: neither a file nor a folder, but a pipe or a device.", remedy="Save it as a file.")


def source_digest(source: str) -> str | None:
    """SHA-256 of a source's file, or of the files with rows in its folder, as they are: nothing is decoded.

    None of a hub id, and of what cannot be read.
    """
    path, sha256 = path_of(source), hashlib.sha256()
    try:
        files = [path] if path.is_file() else sorted(_with_rows_below(path))
        for file in files:
            sha256.update(os.fsencode(os.path.relpath(file, path)))
            with file.open("rb") as content:
                sha256.update(hashlib.file_digest(content, "sha256").digest())
    except (OSError, ValueError):
        return None
    return sha256.hexdigest() if files else None


def _with_rows_below(folder: Path) -> Iterator[Path]:
    def fails(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=fails):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        # Beside rows that were saved datasets keeps what others have computed of them.
        arrow = [name for name in names if name.endswith(".arrow") and not name.startswith("cache-")]
        yield from (path for name in [*files_in(names), *arrow] if (path := Path(place, name)).is_file())


def names_of(source: Source | None) -> list[str]:
    """The sources that a setting names."""
    return source if isinstance(source, list) else [] if source is None else [source]


def has_splits(source: Source) -> bool:
    """Whether each source may bring a held-out part of its own: a hub id, the folder of one, a saved `DatasetDict`."""
    return all(os.path.lexists(path_of(one) / "dataset_dict.json") or is_of_hub(one) for one in names_of(source))


def is_hub_id(source: str) -> bool:
    """Whether the hub is asked for the source: nothing here has that name, and a hub id may have it."""
    path = path_of(source)
    return not os.path.exists(path) and path.suffix.lower() not in READERS and may_be_hub_id(source)


def may_be_hub_id(source: str) -> bool:
    """Whether datasets would ask the hub: "json" and the like are its own readers, of all files of a folder."""
    return bool(_HUB_ID.fullmatch(source)) and source not in _PACKAGED_DATASETS_MODULES


def is_of_hub(source: str) -> bool:
    """Whether the source is a hub id, or the folder of one."""
    return is_hub_id(source) or is_downloaded(source)


def is_downloaded(source: str) -> bool:
    """Whether a folder is one that datasets finds its way in, as in a data set of the hub.

    It is if `hf download` wrote it, which leaves its mark, or if no file lies in it that could be named in its place:
    of several that do, datasets would pass over those of another kind than most without a word.
    """
    try:
        path = path_of(source)
        if not path.is_dir() or any(os.path.lexists(path / name) for name in ("dataset_dict.json", "state.json")):
            return False
        return (path / ".cache" / "huggingface").is_dir() or not files_in(os.listdir(path))
    except (OSError, ValueError):  # reading it says why
        return False


def files_in(names: list[str]) -> list[str]:
    """Those of the names that a file with rows may have."""
    return [name for name in names if Path(name).suffix.lower() in READERS and Path(name).name not in _WITHOUT_ROWS]


def sources_of(setting: str, data: Mapping[str, Any]) -> list[str]:
    """The sources among the settings of a task of which one of `PART_SETTINGS` selects a part."""
    train, held_out = (names_of(data.get(field)) for field in ("train", "validation"))
    of_one = {"split": train, "validation_split": held_out or train}
    return of_one.get(setting, [*train, *held_out])


def has_part(setting: str, source: str) -> bool:
    """Whether a source may have what one of `PART_SETTINGS` selects."""
    return is_of_hub(source) if setting in ("subset", "name") else has_splits(source)


def check_part_settings(data: Mapping[str, Any]) -> None:
    """Raises DataError if one of `PART_SETTINGS` is among a task's settings, and none of its sources has such parts."""
    wrong: dict[str, list[str]] = {}
    for setting in PART_SETTINGS:
        sources = sources_of(setting, data)
        if data.get(setting) is not None and not any(has_part(setting, source) for source in sources):
            has = "a hub id has that" if setting in ("subset", "name") else "a hub id or a DatasetDict has splits"
            why = f"would have no effect: only {has}, and {' and '.join(map(shown, sources))} is none."
            wrong.setdefault(why, []).append(setting)
    for why, settings in wrong.items():
        raise DataError(f"{' and '.join(settings)} {why}", field=settings[0], remedy="Remove it.")


def nearest(path: Path) -> str:
    """`Did you mean data/x.jsonl?`, or nothing."""
    try:
        names = os.listdir(path.parent)
    except (OSError, ValueError):
        return ""
    near = get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"Did you mean {path.parent / near[0]}?" if near else ""
