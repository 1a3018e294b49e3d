"""Which products with 4-bit weights a card makes without unpacking them, against bitsandbytes' own rule."""

import ast
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import bitsandbytes
import pytest
import torch

from toolkit.costs import CARDS
from toolkit.costs.counted import Costs, Kernel
from toolkit.costs.devices import GRAPH_KERNEL

RULE = "_gemm_4bit_use_custom_cuda"
WIDTHS = {2048: 8192, 4096: 14336, 8192: 28672}  # of Llamas, and of their MLPs
SHAPES = [
    shape
    for hidden, wide in WIDTHS.items()
    for shape in ((hidden, hidden), (1024, hidden), (wide, hidden), (hidden, wide))
]


def rule_of_bitsandbytes(card):
    """The function that decides on a card, of a module that a CPU build of torch cannot import."""
    path = Path(bitsandbytes.__file__).parent / "backends" / "cuda" / "ops.py"
    functions = (one for one in ast.parse(path.read_text()).body if isinstance(one, ast.FunctionDef))
    (function,) = (one for one in functions if one.name == RULE)
    function.decorator_list = []
    names = {
        "torch": torch,
        "_GEMM_4BIT_CUSTOM_FLOOR_M": 4,
        "_gpu_dispatch_props": lambda _: (card.multiprocessors, *card.capability),
    }
    exec(compile(ast.Module([function], []), str(path), "exec"), names)
    return names[RULE]


@pytest.mark.parametrize("name", CARDS)
def test_a_card_multiplies_with_packed_weights_as_bitsandbytes_has_it(name):
    """In its main lines: of the weights that 8 to 128 rows are multiplied with, nine tenths."""
    card = CARDS[name]
    rule, dtype = rule_of_bitsandbytes(card), torch.bfloat16 if torch.bfloat16 in card.peak else torch.float16
    agreed, all_weights = 0, 0
    for (outputs, inputs), rows in product(SHAPES, (8, 16, 32, 64, 128)):
        agrees = (rows <= card.packed_rows(outputs, inputs)) == rule(0, dtype, rows, outputs, inputs)
        agreed, all_weights = agreed + agrees * outputs * inputs, all_weights + outputs * inputs
    assert agreed / all_weights > 0.9


def test_weights_that_are_unpacked_are_written_and_read():
    card, packed = CARDS["RTX4090"], 10.0
    few, many = (Kernel(2.0 * rows * 4096 * 4096, packed, torch.bfloat16, (rows, 4096, 4096)) for rows in (8, 1000))
    assert card.moved(few) == packed and card.moved(many) == packed + 2 * 2 * 4096 * 4096
    assert card.moved(few, merged=True) == 2 * (4096 * 4096 + 8 * (4096 + 4096))
    other = replace(few, dtype=torch.float32, packed=(8, 4096 * 8, 4096))  # of which no matrix unit multiplies
    assert card.moved(other) > packed == card.moved(replace(other, dtype=torch.bfloat16))
    assert card.moved(SimpleNamespace(packed=None, bytes=7.0)) == 7.0
    costs = Costs()
    costs.kernels[few] += 3
    busy = card.busy(costs)
    assert busy == pytest.approx(3 * card.seconds(few.flops, packed, torch.bfloat16))
    assert card.recorded(costs) == pytest.approx(busy + 3 * GRAPH_KERNEL)
    slow, fast = (replace(card, operator=share * busy) for share in (1.0, 0.1))  # 3 and 0.3 times as long in all
    assert (slow.eager(costs), fast.eager(costs)) == pytest.approx((3 * busy, busy))
    assert replace(fast, graphs=False).eager(costs) == pytest.approx(1.3 * busy)  # a CPU does both itself
