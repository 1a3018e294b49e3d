"""What the tests share. Libraries are imported where they are needed: one of several processes only hands out tests."""

import gc
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests compare numbers with those of a CPU; the few that are for a GPU ask for it (make test-gpu).
if os.environ.get("TOOLKIT_TESTS_ON_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
else:  # of several one, as in a stage: transformers' trainers would copy a model to each
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
# On models this small a second thread costs several times what it gives. Read by torch when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `make test CPU=avx2` hands its variable down to every make inside it, which refuses what it does not read.
os.environ.pop("MAKEFLAGS", None)

LONGEST = (
    "test_resume.py",
    "test_docs.py",
    "test_stages.py",
    "test_notebooks.py",
    "test_kill_and_resume.py",
    "test_share.py",
    "test_plan.py",
)


def pytest_collection(session):
    gc.disable()  # it would walk all that the imports make, again and again, for a quarter of their time


def pytest_ignore_collect(collection_path):
    """The benchmarks compare with TRL's own loop."""
    if collection_path == Path(__file__).parent / "benchmarks":
        from toolkit.trainers.trl_compat import HAS_PPO

        return None if HAS_PPO else True
    return None


def pytest_collection_modifyitems(items):
    """The files that take longest come first, so that none of several processes is left alone with one at the end."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish(session):
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def garbage_is_left_to_python():
    """transformers has accelerate collect it whenever a trainer begins, which walks all that the tests have made."""
    from accelerate.utils import memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "gc", SimpleNamespace(collect=lambda: 0))
        yield


@pytest.fixture
def tokenizer():
    from toolkit.data import doubling

    return doubling.tokenizer()


@pytest.fixture
def unpacked(monkeypatch):
    """The 4-bit weights of layers with adapters that are unpacked from here on, one after the other."""
    from toolkit.models import fused_lora

    weights, dequantize = [], fused_lora.dequantize_4bit

    def noted(weight, state):
        weights.append(weight)
        return dequantize(weight, state)

    monkeypatch.setattr(fused_lora, "dequantize_4bit", noted)
    return weights


@pytest.fixture
def shared_data() -> Path:
    """hh-rlhf pairs beside the checkout, for development; not part of the project."""
    folder = Path(__file__).parents[2] / "shared" / "data" / "hh_rlhf"
    if not folder.is_dir():
        pytest.skip("needs the hh-rlhf pairs in ../shared, which only development checkouts have")
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A random Llama with a byte tokenizer and a chat template; pad == eos, as Llama checkpoints ship."""
    from tests import tiny_runs

    return tiny_runs.save_llama(tmp_path_factory.mktemp("checkpoint"), tiny_runs.byte_tokenizer())


@pytest.fixture(scope="session")
def llama3_checkpoint(tmp_path_factory) -> Path:
    """A random Llama with a tokenizer of Llama 3's shape; the configuration has several ends, as Llama 3.1's."""
    from tests import tiny_runs

    tokenizer = tiny_runs.llama3_tokenizer()
    ends = tokenizer.convert_tokens_to_ids(["<|end_of_text|>", "<|eot_id|>"])
    return tiny_runs.save_llama(tmp_path_factory.mktemp("llama3"), tokenizer, eos_token_id=ends, num_hidden_layers=2)


@pytest.fixture
def stages_here():
    from tests import tiny_runs

    with tiny_runs.stages_here():
        yield


@pytest.fixture(scope="session")
def two():
    """Two processes over gloo."""
    from tests.several import Several

    several = Several(2)
    yield several
    several.close()


@pytest.fixture(scope="module")
def four():
    """Four processes over gloo, more than there are rows of anything small."""
    from tests.several import Several

    several = Several(4)
    yield several
    several.close()


@pytest.fixture
def as_of_a_terminal():
    """SIGHUP ends this process and what it starts, as by default: under nohup it would be ignored."""
    stop = getattr(signal, "SIGHUP", signal.SIGTERM)
    before = signal.signal(stop, signal.SIG_DFL)
    yield
    signal.signal(stop, before)
