import pytest
import torch
from torch import distributed as dist

from benchmarks import scaling
from benchmarks.random_llama import TINY
from benchmarks.work import PHASES, Size, Work

CARD = scaling.Card(operations=1e12, bandwidth=1e9)


def work(lengths, prompt=10):
    size = Size(rollouts=len(lengths), response_length=max(lengths), micro_batch=1)
    return Work(size, [[5] * prompt for _ in lengths], [[7] * max(lengths) for _ in lengths], list(lengths), 2)


def update(lengths=(4, 4, 4, 4), **changes):
    return scaling.Update(work(lengths), **{"mini_batches": 2, "value": "shared", "checkpointing": False, **changes})


def test_gradients_of_the_recipe():
    # 32 layers of q, o: 4096 + 4096; k, v: 4096 + 1024; gate, up, down: 4096 + 14336, all of rank 16.
    of_a_role = 32 * 16 * (2 * 8192 + 2 * 5120 + 3 * 18432)
    assert update().trained == of_a_role == 41_943_040 and update(value="separate").trained == 2 * of_a_role
    assert update().steps == 4  # two passes of two mini-batches


def test_seconds_of_sums_by_hand():
    net = scaling.Net("", bandwidth=1e9, latency=0.001)
    assert scaling.predicted(update(), 1, CARD, net)["sum"] == 0
    # 4 steps of 168 MB, of which a ring of four sends 3/4 twice, in six messages.
    by_hand = 4 * (167_772_160 * 1.5 / 1e9 + 6 * 0.001)
    assert scaling.predicted(update(), 4, CARD, net)["sum"] == pytest.approx(by_hand)


def test_what_is_divided_and_what_is_not():
    alone, four = (scaling.predicted(update(), number, CARD, scaling.PCIE) for number in (1, 4))
    for phase in ("score", "update"):
        assert four[phase] == pytest.approx(alone[phase] / 4)
    # A token of four rows unpacks 4-bit weights: 0.53 + 2 + 2 bytes each, one of a single row reads 0.53 of them.
    weights, head = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336), 4096 * 128256
    decoding = 4 * (4.53 * weights + 2 * head) / 1e9, 4 * (0.53 * weights + 2 * head) / 1e9
    assert alone["rollout"] - decoding[0] == pytest.approx(4 * (four["rollout"] - decoding[1]))
    longer = scaling.predicted(update((4, 4, 4, 40)), 4, CARD, scaling.PCIE)
    assert longer["rollout"] > 9 * decoding[1]  # all wait for the longest
    assert scaling._largest_share(work((4, 4, 4, 40)), 4) == pytest.approx(50 / 92)
    again = scaling.predicted(update(checkpointing=True), 1, CARD, scaling.PCIE)
    assert alone["update"] < again["update"] < 1.6 * alone["update"]


def test_a_row_for_each_cluster():
    rows = scaling.rows_of(update(), CARD)
    assert [row["processes"] for row in rows] == [1, 4, 8, 16, 16] and rows[0]["faster"] == 1
    assert rows[3]["sum"] > rows[4]["sum"]


def test_a_measured_update(monkeypatch):
    monkeypatch.setattr(scaling, "SMALL", TINY)
    monkeypatch.setattr(scaling, "ON_A_CPU", Size(rollouts=4, response_length=6, micro_batch=2))
    found = scaling.measure(1)
    assert found["seconds"].keys() == set(PHASES) and all(value > 0 for value in found["seconds"].values())
    assert found["bytes"] == {"summed": 0, "objects": 0}


def test_bytes_are_counted(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.add_(1))
    monkeypatch.setattr(dist, "all_gather_object", lambda values, value: values.append(value))
    tensor, values = torch.zeros(3), []
    with scaling.counted_bytes() as sent:
        dist.all_reduce(tensor)
        dist.all_gather_object(values, [1, 2])
    assert sent == {"summed": 12, "objects": len("[1, 2]")} and values == [[1, 2]] and tensor.tolist() == [1, 1, 1]
