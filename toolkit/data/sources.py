"""Rows of any source: a file that `files` reads, a folder of `save_to_disk` or of `hf download`, or a hub id.

Nothing is unpickled and no code of a data set is run.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR

from datasets import DatasetDict, load_dataset, load_dataset_builder, load_from_disk
from datasets import config as datasets_config
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

from toolkit import hub, phases
from toolkit.data.files import READERS, Row, listed, numbered, reason, shown
from toolkit.data.source_kinds import (
    SAVED,
    Source,
    check_regular,
    files_in,
    is_downloaded,
    may_be_hub_id,
    mode_of,
    names_of,
    nearest,
    path_of,
)
from toolkit.errors import DataError, within

# What datasets says where a configuration is missing or unknown.
_CONFIGURATIONS = re.compile(r"(?:the available configs: |not found\. Available: )\[(.*)\]")


def read_rows(
    source: str,
    *,
    field: str,
    split: str = "train",
    own_split: str | None = None,
    subset: Source | None = None,
    name: str | None = None,
) -> Iterator[Row]:
    """Every row of a source as `(place, row)`, for example `("data/queries.jsonl, line 3", {"query": …})`.

    Lines and rows are counted from 1. Blank lines of JSON Lines and CSV are not rows; in a text file they are.

    Args:
        source: file, folder or hub id.
        field: what named it, for errors: "train".
        split: of a source that has splits: "train", or anything else for the held-out one, which is `test`, or
            `validation` where there is no `test`.
        own_split: what the source itself calls that one, if it has another name there.
        subset: `data_dir` of a hub id, or of the folder of one; or several, read one after the other.
        name: of the configuration of a hub id or such a folder, where it has several.
    """
    path = path_of(source)
    accepted = f"Name a {', '.join(READERS)} file, a folder that save_to_disk or hf download wrote, or a hub id."
    parts = names_of(subset) if subset is not None else [None]
    with within(field):
        mode = mode_of(path) if source.strip() else None
        if mode is not None and S_ISDIR(mode) and not is_downloaded(source):
            yield from _read_folder(path, split, own_split)
        elif mode is not None and S_ISDIR(mode):
            for part in parts:
                data = _from_folder(path, part, name)
                if name is None and field == split:
                    _tell_unread(path, part)
                yield from _rows_of(data, str(path), part, split, own_split)
        elif path.suffix.lower() in READERS:
            if mode is None:
                wrong = f"{shown(str(path))}: there is no such file."
                looked = "" if path.is_absolute() else f"; it was looked for in {Path.cwd()}"
                raise DataError(wrong, remedy=nearest(path) or f"Check the path{looked}.")
            check_regular(path)
            yield from READERS[path.suffix.lower()](path)
        elif mode is not None:
            raise DataError(f'{shown(str(path))} ends in "{path.suffix}", which is not read.', remedy=accepted)
        elif not may_be_hub_id(source):
            raise DataError(f'there is no "{shown(source)}".', remedy=f"{nearest(path)} {accepted}".strip())
        else:
            for part in parts:
                yield from _rows_of(_from_hub(source, part, name), source, part, split, own_split)


def _holds_an_object(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes()), dict)
    except (ValueError, RecursionError):
        return False


def _read_folder(path: Path, split: str, own_split: str | None) -> Iterator[Row]:
    try:
        inside = sorted(path.iterdir())
        for entry in [*inside, *(below for folder in inside if folder.is_dir() for below in folder.iterdir())]:
            check_regular(entry)
            if entry.name in SAVED and not _holds_an_object(entry):
                raise DataError(
                    f"{entry}: not a JSON object, which save_to_disk writes.", remedy="Save the data again."
                )
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).", remedy="Check its permissions.") from error
    try:
        data = load_from_disk(str(path))
        if isinstance(data, DatasetDict):
            name = _split_name(data, split, own_split, str(path), f"its own folder: {path / next(iter(data))}")
            path, data = path / name, data[name]
        # As Arrow, since rows in Python would decode pictures and sound that nobody asked for.
        yield from numbered(str(path), data.with_format("arrow").iter(batch_size=1000))
    except DataError:
        raise
    except PermissionError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).", remedy="Check its permissions.") from error
    except Exception as error:  # of datasets and pyarrow, as the damage has it
        raise _no_folder(path, error, files_in([entry.name for entry in inside])) from error


def _no_folder(path: Path, error: Exception, files: list[str]) -> DataError:
    others = f", or one of its files: {listed(files[:5])}" if files else ""
    wrong = f"{path} is no folder that datasets can read ({reason(error)})."
    return DataError(wrong, remedy=f"Name one that save_to_disk or hf download wrote{others}.")


def _from_folder(path: Path, subset: str | None, name: str | None) -> DatasetDict:
    """What datasets makes of the files of a folder, in its own cache: nothing is written to the folder."""
    whole = os.path.abspath(path)  # else "json" would be one of datasets' own readers
    try:
        return _of_files(whole, subset, name)
    except DataError:
        raise
    except Exception as error:  # of datasets, pyarrow and yaml, as the damage has it
        _check_configuration(str(path), name, error)
        why = _cause(error)
        if isinstance(why, PermissionError) and str(why.filename).startswith(whole):
            wrong = f"{path}: cannot be read ({why.strerror}: {shown(str(why.filename))})."
            raise DataError(wrong, remedy="Check its permissions.") from error
        if remedy := hub.way_to_cache(error):
            raise DataError(f"{path} cannot be read ({reason(why)}).", remedy=remedy) from error
        below = sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))
        refused = _no_folder(path, why, files_in(below))
        if remedy := _without_settings(subset, name):
            refused.add_remedy(remedy)
        raise refused from error


def _of_files(folder: str, subset: str | None, name: str | None) -> DatasetDict:
    """What datasets makes of the files of a folder. Raises DataError for a file elsewhere: a stranger's card may name a
    private one of the user's. Of a hub id datasets refuses that itself."""
    inside = os.path.normpath(os.path.join(folder, subset or ""))
    # datasets takes the folder that a link is to, but for the files of a card. Files themselves may be links: to blobs.
    own = tuple(os.path.join(root, "") for root in (inside, os.path.realpath(inside)))
    for file in _data_files(folder, subset, name):
        # An address is none, whatever it is of: local:// and zip:// reach the user's own files.
        if not os.path.normpath(file).startswith(own):
            wrong = f"{folder}: its configs name {shown(file)}, which is none of its own files."
            raise DataError(wrong, remedy="Take that out of its README.md, or put the file into the folder.")
    return load_dataset(folder, name, data_dir=subset)


def _data_files(folder: str, subset: str | None, name: str | None = None) -> list[str]:
    """The files that datasets would read in a folder."""
    of_splits = load_dataset_builder(folder, name, data_dir=subset).config.data_files or {}
    return [file for files in of_splits.values() for file in files]


def _tell_unread(path: Path, subset: str | None) -> None:
    """Tells of files in a folder that datasets passes over: those of another kind than most of a split, and beside
    names of splits those without one. What `hf download` wrote, or a card divides, is as its author means it."""
    card = path / "README.md"
    if (path / ".cache" / "huggingface").is_dir() or (card.is_file() and b"\nconfigs:" in card.read_bytes()):
        return
    whole = os.path.abspath(path)
    read = {os.path.realpath(name) for name in _data_files(whole, subset)}  # the folder may be a link
    below = (entry.relative_to(whole) for entry in Path(whole, subset or "").rglob("*"))
    shown_to_it = (entry for entry in below if not any(part.startswith((".", "__")) for part in entry.parts))
    files = files_in(sorted(map(str, shown_to_it)))
    if unread := [name for name in files if os.path.realpath(os.path.join(whole, name)) not in read]:
        one = len(unread) == 1
        told = f"{path}: {listed(unread)} {'is' if one else 'are'} not read: datasets passes over files of another kind"
        told += ", and those without the name of a split beside others that have one."
        phases.tell(f"{told} If {'it has' if one else 'they have'} rows of yours, name the files one by one.")


def _from_hub(source: str, subset: str | None, name: str | None) -> DatasetDict:
    host, folder = hub.silent_host(), ""
    try:
        try:
            return load_dataset(source, name, data_dir=subset)
        except Exception:
            if not (folder := _cached(source, subset, name)):
                raise
            return _of_files(folder, subset, name)
    except DataError:
        raise
    except Exception as error:  # of httpx, huggingface_hub, datasets and pyarrow, without a common root
        _check_configuration(source, name, error)
        why = reason(_cause(error))
        wrong = f'"{source}" is no file, and the hub did not give it ({why}).'
        if folder:
            wrong = f'"{source}" is in the cache of the hub, and cannot be read from there ({why}).'
            again = f"If a file is damaged, hf download --repo-type dataset {source} --force-download gets it anew."
            raise DataError(wrong, remedy=f"{again} {_without_settings(subset, name)}".strip()) from error
        if host:
            wrong = f'"{source}" is no file here and not in the cache of the hub, and {host} does not answer.'
        otherwise = f"{nearest(Path(source))} Name files in its place.".strip()
        remedy = hub.way_to(source, error, otherwise=otherwise, of_data=True)
        raise DataError(wrong, remedy=f"{remedy} {_without_settings(subset, name)}".strip()) from error


def _cached(source: str, subset: str | None, name: str | None) -> str:
    """The folder in the hub's cache with all files of a data set, or of its subset; "" where some may be missing, or
    the hub can be asked. Offline, datasets looks for what it has made of files itself, and finds no subset there."""
    if not hub.is_offline(of_data=True):
        return ""
    needed = None if subset is None else [f"{subset}/*", "README.md"]
    try:
        folder = snapshot_download(source, repo_type="dataset", allow_patterns=needed, local_files_only=True)
    except LocalEntryNotFoundError:
        return ""
    with suppress(CachedRepoTreeNotFoundError):
        get_cached_repo_tree(source, repo_type="dataset")  # of hf download: the folder has been compared with it
        return folder
    if subset is None:
        return ""
    # Of datasets, which gets file by file, and notes the size of all once it has read them to the end.
    size = sum(map(os.path.getsize, _data_files(folder, subset, name)))
    read = Path(datasets_config.HF_DATASETS_CACHE).glob(f"*/*/*/{Path(folder).name}/dataset_info.json")
    return folder if any(json.loads(info.read_bytes()).get("download_size") == size for info in read) else ""


def _cause(error: Exception) -> Exception:
    """What says why: datasets says of some no more than that they happened "while generating the dataset"."""
    cause = error.__cause__ if isinstance(error, DatasetGenerationError) else None
    return cause if isinstance(cause, Exception) else error


def _check_configuration(source: str, name: str | None, error: Exception) -> None:
    """Raises DataError if an error of datasets is of a configuration that is missing or unknown."""
    if available := _CONFIGURATIONS.search(str(error)):
        seen = "none is named" if name is None else f'"{name}" is none of them'
        wrong = f"{source} has the configurations {available.group(1)}, and {seen}."
        raise DataError(wrong, remedy="Give one as name.") from error


def _without_settings(subset: str | None, name: str | None) -> str:
    given = " and ".join(key for key, value in (("subset", subset), ("name", name)) if value is not None)
    return f"Set {given} to null, if that is of another data set." if given else ""


def _rows_of(data: DatasetDict, source: str, subset: str | None, split: str, own_split: str | None) -> Iterator[Row]:
    place = source if subset is None else f"{source}/{subset}"
    part = _split_name(data, split, own_split, place, "another source")
    yield from numbered(f"{place} ({part})", data[part].with_format("arrow").iter(batch_size=1000))


def _split_name(data: DatasetDict, split: str, own_split: str | None, place: str, next_step: str) -> str:
    """What a data set calls a split; raises DataError, which lists those that are there, if it has none of the name."""
    usual = ("train",) if split == "train" else ("test", "validation")
    wanted = usual if own_split is None else (own_split,)
    if there := [name for name in wanted if name in data]:
        return there[0]
    wrong = f"{place} has no split {' or '.join(map(shown, wanted))}; it has {listed(data)}."
    setting = "split" if split == "train" else "validation_split"
    if own_split is not None:
        raise DataError(wrong, remedy=f"Give one of these as {setting}.")
    held_out = "G" if split == "train" else "Hold some of train out with validation_size, g"
    raise DataError(wrong, remedy=f"{held_out}ive one of these as {setting}, or name {next_step}.")
