"""The value role on a base of its own."""

import json
from dataclasses import replace

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from benchmarks.architectures import tiny_config
from tests.tiny_models import ARCHITECTURES, SPECIAL, lora, shared_base, tiny_model
from tests.tolerances import EXACT
from toolkit.data import doubling
from toolkit.errors import AdapterError, ModelError
from toolkit.models import (
    ModelSpec,
    ScoreHead,
    Sequences,
    SharedBase,
    ValueModel,
    load_value_model,
    load_weights,
    response_values,
    save_role,
    value_after_response,
)

PROMPTS, RESPONSES = [[1, 4, 9], [1, 30, 31, 32]], [[7, 8, 2], [5, 2]]


@pytest.fixture(params=ARCHITECTURES)
def checkpoint(request, tmp_path):
    """A language model's folder with its tokenizer."""
    tiny_model(request.param).save_pretrained(tmp_path / "lm")
    doubling.tokenizer().save_pretrained(tmp_path / "lm")
    return str(tmp_path / "lm")


def loaded(checkpoint: str, *, lora, head_bias: bool = False) -> ValueModel:
    """Without the comparison of tokenizers: that of Qwen 2 has a token that the test's has not."""
    classifier = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1)
    return ValueModel(classifier, lora, head=ScoreHead(classifier.score.in_features, 1, bias=head_bias))


def placed(model: ValueModel) -> SharedBase:
    base = SharedBase(tiny_model())
    base.add_role("policy", lora())
    base.add_role("reference")
    base.place_value(model)
    base.train_roles("policy", "value")
    return base


def sequences():
    return Sequences.from_ids(PROMPTS, RESPONSES, pad_token_id=0, device=torch.device("cpu"))


def randomized(model: ValueModel) -> ValueModel:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in [*(model.body_parameters if model.lora else []), *model.head.parameters()]:
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("adapter", [True, False], ids=["adapter", "all weights"])
def test_saved_it_is_what_transformers_loads_and_reads_alike(checkpoint, adapter, tmp_path):
    base = placed(randomized(loaded(checkpoint, lora=lora() if adapter else None)))
    with base.role("value"), torch.no_grad():
        ours, after = response_values(base, sequences()), value_after_response(base, sequences())
    folder = save_role(base, "value", tmp_path / "value", pad_token_id=0, base_name=checkpoint)
    kind = AutoPeftModelForSequenceClassification if adapter else AutoModelForSequenceClassification
    plain = kind.from_pretrained(str(folder), num_labels=1).eval()
    # A classifier reads one place: the last token of what it is given that is no padding.
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        for t in range(len(response) + 1):
            ids = torch.tensor([prompt + response[:t]])
            with torch.no_grad():
                expected = plain(input_ids=ids).logits.item()
            found = ours[row, t] if t < len(response) else after[row]
            assert found.item() == pytest.approx(expected, abs=1e-5)
    assert ours[1, 2] == 0  # outside the mask


def test_its_adapter_names_its_own_base(checkpoint, tmp_path):
    folder = save_role(placed(loaded(checkpoint, lora=lora())), "value", tmp_path, pad_token_id=0, base_name="another")
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == checkpoint


def test_saved_whole_it_leaves_nothing_of_an_earlier_value_beside_it(tmp_path):
    config = tiny_model().config
    config.num_labels = 1
    whole = placed(ValueModel(AutoModelForSequenceClassification.from_config(config), None))
    for earlier in ("separate", "shared"):
        save_role(shared_base(value=earlier), "value", tmp_path, pad_token_id=0, base_name="tiny")
        save_role(whole, "value", tmp_path, pad_token_id=0, base_name="tiny")
        assert {"config.json", "model.safetensors"} <= (names := {path.name for path in tmp_path.iterdir()})
        assert not names & {"adapter_config.json", "adapter_model.safetensors", "value_head.safetensors"}


def test_an_adapter_that_does_not_fit_it(tmp_path):
    config = tiny_model().config
    config.num_labels = 1
    classifier = AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(AdapterError, match='target_modules: the base has no module "v_prj". Did you mean v_proj?'):
        ValueModel(classifier, replace(lora(), target_modules=["q_proj", "v_prj"]))


@pytest.mark.parametrize("adapter", [True, False], ids=["adapter", "all weights"])
def test_round_trip(checkpoint, adapter, tmp_path):
    settings = {"lora": lora() if adapter else None, "head_bias": True}
    base = placed(randomized(loaded(checkpoint, **settings)))
    save_role(base, "value", tmp_path / "value", pad_token_id=0, base_name=checkpoint)
    other = placed(loaded(checkpoint, **settings))
    load_weights(other, "value", tmp_path / "value")
    assert len(base.parameters_of("value")) > 2
    for one, two in zip(base.parameters_of("value"), other.parameters_of("value"), strict=True):
        assert torch.equal(one, two)
    wrong = placed(loaded(checkpoint, **{**settings, "head_bias": False}))
    message = "the head has bias and weight, and the role weight" if adapter else "1 of the weights .*score.bias first"
    with pytest.raises(AdapterError, match=message):
        load_weights(wrong, "value", tmp_path / "value")


def test_it_starts_as_a_copy_of_a_reward_model(tmp_path):
    tiny_model("opt").save_pretrained(tmp_path / "lm")
    reward = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=1)
    reward.save_pretrained(tmp_path / "reward")
    doubling.tokenizer().save_pretrained(tmp_path / "reward")
    spec = ModelSpec(str(tmp_path / "reward"), dtype="float32")
    made = load_value_model(spec, doubling.tokenizer(), lora=None)
    assert torch.equal(made.head.weight, reward.score.weight)
    for other in ({"head_bias": True}, {"head_init": "zeros"}):
        for device in (None, torch.device("meta")):  # as a check has it, before anything is trained
            with pytest.raises(ModelError, match="bias and initialisation would have no effect: .* has a trained head"):
                load_value_model(spec, doubling.tokenizer(), lora=None, device=device, **other)
    torch.testing.assert_close(
        made.backbone.decoder.layers[0].fc1.weight, reward.model.decoder.layers[0].fc1.weight, **EXACT
    )


def test_only_its_own_parameters_train_and_the_policy_s_gradient_is_untouched():
    made = ValueModel(small("gpt2"), lora())
    base = placed(made)
    assert {id(p) for p in base.parameters_of("value")} == {id(p) for p in made.parameters() if p.requires_grad}
    with base.role("value"):
        response_values(base, sequences()).sum().backward()
    assert all(p.grad is not None for p in base.parameters_of("value"))
    assert all(p.grad is None for p in base.parameters_of("policy"))
    base.train_roles("policy")
    assert not any(p.requires_grad for p in made.parameters())
    assert base.packs_rows
    made.packs_rows = False  # of a critic that cannot keep rows apart
    assert not base.packs_rows


def test_a_critic_whose_states_reach_from_row_to_row_is_not_packed():
    config = tiny_config("bloom")
    config.num_labels = 1
    torch.manual_seed(0)
    assert not ValueModel(AutoModelForSequenceClassification.from_config(config), None).packs_rows


def small(architecture):
    """A classifier on random weights, with its head."""
    config = tiny_model(architecture).config
    config.num_labels = 1
    torch.manual_seed(1)
    return AutoModelForSequenceClassification.from_config(config)


def test_what_reads_both_ways_is_refused():
    torch.manual_seed(0)
    bert = BertForSequenceClassification(
        BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=1,
                   **SPECIAL)
    )  # fmt: skip
    with pytest.raises(ModelError, match="BertForSequenceClassification has no head `score`"):
        ValueModel(bert, None)
    bert.score = bert.classifier  # with one, it still sees what comes
    with pytest.raises(ModelError, match="is not causal"):
        ValueModel(bert, None)


def test_other_tokens_are_refused(tmp_path):
    tokenizer = doubling.tokenizer()
    tiny_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    tokenizer.add_tokens(["more"])
    with pytest.raises(ModelError, match=r"^model: .* has another tokenizer than base \(1 entries differ\)"):
        load_value_model(ModelSpec(str(tmp_path)), tokenizer, lora=None)
    with pytest.raises(ModelError, match='^model: no checkpoint could be loaded from the folder or hub id "nowhere"'):
        load_value_model(ModelSpec("nowhere"), tokenizer, lora=None)


def test_a_head_starts_orthogonal_with_gain_root_two():
    torch.manual_seed(0)
    head = ScoreHead(64, 1, init="orthogonal", bias=True)
    assert head.weight.norm().item() == pytest.approx(2**0.5, abs=1e-5)  # one row: its length is the gain
    assert torch.equal(head.bias.detach(), torch.zeros(1))
    rows = ScoreHead(64, 3, init="orthogonal").weight
    torch.testing.assert_close(rows @ rows.T, 2 * torch.eye(3), rtol=0.0, atol=1e-5)
    assert ScoreHead(64, 1).bias is None
    assert torch.count_nonzero(ScoreHead(64, 2, init="zeros").weight) == 0
    assert ScoreHead(4096, 1).weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("value", ["separate", "shared"])
def test_a_bias_of_the_value_head_is_kept(value, tmp_path):
    from toolkit.models import load_role

    base = SharedBase(tiny_model())
    base.add_role("policy", lora())
    base.add_role("value", lora() if value == "separate" else None, head_bias=True)
    with torch.no_grad():
        base.head("value").bias.fill_(3.0)
    save_role(base, "value", tmp_path, pad_token_id=0, base_name="tiny")
    assert json.loads((tmp_path / "role.json").read_text())["head_bias"] is True  # which PEFT would leave out
    other = SharedBase(tiny_model())
    other.add_role("policy", lora())
    load_role(other, "value", tmp_path)
    assert other.head("value").bias.item() == 3.0
    load_weights(other, "value", tmp_path)
    with pytest.raises(AdapterError, match="the head has bias and weight, and the role weight"):
        load_weights(shared_base(value=value), "value", tmp_path)


def test_a_head_begins_as_it_is_asked_to_on_either_base(tmp_path):
    base = SharedBase(tiny_model())
    base.add_role("policy", lora())
    base.add_role("value", lora(), head_init="zeros")
    assert not base.head("value").weight.any()
    tiny_model().save_pretrained(tmp_path)
    doubling.tokenizer().save_pretrained(tmp_path)
    spec = ModelSpec(str(tmp_path), dtype="float32")
    made = load_value_model(spec, doubling.tokenizer(), lora=None, head_init="zeros")
    assert not made.head.weight.any()
