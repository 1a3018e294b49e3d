"""Rows in passes of bounded tokens, held against every way to divide them."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.portion import Portion, at_one_row, by_tokens


def width(lengths, part, packed):
    """Tokens of a pass, padding among them."""
    return sum(lengths[i] for i in part) if packed else len(part) * max(lengths[i] for i in part)


def fewest_and_smallest(lengths, size, packed):
    """Of all ways to cut the rows in order of length: as few passes as fit, and of those the smallest largest pass."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    found = []
    for number in range(len(order)):
        for cuts in combinations(range(1, len(order)), number):
            parts = [order[a:b] for a, b in pairwise((0, *cuts, len(order)))]
            largest = max(width(lengths, part, packed) for part in parts)
            if largest <= size * max(lengths):
                found.append((len(parts), largest))
    return min(found)


@pytest.mark.parametrize("packed", [True, False])
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), size=st.integers(1, 4))
def test_passes_are_few_and_even_and_no_larger_than_so_many_of_the_longest_rows(packed, lengths, size):
    passes = by_tokens(lengths, range(len(lengths)), size, packed=packed)
    assert sorted(i for part in passes for i in part) == list(range(len(lengths)))
    largest = max(width(lengths, part, packed) for part in passes)
    assert (len(passes), largest) == fewest_and_smallest(lengths, size, packed)
    taken = [lengths[i] for part in passes for i in part]
    assert taken == sorted(taken, reverse=True)


def test_rows_that_are_all_long_go_by_as_many_as_were_asked_for():
    assert by_tokens([7] * 6, range(6), 3) == [[0, 1, 2], [3, 4, 5]]


def test_some_rows_are_held_to_the_longest_of_all():
    assert by_tokens([2, 2, 8, 2, 2], [0, 1, 3, 4], 1) == [[0, 1, 3, 4]]
    assert by_tokens([2, 2, 8], [], 1) == []


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("CUDA error: out of memory\nfurther lines"),  # of a kernel that is loaded
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
])  # fmt: skip
def test_rows_are_halved_whatever_of_a_card_s_memory_runs_out(error):
    tried = []

    def attempt(rows):
        tried.append(rows)
        if rows > limit:
            raise error
        return rows

    limit = 2
    assert Portion("rows", 8)(attempt, most=8) == 2 and tried == [8, 4, 2]
    limit = 0
    with pytest.raises(torch.OutOfMemoryError) as ended:
        Portion("rows", 2)(attempt, most=8)
    assert at_one_row(ended.value) and not at_one_row(error)
    error = RuntimeError("another one")
    with pytest.raises(RuntimeError, match="another one"):
        Portion("rows", 2)(attempt, most=8)
