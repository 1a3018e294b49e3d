"""One base model, an adapter for each role, and the only place where a role is switched."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from types import TracebackType
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from toolkit.errors import AdapterError, ModelError
from toolkit.models.base import neutral_generation_config, switch_off_dropout
from toolkit.models.heads import HeadInit, ScoreHead
from toolkit.models.value_model import ValueModel

ROLES = ("policy", "value", "reward", "reference", "q", "q_target")
HEAD_ROLES = ("value", "reward")
Q_ROLES = ("q", "q_target")
# The others (PiSSA, OLoRA, CorDA, LoftQ, EVA) subtract from the base's weights, or replace them.
_INITS_OF_THE_ADAPTER_ALONE = (True, False, "gaussian", "orthogonal")


_HEAD = "head."


class _InRole:
    """Enter a role, leave to whatever was before it. Can be entered again, as recomputation needs."""

    def __init__(self, base: "SharedBase", role: str | None):
        self._base, self._role = base, role
        self._previous: list[str | None] = []

    def __enter__(self) -> "SharedBase":
        self._previous.append(self._base.active_role)
        self._base._switch(self._role)
        return self._base

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._base._switch(self._previous.pop())


class SharedBase(nn.Module):
    """A frozen causal language model that carries the roles policy, value, reward and reference, or those of Q.

    Each role has a LoRA adapter on the one base, but for a reference without an adapter (then it is the
    base itself), a value role that shares the policy's adapter, and one with a base of its own (`place_value`). Value
    and reward have a `ScoreHead`.

    Outside `role` no adapter is active. Inside it, exactly one role is:

        with base.role("policy"):
            hidden = base.hidden_states(input_ids, attention_mask)

    Call `backward` inside the role whose loss it is where you can: activations of one role are then freed
    before the next. With gradient checkpointing switched on *here*, layers are recomputed in the role of
    their forward pass wherever backward is called.

    Args:
        causal_lm: the base. It is frozen, its dropout is switched off, and its generation settings are
            replaced by neutral ones.

    Raises:
        ModelError: the logits are not `lm_head(last hidden state)`, as where a model scales or caps them.
    """

    def __init__(self, causal_lm: PreTrainedModel):
        super().__init__()
        # From torch 2.11 on cuDNN's attention comes first on Hopper and Blackwell. It makes a plan for every new
        # length, and each token that is decoded is one; with a mask its gradients can be NaN (pytorch#196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
        causal_lm.requires_grad_(False)
        switch_off_dropout(causal_lm)
        self.checkpoint_stops = _stops_of(causal_lm)
        """Tokens that end a response by the checkpoint's own settings, of the model or of generation."""
        causal_lm.generation_config = neutral_generation_config(causal_lm.config)
        self.model: PreTrainedModel | PeftModel = causal_lm
        self.heads = nn.ModuleDict()
        self.value_model: ValueModel | None = None
        """Where the value role has a base of its own."""
        self._base: tuple[PreTrainedModel] = (causal_lm,)  # in a tuple, so that it is not registered twice
        self._adapter_of: dict[str, str | None] = {}
        self._adapter_parameters: dict[str, dict[str, nn.Parameter]] = {}  # by role, then by name without the role's
        self._adapted_layers: tuple[BaseTunerLayer, ...] = ()
        self._trained: frozenset[str] = frozenset()
        self.active_role: str | None = None
        self._active_adapter: str | None = None
        self.eval()
        self._check_logits()

    # ------------------------------------------------------------------ what it is made of

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The base, with the adapters' layers in it once there are any."""
        return self._base[0]

    @property
    def config(self) -> Any:
        return self.causal_lm.config

    @property
    def device(self) -> torch.device:
        return self.causal_lm.device

    @property
    def lm_head(self) -> Any:
        """Maps the last hidden state (..., H) to logits (..., V)."""
        return self.causal_lm.get_output_embeddings()

    @property
    def adapts_lm_head(self) -> bool:
        """Whether an adapter has a part on `lm_head`, so that logits too are a role's own."""
        return isinstance(self.lm_head, BaseTunerLayer)

    @property
    def hidden_size(self) -> int:
        """H of the last hidden state; with OPT's projection not `config.hidden_size`."""
        return int(self.lm_head.weight.shape[1])

    def head(self, role: str) -> ScoreHead:
        """The head of a role that has one, `value` or `reward`."""
        if role not in self.heads:
            raise AdapterError(f'role "{role}" has no head on this base.')
        head = self.heads[role]
        assert isinstance(head, ScoreHead)
        return head

    def stop_token_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The tokens that end a response: the tokenizer's own, then the checkpoint's.

        A chat model has several, as Llama 3 with the end of a turn and the end of a text.
        """
        return list(dict.fromkeys([int(tokenizer.eos_token_id), *self.checkpoint_stops]))

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that this base carries."""
        return tuple(self._adapter_of)

    @property
    def trained_roles(self) -> tuple[str, ...]:
        return tuple(role for role in self._adapter_of if role in self._trained)

    @property
    def shares_value(self) -> bool:
        """True where the value role is a head on the policy's adapter."""
        return "value" in self._adapter_of and self._adapter_of["value"] == self._adapter_of.get("policy")

    def adapter_config(self, role: str) -> LoraConfig:
        """The LoRA configuration of a role's own adapter."""
        adapter = self._adapter_of[self._known(role)]
        if role == "value" and self.value_model is not None:
            if self.value_model.lora is None:
                raise AdapterError('role "value" has no adapter: all weights of its own base are trained.')
            return self.value_model.lora
        if adapter is None:
            raise AdapterError(f'role "{role}" has no adapter of its own: it is the base with all adapters off.')
        return self.model.peft_config[adapter]

    def parameters_of(self, role: str) -> list[nn.Parameter]:
        """The role's own parameters: its adapter's, unless it shares one, or what trains of a base of its own; and its
        head's."""
        adapter = self._adapter_of[self._known(role)]
        own = list(self._adapter_parameters[role].values()) if adapter == role else []
        if role == "value" and self.value_model is not None:
            own = self.value_model.body_parameters
        return own + (list(self.heads[role].parameters()) if role in self.heads else [])

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
        num_labels: int | None = None,
        head_init: HeadInit = "normal",
        head_bias: bool = False,
        head: nn.Module | None = None,
    ) -> None:
        """Add a role with a fresh adapter, and a fresh head where the role has one.

        Args:
            role: one of `ROLES`.
            config: LoRA configuration. None gives the reference the base itself, and the value role the
                policy's adapter.
            num_labels: outputs of the head; 1 if None.
            head_init: how the head starts: see `ScoreHead`.
            head_bias: whether the head has a bias.
            head: what a Q role reads its logits with, whose parameters are the role's own; None for nothing.

        Raises:
            AdapterError: an unknown or second role, or a configuration that would change the shared base.
        """
        if role not in ROLES:
            raise AdapterError(f'unknown role "{role}"; the roles are {", ".join(ROLES)}.')
        if role in self._adapter_of:
            raise AdapterError(f'this base already carries the role "{role}".')
        if config is None:
            if role not in ("reference", "value"):
                raise AdapterError(f'role "{role}" needs an adapter: give adapters.{role} in the recipe.')
            self._adapter_of[role] = None if role == "reference" else self._adapter_of[self._known("policy")]
        else:
            self._add_adapter(role, config)
            self._adapter_of[role] = role
        if role in HEAD_ROLES:
            head = ScoreHead(self.hidden_size, num_labels or 1, init=head_init, bias=head_bias)
        if head is not None:
            self.heads[role] = head.to(self.device)
        self.train(self.training)  # PEFT's new layers begin in training mode
        self.train_roles(*self._trained)
        self._switch(self.active_role, force=True)

    def remove_role(self, role: str) -> None:
        """Take a role away again, with its adapter and head.

        Raises:
            AdapterError: it is active, another role shares its adapter, or it has a base of its own.
        """
        adapter = self._adapter_of[self._known(role)]
        shared = [other for other, its in self._adapter_of.items() if its == role and other != role]
        if self.active_role == role or shared or (role == "value" and self.value_model is not None):
            raise AdapterError(f'role "{role}" cannot be taken away: it is in use.')
        if adapter == role:
            with warnings.catch_warnings():
                # PEFT activates another in its place; which one is active is decided here, below.
                warnings.filterwarnings("ignore", message="Adapter .* was active which is now deleted")
                self.model.base_model.delete_adapter(role)
            del self._adapter_parameters[role]
        if role in self.heads:
            del self.heads[role]
        del self._adapter_of[role]
        self._active_adapter = None if self._active_adapter == role else self._active_adapter
        self.train_roles(*(self._trained - {role}))
        self._switch(self.active_role, force=True)

    def place_value(self, model: ValueModel) -> None:
        """Give the value role a base of its own, in place of an adapter on this one.

        Raises:
            AdapterError: there is a value role already.
        """
        if "value" in self._adapter_of:
            raise AdapterError('this base already carries the role "value".')
        self.value_model, self._adapter_of["value"], self.heads["value"] = model, None, model.head
        self.train_roles(*self._trained)

    def _add_adapter(self, role: str, config: LoraConfig) -> None:
        if config.bias != "none" or config.modules_to_save or config.trainable_token_indices:
            raise AdapterError(
                f"adapters.{role}: bias, modules_to_save and trainable_token_indices change weights of the base, "
                "which the other roles share. Leave them out."
            )
        if config.init_lora_weights not in _INITS_OF_THE_ADAPTER_ALONE:
            raise AdapterError(
                f'adapters.{role}: init_lora_weights "{config.init_lora_weights}" starts by changing weights of the '
                "base, which the other roles share. Leave it out, or take gaussian or orthogonal."
            )
        missing = missing_modules(self, config)
        if missing:  # PEFT passes over those in silence as long as one of them is there
            said = " ".join(_no_module(self, target) for target in missing)
            raise AdapterError(f"adapters.{role}.target_modules: {said}")
        with warnings.catch_warnings():
            # PEFT notes for each Conv1D that it sets fan_in_fan_out itself, and that a second adapter is added.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            try:
                if isinstance(self.model, PeftModel):
                    self.model.add_adapter(role, config)
                else:
                    self.model = get_peft_model(self.causal_lm, config, adapter_name=role)
            except ValueError as error:
                raise AdapterError(f"adapters.{role}: {error}") from error
        self._adapted_layers = tuple(module for module in self.model.modules() if isinstance(module, BaseTunerLayer))
        # On an embedding PEFT keeps the tensors themselves by role, on other layers modules that hold them.
        own = re.compile(rf"(\.lora_\w+)\.{role}(?=\.|$)")
        self._adapter_parameters[role] = {
            own.sub(r"\1", name): parameter for name, parameter in self.model.named_parameters() if own.search(name)
        }

    def copy_adapter(self, source: str, target: str) -> None:
        """Copy the weights of one role's adapter, and of its head if both have one, to another role.

        Raises:
            AdapterError: a role has no adapter of its own, or the two are on other modules, or differ in shape or
                scaling.
        """
        ours, theirs = self._own_tensors(target), self._own_tensors(source)
        if target not in self.heads:
            theirs = {name: tensor for name, tensor in theirs.items() if not name.startswith(_HEAD)}
        if {name: p.shape for name, p in ours.items()} != {name: p.shape for name, p in theirs.items()} or (
            self._scaling(target) != self._scaling(source)
        ):
            raise AdapterError(
                f'role "{target}" cannot start as a copy of "{source}": their adapters or heads differ in modules, '
                f"shape or scaling. Give adapters.{target} the rank, lora_alpha and target_modules of "
                f"adapters.{source}."
            )
        with torch.no_grad():
            for name, mine in ours.items():
                mine.copy_(theirs[name])

    def _own_tensors(self, role: str) -> dict[str, nn.Parameter]:
        """The parameters of a role's own adapter and head, by names without the role's."""
        if self._adapter_of[self._known(role)] != role:
            raise AdapterError(f'role "{role}" has no adapter of its own that could be copied.')
        head = dict(self.heads[role].named_parameters()) if role in self.heads else {}
        return self._adapter_parameters[role] | {f"{_HEAD}{name}": tensor for name, tensor in head.items()}

    def _scaling(self, role: str) -> dict[str, float]:
        """What each layer multiplies the product of its two factors with."""
        layers = ((name, module) for name, module in self.model.named_modules() if isinstance(module, LoraLayer))
        return {name: layer.scaling[role] for name, layer in layers if role in layer.scaling}

    def train_roles(self, *roles: str) -> None:
        """Make exactly these roles trainable, whichever is active."""
        for role in roles:
            self._known(role)
        self._trained = frozenset(roles)
        self._restore_requires_grad()

    def _restore_requires_grad(self) -> None:
        # PEFT ties "active" to "trainable": an adapter that it adds or activates has its gradients switched on, all
        # others off, and a gradient that arrives at such a leaf is dropped without a word. Here the two are apart.
        trained_adapters = {self._adapter_of[role] for role in self._trained}
        for adapter, parameters in self._adapter_parameters.items():
            for parameter in parameters.values():
                parameter.requires_grad_(adapter in trained_adapters)
        for role, head in self.heads.items():
            head.requires_grad_(role in self._trained)
        for parameter in [] if self.value_model is None else self.value_model.body_parameters:
            parameter.requires_grad_("value" in self._trained)

    # ------------------------------------------------------------------ switching

    def role(self, name: str) -> _InRole:
        """Context manager: `name` is the active role inside, what was active before it afterwards.

        Raises:
            AdapterError: this base carries no such role.
        """
        return _InRole(self, self._known(name))

    def _switch(self, role: str | None, *, force: bool = False) -> None:
        """What PEFT's own switch comes to: two attributes of each layer with adapters, which are remembered here.

        PEFT's walks all modules of the model several times and changes what has gradients, a hundred times as slowly.
        """
        adapter = None if role is None else self._adapter_of[role]
        if isinstance(self.model, PeftModel) and (adapter != self._active_adapter or force):
            for layer in self._adapted_layers:
                layer._disable_adapters = adapter is None
                if adapter is not None:
                    layer._active_adapter = [adapter]
            if adapter is not None:
                self.model.active_adapter = self.model.base_model.active_adapter = adapter
            self._active_adapter = adapter
        self.active_role = role

    # ------------------------------------------------------------------ forward passes

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        """Last hidden states (B, L, H) in the active role, before `lm_head`. No logits are made."""
        decoder = self.causal_lm.base_model
        return decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **kwargs).last_hidden_state

    def forward(self, **kwargs: Any) -> Any:
        """The causal language model's own forward pass, in the active role."""
        return self.causal_lm(**kwargs)

    @torch.no_grad()
    def generate(
        self, input_ids: Tensor, attention_mask: Tensor, config: GenerationConfig, *, streamer: Any = None
    ) -> Tensor:
        """Continue left-padded prompts in the active role.

        Args:
            input_ids: int64 (B, P), left-padded.
            attention_mask: (B, P), 1 at real tokens.
            config: all generation settings; none come from the checkpoint.
            streamer: as in transformers: shown each token of a single row as it comes.

        Returns:
            int64 (B, T), what came after the prompts.
        """
        with self.in_eval_mode():
            output = self.causal_lm.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                generation_config=config,
                streamer=streamer,
            )
        return output[:, input_ids.shape[1] :]

    def autocast(self) -> torch.autocast:
        """The precision of training: 16 bits as the base has them, and none where it is float32.

        Without it float32 adapters on a 16-bit base would cast at each layer.
        """
        dtype = self.causal_lm.dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not torch.float32)

    @contextmanager
    def in_eval_mode(self) -> Iterator[None]:
        """Adapter dropout and gradient checkpointing are off inside, as they were afterwards."""
        was_training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(was_training)

    def _check_logits(self) -> None:
        """The chunked log-probabilities rest on logits = lm_head(hidden); find out at once where that fails."""
        ids = torch.arange(4, device=self.device).unsqueeze(0) % self.lm_head.weight.shape[0]
        mask = torch.ones_like(ids)
        with torch.no_grad(), self.in_eval_mode():
            ours, theirs = (
                self.lm_head(self.hidden_states(ids, mask)),
                self.causal_lm(input_ids=ids, attention_mask=mask).logits,
            )
        if ours.shape != theirs.shape or not torch.allclose(ours.float(), theirs.float(), rtol=1e-3, atol=1e-3):
            raise ModelError(
                f"base.model: {type(self.causal_lm).__name__} changes its logits after lm_head (a scale or a cap), "
                "which the log-probabilities here do not follow. Llama, Mistral, Qwen, GPT-2 and OPT do not."
            )

    # ------------------------------------------------------------------ gradient checkpointing

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Switch checkpointing on, with recomputation in the role of the forward pass.

        A checkpointed layer is recomputed during backward with whichever adapter is active *then*; by itself
        that gives wrong gradients without an error. Whoever switches checkpointing off and on again through
        this method (TRL does around generation) keeps the cure.
        """
        kwargs = {**(gradient_checkpointing_kwargs or {}), "use_reentrant": False, "context_fn": self._contexts}
        with warnings.catch_warnings():
            # Deprecated in transformers 5.23 for a name that the lowest supported version lacks.
            warnings.filterwarnings("ignore", message="`gradient_checkpointing_enable` is deprecated")
            self.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs, **options)
            if self.value_model is not None:
                self.value_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """The name that transformers' `Trainer` uses from 5.23 on."""
        self.gradient_checkpointing_enable(activation_checkpointing_kwargs, **options)

    def gradient_checkpointing_disable(self) -> None:
        """Switch checkpointing off."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`gradient_checkpointing_disable` is deprecated")
            self.causal_lm.gradient_checkpointing_disable()
            if self.value_model is not None:
                self.value_model.gradient_checkpointing_disable()

    @property
    def is_gradient_checkpointing(self) -> bool:
        return any(getattr(module, "gradient_checkpointing", False) for module in self.causal_lm.modules())

    def _contexts(self) -> tuple[Any, _InRole]:
        return nullcontext(), _InRole(self, self.active_role)


def _stops_of(model: PreTrainedModel) -> tuple[int, ...]:
    """End-of-sequence ids of the configuration, then those that stand in `generation_config.json` alone."""
    found: list[int] = []
    for settings in (model.config, model.generation_config):
        ids = getattr(settings, "eos_token_id", None)
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple(dict.fromkeys(found))


def missing_modules(base: SharedBase, config: LoraConfig) -> list[str]:
    """Modules that an adapter names and the base does not have."""
    if not isinstance(config.target_modules, (list, set)):
        return []  # a pattern, which PEFT resolves itself
    present = [name.replace(".base_layer", "") for name, _ in base.causal_lm.named_modules()]
    return sorted(
        target
        for target in config.target_modules
        if not any(name == target or name.endswith(f".{target}") for name in present)
    )


def _layer_names(base: SharedBase) -> list[str]:
    """Last parts of the names of layers that an adapter can be on."""
    layers = (nn.Linear, nn.Embedding, nn.Conv1d, Conv1D)
    names = [name for name, module in base.causal_lm.named_modules() if isinstance(module, layers)]
    own = [name.removesuffix(".base_layer") for name in names if ".lora_" not in name]  # not those of other roles
    return list(dict.fromkeys(name.rpartition(".")[2] for name in own))


def _no_module(base: SharedBase, target: str) -> str:
    known = _layer_names(base)
    near = get_close_matches(target, known, n=1, cutoff=0.6)
    listed = f" Known: {', '.join(sorted(known))}." if len(known) <= 15 else ""
    return f'the base has no module "{target}".' + (f" Did you mean {near[0]}?" if near else listed)
