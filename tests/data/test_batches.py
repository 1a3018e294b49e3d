"""The place in the data, and whether they are the same data."""

import pytest
import torch
from datasets import Dataset
from torch.utils.data import RandomSampler

from toolkit.data import PlacedDataLoader, data_digest, parts_of, values_of

ROWS = list(range(11))


def loader(replacement=False, workers=0, rows=ROWS):
    order = torch.Generator().manual_seed(5)
    sampler = RandomSampler(rows, replacement=replacement, generator=order)
    return PlacedDataLoader(
        rows, generator=order, sampler=sampler, batch_size=3, drop_last=True, collate_fn=list, num_workers=workers
    )


def drawn(batches, number):
    """The next batches over as many passes as it takes, with the place after each."""
    found = []
    while True:
        for batch in batches:
            found.append((batch, batches.state_dict()))
            if len(found) == number:
                return found


@pytest.mark.parametrize(("replacement", "workers"), [(False, 0), (True, 0), (False, 2)])
def test_a_resumed_loader_draws_what_is_left(replacement, workers):
    whole = drawn(loader(replacement, workers), 8)  # passes of 3 batches
    assert len({tuple(batch) for batch, _ in whole}) > 4
    for at in (2, 4) if workers else (1, 2, 3, 4, 6):  # each starts them anew
        again = loader(replacement, workers)
        again.load_state_dict(whole[at - 1][1])
        assert [batch for batch, _ in drawn(again, 8 - at)] == [batch for batch, _ in whole[at:]], at


def test_a_place_at_the_end_of_a_pass_ends_that_pass_first():
    within = drawn(loader(), 3)[-1][1]
    again = loader()
    again.load_state_dict(within)
    assert list(again) == []  # events of the pass's end are still due
    between = loader()
    list(between)
    after = loader()
    after.load_state_dict(between.state_dict())
    assert list(after) == list(between) != []


@pytest.mark.parametrize(("replacement", "at", "rows"), [(False, 2, 11), (True, 2, 11), (True, 10, 80)])
def test_a_pass_that_is_ended_right_after_a_load_is_over(replacement, at, rows):
    """With replacement torch draws 32 rows at a time: at batch 10 the first of them are not used up."""
    whole, again = (loader(replacement, rows=list(range(rows))) for _ in range(2))
    for _ in range(at):
        whole.next_batch()
    again.load_state_dict(whole.state_dict())
    assert again.end_pass() == whole.end_pass() == rows // 3 - at
    assert [again.next_batch() for _ in range(4)] == [whole.next_batch() for _ in range(4)]


@pytest.mark.parametrize("replacement", [False, True])
def test_who_looks_at_a_pass_changes_nothing(replacement):
    """As a callback may, to which transformers gives a loader."""
    whole, seen = drawn(loader(replacement), 8), loader(replacement)
    look = seen.look()
    assert len(look) == 3 and list(look) == [batch for batch, _ in whole[:3]] and next(iter(look)) == whole[0][0]
    for batch, _ in whole:
        assert seen.next_batch() == batch
        place = str(seen.state_dict())
        assert len(list(look)) == 3 and next(iter(look)) and str(seen.state_dict()) == place


class Counted(list):
    read = 0

    def __getitems__(self, numbers):
        self.read += 1
        return [self[number] for number in numbers]


def test_a_resumed_loader_does_not_read_what_it_skips():
    order, rows = torch.Generator().manual_seed(5), Counted(ROWS)
    again = PlacedDataLoader(
        rows,
        generator=order,
        sampler=RandomSampler(rows, generator=order),
        batch_size=3,
        drop_last=True,
        collate_fn=list,
    )
    whole = drawn(loader(), 3)
    again.load_state_dict(whole[1][1])
    assert again.next_batch() == whole[2][0] and rows.read == 1 and len(again) == 3


def test_digest_is_of_the_content():
    rows = {"ids": [[1, 2], [3], [], [4]] * 600, "text": ["a", "b", None, ""] * 600}
    one, other = Dataset.from_dict(rows), Dataset.from_dict(rows)
    digest = data_digest(one)
    assert digest == data_digest(other) == data_digest(other.select(range(2400)))
    changed = {**rows, "ids": [[1, 2], [3], [], [5]] * 600}
    others = (
        Dataset.from_dict(changed),
        one.select(range(2399)),
        one.shuffle(seed=1),
        one.select_columns(["ids"]),
        one.rename_column("text", "words"),
    )
    for different in others:
        assert data_digest(different) != digest
    assert data_digest(one.shuffle(seed=1)) == data_digest(other.shuffle(seed=1))


def test_a_column_is_read_some_rows_at_a_time_in_the_order_of_the_rows(monkeypatch):
    monkeypatch.setattr("toolkit.data.rows._AT_ONCE", 4)
    rows = Dataset.from_dict({"a": [[i] * (i % 3) for i in range(11)], "b": [*range(11)]})
    for some in (rows, rows.shuffle(seed=1), rows.select([7, 2, 2]), rows.select([]), rows.with_format("torch")):
        expected = [some.with_format(None)[i]["a"] for i in range(len(some))]
        assert [*values_of(some, "a")] == expected and all(type(ids) is list for ids in values_of(some, "a"))
        sizes = [len(part) for part in parts_of(some, "b")]
        assert sum(sizes) == len(some) and all(size == 4 for size in sizes[:-1])
