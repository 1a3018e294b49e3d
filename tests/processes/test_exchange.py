"""What several processes tell each other, and how items are divided among them."""

import os
import signal
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from toolkit import processes
from toolkit.cli import app
from toolkit.errors import PeerError, RecipeError, RewardError, ToolkitError
from toolkit.processes import exchange
from toolkit.recipes import Recipe
from toolkit.reports import Output
from toolkit.runs.said import say


def shares(weights):
    return processes.own(weights), processes.count(), processes.rank(), processes.is_main()


def test_alone_everything_is_ones_own():
    assert shares([3.0, 1.0, 2.0]) == ([0, 1, 2], 1, 0, True)
    assert processes.gather("x") == ["x"] and processes.by_main(lambda: 3) == 3
    tensor = torch.ones(2)
    processes.sum_([tensor])
    assert tensor.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="mine"), processes.agreed():
        raise ValueError("mine")


def test_items_are_divided_by_weight_and_none_is_lost(two, monkeypatch):
    for weights in ([1.0] * 7, [10.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0], [4.0], []):
        (first, *_, main), (second, number, rank, other) = two(shares, weights)
        assert sorted([*first, *second]) == list(range(len(weights))) and (number, rank, main, other) == (
            2,
            1,
            True,
            False,
        )
        loads = [sum(weights[i] for i in share) for share in (first, second)]
        assert max(loads) - min(loads) <= max(weights, default=0.0)
    for items, number in ((8, 4), (4, 4), (3, 4), (7, 3)):  # whole runs in order, of equal size up to one
        monkeypatch.setattr(exchange, "count", lambda number=number: number)
        owners = [processes.owner(item, items) for item in range(items)]
        sizes = [owners.count(rank) for rank in range(number)]
        assert owners == sorted(owners) and sum(sizes) == items and max(sizes) - min(sizes) <= 1
    long, rest = two(shares, [10.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0])
    assert long[0] == [0] and len(rest[0]) == 6  # one response that is as long as all others together


def summed():
    rank = processes.rank()
    tensors = [torch.tensor([[1.0, rank]]), torch.tensor([rank + 1], dtype=torch.float64), torch.tensor(2.0)]
    processes.sum_(tensors)
    return [tensor.tolist() for tensor in tensors], [str(tensor.dtype) for tensor in tensors]


def test_tensors_are_added_up_whatever_their_dtype(two):
    expected = [[[2.0, 1.0]], [3.0], 4.0], ["torch.float32", "torch.float64", "torch.float32"]
    assert two(summed) == [expected, expected]


def fails_on(rank, error):
    def call():
        if processes.rank() == rank:
            raise error
        return "well"

    try:
        with processes.agreed():
            call()
    except ToolkitError as found:
        return type(found).__name__, str(found)
    return None


def fails_in_all():
    try:
        with processes.agreed():
            raise RewardError("no answer")
    except ToolkitError as found:
        return type(found).__name__, str(found)


def hears_later(rank):
    """Of an error that one process meets where the others do not wait."""
    heard = []
    try:
        for part in range(3):
            with processes.agreed(now=part == 2):
                heard.append(part)
                if processes.rank() == rank and part == 1:
                    raise RewardError("no answer")
    except ToolkitError as found:
        return heard, type(found).__name__


def fails_further_out(rank):
    """Of an error of one process where the others have gone further in; what they do next still meets."""
    try:
        with processes.agreed():
            if processes.rank() == rank:
                raise RewardError("no answer")
            with processes.agreed():
                pass
    except ToolkitError as found:
        return type(found).__name__, getattr(found, "of", ""), processes.gather(processes.rank())


def runs_out_of_memory():
    """As equal cards do, each with sizes of its own."""
    try:
        with processes.agreed(), processes.agreed():
            raise torch.OutOfMemoryError(f"CUDA out of memory: process {processes.rank()}")
    except RuntimeError as found:
        return type(found).__name__, getattr(found, "of", "")


def fails_in_main():
    def call():
        raise RewardError("no answer")

    try:
        processes.by_main(call)
    except ToolkitError as found:
        return type(found).__name__, str(found)


def test_an_error_of_one_is_raised_by_all(two):
    mine, others = two(fails_on, 0, RewardError("no answer"))
    assert mine == ("RewardError", "no answer") and others == ("PeerError", "process 0 of 2: RewardError: no answer")
    assert two(fails_in_main) == [mine, others]
    assert two(fails_on, 5, RewardError("never")) == [None, None]
    assert two(fails_in_all) == [mine, others]  # said by one of them
    assert two(runs_out_of_memory) == [("OutOfMemoryError", ""), ("PeerError", "OutOfMemoryError")]
    assert two(hears_later, 1) == [([0, 1, 2], "PeerError"), ([0, 1], "RewardError")]
    assert two(hears_later, None) == [None, None]
    assert two(fails_further_out, 1) == [("PeerError", "RewardError", [0, 1]), ("RewardError", "", [0, 1])]


def begins(*failing):
    """How often a stage's command reads its recipe, its exit code and what it says, where that fails in some."""
    read = []

    def load(*_, **__):
        read.append(1)
        if processes.rank() in failing:
            raise RecipeError("no such recipe.")
        return Recipe("x", {}, "x", Path())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.recipes.load", load)
        patch.setattr("toolkit.runs.stages.run", lambda *_, **__: None)
        patch.setattr("toolkit.cli.stages.join", lambda number: None)  # these have, and keep their output
        done = CliRunner().invoke(app, ["ppo", "doubling"])
    return len(read), done.exit_code, done.stderr


def test_a_recipe_is_read_once_and_its_errors_are_told_once(two):
    said = "RecipeError: no such recipe.\n"
    assert two(begins) == [(1, 0, ""), (1, 0, "")]
    assert two(begins, 0, 1) == [(1, 1, said), (1, 1, "")]
    assert two(begins, 1) == [(1, 1, ""), (1, 1, said)]  # a file that one machine lacks


def told():
    with redirect_stdout(StringIO()) as printed:
        say("a sentence")
        Output().print("a table")
    return printed.getvalue()


def test_one_process_says_what_concerns_all(two):
    """Of a script of one's own, too, where nobody silences the others."""
    assert two(told) == ["a sentence\na table\n", ""]


def test_a_broken_connection_is_not_asked_again(monkeypatch):
    monkeypatch.setattr(exchange, "count", lambda: 2)
    monkeypatch.setattr(exchange, "gather", lambda told: pytest.fail("asked those who are not there"))
    with pytest.raises(PeerError, match="broken"), processes.agreed():
        raise PeerError("the connection is broken")


def of_main():
    return processes.by_main(lambda: {"rank": processes.rank(), "text": "ü"}), processes.gather(processes.rank())


def test_what_the_main_process_found_is_known_to_all(two):
    assert two(of_main) == [({"rank": 0, "text": "ü"}, [0, 1])] * 2


def interrupted_between(rank):
    """Ctrl-C comes to one that waits for the others in an exchange within another; they have had it, too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background does without
    pids = processes.gather(os.getpid())
    try:
        with processes.agreed(), processes.agreed():
            if processes.rank() == rank:
                time.sleep(1.0)  # the other has long come to the exchange
                os.kill(pids[1 - rank], signal.SIGINT)
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        return "KeyboardInterrupt", processes.gather(processes.rank())


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal for one process")
@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_is_met_after_an_exchange(rank, two):
    assert two(interrupted_between, rank) == [("KeyboardInterrupt", [0, 1])] * 2


def test_a_connection_that_breaks_is_told_in_a_line(monkeypatch):
    def broken(*_):
        raise RuntimeError("Connection closed\n by peer")

    monkeypatch.setattr(exchange, "count", lambda: 2)
    monkeypatch.setattr(exchange, "rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "all_gather_object", broken)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(PeerError, match="of process 1 of 2 to another is broken: Connection closed by peer"):
        processes.gather(1)
    assert signal.getsignal(signal.SIGINT) is before
