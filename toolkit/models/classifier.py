"""A sequence classifier on a base of its own, as the reward stage trains it: given LoRA, saved and read back.

transformers' decoders pool at the last token that is not the padding token, encoders such as BERT at the first one.
What is written here is what `AutoModelForSequenceClassification.from_pretrained`, or for LoRA
`AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=…)`, loads.
"""

import copy
import functools
from pathlib import Path
from typing import Any, TypeAlias

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit.disk import as_the_umask_says
from toolkit.errors import ModelError
from toolkit.models.base_checks import switch_off_dropout
from toolkit.models.decoding import all_positions_of
from toolkit.models.folders import load_whole, put_adapter, read_tensors
from toolkit.models.lora import fitting, trained_copy, under_adapter
from toolkit.models.pretrained import HEAD_NAMES

Classifier: TypeAlias = PreTrainedModel | PeftModel


def head_name(model: Classifier) -> str:
    """What the model calls its head: one of `HEAD_NAMES`, or a `ModelError`."""
    inner = under_adapter(model)
    for name in HEAD_NAMES:
        if isinstance(getattr(inner, name, None), nn.Module):
            return name
    wrong = f"the head of a {type(inner).__name__} is called neither {' nor '.join(HEAD_NAMES)}."
    raise ModelError(wrong, field="model", remedy="Use another base.")


def check_reads_tokens(model: Classifier) -> None:
    """Nothing, if the head can be read at every token; a `ModelError` if it reads whole sequences, as BERT's does."""
    if head_name(model) != "score":
        name = type(under_adapter(model)).__name__
        raise ModelError(
            f"token_level reads the head at every token, and that of a {name} reads the whole sequence at once.",
            field="loss",
            remedy="Use bradley_terry, or a decoder such as Llama, OPT or GPT-2.",
        )


def classifier_token_scores(model: Classifier, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The head of a decoder with one output at every token, float32 (B, L), of rows that are padded on the right."""
    inner = under_adapter(model)
    states = inner.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    return inner.score(states).squeeze(-1)


def add_lora(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """A LoRA adapter on the classifier, whose head trains with it, the base frozen and without dropout.

    Raises:
        AdapterError: none fits, or it is more than an adapter.
    """
    config = copy.deepcopy(config)
    with fitting(model, config):
        switch_off_dropout(model)
        config.task_type, config.modules_to_save = "SEQ_CLS", [head_name(model)]
        config.revision = getattr(model.config, "_commit_hash", None)  # PEFT loads the base at this commit
        return get_peft_model(model, config)


def train_in_float32(model: Classifier) -> None:
    """What trains is float32: in 16 bits AdamW's small steps round to nothing, and neighbouring scores are equal."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    head_in_float32(model)


def head_in_float32(model: Classifier) -> None:
    """Make the classifier's head compute in float32, as `ScoreHead` does."""
    head = trained_copy(getattr(under_adapter(model), head_name(model))).float()
    plain = type(head).forward

    @functools.wraps(plain)
    def forward(hidden: Tensor, *arguments: Any, **named: Any) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return plain(head, hidden.float(), *arguments, **named)

    head.forward = forward


def save_model(model: Classifier, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write a model, or its adapter and head where it has one, with the tokenizer: an ordinary checkpoint folder."""
    if isinstance(model, PeftModel):
        # PEFT would write an empty model card, or change the user's own.
        vars(model)["create_or_update_model_card"] = lambda folder: None
        try:
            # "auto" would ask the hub whether the vocabulary grew; it cannot, the base is frozen.
            model.save_pretrained(str(folder), save_embedding_layers=False)
        finally:
            del vars(model)["create_or_update_model_card"]
    else:
        model.save_pretrained(str(folder))
    if type(under_adapter(model)).__name__.endswith(
        "ForSequenceClassification"
    ):  # which is read with padding on the right
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.padding_side = "right"
    tokenizer.save_pretrained(folder)
    as_the_umask_says(Path(folder).glob("*.safetensors"))


def load_classifier_weights(model: Classifier, folder: str | Path) -> None:
    """Put the weights that `save_model` wrote into a model of the same form."""
    if isinstance(model, PeftModel):
        put_adapter(model, "default", read_tensors(Path(folder)), Path(folder))
    else:
        load_whole(model, Path(folder))


def table_of_positions(model: nn.Module) -> int | None:
    """The longest sequence for which a model has positions in a table, beyond which it breaks off; None where it has no
    table, as with rotary positions."""
    named = ((name.removesuffix(".base_layer").rpartition(".")[2], one) for name, one in model.named_modules())
    tables = [one for name, one in named if isinstance(one, nn.Embedding) and ("pos" in name or name == "wpe")]
    positions = all_positions_of(model.config)
    return None if positions is None or not tables else positions - positions_passed_over(model)


def positions_passed_over(model: nn.Module) -> int:
    """Positions that a model never uses: one of RoBERTa's kind counts from after that of padding."""
    named = ((name.removesuffix(".base_layer"), layer) for name, layer in model.named_modules())
    tables = [layer for name, layer in named if name.endswith("position_embeddings")]
    return max(
        (layer.padding_idx + 1 for layer in tables if getattr(layer, "padding_idx", None) is not None), default=0
    )
