"""A trained policy written for other tools."""

import json
import shutil
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import one_hot
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from benchmarks.architectures import tiny_model as tiny_architecture
from tests.tiny_runs import byte_tokenizer, command_here, save_llama
from toolkit.data import doubling
from toolkit.errors import AdapterError, ModelError, ToolkitError
from toolkit.inference import export as exporting
from toolkit.inference.export import export_adapter, export_merged
from toolkit.inference.export_card import write_card
from toolkit.inference.saved_run import open_run, policy_folder
from toolkit.models import load_base, load_tokenizer, merge_adapter, name_base, save_tokenizer

BRIEF = "Be brief, and write code in ```."


@pytest.mark.smoke
def test_export_as_adapter_and_as_checkpoint(trained, tmp_path):
    folder, recipe = trained
    done = command_here("export", "chat", tmp_path / "adapter", cwd=folder)
    assert done.returncode == 0, done.stderr
    merged = command_here("export", "chat", tmp_path / "merged", "--merge", cwd=folder)
    assert merged.returncode == 0 and "the logits differ" in merged.stdout, merged.stderr
    for name in ("adapter", "merged"):
        assert len(AutoTokenizer.from_pretrained(tmp_path / name)) == len(recipe.tokenizer)
    dtype = getattr(torch, recipe.base.dtype)
    base = AutoModelForCausalLM.from_pretrained(recipe.base_path, dtype=dtype)
    base_weights = {name: value.clone() for name, value in base.state_dict().items()}
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert whole.dtype is dtype and not hasattr(whole.config, "quantization_config")
    merged_weights, changed = whole.state_dict(), 0
    for name, module in adapted.named_modules():
        if hasattr(module, "lora_A"):
            apart, delta = module.get_base_layer().weight.float(), module.get_delta_weight("default").float()
            weight = merged_weights.pop(f"{name.removeprefix('base_model.model.')}.weight").float()
            # In weights and not in logits, which at some token of a random model hang on the last bit of one.
            assert bool(((weight - apart - delta).abs() <= 2**-7 * (apart.abs() + delta.abs())).all()), name
            changed += bool((weight != apart).any())
    assert changed == 7
    assert all(torch.equal(value, base_weights[name]) for name, value in merged_weights.items())
    assert whole.generation_config.temperature == 0.6  # the checkpoint's own, as it came
    readable = [(tmp_path / name).stat().st_mode & 0o777 for name in (
        "adapter/adapter_model.safetensors", "merged/model.safetensors", "adapter/adapter_config.json"
    )]  # fmt: skip
    assert len(set(readable)) == 1  # the weights by whom all else may be read
    again = command_here("export", "chat", tmp_path / "merged", "--merge", cwd=folder)
    assert again.returncode == 1 and "is not empty. Name a new folder." in again.stderr


def test_an_exported_adapter_names_the_base_that_is_here(trained, tmp_path, monkeypatch):
    """And not where it was when the run was trained."""
    _, recipe = trained
    shutil.copytree(recipe.base_path, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    moved = open_run("chat", "base.model=base", runs_dir=recipe.runs_dir)
    exported = json.loads((export_adapter(moved, tmp_path / "adapter") / "adapter_config.json").read_text())
    config = json.loads((policy_folder(recipe) / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == recipe.base_path
    assert exported == {**config, "base_model_name_or_path": str(tmp_path / "base")}


def test_the_commit_of_another_base_is_not_named(tmp_path):
    saved = {"base_model_name_or_path": "meta/llama", "revision": "abc", "r": 8}
    for name, revision in (("meta/llama", "abc"), ("mirror/llama", None)):
        (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
        name_base(tmp_path, name)
        named = {"base_model_name_or_path": name, "revision": revision, "r": 8}
        assert json.loads((tmp_path / "adapter_config.json").read_text()) == named


def test_an_export_is_read_by_transformers_4_and_llama_cpp(trained, tmp_path):
    """It has names that are known there, the base's own file of sentencepiece, and gives the same ids here."""
    recipe, base = trained[1], tmp_path / "base"
    shutil.copytree(recipe.base_path, base)
    (base / "tokenizer.model").write_bytes(b"\x0asentences")
    (base / "token.json").write_text('"secret"')
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    config = json.loads((base / "config.json").read_text()) | {"rope_theta": 5e5, "rope_scaling": scaling}
    config.pop("rope_parameters", None)
    (base / "config.json").write_text(json.dumps(config))
    opened = open_run("chat", f"base.model={base}", runs_dir=recipe.runs_dir)
    adapter, (merged, _) = export_adapter(opened, tmp_path / "adapter"), export_merged(opened, tmp_path / "merged")
    for folder in (adapter, merged):
        assert (folder / "tokenizer.model").read_bytes() == b"\x0asentences" and not (folder / "token.json").exists()
        assert (
            json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.chat_template == recipe.tokenizer.chat_template
        assert tokenizer("Bread rises.").input_ids == recipe.tokenizer("Bread rises.").input_ids
    written = json.loads((merged / "config.json").read_text())
    assert (written["rope_theta"], written["rope_scaling"]) == (5e5, scaling)
    assert AutoConfig.from_pretrained(merged).rope_parameters == {**scaling, "rope_theta": 5e5}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    longrope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    phi = tiny_architecture("phi3", original_max_position_embeddings=16, rope_parameters=longrope)
    (tmp_path / "phi3").mkdir()
    exporting._save(phi, tmp_path / "phi3")
    written = json.loads((tmp_path / "phi3" / "config.json").read_text())
    assert written["rope_scaling"] == {"type": "longrope", **factors}  # its reader takes no other key
    read = AutoConfig.from_pretrained(tmp_path / "phi3").rope_parameters
    assert {**read, "type": None} == {**phi.config.rope_parameters, "type": None}
    for kind in ("gpt2", "gpt_neox"):  # without rotary positions, and with names of its own
        (tmp_path / kind).mkdir()
        exporting._save(model := tiny_architecture(kind), tmp_path / kind)
        written = json.loads((tmp_path / kind / "config.json").read_text())
        assert "rope_theta" not in written and written.get("rope_parameters") == getattr(
            model.config, "rope_parameters", None
        )


def test_an_exported_tokenizer_splits_text_as_the_base_s_whatever_class_that_names(tmp_path):
    """Of phi-4 the class that its file names splits digits otherwise than the one that transformers takes for phi3; an
    adapter's folder has no type of a model."""
    base = tmp_path / "base"
    save_llama(base, byte_tokenizer(), architectures=None)
    backend = json.loads((base / "tokenizer.json").read_text())
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "GPT2Tokenizer"}))
    (base / "config.json").write_text(json.dumps({"model_type": "phi3"}))
    loaded = load_tokenizer(str(base))
    save_tokenizer(loaded, tmp_path / "adapter", str(base))
    again = AutoTokenizer.from_pretrained(tmp_path / "adapter")
    assert json.loads(again.backend_tokenizer.to_str())["pre_tokenizer"] == backend["pre_tokenizer"]
    text = "In 1234 days, IT'S done."
    assert again(text).input_ids == loaded(text).input_ids
    assert AutoTokenizer.from_pretrained(base)(text).input_ids == loaded(text).input_ids


@pytest.mark.parametrize("added", [(False, False), (True, False), (True, True)])
def test_what_stands_around_a_text_is_written(added, tmp_path):
    """transformers 4 puts a beginning before each text for Llama's class, unless it is told not to."""
    tokenizer = byte_tokenizer()
    template = "<s> " * added[0] + "$A" + " </s>" * added[1]
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=ids)
    save_tokenizer(tokenizer, tmp_path, str(tmp_path))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["add_bos_token"], config["add_eos_token"]) == added
    assert AutoTokenizer.from_pretrained(tmp_path)("Hi").input_ids == tokenizer("Hi").input_ids


def test_no_question_is_asked_about_code_of_a_tokenizer_s_own(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it was asked"))
    tokenizer = byte_tokenizer()
    tokenizer.__class__ = type("OwnTokenizer", (type(tokenizer),), {})
    tokenizer.init_kwargs["auto_map"] = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    save_tokenizer(tokenizer, tmp_path, str(tmp_path))
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["auto_map"]


def test_a_tokenizer_of_few_letters_is_exported(tmp_path):
    """And none of those is asked of it that it does not know."""
    tokenizer = doubling.tokenizer()
    save_tokenizer(tokenizer, tmp_path, str(tmp_path))
    text = doubling.question(5487, "小写")
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == tokenizer(text).input_ids


def test_a_name_that_would_give_another_tokenizer_is_not_written(trained, tmp_path, monkeypatch):
    tokenizer = trained[1].tokenizer
    tokenizer.save_pretrained(tmp_path / "own")
    monkeypatch.setattr("toolkit.models.pretrained._ANY_TOKENIZER", "BertTokenizer")
    save_tokenizer(tokenizer, tmp_path / "out", str(tmp_path / "own"))
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == json.loads(
        (tmp_path / "own" / "tokenizer_config.json").read_text()
    )


def test_tokenizer_files_come_from_the_hub_s_cache_or_their_lack_is_told(trained, tmp_path, monkeypatch):
    tokenizer, asked = trained[1].tokenizer, []

    def snapshot(model, *, revision, allow_patterns):
        asked.append((model, revision))
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "tokenizer.model").write_bytes(b"sentences")
        return str(tmp_path / "cache")

    monkeypatch.setattr("toolkit.models.pretrained.snapshot_download", snapshot)
    save_tokenizer(tokenizer, tmp_path / "there", "meta/llama", revision="abc")
    assert asked == [("meta/llama", "abc")]
    assert (tmp_path / "there" / "tokenizer.model").read_bytes() == b"sentences"

    def broken_off(model, **_):
        raise ZeroDivisionError("a connection that broke off")  # of httpx, whose errors have no root of ours

    monkeypatch.setattr("toolkit.models.pretrained.snapshot_download", broken_off)
    with pytest.warns(
        UserWarning, match=r'of "meta/llama" cannot be had, if there are such \(a connection that broke off'
    ):
        save_tokenizer(tokenizer, tmp_path / "absent", "meta/llama")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "absent")) == len(tokenizer)


def test_an_export_s_readme_says_what_it_is_and_how_it_is_asked(trained, tmp_path):
    recipe = trained[1]
    shutil.copytree(recipe.folder, tmp_path / "other")
    values = {**recipe.values, "data": {**recipe.values["data"], "system": BRIEF}}
    briefly = replace(open_run("other", runs_dir=tmp_path), values=values)
    adapter, (merged, _) = export_adapter(briefly, tmp_path / "adapter"), export_merged(recipe, tmp_path / "merged")
    result = json.loads((recipe.stage_folder("ppo") / "result.json").read_text())
    for folder, library in ((adapter, "peft"), (merged, "transformers")):
        card = ModelCard.load(folder / "README.md")
        assert card.data.library_name == library and card.data.base_model is None  # a folder, which is not published
        assert str(tmp_path) not in card.text and str(recipe.base_path) not in card.text
        assert f"| score | {result['before']['score']:.4f} | {result['after']['score']:.4f} |" in card.text
    assert "run `other`, recipe `chat`, seed 0." in (adapter / "README.md").read_text()
    asked = [{"role": "user", "content": "Why does bread rise?"}]
    messages = [{"role": "system", "content": BRIEF}, *asked]
    text = recipe.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert f"\n````text\n{text}\n````" in (adapter / "README.md").read_text()
    text = recipe.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert f"\n```text\n{text}\n```" in (merged / "README.md").read_text()


def test_a_readme_names_a_base_of_the_hub_and_a_rank_that_vllm_has_to_be_told(trained, tmp_path):
    recipe = trained[1]
    of_hub = replace(recipe, values={**recipe.values, "base": {**recipe.values["base"], "model": "meta/llama"}})
    of_hub.__dict__["tokenizer"] = recipe.tokenizer
    own = json.loads((policy_folder(recipe) / "adapter_config.json").read_text()) | {"revision": "abc"}
    for number, (config, said) in enumerate((
        ({"r": 16}, ""),
        ({"r": 64}, "vLLM serves it with `--max-lora-rank 64` or more."),
        ({"use_dora": True}, "vLLM does not serve it as an adapter (use_dora): export it with `--merge`."),
        (
            {"lora_bias": True},
            "vLLM does not serve it as an adapter (lora_bias): export it with `--merge`, which needs a base whose "
            "adapted layers have biases.",
        ),
    )):  # fmt: skip
        (folder := tmp_path / str(number)).mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(own | config))
        write_card(of_hub, folder, merged=False)
        card = ModelCard.load(folder / "README.md")
        assert card.data.base_model == "meta/llama" and card.data.to_dict()["base_model_relation"] == "adapter"
        assert [line for line in card.text.split("\n") if "vLLM" in line] == ([said] if said else [])
        assert 'from_pretrained("meta/llama", revision="abc")' in card.text


def test_what_a_link_leads_to_is_not_given_away(trained, tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(trained[1].folder, runs / "chat")
    (tmp_path / "secret").write_text("mine")
    (runs / "chat" / "ppo" / "policy" / "notes.txt").symlink_to(tmp_path / "secret")
    folder = export_adapter(open_run("chat", runs_dir=runs), tmp_path / "out")
    assert (folder / "adapter_model.safetensors").is_file() and not (folder / "notes.txt").exists()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, "on the quantised base, at"),
        (AdapterError("there is no folder warm"), "base says is not known: there is no folder warm"),
        (torch.OutOfMemoryError("CUDA out of memory."), "base says is not known: the GPU's memory does not suffice"),
    ],
    ids=["held", "no adapter", "no memory"],
)
def test_a_base_that_a_card_does_not_hold_whole_is_merged_on_the_cpu(error, said, trained, tmp_path, monkeypatch):
    """And it is gone before the one in 4 bits is loaded, without which the checkpoint is as good."""
    recipe, held, load, open_trained = trained[1], [], exporting.load_base, exporting.trained_sampler

    def too_small(model, *, device, **settings):
        if device is None:  # the card, where there is one
            raise torch.OutOfMemoryError("CUDA out of memory.")
        held.append(weakref.ref(made := load(model, device=device, **settings)))
        return made

    def beside(recipe, **settings):
        assert held[0]() is None
        if error is not None:
            raise error
        return open_trained(recipe, **settings)

    monkeypatch.setattr(exporting, "load_base", too_small)
    monkeypatch.setattr(exporting, "trained_sampler", beside)
    monkeypatch.setattr("toolkit.spec.recipe.Recipe.quantization", lambda recipe: "not None")
    folder, told = export_merged(recipe, tmp_path / "out")
    assert (folder / "model.safetensors").is_file() and said in told


def test_a_merged_checkpoint_has_the_generation_settings_of_its_base(trained, tmp_path, monkeypatch):
    """Where transformers refuses to save them, too; and no more of the text is read than the base has positions for."""
    folder, recipe = trained
    shutil.copytree(recipe.base_path, tmp_path / "base")
    (settings := tmp_path / "base" / "generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.6}')
    save = GenerationConfig.save_pretrained

    def strict(self, *arguments, **named):  # as in transformers 5.17
        self.validate(strict=True)
        save(self, *arguments, **named)

    monkeypatch.setattr(GenerationConfig, "save_pretrained", strict)
    monkeypatch.setattr("toolkit.inference.export.positions_of", lambda config: 20)
    opened = open_run("chat", f"base.model={settings.parent}", "base.quantization=null", runs_dir=folder / "runs")
    merged, told = export_merged(opened, tmp_path / "out")
    assert "over 20 tokens of held-out prompts" in told
    saved = json.loads((merged / "generation_config.json").read_text())
    saved.pop("transformers_version")
    assert saved == json.loads(settings.read_text())


def test_the_agreement_with_the_quantised_base_is_the_share_of_equal_tokens(monkeypatch):
    class Roles:
        device = torch.device("cpu")

        def __call__(self, *, input_ids):
            assert input_ids.tolist() == [[5, 6, 7, 8]]
            return SimpleNamespace(logits=one_hot(torch.tensor([[1, 2, 3, 9]]), 10))

        role = staticmethod(nullcontext)
        autocast = nullcontext

    monkeypatch.setattr(exporting, "trained_sampler", lambda *_, **__: SimpleNamespace(roles=Roles()))
    assert exporting._agreement_on_quantised(None, [5, 6, 7, 8], torch.tensor([[1, 2, 3, 4]])) == 0.75


def test_nothing_is_merged_into_four_bits(trained):
    _, recipe = trained
    base = load_base(recipe.base_path, quantization=recipe.quantization())
    with pytest.raises(AdapterError, match="never merged into a quantised base. Export the adapter alone, or"):
        merge_adapter(base, policy_folder(recipe), torch.tensor([[3, 4, 5]]))


def test_the_difference_of_a_merge_is_measured(trained):
    _, recipe = trained
    base = load_base(recipe.base_path, dtype="float32")
    merged = merge_adapter(base, policy_folder(recipe), torch.tensor([[3, 4, 5, 6]]))
    assert merged.largest < 1e-4 * merged.scale and merged.agreement == 1.0
    with torch.no_grad():
        logits = merged.model(input_ids=torch.tensor([[3, 4, 5, 6]])).logits
    assert float(logits.abs().max()) == pytest.approx(merged.scale, rel=1e-3)


def test_tokenizer_and_merge_are_of_the_revision_that_the_recipe_names(trained, tmp_path, monkeypatch):
    recipe, own, asked = trained[1], trained[1].tokenizer, []

    def tokenizer(_, **named):
        asked.append(named)
        return own

    def base(_, *, device, dtype, **named):
        asked.append(named)
        raise ModelError("enough")

    monkeypatch.setattr("toolkit.spec.recipe.load_tokenizer", tokenizer)
    monkeypatch.setattr(exporting, "load_base", base)
    named = {"revision": "abc", "trust_remote_code": True}
    of_hub = replace(recipe, values={**recipe.values, "base": {**recipe.values["base"], **named}})
    with pytest.raises(ModelError, match="enough"):
        export_merged(of_hub, tmp_path / "out")
    assert asked == [named, named]


def test_an_export_that_fails_leaves_nothing(trained, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    recipe, there = trained[1], tmp_path / "there"
    gone = replace(recipe, values={**recipe.values, "base": {**recipe.values["base"], "model": str(tmp_path / "gone")}})
    there.mkdir()
    for export in (export_adapter, export_merged):
        for folder in (there, tmp_path / "new" / "inner"):
            with monkeypatch.context() as patch, pytest.raises(ToolkitError, match="No space left on device"):
                patch.setattr(type(recipe.tokenizer), "save_pretrained", full)
                export(recipe, folder)
            with pytest.raises(ModelError):
                export(gone, folder)
            assert list(tmp_path.iterdir()) == [there] and not any(there.iterdir())
    assert any(export_adapter(recipe, there).iterdir())
