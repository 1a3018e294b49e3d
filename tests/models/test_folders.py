"""Whole models from folders that name their weights in another way than the model does."""

import pytest
import torch
from transformers import MixtralConfig, MixtralForSequenceClassification

from tests.tiny_models import SPECIAL, tiny_model
from toolkit.errors import AdapterError
from toolkit.models.folders import load_whole


def mixtral(**changes):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "num_local_experts": 2, "num_labels": 1}  # fmt: skip
    config = MixtralConfig(**{**SPECIAL, **sizes, **changes})
    return MixtralForSequenceClassification(config).eval()


@pytest.mark.parametrize("made", [mixtral, lambda: tiny_model("gpt2")], ids=["fused experts", "tied embeddings"])
def test_what_save_pretrained_writes_is_read_back(made, tmp_path):
    torch.manual_seed(0)
    model, other = made(), made()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    model.save_pretrained(tmp_path)
    load_whole(other, tmp_path)
    weights = other.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    tied = getattr(other, "lm_head", None)
    assert tied is None or tied.weight is other.get_input_embeddings().weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_another_model_is_refused(device, tmp_path):
    mixtral(num_local_experts=4).save_pretrained(tmp_path)
    with torch.device(device):
        other = mixtral()
    with pytest.raises(AdapterError, match="belongs to another base"):
        load_whole(other, tmp_path)


def test_a_check_without_weights_reads_fused_experts_too(tmp_path):
    mixtral().save_pretrained(tmp_path)
    with torch.device("meta"):
        outline = mixtral()
    load_whole(outline, tmp_path)
    assert {parameter.device.type for parameter in outline.parameters()} == {"meta"}
