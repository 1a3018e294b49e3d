"""Weights in PEFT folders and whole checkpoints: read from safetensors alone, and put only where all of them fit."""

import copy
from pathlib import Path
from typing import Any, TypeAlias

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from toolkit.errors import AdapterError
from toolkit.models.pretrained import outline_of

MERGED_INSTEAD = "merge it into its base, and name that as base.model"
"""What else can be done with an adapter that changes the base for all roles."""

State: TypeAlias = dict[str, Tensor]


def read_tensors(folder: Path, name: str = SAFETENSORS_WEIGHTS_NAME, *, device: torch.device | None = None) -> State:
    """Tensors by name, on the CPU, and finite; for the meta device only names and shapes, from the file's header."""
    if not (folder / name).is_file():
        if (folder / WEIGHTS_NAME).is_file():
            wrong = f"{folder}: the weights are a pickle ({WEIGHTS_NAME}), which is never opened here since it can run "
            wrong += "code."
            raise AdapterError(wrong, remedy="Save the adapter again with safetensors (PEFT's default).")
        raise AdapterError(f"{folder}: {name} is missing, so there is nothing to load.")
    try:
        (folder / name).open("rb").close()  # which says why not, where safetensors has no such file
    except OSError as error:
        wrong = f"{folder / name} cannot be read ({error.strerror})."
        raise AdapterError(wrong, remedy="Check its permissions.") from error
    try:
        if device is not None and device.type == "meta":
            return outline_of(folder / name)
        state = load_file(folder / name)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{folder / name} is damaged ({error}).", remedy="Train or copy it again.") from error
    small = {key: tensor.dtype for key, tensor in state.items() if tensor.is_floating_point() and tensor.itemsize == 1}
    if name == SAFETENSORS_WEIGHTS_NAME:  # of an adapter all is trained
        small |= {key: tensor.dtype for key, tensor in state.items() if not tensor.is_floating_point()}
    if small:
        key, dtype = next(iter(small.items()))
        wrong = f"{folder / name}: {key} is {str(dtype).removeprefix('torch.')}, and at least 16-bit floats are needed."
        raise AdapterError(wrong, remedy="Convert it, or train it again.")
    if odd := [key for key, tensor in state.items() if not tensor.isfinite().all()]:
        remedy = "Train it again, or copy an older one."
        raise AdapterError(f"{folder / name}: {odd[0]} is not finite.", remedy=remedy)
    return state


def adapter_state(model: PeftModel, adapter: str) -> State:
    """What PEFT saves of an adapter."""
    # "auto" would ask the hub whether the vocabulary grew; it cannot, the base is frozen.
    return get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)


def put_adapter(model: PeftModel, adapter: str, state: State, folder: Path) -> None:
    """Put an adapter's tensors, which were read from `folder`, into it."""
    own = adapter_state(model, adapter)
    state = _without_embeddings_of_the_base(model, own, state, folder)
    check_fits(state, own, folder)
    with torch.no_grad():  # PEFT's own renames keys of some models for a second time, and then leaves them out
        for name, mine in own.items():
            mine.copy_(state[name])


def _without_embeddings_of_the_base(model: PeftModel, own: State, state: State, folder: Path) -> State:
    """An adapter's tensors without the base's own embeddings or `lm_head`, which PEFT saves beside an adapter on them,
    and where it is asked to (`save_embedding_layers`).

    Raises: AdapterError: they are others than the base's.
    """
    of_base = dict(model.named_parameters(remove_duplicate=False))  # lm_head may be tied
    kept = {}
    for name, tensor in state.items():
        theirs, copied = of_base.get(name) if name not in own else None, ".base_layer." in name
        if theirs is None or (copied and theirs.shape != tensor.shape):
            kept[name] = tensor
        elif theirs.shape != tensor.shape or (
            theirs.device.type != "meta" and not torch.equal(theirs, tensor.to(theirs))
        ):
            layer = name.rpartition(".base_layer." if copied else ".")[0]
            wrong = f"{folder} brings {layer} of its own, which all roles would share."
            raise AdapterError(wrong, remedy=f"Train it without, or on this base; or {MERGED_INSTEAD}.")
    return kept


def load_whole(model: PreTrainedModel, folder: Path) -> None:
    """Put the weights of a whole checkpoint into a model of the same form."""
    state, own = read_tensors(folder, SAFE_WEIGHTS_NAME, device=model.device), model.state_dict()
    if state.keys() != own.keys():
        state = _as_transformers_reads(model, folder) or state
    check_fits(state, own, folder)
    model.load_state_dict(state)


def _as_transformers_reads(model: PreTrainedModel, folder: Path) -> State | None:
    """The weights of a checkpoint by the names that the model has for them: the file has the fused experts of a mixture
    one by one, and tied weights once. None where they are not this model's."""
    given: dict[str, Any] = {"config": copy.deepcopy(model.config), "dtype": model.dtype, "use_safetensors": True}
    given["device_map"] = "meta" if model.device.type == "meta" else None
    try:
        loaded, about = type(model).from_pretrained(folder, output_loading_info=True, **given)
    except (OSError, RuntimeError, ValueError):
        return None
    return None if any(about.values()) else loaded.state_dict()


def check_fits(state: State, expected: State, folder: Path) -> None:
    """Nothing, if there are all the tensors that are expected, and no others, of the same shapes; else an
    `AdapterError`."""
    ours, theirs = ({(name, tensor.shape) for name, tensor in of.items()} for of in (expected, state))
    if wrong := sorted({name for name, _ in ours ^ theirs}):
        first = " and ".join(
            f"{list(of[wrong[0]].shape) if wrong[0] in of else 'missing'} {where}"
            for of, where in ((state, "there"), (expected, "here"))
        )
        raise other_base(folder, f"{len(wrong)} of the weights do not fit, {wrong[0]} first: it is {first}.")


def other_base(folder: Path, reason: str) -> AdapterError:
    """What to raise where a folder's weights do not fit."""
    remedy = "Name the base that it was trained on, with the adapter's own settings."
    return AdapterError(f"{folder} belongs to another base: {reason}", remedy=remedy)
