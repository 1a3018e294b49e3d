"""Roles on disk: ordinary PEFT folders.

A policy or reference folder is what `PeftModel.from_pretrained` loads. A value or reward folder holds its
head as `score` beside the LoRA weights, as `trl.RewardTrainer` and PEFT save it, so that
`AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=…)` loads it. `role.json` beside
them says which role it is and where the head is read, and has `head_bias` where the head has a bias: PEFT builds
`score` without one, and leaves it out without a word. A value head on the policy's adapter is saved alone, as
`value_head.safetensors`; a value model all of whose weights are trained is a whole checkpoint. A Q role is a plain
adapter; what bounds its Q-values is beside it in `q_bound.safetensors`.
"""

import copy
import json
import os
import sys
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file

from toolkit.disk import as_the_umask_says, read_object, write_whole, writing
from toolkit.errors import AdapterError, ToolkitError
from toolkit.models.folders import (
    MERGED_INSTEAD,
    State,
    adapter_state,
    check_fits,
    load_whole,
    other_base,
    put_adapter,
    read_tensors,
)
from toolkit.models.heads import Q_BOUND_FILE, QBound
from toolkit.models.lora import missing_modules
from toolkit.models.roles import Q_ROLES, SharedBase, has_head

ROLE_FILE = "role.json"
_NO_NUMBERS = torch.device("meta")
_TOKENIZER_CONFIG = "tokenizer_config.json"
SHARED_HEAD_FILE = "value_head.safetensors"
_LARGEST_RANK = 2**16  # of an adapter: what a damaged file asks for would fill all memory
FEWEST_SCORES = 100
_LEVEL = ("mean_score", "high_score")  # of a head


def save_role(base: SharedBase, role: str, folder: str | Path, *, pad_token_id: int, base_name: str) -> Path:
    """Write one role's adapter and head into a folder, which is given back.

    `pad_token_id` is the one that the head is read with: see `score_positions`. `base_name` is that of the shared base;
    a value model has its own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {"role": role}
    head = base.head(role) if has_head(role) and role in base.heads else None
    if head is not None:
        reads = "every response token" if role == "value" else "the last token that is not pad_token_id"
        about |= {"num_labels": head.out_features, "pad_token_id": pad_token_id, "head_reads": reads}
        about |= {} if head.bias is None else {"head_bias": True}
        if role not in base.trained_roles:  # whose scores are others by now
            about |= {name: level for name in _LEVEL if (level := getattr(head, name)) is not None}
    written: tuple[str, ...] = (CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME)
    if head is not None and role == "value" and base.shares_value:
        written = (SHARED_HEAD_FILE,)
        _write(head.state_dict(), folder / SHARED_HEAD_FILE)
    elif role == "value" and base.value_model is not None and base.value_model.adapted is None:
        written = ()
        base.value_model.classifier.save_pretrained(folder)
    else:
        config = copy.deepcopy(base.adapter_config(role))
        own_base = base.value_model.classifier if role == "value" and base.value_model is not None else None
        config.inference_mode = True
        config.base_model_name_or_path = base_name if own_base is None else own_base.name_or_path
        # PEFT loads the base at this commit; of a folder there is none.
        config.revision = getattr((own_base or base.causal_lm).config, "_commit_hash", None)
        config.task_type, config.modules_to_save = ("CAUSAL_LM", None) if head is None else ("SEQ_CLS", ["score"])
        config.save_pretrained(folder)
        own = {} if head is None else head.state_dict(prefix="base_model.model.score.")
        _write(adapter_state(_adapted(base, role), role) | own, folder / SAFETENSORS_WEIGHTS_NAME)
    if role == "value":  # of an earlier one
        for name in {CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, SHARED_HEAD_FILE}.difference(written):
            (folder / name).unlink(missing_ok=True)
    if role in Q_ROLES:
        (folder / Q_BOUND_FILE).unlink(missing_ok=True)  # of an earlier one
        if role in base.heads:
            bound = base.heads[role]
            assert isinstance(bound, QBound)
            bound.save(folder)
    (folder / ROLE_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    as_the_umask_says(folder.glob("*.safetensors"))
    return folder


def _adapted(base: SharedBase, role: str) -> PeftModel:
    """PEFT's model with the role's adapter, which is called by the role's name."""
    return base.model if role != "value" or base.value_model is None else base.value_model.adapted


def _write(state: State, path: Path) -> None:
    on_cpu = {key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}
    save_file(on_cpu, path, metadata={"format": "pt"})  # without which transformers does not read it


def load_role(base: SharedBase, role: str, folder: str | Path) -> dict[str, Any]:
    """Add a role from a PEFT folder, ours, plain PEFT's, or that of `trl.RewardTrainer`; what its `role.json` says.

    On the meta device everything is checked, and no weights are read.

    Raises:
        AdapterError: a file is missing or damaged, the adapter is another base's, or a value or reward has no head.
    """
    folder = Path(os.path.expanduser(folder))  # where Path's own raises for a user that is not there
    if not folder.is_dir():
        may_be_id = len(folder.parts) == 2 and not folder.is_absolute()
        of_hub = f" One of the hub comes by hf download {folder} --local-dir FOLDER." if may_be_id else ""
        raise AdapterError(
            f'role "{role}": there is no folder {folder}.', remedy=f"Name a PEFT adapter folder.{of_hub}"
        )
    about = _about(folder) or _about_of_others(folder)
    head: State | None
    of_an_adapter = not has_head(role) and (folder / CONFIG_NAME).is_file()  # LLaMA-Factory's has a head beside it
    if (folder / SHARED_HEAD_FILE).is_file() and not of_an_adapter:
        head = read_tensors(folder, SHARED_HEAD_FILE, device=_NO_NUMBERS)
        if any(name.startswith("v_head.") for name in head):
            wrong = f"{folder} has a value head as TRL's AutoModelForCausalLMWithValueHead and LLaMA-Factory save it."
            raise AdapterError(wrong, remedy="Train a reward here, or by trl.RewardTrainer.")
        if role != "value":
            raise AdapterError(f'{folder} holds a value head on the policy\'s adapter; it cannot be the role "{role}".')
        config = None
    else:
        config = adapter_config(folder)
        _, head = _split_head(read_tensors(folder, device=_NO_NUMBERS), role, folder)
        if missing := missing_modules(base.causal_lm, config):
            raise other_base(folder, f"this one has no module {missing[0]} for it.")
    if head is not None and ("weight" not in head or head["weight"].dim() != 2 or not len(head["weight"])):
        raise AdapterError(f"{folder}: its head is no matrix of weights.", remedy="Train or copy it again.")
    bound = _bound(folder) if role in Q_ROLES else None
    shape: Any = {} if head is None else {"num_labels": head["weight"].shape[0], "head_bias": "bias" in head}
    try:
        base.add_role(role, config, head=bound, saved=True, **shape)
    except AdapterError as error:  # of the file, which is no section of a recipe
        problem = error.problems[0]
        of = f" {problem.field}:" if problem.field else ""
        raise AdapterError(f"{folder / CONFIG_NAME}:{of} {problem.wrong}", remedy=problem.remedy) from error
    try:
        load_weights(base, role, folder)
    except BaseException:
        base.remove_role(role)  # it would be there with random weights
        raise
    if head is not None:
        own = base.head(role)
        # A folder without either has been copied in part, from here or from there.
        own.elsewhere = not (folder / ROLE_FILE).is_file() and (folder / _TOKENIZER_CONFIG).is_file()
        for name in about.keys() & set(_LEVEL):
            setattr(own, name, float(about[name]))
    return about


def level_of(scores: Sequence[float]) -> dict[str, float]:
    """Of scores of held-out responses their `mean_score`, and of 100 or more the `high_score`, which 99 in 100 are less
    than."""
    if not scores:
        return {}
    given = torch.tensor(scores)
    high = {"high_score": float(given.quantile(0.99))} if len(scores) >= FEWEST_SCORES else {}
    return {"mean_score": float(given.mean()), **high}


def save_level(folder: Path, scores: Sequence[float]) -> None:
    """Note beside a saved reward the level of what it gave."""
    about = read_object(folder / ROLE_FILE) or {}
    with writing(folder):
        write_whole(folder / ROLE_FILE, json.dumps({**about, **level_of(scores)}, indent=2) + "\n")


def load_weights(base: SharedBase, role: str, folder: str | Path) -> None:
    """Put the weights of a saved role into that role, which the base carries already; errors as for `load_role`."""
    folder = Path(folder)
    if role == "value" and base.shares_value:
        _set_head(base, role, read_tensors(folder, SHARED_HEAD_FILE, device=base.device), folder)
    elif role == "value" and base.value_model is not None and base.value_model.adapted is None:
        load_whole(base.value_model.classifier, folder)
    else:
        adapter, head = _split_head(read_tensors(folder, device=base.device), role, folder)
        _check_scaling(adapter_config(folder), _adapted(base, role).peft_config[role], folder)
        put_adapter(_adapted(base, role), role, adapter, folder)
        if head is not None:
            _set_head(base, role, head, folder)
    if role in Q_ROLES:
        saved, own = _bound(folder), dict(base.heads.items()).get(role)
        theirs, ours = (
            f"between {x.lowest} and {x.highest}" if x is not None else "without bounds" for x in (saved, own)
        )
        if theirs != ours:
            wrong = f"{folder}: its Q-values are {theirs}, and those of this role {ours}."
            raise AdapterError(wrong, remedy="Set bound, lowest_return and highest_return as they were trained.")
        if saved is not None and own is not None:
            own.load_state_dict(saved.state_dict())


def _check_scaling(saved: LoraConfig, own: LoraConfig, folder: Path) -> None:
    """That a role multiplies an adapter's weights with what they were trained with, of which they say nothing."""
    for name in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"):
        theirs, ours = (getattr(config, name) or None for config in (saved, own))
        if theirs != ours:
            wrong = f"{folder / CONFIG_NAME}: {name} is {theirs!r}, and that of the role {ours!r}."
            raise AdapterError(wrong, remedy="Give the role the adapter's own settings.")


def _about(folder: Path) -> dict[str, Any]:
    path, remedy = folder / ROLE_FILE, "Copy it again, or train the role again."
    try:
        about = read_object(path) or {}  # another tool's folder has none
    except ToolkitError as error:
        raise AdapterError(error.problems[0].wrong, remedy=remedy) from error
    pad = about.get("pad_token_id", 0)
    if type(pad) is not int or not 0 <= pad < 2**31:
        raise AdapterError(f"{path}: pad_token_id is {pad!r}, and the id of a token is needed.", remedy=remedy)
    for name in _LEVEL:
        score = about.get(name, 0.0)
        if type(score) not in (int, float) or not isfinite(score):
            raise AdapterError(f"{path}: {name} is {score!r}, and a finite number is needed.", remedy=remedy)
    return about


def _about_of_others(folder: Path) -> dict[str, Any]:
    """What stands for a `role.json` in a folder of `trl.RewardTrainer`: the `pad_token` of the tokenizer beside it."""
    given = (read_object(folder / _TOKENIZER_CONFIG) or {}).get("pad_token")
    token = given.get("content") if isinstance(given, dict) else given
    return {"pad_token": token} if isinstance(token, str) else {}


def _bound(folder: Path) -> QBound | None:
    """What bounds a saved Q role's values; None where nothing does."""
    if not (folder / Q_BOUND_FILE).is_file():
        return None
    saved = read_tensors(folder, Q_BOUND_FILE)
    try:
        return QBound.of(saved)
    except (KeyError, ValueError, RuntimeError) as error:
        wrong = f"{folder / Q_BOUND_FILE} holds no bound of Q-values ({' '.join(str(error).split())})."
        raise AdapterError(wrong, remedy="Train or copy it again.") from error


def base_named(folder: Path) -> str | None:
    """The base that a PEFT folder names."""
    return (read_object(folder / CONFIG_NAME) or {}).get("base_model_name_or_path")


def name_base(folder: Path, base_name: str) -> None:
    """Let a PEFT folder name this base, which PEFT loads for it; the commit of another one is none of this."""
    config = read_object(folder / CONFIG_NAME) or {}
    if config.get("base_model_name_or_path") != base_name:
        config |= {"base_model_name_or_path": base_name}
        config |= {"revision": None} if config.get("revision") is not None else {}
    write_whole(folder / CONFIG_NAME, json.dumps(config, indent=2, sort_keys=True))


def adapter_config(folder: Path) -> LoraConfig:
    """The configuration in a PEFT folder, as one of a role of any base; an AdapterError if it cannot be one."""
    if not (folder / CONFIG_NAME).is_file():
        raise AdapterError(f"{folder}: {CONFIG_NAME} is missing, so this is not a PEFT adapter folder.")
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # whatever PEFT comes to, as the file is
        wrong = f"{folder / CONFIG_NAME} cannot be read: {' '.join(str(error).split())}."
        raise AdapterError(wrong, remedy="Train or copy it again.") from error
    if not isinstance(config, LoraConfig):
        raise AdapterError(f"{folder}: the adapter is of type {config.peft_type}; the roles here are LoRA adapters.")
    for name in ("lora_alpha", "alpha_pattern", "rank_pattern"):
        value = getattr(config, name)
        numbers = [value] if name == "lora_alpha" else list(value.values()) if isinstance(value, dict) else [None]
        if not all(isinstance(n, int | float) and abs(n) <= sys.float_info.max for n in numbers):
            wrong = f"{folder / CONFIG_NAME}: {name} is {value!r}, and finite numbers are needed."
            raise AdapterError(wrong, remedy="Train or copy it again.")
    ranks = [rank for rank in (config.r, *config.rank_pattern.values()) if isinstance(rank, int | float)]
    if max(ranks, default=0) > _LARGEST_RANK:
        wrong = f"{folder / CONFIG_NAME}: a rank is larger than {_LARGEST_RANK:,}."
        raise AdapterError(wrong, remedy="Train or copy it again.")
    saved = config.modules_to_save
    if saved is not None and not (isinstance(saved, list | set) and all(isinstance(name, str) for name in saved)):
        wrong = f"{folder / CONFIG_NAME}: modules_to_save is {saved!r}, and names of modules are needed."
        raise AdapterError(wrong, remedy="Train or copy it again.")
    if extra := set(config.modules_to_save or []) - {"score", "classifier"}:
        wrong = f"{folder}: the adapter replaces {', '.join(sorted(extra))} of the base (modules_to_save), "
        wrong += "which the other roles share."
        raise AdapterError(wrong, remedy=f"Train it without; or {MERGED_INSTEAD}.")
    config.modules_to_save, config.task_type, config.inference_mode = None, "CAUSAL_LM", False
    # Those that leave the base alone: the weights are in the file.
    if config.init_lora_weights in ("orthogonal", "eva", "mica"):
        config.init_lora_weights = True
    config.megatron_config = None  # of layers that no base here has: PEFT would import the module that it names
    # Where it was trained; the weights' names and shapes are checked instead.
    config.base_model_name_or_path = config.revision = None
    return config


def _split_head(state: State, role: str, folder: Path) -> tuple[State, State | None]:
    """The adapter's tensors, and the head's by their own names; None for a role without a head."""
    heads = {key: tensor for key, tensor in state.items() if ".score." in key}
    adapter = {key: tensor for key, tensor in state.items() if key not in heads}
    if not has_head(role):
        return adapter, None
    named = {key.rpartition(".")[2]: tensor for key, tensor in heads.items()}
    if "weight" not in named or len(named) != len(heads):
        raise AdapterError(
            f'{folder}: role "{role}" needs one score head and the adapter holds {len(heads)}; a random head would '
            "give random scores.",
            remedy='Train the role with toolkit or trl.RewardTrainer, or save it with modules_to_save=["score"].',
        )
    return adapter, named


def _set_head(base: SharedBase, role: str, state: State, folder: Path) -> None:
    head = base.head(role)
    own = head.state_dict()
    if state.keys() != own.keys():
        wrong = f"{folder}: the head has {' and '.join(sorted(state))}, and the role {' and '.join(sorted(own))}."
        raise AdapterError(wrong, remedy="Give the role's head a bias, or none, as the folder has it.")
    saved, ours = ({f"head.{name}": tensor for name, tensor in of.items()} for of in (state, own))
    check_fits(saved, ours, folder)
    head.load_state_dict(state)
