import pytest

from benchmarks import breakdown
from benchmarks.work import PHASES


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["aten::mm"], "matmuls"),
        (["mkldnn::_linear_pointwise", "_Pass"], "matmuls"),
        (["aten::bmm", "_Causal"], "attention"),
        (["aten::exp", "aten::_scaled_dot_product_flash_attention_for_cpu"], "attention"),
        (["aten::mul", "bitsandbytes::dequantize_4bit"], "unpacking 4-bit weights"),
        (["aten::mm", "bitsandbytes::dequantize_4bit"], "unpacking 4-bit weights"),
        (["aten::add"], "other operators"),
    ],
)
def test_an_operator_is_of_the_kind_of_what_called_it(names, kind):
    assert breakdown.kind_of(names) == kind


def test_all_of_a_phase_is_of_some_kind(checkpoint, work):
    found = breakdown.break_down(checkpoint, work, "ours-shared-nf4", "float32")
    assert set(found["seconds"]) == set(found["profiled"]) == set(found["by_kind"]) == set(PHASES)
    for phase, kinds in found["by_kind"].items():
        assert sum(kinds.values()) == pytest.approx(found["profiled"][phase])
        assert kinds["matmuls"] > 0 and kinds["attention"] > 0 and kinds[breakdown.PYTHON] > 0
    assert found["by_kind"]["score"]["unpacking 4-bit weights"] > 0
    machine = {"processor": "a chip", "cores": 2, "threads": 1, "memory_gb": 24}
    cpu = {"capability": "AVX2", "gigaoperations_per_second": {"float32": 200.0, "bfloat16": 3.0}}
    result = {"contenders": {"ours-shared-nf4": found}, "dtype": "float32", "cpu": cpu}
    text = breakdown.table({**result, "machine": machine, "versions": {}, "date": "2026-11-28"})
    assert text.count("| ours, shared value, NF4: ") == 3
    assert text.endswith("AVX2; a square product reaches 200 GFLOP/s in float32 and 3 GFLOP/s in bfloat16.")
