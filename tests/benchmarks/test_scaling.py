import torch
from torch import distributed as dist

from benchmarks import scaling
from benchmarks.random_llama import TINY
from benchmarks.work import PHASES, Size


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
