"""Whatever a reward does to what it is given and to the process, the run goes on as without it."""

import asyncio
import io
import os
import random
import signal
import sys
import tempfile
import warnings
from copy import deepcopy

import numpy as np
import pytest
import torch

from tests.trainers.helpers import rollout
from toolkit.rewards import WeightedSum, load_function, score_with

RESPONSES = [[12, 13, 2], [9, 9, 8]]
CHANGES = {
    "the working folder": lambda: os.chdir("/"),
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch's default device": lambda: torch.set_default_device("meta"),
    "torch's number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch's precision of products": lambda: torch.set_float32_matmul_precision("medium"),
    "torch's choice of algorithms": lambda: torch.use_deterministic_algorithms(True),
    "standard output or error": lambda: setattr(sys, "stdout", io.StringIO()),
    # Not SIG_IGN, with which a background job starts.
    "how Ctrl-C, SIGTERM or SIGHUP is met": lambda: signal.signal(signal.SIGINT, print),
    "how Ctrl-C, SIGTERM or SIGHUP .*": lambda: signal.signal(signal.SIGTERM, print),
    "the random state of Python, NumPy or torch": lambda: torch.rand(3),
    "the random state of Python, .*": lambda: np.random.seed(3),
    "the random state of .*": random.random,
}


def process():
    draws = (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        np.random.get_state()[2:],
        torch.get_rng_state().tolist(),
    )
    draws += (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    of_torch = torch.get_default_dtype(), torch.empty(0).device, torch.get_num_threads()
    of_torch += torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    of_torch += (torch._C._len_torch_function_stack(),)  # what each call of torch goes through
    return os.getcwd(), sys.stdout, of_torch, draws


def test_a_folder_that_the_reward_went_to_and_deleted(tmp_path):
    def change(batch):
        torch.rand(3)
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            os.chdir(folder)
        return batch.lengths

    before = process()
    with pytest.warns(UserWarning, match="the reward changed (the working folder|the random state)"):
        assert score_with(change, rollout(RESPONSES)).tolist() == [3, 3]
    assert process() == before


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("kind", ["sync", "async", "part", "raises", "file"])
def test_the_process_is_as_it_was(what, kind, tmp_path, monkeypatch):
    def change(batch):
        CHANGES[what]()
        assert kind != "raises"
        return batch.lengths

    async def later(batch):
        await asyncio.sleep(0)
        return change(batch)

    of_threads = ("torch's number of threads", "torch's default device", "how Ctrl-C, SIGTERM or SIGHUP")
    if kind == "async" and what.startswith(of_threads):
        pytest.skip("a thread has its own, or none")
    before = process()
    own = r"\. Its draws may then repeat at each call: give it a generator of its own" if "random" in what else ""
    with pytest.warns(UserWarning, match=f"^the reward changed {what}, which is the run's: it was put back{own}"):
        if kind == "file":
            monkeypatch.setattr("builtins.change_for_test", CHANGES[what], raising=False)
            (tmp_path / "rule.py").write_text("change_for_test()\ndef rule(rollout):\n    return rollout.lengths\n")
            load_function(f"{tmp_path}/rule.py:rule")
        elif kind == "raises":
            with pytest.raises(ValueError, match="AssertionError"):
                score_with(change, rollout(RESPONSES))
        else:
            reward = {"sync": change, "async": later, "part": WeightedSum({"a": change})}[kind]
            assert score_with(reward, rollout(RESPONSES)).tolist() == [3, 3]
    assert process() == before


@pytest.mark.parametrize("kind", ["file", "call"])
def test_a_reward_silences_itself_alone(kind, tmp_path, recwarn):
    """As with the line that many notebooks begin with."""
    warnings.simplefilter("default")  # which tells once of each place
    before = list(warnings.filters)
    text = (
        "import warnings\n{}\ndef rule(rollout):\n    {}\n    warnings.warn('of the reward')\n    return [1.0, 2.0]\n"
    )
    hush = 'warnings.filterwarnings("ignore")'
    (tmp_path / "rule.py").write_text(text.format(*((hush, "pass") if kind == "file" else ("", hush))))
    rule = load_function(f"{tmp_path}/rule.py:rule")
    for number in (1, 2):
        assert score_with(rule, rollout(RESPONSES)).tolist() == [1.0, 2.0]
        warnings.warn(f"of the run, {number}", stacklevel=1)
    told = ["of the reward"] * (kind == "file") + ["of the run, 1", "of the run, 2"]
    assert sorted(str(one.message) for one in recwarn) == told and warnings.filters == before


def test_what_was_told_within_a_reward_is_told_again(recwarn):
    """Python remembers by filters what it has told, until it hears that they are others."""

    def tell():
        warnings.warn("told", stacklevel=1)

    def rule(batch):
        warnings.simplefilter("default")
        tell()
        return batch.lengths

    warnings.simplefilter("always")
    score_with(rule, rollout(RESPONSES))
    tell()
    assert [str(one.message) for one in recwarn] == ["told", "told"]


@pytest.fixture
def products_in_tf32():
    """As `tf32: true` leaves them, which no CPU takes: the older way does not read them."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"


def test_products_in_tf32_are_no_reason_to_fail(products_in_tf32):
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    assert score_with(lambda batch: batch.lengths, rollout(RESPONSES)).tolist() == [3, 3]
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_a_reward_that_sets_tf32_keeps_nothing_from_being_put_back():
    before = process()

    def sets(batch):
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.set_default_dtype(torch.float64)
        return batch.lengths

    with pytest.warns(UserWarning, match="torch's (precision of products|default dtype)"):
        score_with(sets, rollout(RESPONSES))
    assert process() == before and torch.backends.cuda.matmul.fp32_precision == "none"


def test_the_rollout_is_as_it_was():
    batch = rollout(RESPONSES)
    before = deepcopy(batch)

    def spoils(given):
        given.responses[0], given.ended[0] = "", not given.ended[0]
        given.response_ids[1].append(7)
        given.prompt_ids[0].clear()
        given.columns["number"][0] = given.columns["new"] = 1
        return [1.0, 2.0]

    assert score_with(WeightedSum({"a": spoils, "b": lambda given: given.lengths}), batch).tolist() == [4.0, 5.0]
    assert batch == before


def test_scores_are_no_longer_the_rewards():
    kept = torch.tensor([1.0, 2.0])
    scores = score_with(lambda batch: kept, rollout(RESPONSES))
    kept += 5
    assert scores.tolist() == [1.0, 2.0]
