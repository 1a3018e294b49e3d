import socket

import pytest
from huggingface_hub import constants

from toolkit.errors import ModelError
from toolkit.models import ModelSpec, load_tokenizer, model_config, pretrained


def test_tokenizer_without_pad_pads_with_eos(tmp_path, tokenizer):
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.pad_token_id == loaded.eos_token_id == 2 and loaded.padding_side == "left"


def test_tokenizer_without_eos_is_refused(tmp_path, tokenizer):
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no eos_token"):
        load_tokenizer(str(tmp_path))


def test_a_hub_that_does_not_answer_is_said_at_once(monkeypatch, tmp_path):
    """transformers asks for each file again and again: 94 s for a model that is not here."""
    with socket.socket() as closed:  # a port at which nobody listens
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(pretrained, "getproxies", dict)
    monkeypatch.setattr(pretrained.AutoTokenizer, "from_pretrained", lambda *a, **k: pytest.fail("it was asked for"))
    pretrained._answers.cache_clear()
    for load in (load_tokenizer, lambda name: model_config(ModelSpec(name))):
        with pytest.raises(ModelError, match='"nobody/nothing" is no folder here.*127.0.0.1 does not answer') as error:
            load("nobody/nothing")
        assert error.value.problems[0].field == "model" and "Name the folder" in str(error.value)
    pretrained.check_there(str(tmp_path))  # a folder needs no hub
    monkeypatch.setattr(pretrained, "try_to_load_from_cache", lambda *a, **k: "/cache/config.json")
    pretrained.check_there("nobody/nothing")
