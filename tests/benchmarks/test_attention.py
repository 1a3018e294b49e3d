"""The forms of attention that are timed compute the same."""

import torch

from benchmarks.attention import FORMS, milliseconds


def test_all_forms_give_the_same():
    torch.manual_seed(0)
    given = [torch.randn(1, heads, 45, 16, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    exact = FORMS["torch, float32"](given, [40, 5])
    for attend in FORMS.values():
        torch.testing.assert_close(attend(given, [40, 5]), exact, rtol=0.02, atol=0.02)
    assert not torch.equal(exact, FORMS["torch, float32"](given, [45]))


def test_each_is_timed():
    assert all(value > 0 for value in milliseconds((4, 2, 16), [40, 5], repeats=1).values())
