"""The value role on a base of its own: another decoder, smaller perhaps, that reads the same tokens."""

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from toolkit.errors import AdapterError, ModelError
from toolkit.models.base import default_device, keep_differentiable, switch_off_dropout
from toolkit.models.classifier import classifier_config, not_loaded
from toolkit.models.heads import HeadInit, ScoreHead

_ADAPTER = "value"


class ValueModel(nn.Module):
    """A transformers sequence classifier of one output, whose head is read at every token instead of the last.

    That form makes a trained one an ordinary checkpoint, and lets it start as a copy of a reward model.

    Args:
        classifier: a decoder with a head `score`. Its dropout is switched off.
        config: LoRA configuration of an adapter on its decoder, which is frozen then; None trains all weights.
        head: in place of the classifier's own; its own weights, in float32, if None.

    Raises:
        ModelError: the classifier is no decoder, so that a value would have seen what comes after it.
        AdapterError: the adapter does not fit it.
    """

    def __init__(self, classifier: PreTrainedModel, config: LoraConfig | None, *, head: ScoreHead | None = None):
        super().__init__()
        own = getattr(classifier, "score", None)
        if not isinstance(own, nn.Linear) or own.out_features != 1:
            raise ModelError(
                f"value_model: a {type(classifier).__name__} has no head `score` of one output. Decoders such as "
                "Llama, Mistral, Qwen, GPT-2 and OPT have one."
            )
        switch_off_dropout(classifier)
        if head is None:
            head = ScoreHead(own.in_features, 1)
            if own.weight.device.type != "meta":
                head.weight.data = own.weight.data.float()
        classifier.score = head.to(own.weight.device)
        self.classifier, self.lora = classifier, config
        classifier.requires_grad_(config is None)
        self._peft: tuple[PeftModel, ...] = ()  # in a tuple, so that nothing is registered twice
        if config is not None:
            if config.bias != "none" or config.modules_to_save or config.trainable_token_indices:
                raise AdapterError(
                    "adapters.value: bias, modules_to_save and trainable_token_indices are not for a value model."
                )
            bare = copy.deepcopy(config)
            bare.task_type = None  # PEFT's class for a task wants what a decoder alone does not have
            try:
                self._peft = (get_peft_model(self.backbone, bare, adapter_name=_ADAPTER),)
            except ValueError as error:
                raise AdapterError(f"adapters.value: {error}") from error
        head.requires_grad_(True)
        self._body = [
            p for name, p in classifier.named_parameters() if p.requires_grad and not name.startswith("score.")
        ]
        self.eval()
        self._check_causal()

    @property
    def backbone(self) -> PreTrainedModel:
        """The decoder under the head."""
        return getattr(self.classifier, self.classifier.base_model_prefix)

    @property
    def head(self) -> ScoreHead:
        """Maps the last hidden state (..., H) to a value (..., 1)."""
        head = self.classifier.score
        assert isinstance(head, ScoreHead)
        return head

    @property
    def body_parameters(self) -> list[nn.Parameter]:
        """What trains besides the head: the adapter's weights, or all of the decoder's."""
        return self._body

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        """Last hidden states (B, L, H)."""
        output = self.backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **kwargs)
        return output.last_hidden_state

    @torch.no_grad()
    def _check_causal(self) -> None:
        """A value must not know what comes after its token: a classifier that reads both ways would."""
        embeddings = self.backbone.get_input_embeddings().weight
        if embeddings.device.type == "meta":
            if type(self.classifier.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
                raise ModelError(f"value_model: a model of type {self.classifier.config.model_type} is no decoder.")
            return
        first = torch.arange(4, device=embeddings.device).unsqueeze(0) % embeddings.shape[0]
        other = first.clone()
        other[0, -1] = (other[0, -1] + 1) % embeddings.shape[0]
        mask = torch.ones_like(first)
        one, two = (self.hidden_states(ids, mask)[:, :-1].float() for ids in (first, other))
        if not torch.allclose(one, two, rtol=1e-3, atol=1e-3):
            raise ModelError(
                f"value_model: a {type(self.classifier).__name__} reads both ways, so that a value would know what "
                "comes after its token. Take a decoder, such as Llama, Mistral, Qwen, GPT-2 or OPT."
            )

    def gradient_checkpointing_enable(self, options: dict[str, Any] | None = None) -> None:
        """Switch checkpointing on."""
        self.classifier.gradient_checkpointing_enable({**(options or {}), "use_reentrant": False})

    def gradient_checkpointing_disable(self) -> None:
        """Switch checkpointing off."""
        self.classifier.gradient_checkpointing_disable()

    # ------------------------------------------------------------------ on disk

    def save(self, folder: Path, *, base_name: str) -> None:
        """Write a PEFT folder with the head as `score`, or a whole checkpoint for sequence classification.

        Args:
            folder: exists.
            base_name: hub id or path of the value model's own base, for those who load an adapter elsewhere.
        """
        if self.lora is None:
            self.classifier.save_pretrained(folder)
            return
        config = copy.deepcopy(self.lora)
        config.inference_mode, config.base_model_name_or_path = True, base_name
        config.task_type, config.modules_to_save = "SEQ_CLS", ["score"]
        config.save_pretrained(folder)
        state = {key: tensor.detach().cpu().contiguous() for key, tensor in self._saved_tensors().items()}
        save_file(state, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})

    def _saved_tensors(self) -> dict[str, Tensor]:
        """By the names that they are saved under."""
        if self.lora is None:
            return self.classifier.state_dict()
        state = get_peft_model_state_dict(self._peft[0], adapter_name=_ADAPTER, save_embedding_layers=False)
        adapter = {f"{self._prefix}{key.removeprefix('base_model.model.')}": tensor for key, tensor in state.items()}
        return adapter | {f"base_model.model.score.{name}": tensor for name, tensor in self.head.state_dict().items()}

    @property
    def _prefix(self) -> str:
        """Between an adapter on the classifier, which is saved, and one on its decoder, which is here."""
        return f"base_model.model.{self.classifier.base_model_prefix}."

    def load(self, state: dict[str, Tensor], folder: Path) -> None:
        """Put what `save` wrote into this model.

        Args:
            state: the tensors of the folder, by name.
            folder: for messages.

        Raises:
            AdapterError: they are of another model.
        """
        expected = self._saved_tensors()
        wrong = sorted(set(state) ^ set(expected)) or [k for k, v in expected.items() if v.shape != state[k].shape]
        if wrong:
            raise AdapterError(
                f"{folder}: this value role belongs to another model: {len(wrong)} of its weights do not fit, "
                f"{wrong[0]} first. Check value_model and adapters.value."
            )
        if self.lora is None:
            self.classifier.load_state_dict(state)
            return
        adapter = {
            f"base_model.model.{key.removeprefix(self._prefix)}": tensor
            for key, tensor in state.items()
            if key.startswith(self._prefix)
        }
        set_peft_model_state_dict(self._peft[0], adapter, adapter_name=_ADAPTER)
        self.head.load_state_dict({k.rpartition(".")[2]: v for k, v in state.items() if ".score." in k})


def load_value_model(
    path: str | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    config: dict[str, Any] | None = None,
    lora: LoraConfig | None,
    head_init: HeadInit = "normal",
    head_bias: bool = False,
    quantization: BitsAndBytesConfig | None = None,
    dtype: str = "bfloat16",
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    device: torch.device | None = None,
) -> ValueModel:
    """A value model from a checkpoint, of a language model or of a reward model, or with random weights.

    Args:
        path: hub id or folder with safetensors weights; None for random ones.
        tokenizer: the policy's.
        config: of random weights: `model_type` and that configuration's arguments.
        lora: of the adapter; None trains all weights.
        head_init: of a head that the checkpoint does not have: see `ScoreHead`.
        head_bias: likewise.
        quantization: as for `from_pretrained`.
        dtype: of the weights that are not quantised.
        revision: of a hub id.
        attn_implementation: as for `from_pretrained`.
        trust_remote_code: run code that comes with the checkpoint. Off unless the user says so.
        device: defaults to the first GPU, else the CPU; "meta" gives names and shapes alone.

    Raises:
        ModelError: no such checkpoint, no decoder, other tokens than the policy's, or settings of a head where the
            checkpoint has one.
        AdapterError: the adapter does not fit it.
    """
    device = device or default_device()
    found = classifier_config(
        tokenizer,
        num_labels=1,
        model=path,
        config=config,
        revision=revision,
        trust_remote_code=trust_remote_code,
        place="value_model",
    )
    arguments: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": attn_implementation}
    if path is None or device.type == "meta":
        classifier, has_head = _from_config(found, device, arguments), False
    else:
        arguments |= {"revision": revision, "trust_remote_code": trust_remote_code}
        classifier, has_head = _from_checkpoint(path, found, device, quantization, arguments)
    if has_head and (head_bias or head_init != "normal"):
        raise ModelError(f'value_head would have no effect: "{path}" has a trained head, with which the role starts.')
    head = None if has_head else ScoreHead(classifier.score.in_features, 1, init=head_init, bias=head_bias)
    return ValueModel(classifier, lora, head=head)


def _from_config(config: PreTrainedConfig, device: torch.device, arguments: dict[str, Any]) -> PreTrainedModel:
    try:
        with device:
            return AutoModelForSequenceClassification.from_config(config, **arguments)
    except (TypeError, ValueError, KeyError) as error:
        raise ModelError(f"value_model: transformers cannot build this model: {error}") from error


def _from_checkpoint(
    path: str,
    config: PreTrainedConfig,
    device: torch.device,
    quantization: BitsAndBytesConfig | None,
    arguments: dict[str, Any],
) -> tuple[PreTrainedModel, bool]:
    """The classifier, and whether the checkpoint has a head for it."""
    log = logging.getLogger("transformers.modeling_utils")
    level = log.level
    log.setLevel(logging.ERROR)  # a language model has no score and its lm_head is not wanted: a table of warnings
    try:
        classifier, report = AutoModelForSequenceClassification.from_pretrained(
            path,
            config=config,
            quantization_config=quantization,
            use_safetensors=True,
            device_map={"": device},
            output_loading_info=True,
            **arguments,
        )
    except (OSError, ValueError) as error:
        raise not_loaded("value_model", path, error) from error
    finally:
        log.setLevel(level)
    missing = sorted(set(report["missing_keys"]) - {"score.weight"})
    if missing:
        raise ModelError(f'value_model.model: "{path}" has no weights for {", ".join(missing[:3])}. Name a whole one.')
    keep_differentiable(classifier)
    return classifier, not report["missing_keys"]
