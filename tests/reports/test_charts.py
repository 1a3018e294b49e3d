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
