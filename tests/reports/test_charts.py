import re

import pytest

from toolkit.reports.charts import bars, curves, histogram, scatter, short, thinned, tick_labels, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.5, 1.0]), (-4.33, 0, [-4, -2, 0]), (1, 80, [20, 40, 60, 80]), (2, 2, [2])],
)  # fmt: skip
def test_ticks_are_round_and_within(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)
    assert len({*ticks(low * 1e-14, high * 1e-14)}) == len(expected)


def test_numbers_are_short():
    numbers = {0: "0", 0.5: "0.5", 999.4: "999", 999.7: "1,000", 1234.5: "1,234", 1.23456e-7: "1.2e-07", 2e9: "2.0e+09"}
    assert {x: short(x) for x in numbers} == numbers


def test_a_colour_that_comes_again_is_dashed():
    text = curves("x", {f"r{i}": [(0.0, i), (1.0, i)] for i in range(8)})
    classes = re.findall('<span class="([^"]*)">r', text)
    assert classes == ["s0", "s1", "s2", "s3", "s4", "s5", "s0 again", "s1 again"]
    assert re.findall('polyline class="line ([^"]*)"', text) == classes


def test_neighbouring_ticks_are_told_apart():
    """Of a score that moves by some ten thousandths."""
    assert tick_labels([0.1234, 0.1236, 0.1238]) == ["0.1234", "0.1236", "0.1238"]
    assert tick_labels([12345.2, 12345.4]) == ["12,345.2", "12,345.4"] and tick_labels([2.0, 4.0]) == ["2", "4"]
    labels = re.findall(r">([^<>]+)</text>", curves("x", {"x": [(10000.0, 1.0001), (10001.0, 1.0004)]}))
    assert labels and len({*labels}) == len(labels)


def test_points_that_become_one_are_drawn_at_their_mean():
    """Of pairs on a line the means are on it, too."""
    pairs = [(float(i), 2.0 * i) for i in range(3000)]
    assert all(y == 2 * x for x, y in thinned(pairs)[0])


def test_a_long_curve_keeps_its_range():
    points = [(float(i), float(i % 2)) for i in range(3000)]
    curve, band = thinned(points)
    assert len(curve) == 300 and {y for _, y in curve} == {0.5} and {b[1:] for b in band} == {(0.0, 1.0)}
    assert thinned(points[:300]) == (points[:300], [])


def drawn(name, text):
    return [[float(n) for n in point.split(",")] for point in re.search(f'{name}" points="([^"]*)"', text)[1].split()]


def test_the_spread_of_a_long_curve_is_thinned_as_its_points_are():
    """Of k rows that become one, of independent errors e, the mean has the error sqrt(sum of e²) / k."""
    points = [(float(i), 5.0) for i in range(1200)]
    curve, band = thinned(points, [(x, y - 1.0, y + 1.0) for x, y in points])
    assert [x for x, *_ in band] == [x for x, _ in curve] and len(band) == 300
    assert all(high - low == pytest.approx(2 / 4**0.5) and (low + high) / 2 == 5.0 for _, low, high in band)
    known = [(x, y - 3.0, y + 3.0) for x, y in points[:2]]  # an error is not known of each row, and of no later one
    assert thinned(points, known)[1] == [(1.5, 5.0 - 18**0.5 / 2, 5.0 + 18**0.5 / 2)]
    many = [(float(i), float(i % 2)) for i in range(20_000)]
    text = curves("score", {"score": many}, spread={"score": [(x, y - 1.0, y + 1.0) for x, y in many]})
    assert len(drawn("band s0", text)) == 600
    lowest, highest = (sorted(y for _, y in drawn("band s0", text))[place] for place in (-1, 0))
    assert (lowest, highest) == (162.0, 12.0)  # the axis is that of what is drawn


def test_of_many_points_some_from_everywhere_are_drawn():
    points = [(float(i), float(i >= 2000)) for i in range(4000)]
    text = scatter("score over length", {"chosen": points, "rejected": points[:2000]})
    found = re.findall('circle class="dot (s.)" cx="[^"]*" cy="([^"]*)"', text)
    assert [found.count(("s0", y)) for y in ("162.0", "12.0")] == [1000, 1000]
    assert found.count(("s1", "162.0")) == 2000
    assert "score over length, 4,000 of 6,000 points<" in text
    assert "points<" not in scatter("x", {"x": points[:2000]}) + scatter("x", {"x": points}, joined=True)


def test_the_axes_of_joined_points_are_those_of_what_is_drawn():
    text = scatter("score vs. KL", {"": [(i / 1000, 100.0 * (-1) ** i + i) for i in range(1000)] * 2}, joined=True)
    found = sorted(float(y) for y in re.findall('circle class="dot s0" cx="[^"]*" cy="([^"]*)"', text))
    assert (found[-1], found[0]) == (162.0, 12.0)


def test_a_curve_is_where_its_numbers_are():
    text = curves("loss", {"loss": [(0.0, 1.0), (5.0, 3.0), (10.0, 2.0)]}, marks=[(5.0, "a <sign>"), (99.0, "beyond")])
    assert drawn("line s0", text) == [[46.0, 162.0], [188.0, 12.0], [330.0, 87.0]]  # of 340 by 190 with its margins
    assert 'class="mark" x1="188.0"' in text and "a &lt;sign&gt;" in text and "beyond" not in text
    with_spread = curves(
        "score", {"score": [(0.0, 1.0), (1.0, 2.0)]}, spread={"score": [(0.0, 0.0, 2.0), (1.0, 1.0, 3.0)]}
    )
    assert drawn("band s0", with_spread) == [[46.0, 62.0], [330.0, 12.0], [330.0, 112.0], [46.0, 162.0]]


def test_what_is_not_finite_is_not_drawn():
    nan = float("nan")
    for text in (
        curves("x", {"x": [(0.0, nan), (1.0, 2.0), (2.0, float("inf"))]}),
        curves("x", {"x": []}),
        scatter("x", {"x": [(nan, 1.0)]}),
        histogram("x", {"x": [nan]}),
    ):
        assert "nan" not in text and "inf" not in text


def test_a_histogram_counts():
    text = histogram("h", {"a": [0.0] * 3 + [24.0], "b": [12.0]}, below="score")
    heights = [float(h) for h in re.findall(r'bar s0".*?height="([\d.]+)"', text)]
    assert heights == [150.0, 50.0] and len(re.findall('bar s1"', text)) == 1 and ">score<" in text


def test_shares_of_all_and_names_as_text():
    text = bars("time", {"roll<out>": 30.0, "update": 10.0}, unit="s")
    assert "roll&lt;out&gt;" in text and "75%" in text and 'width="75.0"' in text and ">10 s<" in text
    assert "<b>" not in scatter("<b>", {"<b>": [(0.0, 0.0)], "c": []}, below="<b>")
