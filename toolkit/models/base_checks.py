"""What all else relies on of a base, tried on a few tokens when it is loaded: no list of architectures is kept.

A base is taken if its logits are `lm_head` of the last hidden state, up to a scale or a cap; if a token's state depends
neither on what comes after it nor, once dropout is off, on the mode of training; and if tokens that are decoded one by
one after left padding get the logits of a whole pass. Else it is refused with what does not hold.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import AttentionInterface, GenerationConfig, LogitsProcessorList, PreTrainedModel

from toolkit.errors import AdapterError, ModelError
from toolkit.models.attention import attention_by_rows
from toolkit.models.bits import check_bits, check_gradients_of_bits, keep_layout
from toolkit.models.decoding import RowProcessor, decode
from toolkit.models.logit_changes import Logits, as_they_are, logits_of
from toolkit.models.lora import adapted_layers, under_adapter
from toolkit.models.trials import SUGGESTION, apart_by, ids_of, probe, random_state, tolerance, tried

_ROWS: dict[str, Any] = {"row_lengths": [6, 3], "common_length": 2}
"""The rows of the line on which packing is tried, as attention is given them."""


def switch_off_dropout(model: nn.Module, *, rate: float = 0.0) -> None:
    """Set whatever a base model draws at random in training to 0, in place: dropout, dropped layers, routers' jitter.

    A frozen base has nothing to regularise, and dropout between rollout and update would make the ratio differ from 1
    before the first step. The adapters' own dropout comes later and is not touched.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = rate if module.p else 0.0
        for owner in (module, getattr(module, "config", None)):  # some models read their configuration in each pass
            for name, value in list(vars(owner).items()) if owner is not None else ():
                number = isinstance(value, float | int) and not isinstance(value, bool)
                if number and value and ("drop" in name or "jitter" in name):
                    setattr(owner, name, rate)


def check_no_adapters(model: nn.Module) -> None:
    """Nothing, if a model is without adapters; else a `ModelError`: roles would be read with those off."""
    if isinstance(model, PeftModel) or adapted_layers(model):
        wrong = f"a {type(model).__name__} with adapters on it is given, and a base is taken without."
        remedy = "Load the model anew, once for each base. A saved adapter becomes a role by load_role(base, role, "
        raise ModelError(wrong, remedy=f"{remedy}folder), or a part of the base by PEFT's merge_and_unload.")


def check_base(
    model: PreTrainedModel, hidden_states: Callable[..., Tensor], *, pack: bool
) -> tuple[Logits, Tensor, bool, bool]:
    """What the model does with the logits of `lm_head`, what `check_states` gives, `rows_can_leave`, and whether rows,
    prompts among them, can be packed.

    On the meta device nothing can be tried.

    Args:
        model: in eval mode, without adapters. Its dropout is switched off.
        hidden_states: maps `input_ids` and `attention_mask`, (B, L) each, to the last hidden states.
        pack: whether packing is tried. Without it they cannot be packed.

    Raises:
        ModelError: what else relies on does not hold.
    """
    name = type(model).__name__
    check_bits(getattr(model.config, "quantization_config", None))
    if not hasattr(model.get_output_embeddings(), "in_features"):
        raise ModelError(f"a {name} has no linear layer lm_head.", remedy=SUGGESTION)
    if model.base_model is model:  # Llama 4's class gives it the name that it has beside a vision part
        raise ModelError(f"a {name} has no base_model, of which the last hidden state is read.", remedy=SUGGESTION)
    states = check_states(model, hidden_states)
    if states.is_meta:
        return as_they_are, states, False, False
    ids = ids_of(model)
    with tried(model):
        given = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float()
        _check_finite(model, given)
        logits = logits_of(model, model.get_output_embeddings()(states), given)
        apart = _decoding_apart(model, ids[0], given[0])
    if not apart <= tolerance(model):
        wrong = f"a {name} gives other logits where tokens are decoded one by one after left padding (by {apart:.1%}): "
        wrong += "responses would not be sampled from the policy whose log-probabilities are trained."
        raise ModelError(wrong, remedy=SUGGESTION)
    pack = pack and rows_can_be_packed(model, hidden_states, states)
    pack = pack and prompts_can_be_packed(model, ids[0], given[0])
    return logits, states, rows_can_leave(model, ids[0], given[0]), pack


def _decoding_apart(model: PreTrainedModel, ids: Tensor, given: Tensor, *, packs_prompts: bool = False) -> float:
    """By how much the logits of tokens that are decoded one by one are off those of a whole pass, `given` (L, V)."""
    steps = _decoded(model, ids, torch.stack([ids[2:4], ids[4:6]]), packs_prompts=packs_prompts)
    return apart_by(torch.stack(steps), torch.stack([given[[1, 3]], given[[2, 4]]]))


def rows_can_leave(model: PreTrainedModel, ids: Tensor, given: Tensor) -> bool:
    """Whether a row that is decoded keeps its logits when another one has ended and left the batch.

    Args:
        ids: (L,), and `given` their logits of a whole pass, (L, V).
    """
    try:
        with tried(model):  # the first row ends with its first token
            steps = _decoded(model, ids, torch.stack([ids[[2, 2]], ids[4:6]]), new_tokens=3, end=int(ids[2]))
    except ModelError:
        return False  # it keeps something of each row beside its cache
    left = torch.stack([scores[-1] for scores in steps[1:]])
    return [len(scores) for scores in steps] == [2, 1, 1] and apart_by(left, given[4:6]) <= tolerance(model)


def _decoded(
    model: PreTrainedModel,
    ids: Tensor,
    tokens: Tensor,
    *,
    new_tokens: int = 2,
    end: int | None = None,
    packs_prompts: bool = False,
) -> list[Tensor]:
    """The logits, (rows, V), of each step of decoding after the first two and the first four of the ids.

    Args:
        tokens: what each row goes on with, (2, T).
        end: ends a row, which then leaves the batch.
        packs_prompts: as of `decode`.
    """
    forced, pad = _Forced(tokens), int(ids[0])
    model.generate(
        input_ids=torch.stack([ids[[0, 0, 0, 1]], ids[:4]]),
        attention_mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]], device=ids.device),
        generation_config=GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=end, pad_token_id=pad
        ),
        logits_processor=LogitsProcessorList([forced]),
        custom_generate=partial(decode, rows_leave=end is not None, packs_prompts=packs_prompts),
    )
    return forced.seen


def rows_can_be_packed(model: PreTrainedModel, hidden_states: Callable[..., Tensor], states: Tensor) -> bool:
    """Whether rows that stand one after the other in a line, their common beginning once, have the hidden states that
    they have by themselves.

    Args:
        states: those that `check_states` gave.
    """
    # A token that keeps so many keys of all that stand in its line (DeepSeek-V3.2) keeps all of the trial's few.
    if states.is_meta or hasattr(model.config.get_text_config(), "index_topk"):
        return False
    (read, positions), first = _line(model, hidden_states), _ROWS["row_lengths"][0]
    alone, embedded = states[0][positions], list[Tensor]()

    def kept(_: Any, __: Any, made: Tensor) -> Tensor:
        embedded.append(made.detach().requires_grad_())
        return embedded[-1].clone()  # some models scale it in place

    try:
        with tried(model):
            mixed = read()
            hook = model.get_input_embeddings().register_forward_hook(kept)
            try:
                with torch.enable_grad():
                    packed = read(**_ROWS)
                    second = packed[0, first:].float()
                    along = torch.linspace(-1, 2, second.numel(), device=second.device).view_as(second)
                    reaches = torch.autograd.grad((second * along).sum(), embedded)
            finally:
                hook.remove()
    except ModelError:
        return False
    # What the second row owes to what is the first one's own, through whatever layer, is a gradient; of rounding there
    # is none.
    if any(of_tokens.view(len(positions[0]), -1)[_ROWS["common_length"] : first].any() for of_tokens in reaches):
        return False
    return apart_by(packed.detach(), alone) <= min(tolerance(model), apart_by(mixed, alone) / 4)


def rows_stay_packed(model: PreTrainedModel, hidden_states: Callable[..., Tensor]) -> bool:
    """Whether rows in a line, with gradient checkpointing on, have the hidden states that they have without it: some
    models hand fewer arguments to layers that are computed again."""
    was_training = model.training
    read, _ = _line(model, hidden_states)
    try:
        with tried(model):
            model.eval()
            mixed, packed = read(), read(**_ROWS)
            model.train()  # in which layers are checkpointed
            for module in model.modules():
                if isinstance(module, _DropoutNd):  # of adapters
                    module.eval()
            found = read(**_ROWS)
    except ModelError:
        return False
    finally:
        model.train(was_training)
    return apart_by(found, packed) <= min(tolerance(model), apart_by(mixed, packed) / 4)


def _line(model: PreTrainedModel, hidden_states: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], Tensor]:
    """What reads the two rows of `_ROWS` in a line, as rows where it is given these; and their positions (1, L)."""
    first, second = _ROWS["row_lengths"]
    positions = torch.cat([torch.arange(first), _ROWS["common_length"] + torch.arange(second)])
    positions = positions.unsqueeze(0).to(model.device)
    ids = ids_of(model)[0][positions]
    return partial(hidden_states, ids, torch.ones_like(ids, dtype=torch.bool), position_ids=positions), positions


def prompts_can_be_packed(model: PreTrainedModel, ids: Tensor, given: Tensor) -> bool:
    """Whether prompts that are read in a line are followed by the logits `given`, as for `rows_can_leave`."""
    try:
        with tried(model):
            apart = _decoding_apart(model, ids, given, packs_prompts=True)
    except ModelError:
        return False
    return apart <= tolerance(model)


class _Forced(RowProcessor):
    """Leaves each row its next token of those that are given, (B, T), for as long as there are any."""

    def __init__(self, tokens: Tensor):
        self.tokens, self.seen = tokens, list[Tensor]()

    def keep(self, rows: Tensor) -> None:
        self.tokens = self.tokens[rows]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(scores)
        token = self.tokens[:, len(self.seen) - 1 : len(self.seen)]
        return scores.scatter(1, token, float("inf"))


def check_adapter(
    model: PreTrainedModel, hidden_states: Callable[..., Tensor], states: Tensor, role: Any, *, to_train: bool
) -> None:
    """Nothing, if an adapter can be read in its role and leaves the base as it is; else an `AdapterError`.

    Args:
        states: those that `check_states` gave.
        role: a context manager in which the adapter is active, as none is outside.
        to_train: whether it has to get a gradient everywhere. One that is read as it was saved need not.
    """
    if states.is_meta:
        return
    read = partial(hidden_states, *probe(model))
    with tried(model):
        off = read()
    if not apart_by(off, states.to(off.device)) <= tolerance(model):  # it may have moved since
        wrong = "the adapter changes the base, which the other roles share, even where it is switched off."
        raise AdapterError(wrong, remedy="Take plain LoRA.")
    try:
        with tried(model), role:
            missed = _untrained(model, read) if to_train else []
            if not to_train:
                read()
    except ModelError as error:
        wrong = f"with this adapter {error.problems[0].wrong}"
        raise AdapterError(wrong, field="target_modules", remedy="Name plain linear layers.") from error
    if missed:
        names = ", ".join(missed)
        wrong = f"in training a {type(model).__name__} gives an adapter on {names} no gradient: it takes the weights "
        wrong += "without calling the layer, or calls it without gradients."
        raise AdapterError(wrong, field="target_modules", remedy=f"Leave it out: exclude_modules: [{names}].")


def _untrained(model: nn.Module, read: Callable[[], Tensor]) -> list[str]:
    """Ends of the names of layers whose active adapter gets no gradient in training, in which the model then is, though
    they are called, or what they are part of.

    Experts that no token came to are not among them, nor is what the pass has no use for.
    """
    # Adapters on a mixture's experts get theirs from whatever token comes to them, and are left out: each makes a copy
    # of all experts of its layer, which the pass would hold for every layer at once.
    experts = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper)
    }
    factors = {
        name: module.lora_B[adapter].weight
        for name, module in layers.items()
        for adapter in module.active_adapters
        if adapter in module.lora_B
    }
    called = set[str]()
    watched = {*factors, *map(_owner, factors)}
    hooks = [model.get_submodule(x).register_forward_hook(lambda *_, name=x: called.add(name)) for x in watched]
    were_trained = [factor.requires_grad for factor in factors.values()]
    were_off = [one._disable_adapters for one in experts]
    try:
        read()  # some layers are called in this mode alone
        model.train()
        for one in experts:
            one._disable_adapters = True
        with torch.enable_grad():
            for factor in factors.values():
                factor.requires_grad_()
            states = read()
            found: Sequence[Tensor | None] = [None] * len(factors)
            if states.requires_grad:
                found = torch.autograd.grad(states.sum(), list(factors.values()), allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
        for one, was_off in zip(experts, were_off, strict=True):
            one._disable_adapters = was_off
        for factor, was_trained in zip(factors.values(), were_trained, strict=True):
            factor.requires_grad_(was_trained)
    pairs = zip(factors, found, strict=True)
    missed = {name for name, gradient in pairs if gradient is None and not called.isdisjoint((name, _owner(name)))}
    return sorted({_end(name, factors.keys() - missed) for name in missed})


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _end(name: str, others: Collection[str]) -> str:
    """As much of the end of a module's name as tells it from others."""
    parts = name.split(".")
    ends = (".".join(parts[first:]) for first in range(len(parts) - 1, 0, -1))
    return next((end for end in ends if not any(f".{other}".endswith(f".{end}") for other in others)), name)


def check_checkpointing(model: nn.Module) -> None:
    """Nothing, if the model, or the one under its adapter, has gradient checkpointing; else a `ModelError`."""
    model = under_adapter(model)
    if not model.supports_gradient_checkpointing:
        wrong = f"a {type(model).__name__} of transformers has no gradient checkpointing."
        raise ModelError(wrong, field="gradient_checkpointing", remedy="Set it to false.")


def _check_finite(model: PreTrainedModel, made: Tensor) -> None:
    if not made.isfinite().all():
        wrong = (
            f"what a {type(model).__name__} makes of a few tokens is not finite: a weight is damaged, or too large for "
        )
        remedy = "Download or convert it again, or load it in another dtype."
        raise ModelError(f"{wrong}{str(model.dtype).removeprefix('torch.')}.", remedy=remedy)


def check_states(model: PreTrainedModel, hidden_states: Callable[..., Tensor]) -> Tensor:
    """The last hidden states of a few tokens, the same in training and whatever comes after; else a `ModelError`.

    Switches the model's dropout off, and keeps the layout of its 4-bit weights.
    """
    check_gradients_of_bits(getattr(model, "hf_quantizer", None))
    keep_layout(model)
    # What is tried is what runs. Without `row_lengths` it is what it was, but for whole rows in bfloat16 on a CPU.
    AttentionInterface.register("sdpa", attention_by_rows)
    name = type(model).__name__
    if model.device.type == "meta":
        switch_off_dropout(model)
        return torch.empty(0, device="meta")

    def read() -> Tensor:
        return hidden_states(*probe(model))

    with tried(model):
        states = read()
        _check_finite(model, states)
        if not apart_by(states[0, :-1], states[1, :-1]) <= tolerance(model):
            wrong = f"a {name} is not causal: what it makes of a token depends on the tokens after it."
            raise ModelError(wrong, remedy=f"Take a decoder. {SUGGESTION}")
        switch_off_dropout(model, rate=0.9)
        apart = [apart_by(read(), states)]
        switch_off_dropout(model)
        if not apart[0] <= tolerance(model):
            wrong = f"a {name} applies its dropout or jitter outside of training, too: it cannot be switched off."
            raise ModelError(wrong, remedy=SUGGESTION)
        try:
            model.train()
            before = random_state(model)
            apart = [apart_by(read(), states)]
            # Layers that are dropped now and then may all have been kept.
            tries = 4 if random_state(model) != before else 0
            apart += [apart_by(read(), states) for _ in range(tries)]
        finally:
            model.eval()
    if not max(apart) <= tolerance(model):
        why = "it draws random numbers that no setting of it switches off" if tries else "it computes something else"
        raise ModelError(
            f"a {name} gives other hidden states in training, by {max(apart):.1%}: {why}. The policy that is trained "
            "would not be the one that sampled.",
            remedy=SUGGESTION,
        )
    return states
