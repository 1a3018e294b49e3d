"""The base that all roles share: a frozen causal language model that gives hidden states and samples responses."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import psutil
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from peft import PeftModel
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from toolkit.models.base_checks import check_base


class FrozenLM(nn.Module):
    """A causal language model, frozen, without dropout, and with neutral generation settings.

    Raises:
        ModelError: it is not a base on which all else could rely: see `toolkit.models.base_checks`.
    """

    def __init__(self, causal_lm: PreTrainedModel):
        super().__init__()
        # From torch 2.11 on cuDNN's attention comes first on Hopper and Blackwell. It makes a plan for every new
        # length, and each token that is decoded is one; with a mask its gradients can be NaN (pytorch#196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
        causal_lm.requires_grad_(False)
        ends = [getattr(of, "eos_token_id", None) for of in (causal_lm.config, causal_lm.generation_config)]
        stops = [x for end in ends if end is not None for x in (end if isinstance(end, list) else [end])]
        self.checkpoint_stops: tuple[int, ...] = tuple(dict.fromkeys(stops))
        """Tokens that end a response by the checkpoint's configuration, then by its `generation_config.json`."""
        # transformers fills what a caller leaves open from the checkpoint's own settings; a repetition penalty from
        # there would make the sampled distribution differ from the one that PPO trains. So only special tokens stay.
        special = ("bos_token_id", "eos_token_id", "pad_token_id")
        tokens = {name: getattr(causal_lm.config, name, None) for name in special}
        causal_lm.generation_config = GenerationConfig(**tokens)
        self.model: PreTrainedModel | PeftModel = causal_lm
        self._base: tuple[PreTrainedModel] = (causal_lm,)  # in a tuple, so that it is not registered twice
        # transformers gives it a slice of the states after a prompt. Where that has gaps torch copies the weight for
        # each row before it multiplies: on a CPU 1 s for 16 prompts of SmolLM2 in bfloat16, against 0.01 s.
        head = causal_lm.get_output_embeddings()
        if isinstance(head, nn.Module):
            head.register_forward_pre_hook(lambda _, given: tuple(states.contiguous() for states in given))
        self.eval()
        self._logits_of, self._states = check_base(causal_lm, self.hidden_states)

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

    def logits(self, hidden: Tensor) -> Tensor:
        """The last hidden state (..., H) to logits (..., V), with what the model does to them after `lm_head`."""
        return self._logits_of(self.lm_head(hidden))

    def stop_token_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The tokens that end a response, of which a chat model has several: the tokenizer's own, the checkpoint's."""
        return list(dict.fromkeys([int(tokenizer.eos_token_id), *self.checkpoint_stops]))

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        """Last hidden states (B, L, H), of which `logits` can be made."""
        kwargs |= {"attention_mask": attention_mask, "use_cache": "past_key_values" in kwargs}
        return self.causal_lm.base_model(input_ids=input_ids, **kwargs).last_hidden_state

    def forward(self, **kwargs: Any) -> Any:
        return self.causal_lm(**kwargs)

    @torch.no_grad()
    def generate(self, input_ids: Tensor, attention_mask: Tensor, config: GenerationConfig, **further: Any) -> Tensor:
        """What comes after left-padded prompts (B, P): int64 (B, T). No setting comes from the checkpoint."""
        with self.in_eval_mode(), self.unpacked() if self.device.type == "cpu" else nullcontext():
            output = self.causal_lm.generate(
                input_ids=input_ids, attention_mask=attention_mask, generation_config=config, **further
            )
        return output[:, input_ids.shape[1] :]

    def autocast(self) -> torch.autocast:
        """The precision of training, that of the base: without it float32 adapters would cast at each layer."""
        dtype = self.causal_lm.dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not torch.float32)

    @contextmanager
    def unpacked(self) -> Iterator[None]:
        """Where there is room for them, the 4-bit layers hold their weights in 16 bits (or 32) too inside.

        On a CPU each pass of a layer unpacks it, and multiplies then: the results are the same bits. Decoding would do
        so for each token. (On a GPU bitsandbytes has kernels that unpack as they multiply.)
        """
        layers: list[Any] = [module for module in self.causal_lm.modules() if type(module) is Linear4bit]
        layers = [layer for layer in layers if layer.compute_dtype in (None, layer.weight.quant_state.dtype)]
        size = sum(layer.in_features * layer.out_features * layer.weight.quant_state.dtype.itemsize for layer in layers)
        if psutil.virtual_memory().available < 2 * size:
            layers = []
        for layer in layers:
            layer.forward = partial(_linear, layer, dequantize_4bit(layer.weight, layer.weight.quant_state))
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    @contextmanager
    def in_eval_mode(self) -> Iterator[None]:
        """Adapter dropout and gradient checkpointing are off inside, as they were afterwards."""
        was_training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(was_training)


def _linear(layer: Linear4bit, weight: Tensor, x: Tensor) -> Tensor:
    if layer.compute_dtype is None and x.dtype != weight.dtype:
        return Linear4bit.forward(layer, x)
    bias = None if layer.bias is None else layer.bias.to(weight.dtype)
    return torch.nn.functional.linear(x.to(weight.dtype), weight, bias).to(x.dtype)
