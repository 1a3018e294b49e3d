import json

import numpy as np
import pytest
import torch

from tests.functional import two_processes
from tests.tolerances import EXACT
from toolkit.functional import masked_mean, masked_var, scale_to_unit_variance, standard_error, whiten, wilson_interval

VALUES = torch.tensor([[1.0, 2.0, 100.0], [3.0, 6.0, -50.0]])
MASK = torch.tensor([[True, True, False], [True, True, False]])


def test_mean_and_variance_by_hand():
    # kept: 1, 2, 3, 6. Mean 12/4 = 3; squared deviations 4 + 1 + 0 + 9 = 14, over 3.
    assert masked_mean(VALUES, MASK).item() == 3.0
    assert masked_var(VALUES, MASK).item() == pytest.approx(14 / 3)


def test_mean_with_a_count_is_a_share_of_a_larger_mean():
    halves = [masked_mean(VALUES[i : i + 1], MASK[i : i + 1], count=4.0) for i in range(2)]
    assert sum(halves).item() == pytest.approx(3.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_masked_cannot_spoil_the_mean(bad):
    values = VALUES.masked_fill(~MASK, bad)
    assert masked_mean(values, MASK).item() == 3.0
    assert torch.isfinite(whiten(values, MASK)).all()


def test_nothing_kept_is_zero_and_not_nan():
    nothing = torch.zeros_like(MASK)
    assert masked_mean(VALUES, nothing).item() == 0.0
    assert masked_var(VALUES, nothing).item() == 0.0


def test_whiten_against_numpy():
    kept = VALUES[MASK].numpy().astype(np.float64)
    expected = (kept - kept.mean()) / np.sqrt(kept.var(ddof=1))
    torch.testing.assert_close(whiten(VALUES, MASK)[MASK], torch.tensor(expected, dtype=torch.float32), **EXACT)
    assert (whiten(VALUES, MASK)[~MASK] == 0).all()


def test_scaling_keeps_the_mean():
    scaled = scale_to_unit_variance(VALUES, MASK)
    assert masked_mean(scaled, MASK).item() == pytest.approx(3.0, abs=1e-5)
    assert masked_var(scaled, MASK).item() == pytest.approx(1.0, abs=1e-5)


def test_padding_changes_nothing():
    padded = torch.cat([VALUES, torch.full((2, 4), 7.0)], dim=1)
    mask = torch.cat([MASK, torch.zeros(2, 4, dtype=torch.bool)], dim=1)
    torch.testing.assert_close(whiten(padded, mask)[:, :3], whiten(VALUES, MASK), **EXACT)


def test_standard_error_by_hand():
    # 1, 2, 3, 4: variance 5/3, over n = 4.
    assert standard_error(torch.tensor([1.0, 2.0, 3.0, 4.0])) == pytest.approx((5 / 3 / 4) ** 0.5)
    assert standard_error(torch.tensor([1.0])) == 0.0


def test_wilson_interval_against_a_published_example():
    # Newcombe 1998, Statistics in Medicine 17, table I, method 3: 81 of 263 and 0 of 20.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    with pytest.raises(ValueError, match="at least one trial"):
        wilson_interval(0, 0)


def test_a_mask_must_be_boolean_and_fit():
    with pytest.raises(TypeError, match="True where a value counts"):
        masked_mean(VALUES, MASK.long())
    with pytest.raises(ValueError, match="differ in shape"):
        masked_mean(VALUES, MASK[:, :2])


def test_over_two_processes_as_over_all_values_together(tmp_path):
    torch.multiprocessing.spawn(two_processes.run, (str(tmp_path),), nprocs=2)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    kept = np.concatenate([np.array(v)[np.array(m)] for v, m in two_processes.PARTS])
    centred, deviation = kept - kept.mean(), kept.std(ddof=1)
    for kind, expected in enumerate((centred / deviation, centred / deviation + kept.mean())):
        parts = [np.array(found[rank][kind])[np.array(mask)] for rank, (_, mask) in enumerate(two_processes.PARTS)]
        np.testing.assert_allclose(np.concatenate(parts), expected, rtol=0, atol=1e-5)
    alone = whiten(*(torch.tensor(x) for x in two_processes.PARTS[1]))
    assert (alone - torch.tensor(found[1][0])).abs().max() > 0.1
