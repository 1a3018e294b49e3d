"""A checkpoint before its model is loaded: its tokenizer, the files of its weights, and why it cannot be loaded."""

import json
import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, find_adapter_config_file

from toolkit import hub
from toolkit.disk import read_object, read_text, write_whole
from toolkit.errors import ModelError

_TOKENIZER_FILES = (
    "token*.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "special_tokens*.json",
)
_CONFIG = "tokenizer_config.json"
_OF_OTHERS = ["*.model", "*.tiktoken", "tekken.json"]  # which transformers 5 reads, and as a rule does not write
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates/*.jinja")
_ANY_TOKENIZER = "PreTrainedTokenizerFast"  # by the name that transformers 4 knows, too
HEAD_NAMES = ("score", "classifier")  # of transformers' sequence classifiers
_POINTER = b"version https://git-lfs"
_READ = {".json", ".safetensors", ".model", ".txt", ".jinja"}


def load_tokenizer(
    model: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, left-padding; one without a pad token pads with its end-of-sequence token.

    That is safe here, where no mask is made from pad ids.
    """
    tokenizer = _tokenizer(model, revision=revision, trust_remote_code=trust_remote_code)
    if tokenizer.eos_token_id is None:
        wrong = f'the tokenizer of "{model}" has no eos_token, so that no response could end.'
        raise ModelError(wrong, field="model", remedy="Name the token as eos_token in its tokenizer_config.json.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return tokenizer


def save_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    model: str,
    *,
    revision: str | None = None,
    template: str | None = None,
) -> None:
    """Write a checkpoint's tokenizer into a folder, for tools without transformers 5 as well.

    transformers 5 by itself writes no tokenizer.model, without which llama.cpp converts no Gemma. It also writes names
    that transformers 4 refuses, and leaves out whether a text begins and ends with special tokens.

    What is written may be published: of a link that leads out of the checkpoint, which somebody else may have made, the
    content is left out, unless it is a file of the hub's cache. A chat `template` that the recipe names stays.
    """
    tokenizer.save_pretrained(folder)
    config = read_object(folder / _CONFIG) or {}
    write_whole(folder / _CONFIG, _as_json(_as_before_version_5(config, tokenizer)))
    if not _reads_alike(folder, tokenizer):
        write_whole(folder / _CONFIG, _as_json(config))
    source = Path(model).expanduser()
    if not source.is_dir():
        try:
            source = Path(snapshot_download(model, revision=revision, allow_patterns=_OF_OTHERS))
        except Exception as error:  # of httpx and huggingface_hub, without a common root
            reason = " ".join(str(error).split())
            wrong = f'{", ".join(_OF_OTHERS)} of "{model}" cannot be had, if there are such ({reason}).'
            warnings.warn(f"{wrong} Copy them to {folder}: llama.cpp needs them for Gemma.", stacklevel=2)
            return
    for path in (path for pattern in _OF_OTHERS for path in source.glob(pattern)):
        if path.is_file() and not (folder / path.name).exists() and not _left_out(path, source):
            shutil.copyfile(path, folder / path.name)
    for path in (path for pattern in _TEMPLATES for path in source.glob(pattern) if template is None):
        ours = folder / path.relative_to(source)  # which the recipe may have named in its place
        if path.is_file() and ours.is_file() and read_text(path) == read_text(ours) and _left_out(path, source):
            ours.unlink()


def _left_out(path: Path, source: Path) -> bool:
    """Whether a file of a checkpoint is a link to one that is none of its own, which is told."""
    real, own = path.resolve(), source.resolve()
    of_cache = own.parents[1] if own.parent.name == "snapshots" else None  # of the hub, however it is called
    of_hub = real.parent.name == "blobs" and (
        real.parents[1] == of_cache or real.parents[1].name.startswith("models--")
    )
    if of_hub or real.is_relative_to(own):
        return False
    wrong = f"{path} is left out: it is a link to {real}, which is no file of the checkpoint."
    warnings.warn(f"{wrong} Put a copy of that file in its place, if it is to be given away.", stacklevel=4)
    return True


def _as_json(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def _as_before_version_5(config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A tokenizer's configuration with names that transformers 4 knows: of the class, of a list of tokens, and of the
    special tokens around a text, which its class for Llama adds where nothing is said."""
    ids = tokenizer("").input_ids  # a letter may be none of a vocabulary
    begins = ids[:1] == [tokenizer.bos_token_id]
    known = {**config, "add_bos_token": begins, "add_eos_token": ids[begins:][-1:] == [tokenizer.eos_token_id]}
    if known.get("tokenizer_class") == "TokenizersBackend":
        known["tokenizer_class"] = _ANY_TOKENIZER
    if isinstance(known.get("extra_special_tokens"), list):
        known["additional_special_tokens"] = known.pop("extra_special_tokens")
    return known


def _reads_alike(folder: Path, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether what stands in a folder gives the same ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    try:
        read = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception:  # of one with code of its own, or whatever the names come to
        return False
    if backend is None or getattr(read, "backend_tokenizer", None) is None:
        return False
    ours, theirs = (json.loads(one.to_str()) for one in (backend, read.backend_tokenizer))
    for state in ("padding", "truncation"):  # of the last call
        ours[state] = theirs[state] = None
    return bool(ours == theirs and read.special_tokens_map == tokenizer.special_tokens_map)


def embeddings_needed(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many a model has that reads what a tokenizer makes of text: one more than the largest id that counts.

    Those of further special tokens do not: text-only Gemma 3 has one for images beyond its embeddings, as CodeLlama 34B
    has for filling in (transformers#37011). In a chat template they do.
    """
    own, template = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id), tokenizer.chat_template
    added = tokenizer.added_tokens_decoder  # of mistral-common's tokenizers a method, which has none
    added = added if isinstance(added, Mapping) else {}
    special = {i for i, token in added.items() if token.special and i not in own}
    further = {i for i in special if tokenizer.convert_ids_to_tokens(i) not in str(template)}
    return max({*tokenizer.get_vocab().values()} - further, default=-1) + 1


def check_same_tokenizer(model: str, tokenizer: PreTrainedTokenizerBase, **code: Any) -> None:
    """Nothing, if the checkpoint has a tokenizer that gives the ids of `tokenizer`, the policy's; else a `ModelError`.

    `code` is `revision` and `trust_remote_code`.
    """
    differ = set(_tokenizer(model, **code).get_vocab().items()) ^ set(tokenizer.get_vocab().items())
    if differ:
        raise ModelError(
            f'"{model}" has another tokenizer than base ({len(differ)} entries differ), and it is to read the ids of '
            "base.",
            field="model",
            remedy="Name a model with the same one. A classifier with another one can score the text of responses, as "
            "a scorer of kind model.",
        )


def _is_path(model: str) -> bool:
    """Whether a checkpoint is named as a folder: there is one, or no hub id is so."""
    if Path(model).expanduser().exists() or model.startswith((".", "/", "~")):
        return True
    try:
        validate_repo_id(model)
    except HFValidationError:
        return True
    return False


def check_there(model: str, revision: str | None = None) -> None:
    """That a checkpoint is a folder, or in the hub's cache, or that the hub can be asked for it.

    transformers finds out within minutes, after many tries of each file.

    Raises: ModelError: it is none of them, or a folder of which a revision is asked for, or in which a file would be
    waited for without end.
    """
    if Path(model).expanduser().is_file():  # transformers takes a config.json for a checkpoint
        raise not_loaded(model, OSError())
    if _is_path(model):
        if revision is not None:
            wrong = f'"{revision}" would have no effect: "{model}" is a folder, which has one state.'
            raise ModelError(wrong, field="revision", remedy="Remove it, or name a hub id.")
        with suppress(OSError):  # of the folder, which is told of where it is read
            for path in sorted(Path(model).expanduser().iterdir()):
                if path.suffix in _READ and path.exists() and not path.is_file():
                    wrong = f"{path} is a folder, a pipe or a device."
                    raise ModelError(wrong, field="model", remedy="Download the checkpoint again.")
        return
    try:
        cached = isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str)
    except ValueError:  # no hub id: transformers says what one is
        return
    if (host := hub.silent_host()) and not cached:
        here = f"no folder here ({Path.cwd()})"
        wrong = f'"{model}" is {here} and not in the cache of the hub, and {host} does not answer.'
        raise ModelError(wrong, field="model", remedy="Name the folder of a checkpoint.")


def cached_commit(model: str, revision: str | None) -> str | None:
    """The state of a repository that a hub id was read at, by the hub's cache; None of a folder."""
    if Path(model).expanduser().exists():
        return None
    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else None


def check_weights_alone(model: str, config: PreTrainedConfig, *, asks_hub: bool = False) -> None:
    """That a checkpoint is loaded as it is, and from safetensors. transformers puts an adapter that lies beside the
    weights on them unasked, and reads the file that a configuration names whatever its kind.

    Args:
        asks_hub: whether the hub is asked, of which the cache alone need not know: transformers would download the
            adapter with the weights, and load the base that it names in the place of this one.

    Raises: ModelError: there is an adapter, or the configuration names another kind of file.
    """
    revision = getattr(config, "_commit_hash", None)  # the state that the configuration is of
    beside = find_adapter_config_file(model, revision=revision, local_files_only=not asks_hub)
    if beside is not None:
        raise ModelError(
            f'"{model}" holds an adapter beside its weights: {beside}.',
            field="model",
            remedy="Name a folder without it. The policy can start from the adapter, in a folder of its own.",
        )
    named = getattr(config, "transformers_weights", None)
    if named is not None and not str(named).endswith((".safetensors", ".safetensors.index.json")):
        wrong = f'"{model}": its config.json has transformers_weights: {named!r}, which is no file of safetensors.'
        raise ModelError(wrong, field="model", remedy="Convert the checkpoint, or name another one.")


def _tokenizer(model: str, **code: Any) -> PreTrainedTokenizerBase:
    check_there(model, code.get("revision"))
    try:
        return AutoTokenizer.from_pretrained(model, **code)
    except Exception as error:  # of tokenizers and transformers, as the files have it
        if (found := _tokenizer_problem(Path(model).expanduser())) is not None:
            wrong, remedy = found
            raise ModelError(wrong, field="model", remedy=remedy) from error
        raise not_loaded(model, error) from error


def _tokenizer_problem(folder: Path) -> tuple[str, str] | None:
    """Why there is no tokenizer in a folder with a configuration, and what to do, where its files tell."""
    if not (folder / "config.json").is_file():
        return None
    found = [path for pattern in _TOKENIZER_FILES for path in sorted(folder.glob(pattern)) if path.is_file()]
    if not found:
        wrong = f'"{folder}" has no tokenizer: neither tokenizer.json nor tokenizer.model, vocab.json or the like.'
        return wrong, "Copy that of the model which it was made from into it: tokenizer.json and tokenizer_config.json."
    for path in found:
        try:
            text = path.read_bytes()
            if text.startswith(_POINTER):
                return f"{path} is a pointer of Git LFS, and not the file.", "Run git lfs pull there, or download it."
            if path.suffix == ".json":
                json.loads(text)
        except (OSError, ValueError) as error:
            return f"{path} is damaged ({error}).", "Download it again."
    return None


def not_loaded(model: str, error: Exception, *, scores: bool = False) -> ModelError:
    """What to raise where a checkpoint, that of a classifier if it `scores`, its configuration or its tokenizer cannot
    be loaded."""
    path = Path(model).expanduser()
    kind = "folder" if _is_path(model) else "folder or hub id"
    lines = f"{'no ' * isinstance(error, KeyError)}{error}".split("\n")
    reason = " ".join(lines[:1] if isinstance(error, OSError) else lines)  # which goes on with how the hub is asked
    if type(error) in (AttributeError, TypeError):  # Python's words for what a file of JSON holds
        reason = "its config.json or tokenizer files have a value of the wrong type"
    if isinstance(error, ArithmeticError):
        much = "is too large" if isinstance(error, OverflowError) else "is 0 where it cannot be"
        reason = f"its config.json has a number that {much}"
    if kind == "folder" and not path.exists():
        looked = "" if path.is_absolute() else f", looked for from {Path.cwd()}"
        reason = f"there is no such folder{looked}."
    elif path.is_file():
        reason = "it is a file; a checkpoint is a folder with config.json and safetensors, and GGUF is not read."
        if (path.parent / "config.json").is_file():
            remedy = f"Name its folder: {path.parent}"
            return ModelError(f'no checkpoint can be loaded from "{model}": {reason}', field="model", remedy=remedy)
    elif (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        remedy = "Name the base that it was trained on here, and the adapter as what the policy starts from."
        if scores:
            remedy = "Merge it into its base, and name that; for one on the shared base set "
            remedy += "scorer.kind: adapter, with start.reward."
        return ModelError(f'"{model}" is a PEFT adapter and no whole model.', field="model", remedy=remedy)
    remedy = "Name a folder or hub id with safetensors weights and a tokenizer."
    if kind != "folder":
        looked = f" There is no such folder in {Path.cwd()}." if hub.is_offline() else ""
        remedy = hub.way_to(model, error, otherwise=f"{remedy}{looked}")
    return ModelError(
        f'no checkpoint could be loaded from the {kind} "{model}" ({reason})', field="model", remedy=remedy
    )


def _weight_files(folder: Path) -> list[Path]:
    """The files of a checkpoint's weights, by its index where it has one. Raises what an index that is damaged does."""
    index, names = folder / SAFE_WEIGHTS_INDEX_NAME, [SAFE_WEIGHTS_NAME]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return [folder / name for name in names]


def outline_of(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, on the meta device, from its header."""
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        return {key: torch.empty(file.get_slice(key).get_shape(), device="meta") for key in names}


def weights_outline(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint's folder by name, on the meta device; none where a file is missing or damaged."""
    state: dict[str, Tensor] = {}
    try:
        for path in _weight_files(folder):
            state |= outline_of(path)
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    return state


def head_outputs(model: str) -> int | None:
    """How many outputs the head of a classifier has, by the headers of its folder's weights; None where there is no
    head, or no folder."""
    state = weights_outline(Path(model).expanduser())
    heads = (state[f"{name}.weight"] for name in HEAD_NAMES if f"{name}.weight" in state)
    return next((head.shape[0] for head in heads), None)


def weight_file_problems(folder: Path) -> Iterator[str]:
    """Weights that are missing, kept from being read, or cut short, by their headers."""
    try:
        paths = _weight_files(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"{folder / SAFE_WEIGHTS_INDEX_NAME} cannot be read ({error}). Download it again."
        return
    for path in paths:
        if not path.is_file():
            yield f"{path} is missing: weights are read from safetensors alone. Download or convert the checkpoint."
            continue
        try:
            path.open("rb").close()  # which says why not, where safe_open has no such file
            with safe_open(path, framework="pt"):
                pass
        except OSError as error:
            yield f"{path} cannot be read ({error.strerror}). Check its permissions."
        except SafetensorError as error:
            yield f"{path} is damaged ({error}). Download it again."


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """transformers prints tables of weights that are missing or not wanted, as where a language model has no score;
    and, where the module that loads is quiet itself, layers that it has not divided among devices."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
