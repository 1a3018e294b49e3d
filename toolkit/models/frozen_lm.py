"""The base that all roles share: a frozen causal language model that gives hidden states and samples responses."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from toolkit.errors import ModelError
from toolkit.models.attention import without_cudnn_attention
from toolkit.models.base_checks import check_base, check_no_adapters
from toolkit.models.caches import CACHE
from toolkit.models.copies import base_of, copied, forwards, have_room, unpackable
from toolkit.models.decoding import decode
from toolkit.models.freed_memory import keep_freed_memory
from toolkit.models.fused_lora import Fused, Kept
from toolkit.models.logit_changes import as_they_are


class FrozenLM(nn.Module):
    """A causal language model, frozen, without dropout, and with neutral generation settings.

    Args:
        pack_rows: whether rows stand one after the other in a pass, without padding. None packs them on a CPU, where
            the model can be read so: on a card attention row by row costs launches, and whether it wins there has not
            been measured.

    Raises:
        ModelError: it is not a base on which all else could rely: see `toolkit.models.base_checks`. Or it has adapters
            on it already. Or rows are to be packed, and it cannot read them so.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, pack_rows: bool | None = None):
        super().__init__()
        check_no_adapters(causal_lm)
        keep_freed_memory()
        without_cudnn_attention()
        causal_lm.requires_grad_(False)
        ends = [getattr(of, "eos_token_id", None) for of in (causal_lm.config, causal_lm.generation_config)]
        stops = [x for end in ends if end is not None for x in (end if isinstance(end, list) else [end])]
        rows = causal_lm.get_input_embeddings().weight.shape[0]
        if odd := [end for end in stops if not _is_token(end, rows)]:
            wrong = f"eos_token_id is {odd[0]} in its config.json or generation_config.json, and it has embeddings for "
            raise ModelError(f"{wrong}0 to {rows - 1}: no response could end there.", remedy="Mend that file.")
        self.checkpoint_stops: tuple[int, ...] = tuple(dict.fromkeys(stops))
        """Tokens that end a response by the checkpoint's configuration, then by its `generation_config.json`."""
        # transformers fills what a caller leaves open from the checkpoint's own settings; a repetition penalty from
        # there would make the sampled distribution differ from the one that PPO trains. So only special tokens stay.
        special = ("bos_token_id", "eos_token_id", "pad_token_id")
        tokens = {name: getattr(causal_lm.config, name, None) for name in special}
        tokens = {name: x for name, x in tokens.items() if isinstance(x, list) or _is_token(x, rows)}  # not pad's -1
        causal_lm.generation_config = GenerationConfig(**tokens)
        self.model: PreTrainedModel | PeftModel = causal_lm
        self._fused: tuple[Fused, ...] = ()  # its layers with adapters, in groups, once there are any
        self._base: tuple[PreTrainedModel] = (causal_lm,)  # in a tuple, so that it is not registered twice
        # transformers gives it a slice of the states after a prompt. Where that has gaps torch copies the weight for
        # each row before it multiplies: on a CPU 1 s for 16 prompts of SmolLM2 in bfloat16, against 0.01 s.
        head = causal_lm.get_output_embeddings()
        if isinstance(head, nn.Module):
            head.register_forward_pre_hook(lambda _, given: tuple(states.contiguous() for states in given))
        self.eval()
        self.pack_rows = pack_rows
        found = check_base(causal_lm, self.hidden_states, pack=self._is_to_pack)
        self._logits_of, self._states, self._rows_leave, self._packs_rows = found
        if pack_rows and not self._packs_rows and not self._states.is_meta:
            wrong = f"a {type(causal_lm).__name__} does not keep rows apart that stand one after the other in a pass."
            raise ModelError(wrong, field="pack_rows", remedy="Leave it out.")

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
        """The last layer, on which an adapter may have a part."""
        return self.causal_lm.get_output_embeddings()

    @property
    def changes_logits(self) -> bool:
        """Whether the model does something to its logits after `lm_head`."""
        return self._logits_of is not as_they_are

    @property
    def can_pack(self) -> bool:
        """Whether the base takes rows that stand one after the other in a line, and is to."""
        return self._packs_rows and self._is_to_pack

    @property
    def _is_to_pack(self) -> bool:
        return self.device.type == "cpu" if self.pack_rows is None else self.pack_rows

    def logits(self, hidden: Tensor) -> Tensor:
        """The last hidden state (..., H) to logits (..., V), with what the model does to them after `lm_head`."""
        return self._logits_of(self.lm_head(hidden))

    def stop_token_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The tokens that end a response, of which a chat model has several: the tokenizer's own, the checkpoint's."""
        return list(dict.fromkeys([int(tokenizer.eos_token_id), *self.checkpoint_stops]))

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        """Last hidden states (B, L, H), of which `logits` can be made."""
        kwargs |= {"attention_mask": attention_mask, "use_cache": CACHE in kwargs}
        return self.causal_lm.base_model(input_ids=input_ids, **kwargs).last_hidden_state

    def forward(self, **kwargs: Any) -> Any:
        return self.causal_lm(**kwargs)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        config: GenerationConfig,
        *,
        merged: bool = False,
        graphs: bool = False,
        **further: Any,
    ) -> Tensor:
        """The likeliest tokens after left-padded prompts (B, P): int64 (B, T). No setting comes from the checkpoint.

        Args:
            merged: see `unpacked`.
            graphs: see `decode`.
            further: arguments of transformers' `generate`.
        """
        # transformers gives its streamer the prompt, and a loop that is not its own no streamer.
        loop = partial(
            decode,
            rows_leave=self._rows_leave,
            packs_prompts=self.can_pack,
            graphs=graphs,
            streamer=further.get("streamer"),
        )
        with self.weights_kept(), self.in_eval_mode(), self.unpacked(merged=merged):
            output = self.causal_lm.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                generation_config=config,
                custom_generate=loop,
                **further,
            )
        return output[:, input_ids.shape[1] :]

    def autocast(self) -> torch.autocast:
        """The precision of training, that of the base: without it float32 adapters would cast at each layer."""
        dtype = self.causal_lm.dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not torch.float32)

    @contextmanager
    def weights_kept(self) -> Iterator[None]:
        """Inside, where no weight may change, each adapter is converted to the precision of the passes once."""
        for group in self._fused:
            group.kept = Kept()
        try:
            yield
        finally:
            for group in self._fused:
                group.kept = None

    def _merged_forwards(self, *, asked: bool, on_cpu: bool) -> list[tuple[Any, Any]]:
        """Layers that an adapter is merged into inside `unpacked`, each with what makes its pass."""
        raise NotImplementedError  # which layers these are only a base with roles knows

    def to_unpack(self, *, merged: bool, on_cpu: bool) -> list[Any]:
        """The layers that hold their weights a second time inside `unpacked`: all on a CPU that has room for all of
        them, elsewhere where asked for; but not those into whose copy an adapter is merged."""
        besides = {base_of(layer) for layer, _ in self._merged_forwards(asked=merged, on_cpu=on_cpu)}
        layers = unpackable(self.causal_lm, besides=besides, on_cpu=on_cpu) if on_cpu or merged else []
        return layers if merged or have_room(layers) else []

    @contextmanager
    def unpacked(
        self, *, merged: bool = False, on_cpu: bool | None = None, layers: list[Any] | None = None
    ) -> Iterator[None]:
        """Linear layers hold their weights a second time inside, ready to multiply with.

        On a CPU each pass unpacks a weight of 4 bits, and lays one of bfloat16 out for its kernel: decoding would do so
        for each token. The results are the same bits. (On a GPU bitsandbytes has kernels that unpack as they multiply,
        for a few rows; for more it unpacks each weight at each token.)

        Args:
            merged: whether they are held in any case, and the policy's adapter is merged into its layers' where it can.
            on_cpu: whether it is for a CPU, where that is not where the base is.
            layers: those of `to_unpack`, where they are known.
        """
        on_cpu = self.device.type == "cpu" if on_cpu is None else on_cpu
        with forwards(self._merged_forwards(asked=merged, on_cpu=on_cpu)):
            layers = self.to_unpack(merged=merged, on_cpu=on_cpu) if layers is None else layers  # by what room is left
            with copied(layers, self._fused if on_cpu else ()):
                yield

    @contextmanager
    def in_eval_mode(self) -> Iterator[None]:
        """Adapter dropout and gradient checkpointing are off inside, as they were afterwards."""
        was_training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(was_training)


def _is_token(token: Any, rows: int) -> bool:
    return isinstance(token, int) and 0 <= token < rows
