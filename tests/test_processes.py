"""What several processes tell each other, and how items are divided among them."""

import pytest
import torch

from toolkit import processes
from toolkit.errors import RewardError, ToolkitError


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


def test_items_are_divided_by_weight_and_none_is_lost(two):
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


def of_main():
    return processes.by_main(lambda: {"rank": processes.rank(), "text": "ü"}), processes.gather(processes.rank())


def test_what_the_main_process_found_is_known_to_all(two):
    assert two(of_main) == [({"rank": 0, "text": "ü"}, [0, 1])] * 2
