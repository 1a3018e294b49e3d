import io
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import run as driver
from benchmarks import worker
from benchmarks.reward_arms import Job
from tests.benchmarks.examples import BY_HAND, FIGURES, SIZE, one_round
from tests.tiny_models import tiny_model
from tests.tiny_runs import byte_tokenizer, save_llama
from toolkit.models import Precision, on_another_machine


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "<pad>"  # TRL's masks come from pad ids
    return str(save_llama(tmp_path_factory.mktemp("bench"), tokenizer))


@pytest.fixture(scope="session")
def work(checkpoint):
    return worker.sample(checkpoint, SIZE)


@pytest.fixture(scope="session")
def result(checkpoint):
    """The driver's result of two rounds, with made-up figures, and the steps that it asked for."""
    asked = []

    def step(name, *, model, work, contender=None, size=None, dtype="bfloat16", updates=None):
        assert dtype == "bfloat16"
        asked.append((name, contender))
        if name == "sample":
            replace(BY_HAND, size=replace(BY_HAND.size, epochs=1)).write(work)
            return {}
        one = one_round()
        return {"compare": FIGURES, "floor": one["floor"], "time": one["contenders"].get(contender)}[name]

    saved, said = [], io.StringIO()

    def save(so_far):
        saved.append(len(so_far["sizes"]["base"]["rounds"]))

    with on_another_machine(Precision("bfloat16")), redirect_stderr(said):
        found = driver.run(checkpoint, "cpu", rounds=2, updates=1, save=save, step=step)
    assert saved == [1, 2]  # a benchmark that is stopped keeps its rounds
    return found, asked, said.getvalue()


@pytest.fixture(scope="session")
def job(tmp_path_factory):
    example = str(Path(__file__).parents[2] / "data" / "preferences_example.jsonl")
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    model = tiny_model(size=64)
    model.resize_token_embeddings(len(tokenizer))
    model.config.pad_token_id, model.config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    model.save_pretrained(folder)
    return Job(str(folder), example, example, 0, 8, 4, 1e-3, 300, 300)
