import json
import logging
import os
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from huggingface_hub import constants
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BitsAndBytesConfig,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.tiny_models import ARCHITECTURES, lora, randomize, tiny_model
from tests.tiny_runs import byte_tokenizer, save_llama
from tests.tolerances import FP32, RELATIVE
from tests.trainers.helpers import own_classifier
from toolkit.data import doubling
from toolkit.errors import AdapterError, ModelError, ToolkitError
from toolkit.models import (
    META,
    ModelSpec,
    Sequences,
    SharedBase,
    ValueModel,
    about_other_bits,
    load_base,
    load_model,
    load_tokenizer,
    pretrained,
    response_logprobs,
    save_role,
)
from toolkit.models import load as load_module
from toolkit.models.folders import read_tensors
from toolkit.models.load import _loading, load_with_report, model_config
from toolkit.models.pretrained import weight_file_problems
from toolkit.models.trials import tried

NF4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_real_nf4_with_double_quantisation(architecture, tmp_path):
    import bitsandbytes as bnb

    tiny_model(architecture, size=128).save_pretrained(tmp_path)
    model = load_base(str(tmp_path), quantization=NF4)
    # Looked at before any forward pass: the CPU kernel then holds the weights in a layout of its own.
    quantised = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(quantised) >= 2 * 6
    assert all(m.weight.quant_state.quant_type == "nf4" and m.weight.quant_state.nested for m in quantised)
    assert all(m.weight.nbytes == m.in_features * m.out_features // 2 for m in quantised)  # two weights a byte
    base = SharedBase(model)
    base.add_role("policy", lora())
    base.add_role("reference")
    randomize(base, "policy")
    base.train_roles("policy")
    sequences = Sequences.from_ids([[1, 4, 9]], [[12, 13, 2]], pad_token_id=0)
    base.train()
    with torch.autocast("cpu", torch.bfloat16), base.role("policy"):
        response_logprobs(base, sequences).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in base.parameters_of("policy"))
    assert all(p.dtype == torch.float32 for p in base.parameters_of("policy"))
    assert not any(p.requires_grad for n, p in base.named_parameters() if "lora_" not in n)


def test_nf4_gradients_on_a_cpu_are_those_of_the_dequantised_model(tmp_path):
    tiny_model(size=128).save_pretrained(tmp_path)
    exact = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    sequences = Sequences.from_ids([[1, 4, 9]], [[12, 13, 2]], pad_token_id=0)
    found = []
    for dequantise in (False, True):
        model = load_base(str(tmp_path), quantization=exact, dtype="float32")
        base = SharedBase(model.dequantize() if dequantise else model)
        base.add_role("policy", lora())
        randomize(base, "policy")
        base.train_roles("policy")
        # A rollout comes first. Left to itself bitsandbytes then repacks the weights, and the gradient is wrong.
        with base.role("policy"), base.in_eval_mode(), torch.no_grad():
            response_logprobs(base, sequences)
        base.train()
        with base.role("policy"):
            response_logprobs(base, sequences).sum().backward()
        found.append([p.grad for p in base.parameters_of("policy")])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() < RELATIVE * theirs.abs().max()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures_load_unquantised_and_frozen(architecture, tmp_path):
    tiny_model(architecture).save_pretrained(tmp_path)
    model = load_base(str(tmp_path), dtype="float32")
    assert not any(p.requires_grad for p in model.parameters())
    base = SharedBase(model)
    base.add_role("reward", lora())
    assert base.head("reward").in_features == (16 if architecture == "opt" else 32)


def test_a_checkpoint_of_pickles_is_not_read(tmp_path):
    model = tiny_model()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        load_base(str(tmp_path))


@pytest.mark.parametrize("device", [None, META])
def test_an_adapter_beside_the_weights_is_not_put_on_them(device, tmp_path):
    """Which transformers does unasked."""
    base = SharedBase(tiny_model())
    base.add_role("policy", lora())
    save_role(base, "policy", tmp_path, pad_token_id=0, base_name="base")
    tiny_model().save_pretrained(tmp_path)
    said = r"model: .* holds an adapter beside its weights: .*adapter_config.json. Name a folder without it"
    with pytest.raises(ModelError, match=said):
        load_base(str(tmp_path), device=device)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "transformers_weights": "adapter_model.bin"}))
    with pytest.raises(ModelError, match="transformers_weights: 'adapter_model.bin', which is no file of safetensors"):
        load_base(str(tmp_path), device=device)


def test_an_adapter_of_the_hub_neither_be_it_in_the_cache_or_there_alone(tmp_path, monkeypatch):
    folder = tmp_path / "models--some--model" / "snapshots" / ("c" * 40)
    tiny_model().save_pretrained(folder)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("c" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    asked, find = [], pretrained.find_adapter_config_file

    def in_hub(model, *, revision, local_files_only):
        asked.append(local_files_only)
        if not local_files_only:  # which downloads it
            (folder / "adapter_config.json").write_text("{}")
        return find(model, revision=revision, local_files_only=True)

    monkeypatch.setattr(pretrained, "find_adapter_config_file", in_hub)
    for device in (None, META):
        with pytest.raises(ModelError, match='"some/model" holds an adapter beside its weights'):
            load_base("some/model", device=device)
    assert asked == [True, False, True]


def test_a_missing_checkpoint_says_how_to_name_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("my llama", "models/of/mine", "./mine"):  # no hub ids, which hf download would refuse
        with pytest.raises(ModelError, match=f'from the folder "{name}" .there is no such folder') as raised:
            load_base(name)
        said = str(raised.value)
        assert f"looked for from {tmp_path}.)" in said and "hf download" not in said
    for kind in ("causal_lm", "sequence_classifier"):
        with pytest.raises(ModelError, match=r"model: no checkpoint could be loaded.*there is no such folder"):
            load_model(ModelSpec(str(tmp_path / "nothing")), kind)
    with pytest.raises(
        ModelError, match='from the folder or hub id "no/where".* Name a folder or hub id with'
    ) as raised:
        load_base("no/where")
    assert raised.value.problems[0].field == "model"
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="is a PEFT adapter and no whole model. Name the base that it was trained on"):
        load_base(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"model_type": "llama", "head_dim": [1]}'),
        ("config.json", '{"model_type": "llama", "rope_parameters": "x"}'),
        ("config.json", '{"model_type": "llama", "num_attention_heads": 0}'),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": "b"}, "merges": []}}'),
        ("tokenizer_config.json", '{"bos_token": 0}'),
        ("tokenizer_config.json", '{"tokenizer_class": true}'),
        ("config.json", "-2.5"),
    ],
)
def test_a_damaged_file_of_a_checkpoint_is_no_traceback(name, text, tmp_path):
    save_llama(tmp_path, byte_tokenizer())
    (tmp_path / name).write_text(text)
    said = rf'no checkpoint could be loaded from the folder "{tmp_path}" \(.{{17,}}\)'
    with pytest.raises(ModelError, match=said) as caught:
        load_tokenizer(str(tmp_path))
        load_base(str(tmp_path))
    assert "object" not in str(caught.value) and "iterable" not in str(caught.value)


def test_other_kinds_of_models_are_refused(tmp_path):
    T5ForConditionalGeneration(T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1, vocab_size=16)).save_pretrained(
        tmp_path / "t5"
    )
    with pytest.raises(ModelError, match="of type t5, which is not a decoder-only language model"):
        load_base(str(tmp_path / "t5"))
    BartConfig(d_model=8, encoder_layers=1, decoder_layers=1).save_pretrained(tmp_path / "bart")
    with pytest.raises(ModelError, match="of type bart, which is not a decoder-only language model"):
        load_base(str(tmp_path / "bart"))


def test_layers_without_end_are_refused_at_once(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 10**9}))
    with pytest.raises(ModelError, match=r"num_hidden_layers: 1000000000, and no model has more than 1000\. Mend"):
        load_model(ModelSpec(str(tmp_path)), device=META)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "head_dim", "num_key_value_heads", "vocab_size"])
@pytest.mark.parametrize("value", [10**18, 10**79, 10**400])
def test_a_size_that_no_model_has_is_named(key, value, tmp_path):
    save_llama(tmp_path, byte_tokenizer())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ModelError) as caught:
        load_model(ModelSpec(str(tmp_path)), device=META)
    said = (
        f'model: "{tmp_path}": transformers cannot build this model: no model has {key}: {value}. Mend its config.json'
    )
    assert str(caught.value) == f"{said}."


@pytest.mark.parametrize(("key", "value"), [("pad_token_id", 259), ("num_key_value_heads", 0), ("head_dim", -1)])
def test_a_value_that_fits_no_model_is_named_beside_what_transformers_says(key, value, tmp_path):
    save_llama(tmp_path, byte_tokenizer())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ModelError, match=rf"\(its configuration has {key}: {value}\) Mend its config.json"):
        load_model(ModelSpec(str(tmp_path)), device=META)


def test_random_weights(tokenizer):
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8}
    model = load_model(ModelSpec(config=config, dtype="float32"), tokenizer=tokenizer)
    assert model.config.vocab_size == len(tokenizer) and model.config.eos_token_id == tokenizer.eos_token_id
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    with pytest.raises(ModelError, match=r"^config: transformers cannot build this model"):
        load_model(ModelSpec(config={"model_type": "gpt7"}), tokenizer=tokenizer)
    with pytest.raises(ModelError, match="neither a checkpoint nor a tokenizer"):
        load_model(ModelSpec(config=config))


@pytest.mark.parametrize("kind", ["causal_lm", "sequence_classifier"])
def test_an_outline_has_the_names_and_shapes_of_the_model(kind, tmp_path, tokenizer):
    tiny_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = {"tokenizer": tokenizer, "num_labels": 3}
    loaded, drawn = (load_model(ModelSpec(str(tmp_path)), kind, device=d, **settings) for d in (None, META))
    assert all(p.is_meta for p in drawn.parameters())
    shapes = [{name: (p.shape, p.dtype) for name, p in model.named_parameters()} for model in (loaded, drawn)]
    assert shapes[0] == shapes[1] and (kind == "causal_lm") == ("score.weight" not in shapes[0])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "gpt2", "n_layr": 2},
            "config.n_layr: a model of type gpt2 has no such setting. Did you mean n_l",
        ),
        (
            {"model_type": "bert", "hidden_dize": 8},
            "config.hidden_dize: a model of type bert has no such setting.",
        ),
        ({"model_type": "llama", "zzz": 8}, "config.zzz: a model of type llama has no such setting. Remove it."),
    ],
)
def test_a_mistyped_setting_of_a_random_model_is_found(config, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        model_config(ModelSpec(config=config), tokenizer=doubling.tokenizer())


def test_other_names_of_a_setting_are_known():
    spec = ModelSpec(config={"model_type": "gpt2", "hidden_size": 8, "num_labels": 3})
    assert model_config(spec, tokenizer=doubling.tokenizer()).n_embd == 8


# ---------------------------------------------------------------------- classifiers


def test_classifiers_that_do_not_fit(tmp_path):
    other, tokenizer = doubling.tokenizer(), doubling.tokenizer()
    other.add_tokens(["?"])
    own_classifier("bert", tokenizer=other).save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)

    def config(**settings):
        return model_config(ModelSpec(**settings), "sequence_classifier", tokenizer=tokenizer)

    with pytest.raises(ModelError, match=r"has another tokenizer than base \(1 entries differ\).*scorer of kind model"):
        config(model=str(tmp_path))
    with pytest.raises(ModelError, match="^config: transformers cannot build this model"):
        config(config={"model_type": "brt"})
    with pytest.raises(ModelError, match="^config: transformers has no sequence classifier for models of type vit"):
        config(config={"model_type": "vit"})
    with pytest.raises(ModelError, match="^config: the model has 10 tokens and the tokenizer of base"):
        config(config={"model_type": "bert", "vocab_size": 10})
    # With its own tokenizer it may have other tokens, and keeps its outputs and padding.
    alone = model_config(ModelSpec(str(tmp_path)), "sequence_classifier")
    assert alone.vocab_size == len(other) and alone.num_labels == 1


@pytest.mark.parametrize("device", [None, META])  # by its weights, and by the headers of its files alone
def test_a_classifier_that_lacks_weights_is_not_filled_up_at_random(device, tmp_path):
    own_classifier("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    layer, head = "model.layers.0.mlp.up_proj.weight", "score.weight"
    for missing, trained, refused in ((layer, False, True), (head, False, False), (head, True, True)):
        kept = {name: tensor for name, tensor in weights.items() if name != missing}
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        spec = ModelSpec(str(tmp_path), dtype="float32")
        settings = {"num_labels": 1, "trained": trained, "device": device}
        if refused:
            with pytest.raises(ModelError, match=rf"has no weights for {missing}, where the model would be random"):
                load_model(spec, "sequence_classifier", **settings)
        else:
            load_model(spec, "sequence_classifier", **settings)  # a fresh head on a language model


def test_a_fresh_head_on_a_language_model_is_loaded_without_a_word(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener = Listener()
    logging.getLogger("transformers").addHandler(listener)
    try:
        load_model(ModelSpec(str(tmp_path)), "sequence_classifier", num_labels=1, trained=False)
    finally:
        logging.getLogger("transformers").removeHandler(listener)
    assert said == []


@pytest.mark.parametrize("device", [None, META])
def test_a_language_model_that_lacks_weights_is_refused(device, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="has no weights for lm_head.weight, where the model would be random"):
        load_base(str(tmp_path), device=device)


@pytest.mark.parametrize("device", [None, META])
def test_weights_of_another_shape_are_refused(device, tmp_path):
    own_classifier("llama", labels=1).save_pretrained(tmp_path)
    spec = ModelSpec(str(tmp_path))
    with pytest.raises(
        ModelError, match=r"score.weight is \[1, (\d+)\], and \[3, \1\] is asked for. Name a checkpoint wi"
    ):
        load_model(spec, "sequence_classifier", num_labels=3, device=device)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"than its configuration asks for: model.norm.weight is \[3\], and .*Mend its"
    ):
        load_model(spec, "sequence_classifier", num_labels=1, device=device)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "mixtral", "tied"])
def test_what_transformers_renames_or_ties_is_not_missing(architecture, tmp_path):
    if architecture == "mixtral":  # whose files name each expert, and the model all of them together
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 50}
        model = MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    else:
        model = tiny_model("llama" if architecture == "tied" else architecture)
    if architecture == "tied":
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(tmp_path, max_shard_size="20kB")  # several files
    named = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert architecture not in ("mixtral", "tied") or named.keys() != model.state_dict().keys()
    load_base(str(tmp_path), device=META)
    name = next(name for name in named if "norm." in name or "ln_1." in name)
    path = tmp_path / named[name]
    save_file({key: x for key, x in load_file(path).items() if key != name}, path, metadata={"format": "pt"})
    for device in (None, META):
        with pytest.raises(ModelError, match=f"has no weights for {re.escape(name)}, where the model would be random"):
            load_base(str(tmp_path), device=device)


def test_an_expert_that_is_missing_is_no_traceback(tmp_path):
    """transformers puts the experts of a layer into one tensor, and fails where it lacks one."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 50}
    MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[next(name for name in weights if ".experts.1." in name)]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="cannot put the model together from its weights: one is missing, or of anot"):
        load_base(str(tmp_path))


def test_what_fails_on_the_way_from_the_hub_is_no_damage(checkpoint, monkeypatch):
    """hf_xet raises RuntimeErrors, as transformers does of weights that it cannot put together."""

    def fails(*_, **__):
        raise RuntimeError("Data processing error: IO Error: No space left on device (os error 28)")

    monkeypatch.setattr(load_module, "model_config", lambda *_, **__: tiny_model().config)
    monkeypatch.setattr(load_module.AutoModelForCausalLM, "from_pretrained", fails)
    told = r'could be loaded from the folder or hub id "me/base" \(.*No space left.*\) Make room for the hub'
    with pytest.raises(ModelError, match=told):
        load_base("me/base")


def test_a_card_that_fails_is_no_fault_of_the_checkpoint_or_of_its_kind(checkpoint, monkeypatch):
    said = "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might be"

    def fails(*given, **named):
        raise RuntimeError(said)

    with pytest.raises(ToolkitError, match=r"^the GPU failed: CUDA error: .* unavailable\. See"), tried(tiny_model()):
        fails()
    monkeypatch.setattr("toolkit.models.load.AutoModelForCausalLM.from_pretrained", fails)
    with pytest.raises(ToolkitError, match=r"^the GPU failed: CUDA error: .* unavailable\. See"):
        load_base(str(checkpoint))


@pytest.mark.parametrize("kind", ["causal_lm", "sequence_classifier"])
@pytest.mark.parametrize(
    ("error", "kind_of_error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), torch.OutOfMemoryError, "CUDA out of memory"),
        (RuntimeError("CUDA error: no kernel image\nmore"), ToolkitError, "^the GPU failed: CUDA error: no kernel"),
        (
            RuntimeError("Configured CUDA binary not found\nmore"),
            ModelError,
            "quantization: weights cannot be put into 4 bits here: Configured CUDA binary not found. See what",
        ),
    ],
)
def test_weights_that_cannot_be_quantised_are_no_fault_of_the_checkpoint(
    kind, error, kind_of_error, said, checkpoint, monkeypatch
):
    """transformers logs what one of them raises, goes on, and says at the end that they cannot be converted."""
    asked = []

    def fails(weight, device):
        asked.append(device)
        raise error

    monkeypatch.setattr(Params4bit, "_quantize", fails)
    spec = ModelSpec(str(checkpoint), quantization=NF4)
    with pytest.raises(kind_of_error, match=said):
        load_with_report(spec, kind)
    assert len(asked) == 1  # and nothing after it


def test_an_outline_needs_no_weights(tmp_path):
    """What a plan is made of: a configuration, and as many files as have been downloaded."""
    tiny_model().save_pretrained(tmp_path, max_shard_size="20kB")
    next(tmp_path.glob("*.safetensors")).unlink()
    load_base(str(tmp_path), device=META)
    for path in tmp_path.glob("model*"):
        path.unlink()
    load_base(str(tmp_path), device=META)


@pytest.mark.parametrize(
    "setting",
    [{"n_embd": "x"}, {"n_embd": 0}, {"n_embd": -4}, {"n_embd": 10**9}, {"n_head": 0}, {"n_layer": True},
     {"tie_word_embeddings": "maybe"}, {"vocab_size": -1}, {"dtype": "bogus"}],
)  # fmt: skip
def test_values_that_no_model_can_have(setting, tokenizer):
    spec = ModelSpec(config={"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, **setting})
    with pytest.raises(ModelError, match="transformers cannot build this model: "):
        load_model(spec, tokenizer=tokenizer, device=META)


def test_what_is_loaded_of_the_hub_is_of_the_revision_that_is_named(tmp_path, monkeypatch):
    cache = tmp_path / "models--some--model"
    (cache / "refs").mkdir(parents=True)
    for name, commit, size in (("main", "c" * 40, 32), ("v2", "d" * 40, 64)):
        tiny_model(size=size).save_pretrained(cache / "snapshots" / commit)
        (cache / "refs" / name).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for revision, size in ((None, 32), ("v2", 64)):
        model = load_base("some/model", revision=revision)
        assert model.get_input_embeddings().weight.shape[1] == size
    base = SharedBase(model)
    base.add_role("policy", lora())
    folder = save_role(base, "policy", tmp_path / "policy", pad_token_id=0, base_name="some/model")
    assert json.loads((folder / "adapter_config.json").read_text())["revision"] == "d" * 40
    (cache / "snapshots" / ("d" * 40) / "adapter_config.json").write_text("{}")
    load_base("some/model", device=META)
    with pytest.raises(ModelError, match="holds an adapter beside its weights"):
        load_base("some/model", revision="v2", device=META)


def test_layers_of_4_bits_keep_the_layout_that_has_gradients(checkpoint, monkeypatch):
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)  # on any machine
    on_cpu = {"quantization_config": NF4, "dtype": torch.bfloat16, "device_map": {"": "cpu"}}
    by_hand = AutoModelForCausalLM.from_pretrained(str(checkpoint), **on_cpu)
    critic = AutoModelForSequenceClassification.from_pretrained(str(checkpoint), num_labels=1, **on_cpu)
    models = (load_base(str(checkpoint), quantization=NF4), SharedBase(by_hand), ValueModel(critic, lora()))
    for model in models:
        layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
        assert layers and not any(layer.support_avx512bf16_for_cpu for layer in layers)
        assert not any(getattr(layer.weight.quant_state, "packing_format_for_cpu", False) for layer in layers)
    by_hand.model.layers[0].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True  # as a pass leaves it
    with pytest.raises(ModelError, match="repacked its 4-bit weights for good.* Load the model anew"):
        SharedBase(by_hand)


def test_a_checkpoint_in_4_bits_computes_in_what_is_asked_for_and_is_never_quantised_again(checkpoint, tmp_path):
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    float16 = BitsAndBytesConfig(**nf4, bnb_4bit_compute_dtype="float16")
    load_base(str(checkpoint), dtype="bfloat16").save_pretrained(rounded := tmp_path / "rounded")
    of_it = load_base(str(rounded), quantization=float16, dtype="bfloat16")
    of_it.save_pretrained(folder := tmp_path / "bnb-4bit")
    ids = torch.tensor([[5, 6, 7]])
    for device in (None, META):
        for asked in (None, BitsAndBytesConfig(**nf4, bnb_4bit_compute_dtype="float32")):
            model = load_model(ModelSpec(str(folder), quantization=asked, dtype="float32"), device=device)
            if device is META:
                assert about_other_bits(model).startswith("its weights are in 4 bits already")
            else:
                layers = [m for m in model.modules() if isinstance(m, Linear4bit)]
                assert {m.compute_dtype for m in layers} == {torch.float32}
                assert {m.weight.quant_state.dtype for m in layers} == {torch.float32}  # what copies are unpacked to
                whole = load_base(str(rounded), quantization=BitsAndBytesConfig(**nf4), dtype="float32")
                torch.testing.assert_close(model(ids).logits, whole(ids).logits, **FP32)
        other = BitsAndBytesConfig(**nf4 | {"bnb_4bit_use_double_quant": False})
        said = r"quantization: .*bnb-4bit\" is quantised already, with bnb_4bit_use_double_quant: True, and False is"
        with pytest.raises(ModelError, match=said):
            load_model(ModelSpec(str(folder), quantization=other), device=device)
        skipping = BitsAndBytesConfig(**nf4, llm_int8_skip_modules=["lm_head", "q_proj"])
        with pytest.raises(ModelError, match="with llm_int8_skip_modules: .*, and .*q_proj.* is given"):
            load_model(ModelSpec(str(folder), quantization=skipping), device=device)


def test_a_classifier_s_head_is_never_put_into_4_bits(checkpoint, tmp_path):
    """transformers keeps it only where no list of modules to skip is given, as a checkpoint's settings have one."""
    skips = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["lm_head"])
    load_base(str(checkpoint), quantization=skips).save_pretrained(folder := tmp_path / "bnb-4bit")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["llm_int8_skip_modules"] = ["lm_head"]  # as other tools save it
    (folder / "config.json").write_text(json.dumps(config))
    for spec in (ModelSpec(str(checkpoint), quantization=skips), ModelSpec(str(folder))):
        for device in (None, META):
            model = load_model(spec, "sequence_classifier", num_labels=1, device=device)
            assert type(model.score) is torch.nn.Linear
            assert sum(isinstance(module, Linear4bit) for module in model.modules()) == 7
    assert skips.llm_int8_skip_modules == ["lm_head"]


def test_the_outline_of_a_checkpoint_in_4_bits_leaves_out_what_it_does(checkpoint, tmp_path):
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    skips = BitsAndBytesConfig(**nf4, llm_int8_skip_modules=["lm_head", "model.layers.0.mlp.up_proj"])
    load_base(str(checkpoint), quantization=skips).save_pretrained(folder := tmp_path / "bnb-4bit")
    for asked in (None, BitsAndBytesConfig(**nf4)):
        spec = ModelSpec(str(folder), quantization=asked)
        bits = [
            {name for name, module in model.named_modules() if isinstance(module, Linear4bit)}
            for model in (load_model(spec), load_model(spec, device=META))
        ]
        assert bits[0] == bits[1] and len(bits[0]) == 7 - 1
    path = folder / "config.json"
    eight = json.loads(path.read_text()) | {"quantization_config": {"load_in_8bit": True}}
    path.write_text(json.dumps(eight))
    with pytest.raises(ModelError, match="with a base in 8 bits a token's outputs depend on"):
        about_other_bits(load_model(ModelSpec(str(folder)), device=META))


def test_a_checkpoint_of_another_method_is_refused_beside_a_quantization_of_ours(checkpoint, tmp_path):
    shutil.copytree(checkpoint, folder := tmp_path / "awq")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    asked = BitsAndBytesConfig(load_in_4bit=True)
    for device in (None, META):
        with pytest.raises(ModelError, match="quantization: .*quantised by awq already, .* Set it to null, or name"):
            load_model(ModelSpec(str(folder), quantization=asked), device=device)


@pytest.mark.parametrize("cut", [0, 40, 5000])
def test_weights_that_were_cut_name_their_file(cut, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelError, match=rf"{path} is damaged \(.*\)\. Download it again"):
        load_base(str(tmp_path))


def test_weights_that_may_not_be_read_say_so(tmp_path, monkeypatch):
    tiny_model().save_pretrained(tmp_path)
    path, plain = tmp_path / "model.safetensors", Path.open

    def opened(self, *arguments, **named):
        if self == path:
            raise PermissionError(13, "Permission denied", str(path))
        return plain(self, *arguments, **named)

    def without_a_reason(*_, **__):  # as safe_open's
        raise FileNotFoundError(f"No such file or directory: {path}")

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr("toolkit.models.load.AutoModelForCausalLM.from_pretrained", without_a_reason)
    said = rf"{path} cannot be read \(Permission denied\)\. Check its permissions"
    with pytest.raises(ModelError, match=said):
        load_base(str(tmp_path))
    assert [*weight_file_problems(tmp_path)] == [f"{path} cannot be read (Permission denied). Check its permissions."]
    with pytest.raises(AdapterError, match=said):
        read_tensors(tmp_path, "model.safetensors")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(name, tmp_path):
    save_llama(tmp_path, byte_tokenizer())
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    for load in (load_base, load_tokenizer, partial(load_base, device=META)):
        with pytest.raises(ModelError, match=f"{name} is a folder, a pipe or a device"):
            load(str(tmp_path))


def test_a_damaged_file_of_the_hub_s_cache_is_not_looked_for_here():
    with (
        pytest.raises(ModelError, match=r'from the folder or hub id "org/name" \(header too small\)'),
        _loading(ModelSpec(model="org/name")),
    ):
        raise SafetensorError("header too small")
