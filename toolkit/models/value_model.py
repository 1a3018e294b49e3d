"""The value role on a base of its own: another decoder, smaller perhaps, that reads the same tokens."""

import copy
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel, PreTrainedTokenizerBase

from toolkit.errors import ModelError
from toolkit.models.base_checks import check_states, rows_can_be_packed
from toolkit.models.heads import HeadInit, ScoreHead
from toolkit.models.load import ModelSpec, load_with_report
from toolkit.models.lora import fitting


class ValueModel(nn.Module):
    """A transformers sequence classifier of one output, whose head is read at every token instead of the last.

    That form makes a trained one an ordinary checkpoint, and lets it start as a copy of a reward model.

    Args:
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
            wrong = f"a {type(classifier).__name__} has no head `score` of one output."
            raise ModelError(wrong, remedy="Decoders such as Llama, Mistral, Qwen, GPT-2 and OPT have one.")
        if head is None:
            head = ScoreHead(own.in_features, 1)
            if own.weight.device.type != "meta":
                head.weight.data = own.weight.data.float()
        classifier.score = head.to(own.weight.device)
        self.classifier, self.lora = classifier, config
        classifier.requires_grad_(config is None).eval()
        if own.weight.is_meta and type(classifier.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ModelError(f"a model of type {classifier.config.model_type} is no decoder.")
        states = check_states(classifier, self.hidden_states)
        self.packs_rows = rows_can_be_packed(classifier, self.hidden_states, states)
        self._adapted: tuple[PeftModel | None] = (None,)  # in a tuple, so that nothing is registered twice
        if config is not None:
            config = copy.deepcopy(config)
            config.task_type = "SEQ_CLS"  # so that `all-linear` leaves the head out
            with fitting(classifier, config):
                # Not PEFT's class for classifiers, which would train a second head.
                self._adapted = (PeftModel(classifier, config, adapter_name="value"),)
        head.requires_grad_(True)
        named = classifier.named_parameters()
        self.body_parameters = [p for name, p in named if p.requires_grad and not name.startswith("score.")]
        self.eval()

    @property
    def adapted(self) -> PeftModel | None:
        """PEFT's model around the classifier, whose adapter is called "value"; None where all weights are trained."""
        return self._adapted[0]

    @property
    def backbone(self) -> PreTrainedModel:
        """The decoder under the head."""
        return getattr(self.classifier, self.classifier.base_model_prefix)

    @property
    def head(self) -> ScoreHead:
        return self.classifier.score

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        """Last hidden states (B, L, H). The policy's base may have more rows than there are tokens, and draw an id that
        has no row here: it is read as the last, so that a run which drew it goes on."""
        kwargs |= {"attention_mask": attention_mask, "use_cache": False}
        known = input_ids.clamp(max=self.backbone.get_input_embeddings().weight.shape[0] - 1)
        return self.backbone(input_ids=known, **kwargs).last_hidden_state


def load_value_model(
    spec: ModelSpec,
    tokenizer: PreTrainedTokenizerBase,
    *,
    lora: LoraConfig | None,
    head_init: HeadInit = "normal",
    head_bias: bool = False,
    device: torch.device | None = None,
) -> ValueModel:
    """A value model from a checkpoint, of a language model or of a reward model, or with random weights.

    Raises:
        ModelError: as for `load_with_report`; it is no decoder, or settings of a head where the checkpoint has one.
        AdapterError: the adapter does not fit it.
    """
    kind: Any = "sequence_classifier"
    classifier, has_head = load_with_report(spec, kind, tokenizer=tokenizer, num_labels=1, device=device)
    if has_head and (head_bias or head_init != "normal"):
        raise ModelError(
            f'the head\'s bias and initialisation would have no effect: "{spec.model}" has a trained head, with which '
            "the role starts.",
            remedy="Leave them out.",
        )
    head = None if has_head else ScoreHead(classifier.score.in_features, 1, init=head_init, bias=head_bias)
    return ValueModel(classifier, lora, head=head)
