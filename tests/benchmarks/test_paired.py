import pytest
import torch

from benchmarks.paired import bootstrap, compare, correctness, log_loss, mcnemar


def test_mcnemar_by_hand():
    # 10 pairs that one judge alone has right, 2 of them the first: 2·(1 + 10 + 45)/1024.
    assert mcnemar(2, 8) == mcnemar(8, 2) == pytest.approx(0.109375)
    assert mcnemar(0, 0) == 1.0 and mcnemar(5, 5) == 1.0


def test_a_tie_is_half_right():
    margins = torch.tensor([2.0, -1.0, 0.0])
    assert correctness(margins).tolist() == [1, 0, 0.5]
    assert log_loss(margins).tolist() == pytest.approx([0.126928, 1.313262, 0.693147], abs=1e-6)


def test_the_interval_is_that_of_the_normal_approximation_for_many_pairs():
    generator = torch.Generator().manual_seed(1)
    differences = torch.randn(1, 400, generator=generator, dtype=torch.float64) + 0.2
    low, high = bootstrap(differences)
    half = 1.96 * float(differences.std()) / 20
    mean = float(differences.mean())
    assert low == pytest.approx(mean - half, abs=0.01) and high == pytest.approx(mean + half, abs=0.01)
    # Seeds that disagree widen it, where the mean over all stays what it was.
    apart = torch.cat([differences + 0.5, differences - 0.5])
    assert bootstrap(apart)[1] - bootstrap(apart)[0] > 4 * (high - low)


def test_pairs_that_do_not_count_change_nothing():
    generator = torch.Generator().manual_seed(1)
    differences = torch.randn(2, 300, generator=generator, dtype=torch.float64)
    kept = torch.rand(2, 300, generator=generator) < 0.6
    found = bootstrap(differences, kept=kept)
    assert found == bootstrap(torch.where(kept, differences, 1e6), kept=kept) != bootstrap(differences)
    assert bootstrap(differences, kept=torch.ones_like(kept)) == bootstrap(differences)
    # Of one seed by those that count alone: as many pairs as are drawn.
    low, high = bootstrap(differences[:1], kept=kept[:1])
    some = differences[0][kept[0]]
    half = 1.96 * float(some.std()) / len(some) ** 0.5
    assert low == pytest.approx(float(some.mean()) - half, abs=0.02)
    assert high == pytest.approx(float(some.mean()) + half, abs=0.02)


def test_a_comparison_by_hand():
    # 100 pairs of one seed: both right on 60, the first alone on 10, the second alone on 10, neither on 20.
    first = [1.0] * 60 + [1.0] * 10 + [-1.0] * 10 + [-1.0] * 20
    second = [1.0] * 60 + [-1.0] * 10 + [1.0] * 10 + [-1.0] * 20
    found = compare([first], [second], margin=0.1)
    assert found["accuracy"]["first"] == found["accuracy"]["second"] == pytest.approx(0.7)
    assert found["mcnemar"] == [{"only_first": 10, "only_second": 10, "p": 1.0}]
    low, high = found["accuracy"]["interval"]  # √(0.2/100) · 1.96 = 0.0877 to either side
    assert low == pytest.approx(-0.088, abs=0.006) and high == pytest.approx(0.088, abs=0.006)
    assert found["non_inferior"] and not compare([first], [second], margin=0.05)["non_inferior"]
    worse = compare([second], [[1.0] * 100], margin=0.1)
    assert worse["accuracy"]["difference"] == pytest.approx(-0.3) and not worse["non_inferior"]
    assert worse["log_loss"]["difference"] == pytest.approx(0.3)  # −log σ(−1) + log σ(1) = 1, on 30 of 100 pairs
