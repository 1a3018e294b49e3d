import re

import pytest
import torch

from benchmarks import architectures
from benchmarks.architectures import BEGIN, END, PAGE, NotTiny, Row, examine, page

PARTS = {"log-probabilities", "rewards", "gradients", "gradients, checkpointing", "generation", "saved"}


def test_a_right_one_is_right_in_every_part_and_its_noise_is_on():
    row = examine("starcoder2")
    assert row.is_right and row.apart.keys() == PARTS
    model = architectures.tiny_model("starcoder2").train()
    torch.manual_seed(0)
    with torch.no_grad():
        one, other = (model(input_ids=torch.tensor([[3, 5, 9]])).logits for _ in range(2))
    assert not torch.allclose(one, other, atol=1e-3)


@pytest.mark.parametrize(
    ("spoilt", "part"),
    [("response_logprobs", "log-probabilities"), ("sequence_logits", "rewards"), ("response_values", "gradients")],
)
def test_a_wrong_one_is_found(spoilt, part, monkeypatch):
    plain = getattr(architectures, spoilt)
    monkeypatch.setattr(architectures, spoilt, lambda *given, **named: 1.001 * plain(*given, **named))
    row = examine("llama")
    assert not row.is_right and row.apart[part] > architectures.RIGHT and row.apart["generation"] <= architectures.RIGHT


def test_a_refusal_is_a_sentence_and_what_cannot_be_made_small_is_left_out():
    row = examine("phimoe")
    assert row.refused.startswith("a PhimoeForCausalLM applies its dropout or jitter") and not row.is_right
    row = examine("openai-gpt")
    assert row.is_right and row.apart.keys() == PARTS - {"gradients, checkpointing"}
    with pytest.raises(NotTiny, match="more than text"):
        architectures.tiny_model("gemma3")


def test_the_page_has_what_was_found():
    rows = [
        Row("a", "A", dict.fromkeys(PARTS, 1e-7)),
        Row("b", "B", {"saved": float("nan")}, failed="KeyError: x"),
        Row("c", "C", refused="no."),
    ]
    made = page(rows, {"d": "too large"})
    assert re.search(r"## Right\n\n.*\n.*\n\| `a` \| 1e-07 \|", made) and "## Wrong" in made
    assert (
        "| `b` | none, refused |" in made
        and "| KeyError: x |" in made
        and "| `c` | no. |" in made
        and "of them: `d`." in made
    )


def test_the_page_as_committed_has_nothing_wrong():
    text = PAGE.read_text(encoding="utf-8").partition(f"<!-- {BEGIN} -->")[2].partition(f"<!-- {END} -->")[0]
    right, refused = text.partition("## Refused")[::2]
    assert right.count("\n| `") > 80 and refused.count("\n| `") > 5 and "## Wrong" not in text
