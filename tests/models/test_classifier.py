import pytest
import torch

from tests.tiny_models import lora, tiny_model
from tests.trainers.helpers import own_classifier
from toolkit.errors import AdapterError, ModelError
from toolkit.models import add_lora, check_reads_tokens, head_name, table_of_positions


def test_a_head_by_either_name_under_an_adapter_too():
    bert, llama = own_classifier("bert"), own_classifier("llama")
    assert (head_name(bert), head_name(llama), head_name(add_lora(llama, lora()))) == ("classifier", "score", "score")
    del bert.classifier
    with pytest.raises(ModelError, match="is called neither score nor classifier"):
        head_name(bert)


def test_a_head_that_reads_the_whole_sequence_cannot_be_read_at_every_token():
    check_reads_tokens(add_lora(own_classifier("llama"), lora()))
    with pytest.raises(ModelError, match="^loss: token_level reads the head at every token, and that of a BertForSeq"):
        check_reads_tokens(own_classifier("bert"))


def test_an_adapter_that_does_not_fit():
    with pytest.raises(AdapterError, match='target_modules: the base has no module "q_proj". Known: classifier'):
        add_lora(own_classifier("bert"), lora().__class__(target_modules=["q_proj"]))


@pytest.mark.parametrize(
    "more", [{"modules_to_save": ["embed_tokens"]}, {"bias": "all"}, {"init_lora_weights": "pissa"}]
)
def test_an_adapter_that_is_more_than_one_is_refused(more):
    with pytest.raises(AdapterError, match=f"^{next(iter(more))}: .* of the base, which is to stay as it is"):
        add_lora(own_classifier("llama"), lora(**more))


def test_a_base_under_an_adapter_draws_nothing_in_training():
    model = own_classifier("bert")
    assert any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))
    adapted, ids = add_lora(model, lora(lora_dropout=0.5)).train(), torch.tensor([[1, 5, 9]])
    rates = {module.p for module in adapted.modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {0.0, 0.5}  # the base's is off, the adapter's as asked for
    one, two = (add_lora(own_classifier("bert"), lora()).train() for _ in range(2))
    two.load_state_dict(one.state_dict())
    with torch.no_grad():
        assert torch.equal(one(input_ids=ids).logits, two(input_ids=ids).logits)


@pytest.mark.parametrize("architecture", ["gpt2", "opt"])
def test_a_table_of_positions_is_as_long_as_what_the_model_takes(architecture):
    model = tiny_model(architecture)
    limit = table_of_positions(model)
    with torch.no_grad():
        assert model(input_ids=torch.full((1, limit), 5)).logits.shape[1] == limit
        with pytest.raises(IndexError):
            model(input_ids=torch.full((1, limit + 1), 5))
