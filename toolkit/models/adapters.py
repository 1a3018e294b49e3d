"""Roles on disk: ordinary PEFT folders.

A policy or reference folder is what `PeftModel.from_pretrained` loads. A value or reward folder holds its
head as `score` beside the LoRA weights, as `trl.RewardTrainer` and PEFT save it, so that
`AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=…)` loads it. `role.json` beside
them says which role it is and where the head is read. A value head on the policy's adapter is saved alone,
as `value_head.safetensors`. A Q role is a plain adapter; what bounds its Q-values is beside it in
`q_bound.safetensors`.
"""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers.utils import SAFE_WEIGHTS_NAME

from toolkit.errors import AdapterError
from toolkit.models.q_head import Q_BOUND_FILE, QBound
from toolkit.models.roles import HEAD_ROLES, Q_ROLES, SharedBase, missing_modules

ROLE_FILE = "role.json"
SHARED_HEAD_FILE = "value_head.safetensors"
_DIGESTED = 64  # numbers of a tensor
_HEAD_PREFIX = "base_model.model.score."


def save_role(base: SharedBase, role: str, folder: str | Path, *, pad_token_id: int, base_name: str) -> Path:
    """Write one role's adapter and head.

    Args:
        base: carries the role.
        role: its name.
        folder: created; files of the same names in it are replaced.
        pad_token_id: the one that the head is read with: see `score_positions`.
        base_name: hub id or path of the base, for those who load the folder elsewhere.

    Returns:
        The folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {"role": role}
    head = base.head(role) if role in HEAD_ROLES and role in base.heads else None
    _save_bound(base, role, folder)
    if head is not None:
        reads = "every response token" if role == "value" else "the last token that is not pad_token_id"
        about |= {"num_labels": head.out_features, "pad_token_id": pad_token_id, "head_reads": reads}
    if role == "value" and base.value_model is not None:
        base.value_model.save(folder, base_name=base_name)
    elif head is not None and role == "value" and base.shares_value:
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
        save_file(state, folder / SHARED_HEAD_FILE)
    else:
        config = copy.deepcopy(base.adapter_config(role))
        config.inference_mode = True
        config.base_model_name_or_path = base_name
        config.task_type = "CAUSAL_LM" if head is None else "SEQ_CLS"
        config.modules_to_save = None if head is None else ["score"]
        config.save_pretrained(folder)
        # "auto" would ask the hub whether the vocabulary grew; it cannot, the base is frozen.
        state = get_peft_model_state_dict(base.model, adapter_name=role, save_embedding_layers=False)
        if head is not None:
            state |= {f"{_HEAD_PREFIX}{name}": tensor for name, tensor in head.state_dict().items()}
        state = {key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}
        save_file(state, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
    (folder / ROLE_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return folder


def role_digest(base: SharedBase, role: str) -> str:
    """SHA-256 of a role's own weights, adapter and head: equal for equal weights."""
    found = hashlib.sha256()
    for parameter in base.parameters_of(role):
        found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def base_digest(base: SharedBase) -> str:
    """SHA-256 of the first numbers of each tensor of the base that is not quantised: tells bases apart, in no time.

    Quantised ones are left out, since two devices may round differently.
    """
    found = hashlib.sha256()
    for name, parameter in base.causal_lm.named_parameters():
        if parameter.is_floating_point() and ".lora_" not in name:
            some = parameter.detach().flatten()[:_DIGESTED].cpu().contiguous()
            found.update(some.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _read(folder: Path, name: str, base: SharedBase) -> dict[str, torch.Tensor]:
    """Tensors by name; for a base on the meta device only their names and shapes, from the file's header."""
    if not (folder / name).is_file():
        if (folder / WEIGHTS_NAME).is_file():
            raise AdapterError(
                f"{folder}: the weights are a pickle ({WEIGHTS_NAME}), which is never opened here since it can run "
                "code. Save the adapter again with safetensors (PEFT's default)."
            )
        raise AdapterError(f"{folder}: {name} is missing, so there is no adapter to load.")
    try:
        if base.device.type == "meta":
            with safe_open(folder / name, framework="pt") as file:
                names = list(file.keys())
                return {key: torch.empty(file.get_slice(key).get_shape(), device="meta") for key in names}
        return load_file(folder / name)
    except SafetensorError as error:
        raise AdapterError(f"{folder / name} is damaged ({error}). Train or copy it again.") from error


def read_about(folder: str | Path) -> dict[str, Any]:
    """What `role.json` says; empty for a folder that another tool wrote."""
    path = Path(folder) / ROLE_FILE
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise AdapterError(f"{path} is not valid JSON ({error}). Delete it or train the role again.") from error


def _adapter_config(folder: Path) -> LoraConfig:
    if not (folder / CONFIG_NAME).is_file():
        raise AdapterError(f"{folder}: {CONFIG_NAME} is missing, so this is not a PEFT adapter folder.")
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError) as error:
        raise AdapterError(f"{folder / CONFIG_NAME} cannot be read: {error}") from error
    if not isinstance(config, LoraConfig):
        raise AdapterError(f"{folder}: the adapter is of type {config.peft_type}; the roles here are LoRA adapters.")
    extra = set(config.modules_to_save or []) - {"score", "classifier"}
    if extra:
        raise AdapterError(
            f"{folder}: the adapter replaces {', '.join(sorted(extra))} of the base (modules_to_save), "
            "which the other roles share. Train it without."
        )
    config.modules_to_save, config.task_type, config.inference_mode = None, "CAUSAL_LM", False
    config.base_model_name_or_path = None  # where it was trained; the weights' names and shapes are checked instead
    return config


def load_role(base: SharedBase, role: str, folder: str | Path) -> dict[str, Any]:
    """Add a role from a PEFT folder: ours, plain PEFT's, or that of `trl.RewardTrainer`.

    Args:
        base: does not carry the role yet. On the meta device everything is checked, and no weights are read.
        role: the name to give it.
        folder: local folder with safetensors weights.

    Returns:
        What `role.json` says, or {} where there is none.

    Raises:
        AdapterError: a file is missing or damaged, the adapter belongs to another base, or a value or
            reward role has no head (a random one would give random scores).
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise AdapterError(f'role "{role}": there is no folder {folder}. Name a PEFT adapter folder.')
    about = read_about(folder)
    if (folder / SHARED_HEAD_FILE).is_file():
        if role != "value":
            raise AdapterError(f'{folder} holds a value head on the policy\'s adapter; it cannot be the role "{role}".')
        shared = _read(folder, SHARED_HEAD_FILE, base)
        base.add_role("value", None, num_labels=shared["weight"].shape[0], head_bias="bias" in shared)
    else:
        config, state = _adapter_config(folder), _read(folder, SAFETENSORS_WEIGHTS_NAME, base)
        _, head = _split_head(state, role, folder)
        missing = missing_modules(base, config)
        if missing:
            raise AdapterError(
                f"{folder}: the adapter belongs to another base: this one has no module {missing[0]} for it. "
                "Check base.model."
            )
        labels = None if head is None else head["weight"].shape[0]
        bound = QBound.load(folder) if role in Q_ROLES and (folder / Q_BOUND_FILE).is_file() else None
        base.add_role(role, config, num_labels=labels, head_bias=head is not None and "bias" in head, head=bound)
    try:
        load_weights(base, role, folder)
    except BaseException:
        base.remove_role(role)  # it would be there with random weights
        raise
    return about


def load_weights(base: SharedBase, role: str, folder: str | Path) -> None:
    """Put the weights of a saved role into that role, which the base carries already.

    Raises:
        AdapterError: as for `load_role`.
    """
    folder = Path(folder)
    if role == "value" and base.value_model is not None:
        name = SAFETENSORS_WEIGHTS_NAME if base.value_model.lora is not None else SAFE_WEIGHTS_NAME
        base.value_model.load(_read(folder, name, base), folder)
        return
    if role == "value" and base.shares_value:
        _set_head(base, role, _read(folder, SHARED_HEAD_FILE, base), folder)
        return
    adapter, head = _split_head(_read(folder, SAFETENSORS_WEIGHTS_NAME, base), role, folder)
    expected = set(get_peft_model_state_dict(base.model, adapter_name=role, save_embedding_layers=False))
    if set(adapter) != expected:
        wrong = sorted(set(adapter) ^ expected)
        raise AdapterError(
            f"{folder}: the adapter belongs to another base: {len(wrong)} of its weights do not fit this one, "
            f"{wrong[0]} first. Check base.model."
        )
    try:
        set_peft_model_state_dict(base.model, adapter, adapter_name=role)
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise AdapterError(
            f"{folder}: the adapter belongs to another base: {lines[min(1, len(lines) - 1)].strip()} Check base.model."
        ) from error
    if head is not None:
        _set_head(base, role, head, folder)
    if role in Q_ROLES:
        _load_bound(base, role, folder)


def _save_bound(base: SharedBase, role: str, folder: Path) -> None:
    """What bounds a Q role's values; a file of an earlier one does not stay beside an adapter without."""
    if role in Q_ROLES:
        (folder / Q_BOUND_FILE).unlink(missing_ok=True)
        bound = base.heads[role] if role in base.heads else None  # noqa: SIM401  (a ModuleDict has no get)
        if isinstance(bound, QBound):
            bound.save(folder)


def _load_bound(base: SharedBase, role: str, folder: Path) -> None:
    ours, theirs = role in base.heads, (folder / Q_BOUND_FILE).is_file()
    if ours != theirs:
        kinds = {True: "between bounds", False: "without bounds"}
        raise AdapterError(
            f"{folder}: its Q-values are {kinds[theirs]}, and those of this role {kinds[ours]}: set q.bound."
        )
    if ours:
        base.heads[role].load_state_dict(QBound.load(folder).state_dict())


def _split_head(
    state: dict[str, torch.Tensor], role: str, folder: Path
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor] | None]:
    """The adapter's tensors, and the head's by their own names; None for a role without a head."""
    heads = {key: tensor for key, tensor in state.items() if ".score." in key}
    adapter = {key: tensor for key, tensor in state.items() if key not in heads}
    if role not in HEAD_ROLES:
        return adapter, None
    named = {key.rpartition(".")[2]: tensor for key, tensor in heads.items()}
    if "weight" not in named or len(named) != len(heads):
        raise AdapterError(
            f'{folder}: role "{role}" needs one score head and the adapter holds {len(heads)}; a random head would '
            "give random scores. Train the role with toolkit or trl.RewardTrainer, or save it with "
            'modules_to_save=["score"].'
        )
    return adapter, named


def _set_head(base: SharedBase, role: str, state: dict[str, torch.Tensor], folder: Path) -> None:
    head, weight = base.head(role), state["weight"]
    if head.weight.shape != weight.shape:
        raise AdapterError(
            f"{folder}: the head reads {weight.shape[1]} numbers a token and this base has {head.weight.shape[1]}; "
            "it belongs to another base. Check base.model."
        )
    if state.keys() != head.state_dict().keys():
        raise AdapterError(
            f"{folder}: the head has {' and '.join(sorted(state))}, and the role {' and '.join(head.state_dict())}. "
            "Check value_head.bias."
        )
    head.load_state_dict(state)
