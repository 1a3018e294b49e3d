"""What several processes tell each other, and how items are divided among them."""

import pytest
import torch

from toolkit import processes
from toolkit.errors import PeerError, RewardError, ToolkitError


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
        monkeypatch.setattr(processes, "count", lambda number=number: number)
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
    assert two(hears_later, 1) == [([0, 1, 2], "PeerError"), ([0, 1], "RewardError")]
    assert two(hears_later, None) == [None, None]


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "2"}, "accelerate is set to FSDP"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "accelerate is set to DEEPSPEED"),
        ({"ACCELERATE_USE_CPU": "True", "MASTER_PORT": "29500"}, "starts one process on a CPU"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_PORT": "29500"}, "RANK is 2 of WORLD_SIZE 2, and ranks begin with 0"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": "29500", "LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
    ],
)
def test_what_accelerate_cannot_do_here_is_refused(environ, said, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ToolkitError, match=said):
        processes.join()


def test_one_process_that_was_launched_is_as_one_that_was_not(monkeypatch):
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    processes.join()
    assert processes.count() == 1 and not {"WORLD_SIZE", "RANK", "LOCAL_RANK"} & processes.environment().keys()


def test_accelerates_own_variables_are_let_pass(monkeypatch):
    for name, value in {"ACCELERATE_USE_FSDP": "false", "ACCELERATE_MIXED_PRECISION": "no"}.items():
        monkeypatch.setenv(name, value)
    processes.join()
    assert processes.count() == 1


def test_a_broken_connection_is_not_asked_again(monkeypatch):
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "gather", lambda told: pytest.fail("asked those who are not there"))
    with pytest.raises(PeerError, match="broken"), processes.agreed():
        raise PeerError("the connection is broken")


def of_main():
    return processes.by_main(lambda: {"rank": processes.rank(), "text": "ü"}), processes.gather(processes.rank())


def test_what_the_main_process_found_is_known_to_all(two):
    assert two(of_main) == [({"rank": 0, "text": "ü"}, [0, 1])] * 2
