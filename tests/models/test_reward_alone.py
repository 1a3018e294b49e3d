"""A reward read through the shared base is the one that plain PEFT and transformers give for the same adapter."""

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig

from tests.conftest import lora, randomize, tiny_model
from toolkit.data import pad_rows
from toolkit.models import SharedBase, load_base, save_role, sequence_logits

# float32 around the 4-bit weights: transformers would compute its head in the base's bfloat16, and ours never is.
NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
)
ROWS = [[1, 5, 9, 12, 2], [1, 7, 2], [1, 30, 31, 32, 33, 34, 35, 2], [1, 8, 8]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model(size=64).save_pretrained(folder)
    return str(folder)


def four_bit(model):
    found = [module for module in model.modules() if isinstance(module, Linear4bit)]
    assert len(found) == 14
    return found


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad_token_id", [0, 2])  # 2 is the end of sequence
def test_on_a_shared_nf4_base(pad_token_id, side, checkpoint, tmp_path):
    base = SharedBase(load_base(checkpoint, quantization=NF4, dtype="float32"))
    for role in ("policy", "reward"):
        base.add_role(role, lora())
    base.add_role("reference")
    base.add_role("value", lora())
    randomize(base, "policy", "value", "reward")
    save_role(base, "reward", tmp_path, pad_token_id=pad_token_id, base_name=checkpoint)
    alone = AutoModelForSequenceClassification.from_pretrained(
        checkpoint, num_labels=1, quantization_config=NF4, dtype=torch.float32, pad_token_id=pad_token_id
    )
    for module in four_bit(alone):
        # As in `load_base`: bitsandbytes repacks the weights on some CPUs, for a kernel that computes in bfloat16.
        module.support_avx512bf16_for_cpu = False
    alone = PeftModel.from_pretrained(alone, str(tmp_path)).eval()
    ids, mask = pad_rows(ROWS, pad_token_id=pad_token_id, side=side)
    with torch.no_grad(), base.role("policy"), base.in_eval_mode():
        ours = sequence_logits(base, ids, mask, pad_token_id=pad_token_id)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        theirs = alone(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    assert all(module.weight.quant_type == "nf4" for model in (base, alone) for module in four_bit(model))
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
