import pytest
from transformers import LlamaConfig

from benchmarks import floor, worker
from benchmarks.random_llama import TINY, outline
from benchmarks.work import PHASES
from tests.benchmarks.examples import BY_HAND


def test_operations_by_hand():
    # One layer of 4 × 8 = 32 weights, lm_head of 4 × 10 = 40; an adapter of rank 1 has 4 + 8 = 12.
    found = floor.matmuls(BY_HAND, ((4, 8),), (4, 10), value="separate", rank=1)
    operations = {(m.phase, m.name): m.operations for m in found}
    assert operations == {
        ("rollout", "prompts"): 2 * 8 * (32 + 12),
        ("rollout", "new tokens"): 2 * 4 * (32 + 12),  # 6, less the first of each response
        ("rollout", "lm_head"): 2 * 6 * 40,
        ("score", "forward"): 2 * 14 * (4 * 32 + 3 * 12),  # four roles, three with an adapter
        ("score", "lm_head"): 2 * 6 * 40 * 2,  # policy and reference
        ("update", "forward"): 2 * 14 * (32 + 12) * 2 * 2,  # two roles, two epochs
        ("update", "backward"): 2 * 14 * (32 + 2 * 12) * 2 * 2,
        ("update", "lm_head"): 2 * 6 * 40 * 2,
        ("update", "lm_head backward"): 2 * 6 * 40 * 2,
    }
    shared = floor.matmuls(BY_HAND, ((4, 8),), (4, 10), value="shared", rank=1)
    operations = {(m.phase, m.name): m.operations for m in shared}
    assert operations["score", "forward"] == 2 * 14 * (3 * 32 + 2 * 12)
    assert operations["update", "forward"] == 2 * 14 * (32 + 12) * 2
    assert {m.rows for m in found if m.phase == "update" and m.name == "forward"} == {7}  # of 14 tokens, half the rows


def test_layers_are_those_of_the_model():
    layers, head = floor.linear_layers(outline(LlamaConfig(**TINY)))
    assert layers == 2 * ((64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64))
    assert head == (64, 512)


def test_the_floor_has_seconds_for_every_phase(checkpoint, work):
    found = worker.measure_floor(checkpoint, work, dtype="float32")
    for value in ("separate", "shared"):
        parts = found[value]["parts"]
        assert {part["phase"] for part in parts} == set(PHASES)
        for part in parts:
            rate = part["gigaoperations_per_second"]
            assert part["seconds"] == pytest.approx(part["gigaoperations"] / rate)
    # One rate for both: the shared value role only has less to do.
    assert found["shared"]["seconds"]["update"] < found["separate"]["seconds"]["update"]
