"""Where a role can come from. Each source places itself on a base, real or on the meta device.

A `Fresh` role has new weights, a `Saved` one those of a folder that the recipe names, a `Trained` one those of an
earlier stage. A value role can also be a `CopyOf` the reward role, be `SharedWith` the policy (a head on its adapter)
or stand on an `OwnBase`, and the reference can be the `BaseItself`. `toolkit.spec.resolve` decides which.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit.disk import read_object
from toolkit.errors import AdapterError, RecipeError
from toolkit.models import (
    ROLE_FILE,
    ModelSpec,
    Precision,
    QBound,
    SharedBase,
    add_lora,
    add_q_roles,
    has_head,
    head_in_float32,
    load_classifier_weights,
    load_model,
    load_role,
    load_value_model,
    load_weights,
)
from toolkit.spec.sections import ModelSection, precision_of

Values = dict[str, Any]


@dataclass(frozen=True)
class Site:
    """What a source needs to place itself, besides the base.

    Args:
        tokenizer: of the base; None where it cannot be had, which a base of its own cannot do without.
        outputs_of: the folder in which a stage has left its outputs; None where it has not run yet.
    """

    tokenizer: PreTrainedTokenizerBase | None
    outputs_of: Callable[[str], Path | None]


class Placed(NamedTuple):
    """A role that stands on the base: where it starts, in words, and what `role.json` says of it."""

    start: str
    about: dict[str, Any] = {}


def lora_config(values: Values) -> LoraConfig:
    """A section of `adapters` as PEFT's object."""
    return LoraConfig(**{"task_type": "CAUSAL_LM", **values})


def _trained_as(folder: Path, role: str) -> str:
    """The base that an adapter names as its own, of which one of the same shape would be taken without a word; and that
    a role without a head has one of a classifier."""
    config = read_object(folder / "adapter_config.json") or {}
    base, of_classes = config.get("base_model_name_or_path"), config.get("task_type") == "SEQ_CLS"
    head = " as a classifier, whose head is left out" if of_classes and not has_head(role) else ""
    return f", trained{f' on {base}' if base else ''}{head}" if base or head else ""


@dataclass(frozen=True)
class Source:
    """Where one role comes from.

    Args:
        role: its name.
        key: of the recipe, whose problems those of placing it are.
        stage: the one that has to run first; None for none.
    """

    role: str
    key: str
    stage: str | None = field(default=None, kw_only=True)

    stands_on: ClassVar[str | None] = None
    """Another role, without which this one cannot be placed."""

    def as_of(self, site: Site) -> "Source":
        """This source, or what stands in its place as long as its stage has not run."""
        return self

    def place(self, roles: SharedBase, site: Site) -> Placed:
        """Put the role on a base; on the meta device names and shapes alone.

        Raises:
            AdapterError: a saved adapter does not fit, or the configuration of a new one.
            ModelError: a base of its own cannot be had.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Fresh(Source):
    """A new adapter, and a new head where the role has one."""

    lora: Values = field(default_factory=dict)
    head: Values = field(default_factory=dict)  # arguments of `SharedBase.add_role`

    def place(self, roles: SharedBase, site: Site) -> Placed:
        roles.add_role(self.role, lora_config(self.lora), **self.head)
        return Placed("fresh")


@dataclass(frozen=True)
class FreshQ(Fresh):
    """A new adapter whose logits are Q-values, and its moving average."""

    bound: Values | None = None  # arguments of `QBound`

    def place(self, roles: SharedBase, site: Site) -> Placed:
        add_q_roles(roles, lora_config(self.lora), bound=None if self.bound is None else QBound(**self.bound))
        return Placed("fresh")


@dataclass(frozen=True)
class BaseItself(Source):
    """No adapter: the base with all of them off."""

    def place(self, roles: SharedBase, site: Site) -> Placed:
        roles.add_role(self.role)
        return Placed("the base itself")


def _check_shares(roles: SharedBase, folder: str, *, shared: bool) -> None:
    """Raises: AdapterError: a value role that came from a folder is not of the form that ppo.value asks for."""
    if roles.shares_value == shared:
        return
    roles.remove_role("value")
    has = "an adapter of its own" if shared else "no adapter, but is a head on the policy's"
    asked, other = ("shared", "separate") if shared else ("separate", "shared")
    wrong = f"{folder}: its value role has {has}, and ppo.value is {asked}."
    raise AdapterError(wrong, remedy=f"Set ppo.value={other}.")


@dataclass(frozen=True)
class Saved(Source):
    """A PEFT folder that the recipe names."""

    folder: str = ""

    def place(self, roles: SharedBase, site: Site) -> Placed:
        about = load_role(roles, self.role, self.folder)
        if self.role == "value":
            _check_shares(roles, self.folder, shared=False)
        return Placed(f"from {self.folder}{_trained_as(Path(self.folder).expanduser(), self.role)}", about)


@dataclass(frozen=True)
class Trained(Source):
    """What an earlier stage leaves; before it has run, what it begins with."""

    begins: Fresh  # of the role as the stage calls it
    stage: str = field(kw_only=True)

    def as_of(self, site: Site) -> Source:
        return self if site.outputs_of(self.stage) is not None else replace(self.begins, role=self.role)

    def place(self, roles: SharedBase, site: Site) -> Placed:
        outputs = site.outputs_of(self.stage)
        assert outputs is not None, f"the {self.stage} stage has not run"
        folder = outputs / self.begins.role
        return Placed(f"from {folder}", load_role(roles, self.role, folder))


@dataclass(frozen=True)
class CopyOf(Source):
    """A new adapter and head with the weights of the reward role on the same base."""

    lora: Values | None = None  # None for the reward role's configuration

    stands_on = "reward"

    def place(self, roles: SharedBase, site: Site) -> Placed:
        roles.add_role(self.role, roles.adapter_config("reward") if self.lora is None else lora_config(self.lora))
        roles.copy_adapter("reward", self.role)
        return Placed("a copy of the reward role")


@dataclass(frozen=True)
class SharedWith(Source):
    """A head on the policy's adapter: one forward pass for both."""

    head: Values = field(default_factory=dict)  # of a new one
    start: str | None = None  # a folder with a saved one

    stands_on = "policy"

    def place(self, roles: SharedBase, site: Site) -> Placed:
        if self.start is None:
            roles.add_role(self.role, **self.head)
            return Placed("a head on the policy's adapter")
        load_role(roles, self.role, self.start)
        _check_shares(roles, self.start, shared=True)
        return Placed(f"a head on the policy's adapter, from {self.start}")


@dataclass(frozen=True)
class OwnBase(Source):
    """A base of its own, whole or under an adapter: the section `value_model`, or `reward_model` for a reward.

    A value role of `reward_model` starts as a copy of what the reward stage trains, which is then its `stage`.
    """

    section: str = ""
    model: Values = field(default_factory=dict)  # the section
    lora: Values | None = None  # None where all weights train
    adapted: bool = False  # whether a copied reward has the adapter, and not the value role
    head: Values = field(default_factory=dict)
    start: str | None = None  # a folder with a saved value role
    num_labels: int = 1

    @property
    def base(self) -> ModelSection:
        """The section, `auto` in it replaced by the dtype of this machine."""
        return ModelSection(**{**self.model, "dtype": self.precision.dtype})

    @property
    def precision(self) -> Precision:
        """Its dtype on this machine, and why."""
        return precision_of(self.model, whole=self.lora is None)

    def _trained_folder(self, site: Site) -> Path:
        """Where the reward stage has left its model; a RecipeError where it has not run."""
        outputs = site.outputs_of("reward")
        assert outputs is not None, "weights are asked of a plan"
        if not (outputs / "model").is_dir():
            wrong = f"{outputs / 'model'} is missing: the reward stage has to train the reward model first."
            raise RecipeError(wrong)
        return outputs / "model"

    def _lora(self) -> LoraConfig | None:
        return None if self.lora is None else lora_config(self.lora)

    def place(self, roles: SharedBase, site: Site) -> Placed:
        spec, start = self.base.model_spec(), None if self.start is None else Path(os.path.expanduser(self.start))
        head = self.head
        if start is not None:  # as it was trained, where the recipe says nothing of it
            head = {"head_bias": bool((read_object(start / ROLE_FILE) or {}).get("head_bias"))}
        copied = self.stage is not None
        if copied and roles.device.type != "meta":
            folder = self._trained_folder(site)
            # Under an adapter the base is the one that the adapter was trained on.
            spec, start = (spec, folder) if self.adapted else (replace(spec, model=str(folder), revision=None), None)
        if spec.model is None:  # the embeddings of a base may have more rows than its tokenizer has tokens
            spec = replace(spec, config={"vocab_size": roles.config.vocab_size, **(spec.config or {})})
        assert site.tokenizer is not None
        roles.place_value(load_value_model(spec, site.tokenizer, lora=self._lora(), device=roles.device, **head))
        if start is not None:
            load_weights(roles, self.role, start)
        if copied:
            return Placed("on a base of its own, a copy of the reward model")
        return Placed("on a base of its own" + (f", from {self.start}" if self.start else ""))

    def classifier(self, site: Site, *, device: torch.device | None = None) -> PreTrainedModel | PeftModel:
        """The sequence classifier as the reward stage begins to train it; on the meta device names and shapes alone.

        Raises:
            ModelError: it cannot be had, or its tokens are not the policy's.
        """
        spec, lora = self.base.model_spec(), self._lora()
        model = self._loaded(spec, site, device=device)
        if lora is None:
            return model
        with device or nullcontext():
            return add_lora(model, lora)

    def trained_classifier(self, site: Site) -> PreTrainedModel | PeftModel:
        """What the reward stage has trained; its head computes in float32.

        Raises:
            RecipeError: the stage has not run.
        """
        folder = self._trained_folder(site)
        if self.lora is not None:
            model = self.classifier(site)
            head_in_float32(model)  # before its weights come, which 16 bits would round
            load_classifier_weights(model, folder)
        else:
            spec = self.base.model_spec(model=str(folder), revision=None, quantization=None)
            model = self._loaded(spec, site, trained=True)
            head_in_float32(model)
        return model

    def _loaded(self, spec: ModelSpec, site: Site, **settings: Any) -> PreTrainedModel:
        settings |= {"tokenizer": site.tokenizer, "num_labels": self.num_labels}
        return load_model(spec, "sequence_classifier", **settings)
