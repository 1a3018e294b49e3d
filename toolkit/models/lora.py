"""LoRA adapters on a model: what may be put there, and what is used of PEFT beyond its public interface.

That is the last part, as read in PEFT 0.21.2, by which `pyproject.toml` bounds PEFT. `tests/models/test_lora.py` fails
where another version has moved one of these; then `BaseTunerLayer.set_adapter`, `enable_adapters` and
`ModulesToSaveWrapper` are to be read again.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, PeftModel, functional, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils import ModulesToSaveWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toolkit.errors import AdapterError, did_you_mean
from toolkit.phases import tell
from toolkit.time_limit import time_limit

# The others (PiSSA, OLoRA, CorDA, LoftQ) subtract from the base's weights, or replace them; EVA looks at data first.
_INITS_OF_THE_ADAPTER_ALONE = (True, False, "gaussian", "orthogonal")

_NOT_BY_ROLE = {
    "layer_replication": "layers of the base would be replicated for all roles, the reference among them.",
    "alora_invocation_tokens": "an aLoRA adapter acts in PEFT's own forward pass alone, and would do nothing here.",
    "ensure_weight_tying": "PEFT ties the adapters of embeddings and lm_head in the first adapter of a base alone.",
    "kasa_config": "KaSA cuts off the smallest singular values of the base's weights, which is to stay as it is.",
    "monteclora_config": "MonteCLoRA has a loss and a noise of its own, which nothing here adds, and none on 4 bits.",
    "velora_config": "VeLoRA projects the gradient on the mean input of a pass, and so differs with micro-batches.",
    "use_bdlora": "PEFT has no BD-LoRA on a base in 4 bits, and would take plain LoRA without a word.",
}


def add_adapter(model: PreTrainedModel | PeftModel, config: LoraConfig, *, name: str) -> PeftModel:
    """The model with one more adapter; an `AdapterError` if that does not fit, or changes weights that others share."""
    with fitting(model, config):
        if isinstance(model, PeftModel):
            model.add_adapter(name, config)
            return model
        return get_peft_model(model, config, adapter_name=name)


@contextmanager
def fitting(model: nn.Module, config: LoraConfig) -> Iterator[None]:
    """Inside, PEFT puts an adapter on a model; an `AdapterError` where that does not fit, or not as it is meant."""
    check_trains_adapter_alone(config)
    if config.init_lora_weights == "orthogonal" and any(isinstance(one, Linear4bit) for one in model.modules()):
        wrong = "PEFT makes orthogonal factors in the dtype of the base's weights, which in 4 bits is a whole number."
        raise AdapterError(wrong, field="init_lora_weights", remedy="Take gaussian, or leave it out.")
    _check_patterns(model, config)
    _check_layers(model, config)
    if missing := missing_modules(model, config):  # PEFT passes over those in silence as long as one of them is there
        raise AdapterError(" ".join(_no_module(model, target) for target in missing), field="target_modules")
    _check_no_names_as_text(model, config)
    linear, meant = _linear_layers(model), deepcopy(config)
    _check_not_widened(model, linear, config)
    experts = [name.replace(".base_layer", "") for name, p in model.named_parameters() if p.dim() == 3]
    with warnings.catch_warnings(), peft_errors():
        # PEFT notes for each Conv1D that it sets fan_in_fan_out itself, and that a second adapter is added.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        # Patterns without effect. PEFT writes some itself, for fused experts, and does not look for them there.
        warnings.filterwarnings("ignore", message=".*did not match any")
        for pattern in {*(config.rank_pattern or ()), *(config.alpha_pattern or ())}:
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in experts):
                warnings.filterwarnings("error", message=f".*did not match any.*{re.escape(repr(pattern))}")
        warnings.filterwarnings("error", message=".*no modules were excluded")
        named = bool(config.target_parameters)
        warnings.filterwarnings("error" if named else "ignore", message=".*no parameter was matched")
        yield
    if set(config.target_parameters or ()) != set(meant.target_parameters or ()):
        _tell_of_layers_beside_experts(model, linear, meant, config)


def _check_no_names_as_text(model: nn.Module, config: LoraConfig) -> None:
    """Names of modules as text are a pattern for whole names to PEFT, which says that the base has no such modules."""
    text = config.target_modules
    if not isinstance(text, str) or text.lower() == "all-linear" or re.search(r"[^\w\s,-]", text):
        return
    names = [name for name, _ in under_adapter(model).named_modules()]
    if text in names:  # as lm_head
        return
    parts = {part for name in names for part in name.split(".")}
    words = [word for word in re.split(r"[\s,]+", text) if word]
    remedy = f"Write a list: [{', '.join(words)}]." if parts.issuperset(words) else "Name modules in a list."
    if text.startswith("all"):
        remedy = "Did you mean all-linear?"
    wrong = f'"{text}" is taken as a pattern for the whole name of a module, and the base has none that is such.'
    raise AdapterError(wrong, field="target_modules", remedy=remedy)


def _check_layers(model: nn.Module, config: LoraConfig) -> None:
    """PEFT passes over layers that are not there as long as one of them is."""
    asked, of_base = config.layers_to_transform, under_adapter(model).config.get_text_config()
    number = getattr(of_base, "num_hidden_layers", math.inf)
    odd = [one for one in ([asked] if isinstance(asked, int) else asked or ()) if not 0 <= one < number]
    if odd:
        wrong = f"the base has layers 0 to {number - 1}, and none {', '.join(map(str, odd))}."
        raise AdapterError(wrong, field="layers_to_transform", remedy="Layers are counted from 0.")


def _check_not_widened(model: nn.Module, linear: list[str], config: LoraConfig) -> None:
    """On some mixtures PEFT takes but the last parts of the names that a pattern finds, and so those of all layers; and
    it puts adapters on the experts of all layers or none."""
    put = deepcopy(config)
    with peft_errors():
        convert_peft_config_for_transformers(put, under_adapter(model), None)
    experts = sorted(set(put.target_parameters or ()) - set(config.target_parameters or ()))
    pattern = isinstance(config.target_modules, str) and config.target_modules != "all-linear"
    if experts and (pattern or config.layers_to_transform is not None):
        wrong = f"PEFT would put this adapter on the {' and '.join(experts)} of the experts of all layers, whatever "
        wrong += "a pattern or layers_to_transform says."
        raise AdapterError(wrong, field="target_modules", remedy="List names without those of experts, or for all.")
    if not pattern:
        return
    more = [x for x in linear if check_target_module_exists(put, x) and not check_target_module_exists(config, x)]
    if more:
        wrong = f"PEFT would put this adapter on {more[0]}, too, which {config.target_modules!r} does not match."
        raise AdapterError(wrong, field="target_modules", remedy="List names, and limit them by layers_to_transform.")


def under_adapter(model: nn.Module) -> Any:
    """The model itself, or the one on which PEFT's stands."""
    return model.base_model.model if isinstance(model, PeftModel) else model


def _linear_layers(model: nn.Module) -> list[str]:
    """The names of those that "all-linear" means."""
    inner = under_adapter(model)
    heads = [getattr(one, "base_layer", one) for one in (inner.get_output_embeddings(), getattr(inner, "score", None))]
    layers = (name for name, module in inner.named_modules() if isinstance(module, nn.Linear) and module not in heads)
    return [name.removesuffix(".base_layer") for name in layers if ".lora_" not in name]


def _tell_of_layers_beside_experts(model: nn.Module, linear: list[str], meant: LoraConfig, put: LoraConfig) -> None:
    """PEFT takes the names that a mixture's experts have in its files for those alone, and moves them to the tensors in
    which the experts stand: layers beside them that have the same names, of a shared expert, get no adapter."""
    others = (one for one in getattr(model, "peft_config", {}).values() if one is not put)
    alike = any(one.target_modules == put.target_modules for one in others)  # of which it was told
    if alike or next(model.parameters()).is_meta:
        return
    if meant.target_modules == "all-linear":
        meant.target_modules = set(linear)
    weights = tuple(f".{name}" for name in put.target_parameters or ())
    left = [name for name in linear if check_target_module_exists(meant, name)]
    left = [x for x in left if not check_target_module_exists(put, x) and not f".{x}.weight".endswith(weights)]
    if left:
        names = ", ".join(sorted({".".join(name.split(".")[-2:]) + ".weight" for name in left}))
        way = f"To have some there, give every role's target_parameters: [{names}]."
        if any(isinstance(module, Linear4bit) for module in model.modules()):
            way = "In 4 bits it cannot put adapters of more than one role there."
        more = f" and {len(left) - 1} others" * (len(left) > 1)
        tell(f"PEFT puts no adapter on {left[0]}{more}, linear layers named like the experts beside them. {way}")


def _as_pefts(field: str, pattern: str) -> Callable[[str], Any]:
    """How PEFT searches a name for a pattern of a field."""
    if field in ("target_modules", "exclude_modules"):
        return partial(re.fullmatch, pattern)
    of_layers = field == "layers_pattern"
    return partial(re.match, rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." if of_layers else rf"(.*\.)?({pattern})$")


def _check_patterns(model: nn.Module, config: LoraConfig) -> None:
    """That patterns end: Python's may try more ways through a name than there is time for."""
    fields = {name: getattr(config, name) for name in ("target_modules", "exclude_modules", "layers_pattern")}
    fields |= {name: list(getattr(config, name) or ()) for name in ("rank_pattern", "alpha_pattern")}
    names = [name for name, _ in under_adapter(model).named_modules()]
    for field, given in fields.items():
        for pattern in [given] if isinstance(given, str) else given if isinstance(given, list) else []:
            search = _as_pefts(field, pattern)
            try:
                with time_limit():
                    for name in names:
                        search(name)
            except re.error as error:
                wrong = f"{pattern!r} is no pattern of module names: {error}."
                raise AdapterError(wrong, field=field) from error
            except (TimeoutError, MemoryError, OverflowError) as error:
                wrong = f"the pattern {pattern!r} takes too long on the names of the base's modules."
                remedy = "Write it without nested repetitions."
                raise AdapterError(wrong, field=field, remedy=remedy) from error


def adapter_dropouts(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The adapters' own dropout, where they have one, in adapted layers among these modules."""
    adapted = (layer for layer in layers if isinstance(layer, LoraLayer))
    return [one for layer in adapted for one in layer.lora_dropout.values() if isinstance(one, nn.Dropout)]


def check_trains_adapter_alone(config: LoraConfig) -> None:
    """Nothing, if an adapter is but its own weights beside the base as it is; else an `AdapterError` with the field."""
    given = ["bias"] if config.bias != "none" else []
    given += [name for name in ("modules_to_save", "trainable_token_indices") if getattr(config, name)]
    if given:
        wrong = f"{' and '.join(given)} would change weights of the base, which is to stay as it is."
        raise AdapterError(wrong, field=given[0], remedy="Leave it out.")
    if config.init_lora_weights not in _INITS_OF_THE_ADAPTER_ALONE:
        wrong = f'"{config.init_lora_weights}" starts by changing weights of the base, which is to stay as it is.'
        if config.init_lora_weights == "eva":
            wrong = '"eva" starts from activations that PEFT collects in a pass of its own, which is not made here.'
        if config.init_lora_weights == "mica":
            wrong = '"mica" trains the factor A alone, and a role trains both.'
        raise AdapterError(wrong, field="init_lora_weights", remedy="Leave it out, or take gaussian.")
    for field, wrong in _NOT_BY_ROLE.items():
        if getattr(config, field):
            raise AdapterError(wrong, field=field, remedy="Leave it out.")


@contextmanager
def peft_errors() -> Iterator[None]:
    """What PEFT refuses of a configuration as an `AdapterError`."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, re.error, UserWarning, RuntimeWarning) as error:
        raise AdapterError(str(error).partition("\n")[0] or type(error).__name__) from error


def missing_modules(model: nn.Module, config: LoraConfig) -> list[str]:
    """Modules that an adapter names and the model does not have.

    Raises:
        AdapterError: of projections that a mixture keeps in one tensor it names some alone.
    """
    if not isinstance(config.target_modules, (list, set)):
        return []  # a pattern, which PEFT resolves itself
    meant = deepcopy(config)
    with peft_errors():  # names that a mixture's experts have in its files are those of tensors to PEFT
        convert_peft_config_for_transformers(meant, model, None)
    present = [name.replace(".base_layer", "") for name, _ in model.named_modules()]
    return sorted(x for x in meant.target_modules if not any(f".{name}".endswith(f".{x}") for name in present))


def _no_module(model: nn.Module, target: str) -> str:
    layers = (nn.Linear, nn.Embedding, nn.Conv1d, Conv1D)  # that an adapter can be on
    names = [name for name, module in model.named_modules() if isinstance(module, layers)]
    own = [name.removesuffix(".base_layer") for name in names if ".lora_" not in name]  # not those of other roles
    known = sorted({name.rpartition(".")[2] for name in own})
    hint = did_you_mean(target, known) or (f"Known: {', '.join(known)}." if len(known) <= 15 else "")
    return f'the base has no module "{target}". {hint}'.rstrip()


# ---------------------------------------------------------------------- not public in PEFT


def adapted_layers(model: nn.Module) -> tuple[BaseTunerLayer, ...]:
    return tuple(module for module in model.modules() if isinstance(module, BaseTunerLayer))


def activate(model: PeftModel, layers: Sequence[BaseTunerLayer], adapter: str | None) -> None:
    """Make one adapter the active one; None switches all of them off.

    What `set_adapter` and `disable_adapter_layers` come to, which take a hundred times as long and change what trains.
    """
    for layer in layers:
        layer._disable_adapters = adapter is None
        if adapter is not None:
            layer._active_adapter = [adapter]
    if adapter is not None:
        model.active_adapter = model.base_model.active_adapter = adapter


def adapter_parameters(model: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """The parameters of one adapter, by names without the adapter's."""
    # On an embedding PEFT keeps the tensors themselves by adapter, on other layers modules that hold them.
    own = re.compile(rf"(\.lora_\w+)\.{adapter}(?=\.|$)")
    return {own.sub(r"\1", name): p for name, p in model.named_parameters() if own.search(name)}


def delete_adapter(model: nn.Module, adapter: str) -> None:
    """Take an adapter away, or what PEFT has put on some layers of one that it then refused. PEFT activates another in
    its place if it was active."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Adapter .* was active which is now deleted")
        active = functional.delete_adapter(model, adapter, "lora_")
    if isinstance(model, PeftModel):
        model.peft_config.pop(adapter, None)
        model.base_model.active_adapter = active or []


def trained_copy(module: nn.Module) -> nn.Module:
    """What trains of a module that `modules_to_save` has wrapped; any other module itself."""
    return module.modules_to_save["default"] if isinstance(module, ModulesToSaveWrapper) else module
