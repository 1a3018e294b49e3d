import contextlib
import os
import shutil
import socket
import threading
import time
import warnings
from pathlib import Path

import pytest
from datasets import config as datasets_config
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from toolkit import hub
from toolkit.data import read_rows
from toolkit.errors import DataError, ModelError, ToolkitError
from toolkit.models import ModelSpec, load_tokenizer, model_config, pretrained, save_tokenizer


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


def test_a_tokenizer_of_mistral_common_has_a_method_in_place_of_its_added_tokens(tokenizer):
    class OfMistral(type(tokenizer)):
        def added_tokens_decoder(self):
            raise NotImplementedError

    tokenizer.__class__ = OfMistral
    assert pretrained.embeddings_needed(tokenizer) == max(tokenizer.get_vocab().values()) + 1


def test_a_file_outside_of_a_checkpoint_is_not_copied_out_of_it(tmp_path, tokenizer):
    """Through a link that somebody else has made. Those of the hub's cache lead beside its snapshots."""
    (tmp_path / "secret").write_text("mine")
    theirs, snapshot = tmp_path / "theirs", tmp_path / "models--meta--llama" / "snapshots" / "abc"
    (snapshot.parents[1] / "blobs").mkdir(parents=True)
    (snapshot.parents[1] / "blobs" / "1").write_text("sentences")
    linked = tmp_path / "linked"  # as hf download --local-dir made it, and a user may
    for source in (theirs, snapshot, linked):
        tokenizer.save_pretrained(source)
    (snapshot / "tokenizer.model").symlink_to(Path("..", "..", "blobs", "1"))
    (linked / "tokenizer.model").symlink_to(snapshot.parents[1] / "blobs" / "1")
    (theirs / "own.tiktoken").write_text("words")
    (theirs / "own.model").symlink_to("own.tiktoken")
    for name in ("x.model", "chat_template.jinja"):
        (theirs / name).unlink(missing_ok=True)
        (theirs / name).symlink_to(tmp_path / "secret")
    saved = tmp_path / "saved"
    with pytest.warns(UserWarning, match="is left out: it is a link to .*secret, which is no file of the") as told:
        save_tokenizer(load_tokenizer(str(theirs)), saved, str(theirs))
    assert sorted(str(one.message).split(" is left out")[0] for one in told) == [
        str(theirs / "chat_template.jinja"), str(theirs / "x.model"),
    ]  # fmt: skip
    assert (saved / "own.model").read_text() == (saved / "own.tiktoken").read_text() == "words"
    assert "mine" not in {path.read_text() for path in saved.iterdir()}
    assert load_tokenizer(str(saved)).chat_template is None
    with pytest.warns(UserWarning, match=r"x\.model is left out"):  # but where the recipe names that text itself
        save_tokenizer(load_tokenizer(str(theirs)), saved, str(theirs), template="mine")
    assert load_tokenizer(str(saved)).chat_template == "mine"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = tmp_path / "llama"  # the cache's folder, by a name of the user's
        shutil.copytree(snapshot.parents[1], copied, symlinks=True)
        for source in (snapshot, linked, copied / "snapshots" / "abc"):
            (saved / "tokenizer.model").unlink(missing_ok=True)
            save_tokenizer(tokenizer, saved, str(source))
            assert (saved / "tokenizer.model").read_text() == "sentences"
    tokenizer.chat_template = "{{ messages }}"  # which the recipe names, in place of the checkpoint's
    with pytest.warns(UserWarning, match=r"x\.model is left out"):
        save_tokenizer(tokenizer, saved, str(theirs))
    assert (saved / "chat_template.jinja").read_text() == "{{ messages }}"


@pytest.fixture
def silent(monkeypatch):
    """A hub at a port at which nobody listens."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets_config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(hub, "_silent", {})


def test_a_hub_that_does_not_answer_is_said_at_once(silent, monkeypatch, tmp_path, caplog):
    """transformers asks for each file again and again: 94 s for a model that is not here."""
    monkeypatch.setattr(pretrained.AutoTokenizer, "from_pretrained", lambda *a, **k: pytest.fail("it was asked for"))
    for load in (load_tokenizer, lambda name: model_config(ModelSpec(name))):
        with pytest.raises(ModelError, match='"nobody/nothing" is no folder here.*127.0.0.1 does not answer') as error:
            load("nobody/nothing")
        assert f"({Path.cwd()})" in str(error.value)
        assert error.value.problems[0].field == "model" and "Name the folder" in str(error.value)
    pretrained.check_there(str(tmp_path))  # a folder needs no hub
    with pytest.raises(ModelError, match='"v2" would have no effect: .* is a folder'):
        pretrained.check_there(str(tmp_path), "v2")
    monkeypatch.setattr(pretrained, "try_to_load_from_cache", lambda *a, **k: "/cache/config.json")
    pretrained.check_there("nobody/nothing")
    assert constants.is_offline_mode() and datasets_config.HF_HUB_OFFLINE  # the cache is read without asking
    assert len([text for text in caplog.messages if "does not answer: models and data" in text]) == 1


def test_data_of_a_hub_that_does_not_answer_too(silent, monkeypatch):
    """datasets waits for 24 s between its tries."""
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"it waits for {seconds} s"))
    with pytest.raises(DataError, match='"nobody/nothing" is no file here and not in the cache.*127.0.0.1 does not an'):
        list(read_rows("nobody/nothing", field="train"))


@pytest.mark.parametrize(("environ", "asked"), [
    ({"http_proxy": "http://near:1", "no_proxy": "hub"}, ""),
    ({"all_proxy": "http://near:1"}, "http://near:1"),
    ({"https_proxy": "http://near:1"}, ""),
    ({"http_proxy": "near:3128"}, "http://near:3128"),
], ids=str)  # fmt: skip
def test_the_proxy_is_the_one_that_the_hubs_library_takes(environ, asked, monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert hub._proxy_before("http://hub/models") == asked


class NoRoom(RuntimeError):
    """As hf_xet has it."""

    def __str__(self):
        return "Data processing error: IO Error: No space left on device (os error 28)"


@pytest.mark.parametrize(("cause", "offline", "said"), [
    (GatedRepoError, False, r"\(no access\) Ask for access at .*/some/model, then log in: hf auth login"),
    (RepositoryNotFoundError, False, "If it is a private one, log in: hf auth login"),
    (LocalEntryNotFoundError, True, "Name a folder .* There is no such folder in .* Offline mode: with a network, hf do"
     "wnload some/model gets what"),
    (LocalEntryNotFoundError, False, "Name a folder or hub id with safetensors"),
    (NoRoom, False, r"Make room for the hub's cache \(.*\), or set HF_HOME to a folder elsewhere"),
])  # fmt: skip
def test_what_the_hub_keeps_back_has_its_own_way_on(cause, offline, said, monkeypatch):
    def refused(*arguments, **named):
        raise OSError("no access\nand how the hub is asked") from cause.__new__(cause)  # without a server's answer

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(pretrained, "check_there", lambda *a: None)
    monkeypatch.setattr(pretrained.AutoTokenizer, "from_pretrained", refused)
    with pytest.raises(ModelError, match=said):
        load_tokenizer("some/model")


@pytest.mark.parametrize("address", ["bogus", "http://[", "http://hub:99999999"])
def test_a_hub_without_an_address_is_named(address, silent, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", address)
    with pytest.raises(ToolkitError, match="is not an address at which the hub.* Correct HF_ENDPOINT") as error:
        load_tokenizer("nobody/nothing")
    assert repr(address) in str(error.value)


def test_a_password_in_the_variable_of_the_proxy_is_not_shown(silent, monkeypatch):
    monkeypatch.setattr(hub, "getproxies", lambda: {"http": "http://alice:pa#ss@proxy:3128"})
    with pytest.raises(ToolkitError, match="'…@proxy:3128' is not an address at which the hub") as error:
        load_tokenizer("nobody/nothing")
    assert "ss@" not in str(error.value) and "alice" not in str(error.value)


@pytest.mark.parametrize(
    ("addresses", "answers"),
    [(["10.255.255.1", "127.0.0.1"], True), (["10.255.255.1"], False), ([], False)],
    ids=["one address is dropped", "all are", "no such name"],
)
def test_a_hub_is_asked_at_all_of_its_addresses_and_not_for_ever(addresses, answers, monkeypatch):
    released = threading.Event()

    def connect(address, timeout):
        if address[0].startswith("10."):  # neither taken nor refused
            released.wait(5)
            raise TimeoutError
        return contextlib.nullcontext()

    entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 443)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries or (released.wait(5) and []))
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(hub, "SECONDS", 0.3)
    started = time.monotonic()
    assert hub._answers("some.hub", 443) is answers
    assert time.monotonic() - started < 3
    released.set()


def test_a_tokenizer_is_of_the_revision_that_is_named(tokenizer, monkeypatch):
    asked = []
    monkeypatch.setattr(pretrained, "check_there", lambda *given: asked.append(given))
    monkeypatch.setattr(
        pretrained.AutoTokenizer, "from_pretrained", lambda name, **code: asked.append((name, code)) or tokenizer
    )
    load_tokenizer("some/model", revision="v2")
    assert asked == [("some/model", "v2"), ("some/model", {"revision": "v2", "trust_remote_code": False})]
