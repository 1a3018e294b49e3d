"""One base model and the roles on it. Which role is active is switched here alone."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from toolkit.errors import AdapterError, ModelError
from toolkit.models.base_checks import check_adapter, check_checkpointing, rows_stay_packed
from toolkit.models.copies import (
    base_of,
    bytes_of,
    forwards,
    laid_out_forward,
    merged_forward,
    to_lay_out,
    to_merge,
    unpackable,
    unpacked_weights,
)
from toolkit.models.decoding import padding_takes_positions, positions_of
from toolkit.models.frozen_lm import FrozenLM
from toolkit.models.fused_lora import fuse
from toolkit.models.heads import HeadInit, ScoreHead
from toolkit.models.lora import (
    activate,
    adapted_layers,
    adapter_dropouts,
    adapter_parameters,
    add_adapter,
    delete_adapter,
)
from toolkit.models.trials import probe
from toolkit.models.value_model import ValueModel

ROLES = ("policy", "value", "reward", "judge", "reference", "q", "q_target")
_SCORING = re.compile(r"(reward|judge)(?:_[1-9]\d*)?")
Q_ROLES = ("q", "q_target")


def scores_for(role: str) -> str | None:
    """Whether a role scores for the "reward" or the "judge": that of this name, or one more, such as "reward_1"."""
    found = _SCORING.fullmatch(role)
    return found and found[1]


def has_head(role: str) -> bool:
    """Whether a role has a `ScoreHead`."""
    return role == "value" or scores_for(role) is not None


class SharedBase(FrozenLM):
    """A frozen causal language model that carries the roles policy, value, reward and reference, or those of Q.

    Each role has a LoRA adapter on the one base, but for a reference without an adapter (then it is the base itself), a
    value role that shares the policy's adapter, and one with a base of its own. Value and reward have a `ScoreHead`,
    and so has a judge, a second reward, which nothing is trained on. Further adapters by which either scores, too, are
    the roles "reward_1", "judge_1" and so on.

    Outside `role` no adapter is active. Inside it, exactly one role is:

        with base.role("policy"):
            hidden = base.hidden_states(input_ids, attention_mask)

    Call `backward` inside the role whose loss it is where you can: activations of one role are then freed before the
    next. With gradient checkpointing switched on *here*, layers are recomputed in the role of their forward pass.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, pack_rows: bool | None = None):
        super().__init__(causal_lm, pack_rows=pack_rows)
        named = (name.rpartition(".")[2] for name, _ in causal_lm.named_modules())
        if taken := next(filter(_is_role, named), None):
            wrong = f'a {type(causal_lm).__name__} has modules called "{taken}", as a role is: PEFT, which tells '
            raise ModelError(f"{wrong}adapters by such names, would leave weights out where it saves them.")
        self.heads = nn.ModuleDict()
        self.value_model: ValueModel | None = None  # where the value role has a base of its own
        self.active_role: str | None = None
        self.trained_roles: tuple[str, ...] = ()
        self._adapter_of: dict[str, str | None] = {}  # its own by its own name; None for the base with all of them off
        self._adapter_parameters: dict[str, dict[str, nn.Parameter]] = {}  # by role, then by name without the role's
        self._layers: tuple[BaseTunerLayer, ...] = ()
        self._active_adapter: str | None = None
        self._loses_rows = False  # of a line, in layers that are checkpointed

    # ------------------------------------------------------------------ roles

    def head(self, role: str) -> ScoreHead:
        """The head of a role that has one: see `has_head`."""
        head = dict(self.heads.named_children()).get(role)
        if not isinstance(head, ScoreHead):
            raise AdapterError(f'role "{role}" has no head on this base.')
        return head

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self._adapter_of)

    @property
    def shares_value(self) -> bool:
        """True where the value role is a head on the policy's adapter."""
        return self._adapter_of.get("value") == "policy"

    @property
    def packs_rows(self) -> bool:
        """Whether rows stand one after the other in a pass of the base, and of the value role's own.

        NEFTune's noise is the smaller the longer a line is.
        """
        noise = self.training and hasattr(self.causal_lm.get_input_embeddings(), "neftune_noise_alpha")
        if noise or self._loses_rows or not self.can_pack:
            return False
        return self.value_model is None or self.value_model.packs_rows

    @property
    def positions(self) -> tuple[int | None, str]:
        """The longest sequence that base and value model take, where a configuration says so; and which takes less."""
        own = None if self.value_model is None else positions_of(self.value_model.classifier.config)
        of_base = positions_of(self.config)
        if own is not None and (of_base is None or own < of_base):
            return own, "the value model"
        return of_base, "the base"

    @property
    def padding_takes_positions(self) -> bool:
        """Whether padding before a prompt counts towards the positions of the base."""
        return padding_takes_positions(self.causal_lm)

    def adapter_config(self, role: str) -> LoraConfig:
        """The LoRA configuration of a role's own adapter, or of the one that it shares."""
        adapter = self._adapter_of[self._known(role)]
        if role == "value" and self.value_model is not None:
            if self.value_model.lora is None:
                raise AdapterError('role "value" has no adapter: all weights of its own base are trained.')
            return self.value_model.lora
        if adapter is None:
            raise AdapterError(f'role "{role}" has no adapter of its own: it is the base with all adapters off.')
        return self.model.peft_config[adapter]

    def parameters_of(self, role: str) -> list[nn.Parameter]:
        """The role's own: of its adapter unless it shares one, or what trains of a base of its own; and of its head."""
        own = list(self._adapter_parameters.get(self._known(role), {}).values())
        if role == "value" and self.value_model is not None:
            own = self.value_model.body_parameters
        return own + (list(self.heads[role].parameters()) if role in self.heads else [])

    @property
    def trained_parameters(self) -> list[nn.Parameter]:
        """Those of all trained roles, a role after the other."""
        return [parameter for role in self.trained_roles for parameter in self.parameters_of(role)]

    def _known(self, role: str) -> str:
        if role not in self._adapter_of:
            carried = ", ".join(self._adapter_of) or "none"
            raise AdapterError(f'no role "{role}" on this base; it carries {carried}.')
        return role

    # ------------------------------------------------------------------ adding roles

    def add_role(
        self,
        role: str,
        config: LoraConfig | None = None,
        *,
        num_labels: int = 1,
        head_init: HeadInit = "normal",
        head_bias: bool = False,
        head: nn.Module | None = None,
        saved: bool = False,
    ) -> None:
        """Add a role with a fresh adapter, and a fresh `ScoreHead` where the role has one.

        Args:
            config: None gives the reference the base itself, and the value role the policy's adapter.
            head: what a Q role reads its logits with, whose parameters are the role's own; None for nothing.
            saved: whether the adapter is made for weights that are there, which may have had no gradient in places.

        Raises:
            AdapterError: an unknown or second role, or a configuration that would change the shared base.
        """
        if not _is_role(role):
            raise AdapterError(f'unknown role "{role}"; the roles are {", ".join(ROLES)}.')
        self._check_free(role)
        if role == "value" and num_labels != 1:
            raise AdapterError(f"a value is one number per token, and this head has {num_labels} outputs.")
        if config is not None:
            try:
                self.model = add_adapter(self.model, config, name=role)
            except BaseException:
                delete_adapter(self.model, role)  # PEFT may have come to some of the layers
                self._restore_role()  # its adapter is active there
                self.train_roles(*self.trained_roles)
                raise
            self._adapter_parameters[role] = adapter_parameters(self.model, role)
            self._adapter_of[role] = role
            self._restore_role()
        elif role in ("reference", "value"):
            self._adapter_of[role] = None if role == "reference" else self._adapter_of[self._known("policy")]
        else:
            raise AdapterError(f'role "{role}" needs an adapter.', remedy="Give it a LoRA configuration.")
        if has_head(role):
            head = ScoreHead(self.lm_head.in_features, num_labels, init=head_init, bias=head_bias)
        if head is not None:
            self.heads[role] = head.to(self.device)
        self.train_roles(*self.trained_roles)
        if config is not None:
            try:
                with self.in_eval_mode(), InRole(self, None):
                    if not self._states.is_meta:
                        self.fuse_layers()
                    check_adapter(self.causal_lm, self.hidden_states, self._states, self.role(role), to_train=not saved)
                if has_head(role) and role in getattr(self.lm_head, "scaling", ()):
                    wrong = f"the {role} role has a head of its own, so that an adapter on lm_head would do nothing."
                    raise AdapterError(wrong, field="target_modules", remedy="Leave that module out.")
            except BaseException:  # it would be there untried, and could not be added again
                self.remove_role(role)
                raise

    @torch.no_grad()
    def fuse_layers(self) -> None:
        """Let layers with one input be computed together: see `toolkit.models.fused_lora`. `add_role` does, but on the
        meta device."""
        with self.in_eval_mode(), InRole(self, None):
            self._fused = fuse(self._layers, lambda: self.hidden_states(*probe(self.causal_lm)))

    def remove_role(self, role: str) -> None:
        """Take a role away again, with its adapter and head; an `AdapterError` if it is in use."""
        adapter = self._adapter_of[self._known(role)]
        shared = [other for other, its in self._adapter_of.items() if its == role and other != role]
        if self.active_role == role or shared or (role == "value" and self.value_model is not None):
            raise AdapterError(f'role "{role}" cannot be taken away: it is in use.')
        if role in self.heads:
            del self.heads[role]
        del self._adapter_of[role]
        if adapter == role:
            delete_adapter(self.model, role)
            del self._adapter_parameters[role]
            self._restore_role()
        self.train_roles(*(set(self.trained_roles) - {role}))

    def place_value(self, model: ValueModel) -> None:
        """Give the value role a base of its own, in place of an adapter on this one."""
        self._check_free("value")
        if self.pack_rows and self.can_pack and not model.packs_rows:
            wrong = f"a {type(model.classifier).__name__} does not keep rows apart that stand one after the other, "
            raise ModelError(f"{wrong}as base.pack_rows has them.", remedy="Leave base.pack_rows out.")
        self.value_model, self._adapter_of["value"], self.heads["value"] = model, None, model.head
        self.train_roles(*self.trained_roles)

    def _check_free(self, role: str) -> None:
        if role in self._adapter_of:
            raise AdapterError(f'this base already carries the role "{role}".')

    def copy_adapter(self, source: str, target: str) -> None:
        """Copy the weights of one role's adapter, and of its head if both have one, to another role of its form."""
        heads = source in self.heads and target in self.heads
        ours, theirs = (self._own_tensors(role, head=heads) for role in (target, source))
        if self._form(target, ours) != self._form(source, theirs):
            raise AdapterError(
                f'role "{target}" cannot start as a copy of "{source}": their adapters or heads differ in modules, '
                "shape or scaling.",
                remedy=f"Give its adapter the rank, lora_alpha and target_modules of that of {source}.",
            )
        with torch.no_grad():
            for name, mine in ours.items():
                mine.copy_(theirs[name])

    def _own_tensors(self, role: str, *, head: bool) -> dict[str, nn.Parameter]:
        if self._known(role) not in self._adapter_parameters:
            raise AdapterError(f'role "{role}" has no adapter of its own that could be copied.')
        of_head = self.heads[role].named_parameters(prefix="head") if head and role in self.heads else ()
        return self._adapter_parameters[role] | dict(of_head)

    def _form(self, role: str, tensors: dict[str, nn.Parameter]) -> tuple[dict, dict]:
        """Names and shapes, and what each layer multiplies the product of its two factors with."""
        layers = ((name, module) for name, module in self.model.named_modules() if isinstance(module, LoraLayer))
        scaling = {name: layer.scaling[role] for name, layer in layers if role in layer.scaling}
        return {name: p.shape for name, p in tensors.items()}, scaling

    def replace_tensors(self, made: Callable[[Tensor], Tensor]) -> None:
        """Put others in place of all parameters and buffers, such as those of another device."""
        others: dict[int, Any] = {}

        def other(tensor: Any) -> Any:
            if tensor is not None and id(tensor) not in others:
                new = made(tensor)
                others[id(tensor)] = (
                    nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
                )
            return None if tensor is None else others[id(tensor)]

        before = list(self.parameters())  # which keeps their ids theirs
        for module in self.modules():
            for held in (module._parameters, module._buffers):
                held.update({name: other(tensor) for name, tensor in held.items()})
        for named in self._adapter_parameters.values():
            named.update({name: other(parameter) for name, parameter in named.items()})
        if self.value_model is not None:
            self.value_model.body_parameters = [other(parameter) for parameter in self.value_model.body_parameters]
        del before

    def train_roles(self, *roles: str) -> None:
        """Make exactly these roles trainable, whichever is active.

        PEFT ties the two: a gradient that arrives at an adapter which it has left is dropped without a word.
        """
        wanted = {self._known(role) for role in roles}
        self.trained_roles = tuple(role for role in self._adapter_of if role in wanted)
        trained_adapters = {self._adapter_of[role] for role in wanted}
        for adapter, parameters in self._adapter_parameters.items():
            for parameter in parameters.values():
                parameter.requires_grad_(adapter in trained_adapters)
        for role, head in self.heads.items():
            head.requires_grad_(role in wanted)
        for parameter in [] if self.value_model is None else self.value_model.body_parameters:
            parameter.requires_grad_("value" in wanted)

    # ------------------------------------------------------------------ the active role

    def role(self, name: str) -> "InRole":
        """Context manager: `name` is the active role inside, what was active before it afterwards."""
        return InRole(self, self._known(name))

    def switch_to(self, role: str | None) -> None:
        """Make a role the active one, whose adapter alone is on; without one all adapters are off."""
        adapter = None if role is None else self._adapter_of[self._known(role)]
        if adapter != self._active_adapter:
            activate(self.model, self._layers, adapter)
            self._active_adapter = adapter
        self.active_role = role

    def _restore_role(self) -> None:
        """Put the active role back after PEFT has added or deleted an adapter, and so activated one by itself."""
        self._layers = adapted_layers(self.model)
        self._active_adapter = None if self.active_role is None else self._adapter_of[self.active_role]
        activate(self.model, self._layers, self._active_adapter)

    @contextmanager
    def unpacked_for_gradients(self, *, on_cpu: bool | None = None) -> Iterator[None]:
        """Layers with adapters hold 4-bit weights unpacked inside, on a CPU that has room for them, where each pass
        with gradients would unpack each of them twice. The results are the same bits. In float32 they and `lm_head`
        multiply with a copy that is laid out, which rounds in another way (see `copies.to_lay_out`).

        Args:
            on_cpu: as for `unpacked`.
        """
        on_cpu = self.device.type == "cpu" if on_cpu is None else on_cpu
        layers = [layer.base_layer for group in self._fused for layer in group.layers] if on_cpu else []
        laid_out = to_lay_out([*layers, self.lm_head]) if on_cpu else []
        with unpacked_weights(layers), forwards((layer, partial(laid_out_forward, layer)) for layer in laid_out):
            yield

    def _merged_forwards(self, *, asked: bool, on_cpu: bool) -> list[tuple[Any, Any]]:
        """The policy's adapter is merged where asked for, or where the base computes in float32 on a CPU. Its factors
        would else be multiplied with for each token."""
        layers = self._to_merge(asked=asked, on_cpu=on_cpu) if self.active_role == "policy" else []
        return [(layer, partial(merged_forward, layer, "policy")) for layer in layers]

    def _to_merge(self, *, asked: bool, on_cpu: bool) -> list[Any]:
        return to_merge(self._layers, "policy", head=self.lm_head, asked=asked, on_cpu=on_cpu)

    @property
    def can_merge(self) -> bool:
        """Whether the policy's adapter is on a layer into whose weight it can be merged, without numbers too."""
        return bool(self._to_merge(asked=True, on_cpu=False))

    @property
    def merged_bytes(self) -> int:
        """What `unpacked(merged=True)` holds in the policy's role; 0 where its adapter can be merged into no layer."""
        on_cpu = self.device.type == "cpu"
        layers = self._to_merge(asked=True, on_cpu=on_cpu)
        others = unpackable(self.causal_lm, besides=[*map(base_of, layers)], on_cpu=on_cpu)
        return bytes_of([*layers, *others]) if layers else 0

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Adapter dropout is off inside, and nothing else is as in eval mode."""
        dropouts = adapter_dropouts(self._layers)
        for dropout in dropouts:
            dropout.eval()
        try:
            yield
        finally:
            for dropout in dropouts:
                dropout.train(self.training)

    # ------------------------------------------------------------------ gradient checkpointing

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Switch checkpointing on, with recomputation in the role of the forward pass.

        By itself a layer is recomputed with whichever adapter is active during backward: wrong gradients, no error.
        """
        kwargs = {**(gradient_checkpointing_kwargs or {}), "use_reentrant": False}
        in_role = kwargs | {"context_fn": lambda: (nullcontext(), InRole(self, self.active_role))}
        _checkpointing(self.causal_lm, "enable", in_role, **options)
        models = [(self.causal_lm, self.hidden_states)]
        if self.value_model is not None:
            _checkpointing(self.value_model.classifier, "enable", kwargs)
            models.append((self.value_model.classifier, self.value_model.hidden_states))
        with InRole(self, None):
            self._loses_rows = self.can_pack and not all(rows_stay_packed(*of_model) for of_model in models)
        if self._loses_rows and self.pack_rows:
            wrong = "with gradient checkpointing its layers do not keep rows apart that stand one after the other."
            raise ModelError(wrong, field="pack_rows", remedy="Leave it out, or set gradient_checkpointing to false.")

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """The name that transformers' `Trainer` uses from 5.23 on."""
        self.gradient_checkpointing_enable(activation_checkpointing_kwargs, **options)

    def gradient_checkpointing_disable(self) -> None:
        self._loses_rows = False
        _checkpointing(self.causal_lm, "disable")
        if self.value_model is not None:
            _checkpointing(self.value_model.classifier, "disable")


def _is_role(name: str) -> bool:
    return name in ROLES or scores_for(name) is not None


def _checkpointing(model: PreTrainedModel, switch: str, *arguments: Any, **options: Any) -> None:
    """Call a method by its name of transformers 5.23 on, or by its older one."""
    if switch == "enable":
        check_checkpointing(model)
    older = getattr(model, f"gradient_checkpointing_{switch}")
    getattr(model, f"activation_checkpointing_{switch}", older)(*arguments, **options)


class InRole:
    """A role inside, what was active before it afterwards. Can be entered again, as recomputation needs."""

    def __init__(self, base: SharedBase, role: str | None):
        self._base, self._role = base, role
        self._previous: list[str | None] = []

    def __enter__(self) -> None:
        self._previous.append(self._base.active_role)
        self._base.switch_to(self._role)

    def __exit__(self, *error: object) -> None:
        self._base.switch_to(self._previous.pop())
