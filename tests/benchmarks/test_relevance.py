import pytest
import torch
from transformers import BertConfig, BertModel

from benchmarks import relevance
from benchmarks.fooled import _apart, belonging
from tests.trainers.helpers import rollout
from toolkit.data import doubling
from toolkit.rewards import load_function


@pytest.fixture
def encoder(tmp_path):
    torch.manual_seed(0)
    tokenizer = doubling.tokenizer()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    folder = tmp_path / "encoder"
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_what_a_person_says_last_is_read():
    turns = (("user", "first"), ("assistant", "yes"), ("user", "and\nlast"))
    chat = "".join(f"<|im_start|>{who}\n{says}<|im_end|>\n" for who, says in turns)
    assert relevance.asked(f"{chat}<|im_start|>assistant\n") == "and\nlast"
    assert relevance.asked("\n\nHuman: first\n\nAssistant: yes\n\nHuman: and\nlast\n\nAssistant:") == "and\nlast"
    assert relevance.asked("of neither form") == "of neither form"


def test_a_response_is_as_relevant_as_the_cosine_of_mean_states_says(encoder):
    texts, others = ["123", "大写:45"], ["123", "9"]
    model, tokenizer = BertModel.from_pretrained(encoder).eval(), doubling.tokenizer()

    def mean(text):
        with torch.no_grad():
            return model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0].double().mean(dim=0)

    expected = [float(torch.cosine_similarity(mean(a), mean(b), dim=0)) for a, b in zip(texts, others, strict=True)]
    found = relevance.relevance(texts, others, encoder)  # padded to one length
    assert found == pytest.approx(expected, abs=1e-5) and found[0] == pytest.approx(1.0) and found[1] < 0.99


def test_a_recipe_names_it_by_a_file(encoder, tmp_path):
    given = rollout([[4, 5], [6], [7, 8], [9]])
    found = load_function(relevance.as_function(encoder, tmp_path))(given)
    assert found == relevance.relevance(given.prompts, given.responses, encoder)


def test_own_responses_are_told_from_others(encoder):
    rows = [{"chosen": f"\n\nHuman: {i}2\n\nAssistant: {i}2", "rejected": "unread"} for i in range(1, 6)]
    pairs = [_apart(pair) for pair in belonging(rows, seed=3)]
    assert all(asked.endswith(f"Human: {own}\n\nAssistant:") and own != other for asked, own, other in pairs)
    assert relevance.share_told(pairs, encoder) == 1.0
    assert relevance.share_told([(asked, other, own) for asked, own, other in pairs], encoder) == 0.0
