"""Charts as SVG, drawn here so that they follow the page: light or dark, narrow or wide. Numbers in, text out."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence

WIDTH, HEIGHT = 340, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 12, 28
_MOST_POINTS = 300  # of a curve; of more, neighbours become their mean with its error or their range
_MOST_DOTS = 2000  # of a series of a scatter
_BINS = 24
_TICKS = 4  # about so many
COLOURS = 6
"""How many there are: `s0`, `s1`, …, in the style of a page; one that comes again has its lines dashed, `again`."""

Point = tuple[float, float]
Band = tuple[float, float, float]  # x, low, high


def short(value: float, digits: int = 3) -> str:
    """A number with three digits, or so many, or a whole one."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    size = abs(float(f"{value:.{digits}g}"))  # 999.7 is 1,000
    if 1e3 <= size < 1e6:
        return f"{value:,.{max(0, digits - 3)}f}"
    return f"{value:.{digits}g}" if 1e-3 <= size < 1e3 else f"{value:.{digits - 2}e}"


def tick_labels(values: Sequence[float]) -> list[str]:
    """Numbers with the fewest digits by which no two of them look alike."""
    of_digits = ([short(value, digits) for value in values] for digits in range(3, 18))
    return next((labels for labels in of_digits if len({*labels}) == len(values)), [short(value) for value in values])


def ticks(low: float, high: float) -> list[float]:
    """Round numbers within a range."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    rough = span / _TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, first + _TICKS + 3) if i * step <= high + 1e-9 * step]


def thinned(points: Sequence[Point], spread: Sequence[Band] = ()) -> tuple[list[Point], list[Band]]:
    """Points that can be told apart: means of neighbours, and, where several became one, the range of those; with a
    `spread`, which is a standard error each way, that of their mean."""
    if len(points) <= _MOST_POINTS:
        return list(points), list(spread)
    errors = {x: (high - low) / 2 for x, low, high in spread}
    curve, band = [], []
    for i in range(_MOST_POINTS):
        part = points[i * len(points) // _MOST_POINTS : (i + 1) * len(points) // _MOST_POINTS]
        x, values = sum(x for x, _ in part) / len(part), [y for _, y in part]
        mean = sum(values) / len(values)
        curve.append((x, mean))
        if known := [errors[place] for place, _ in part if place in errors]:
            error = math.hypot(*known) / len(known)  # of independent ones
            band.append((x, mean - error, mean + error))
        elif not errors:
            band.append((x, min(values), max(values)))
    return curve, band


class _Plane:
    def __init__(self, xs: Iterable[float], ys: Iterable[float]):
        self.x_low, self.x_high = _range(xs)
        self.y_low, self.y_high = _range(ys)

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return round(HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM), 1)

    def path(self, points: Iterable[Point]) -> str:
        return " ".join(f"{self.x(x)},{self.y(y)}" for x, y in points)

    def axes(self) -> str:
        lines = []
        places = ticks(self.y_low, self.y_high)
        for y, label in zip(map(self.y, places), tick_labels(places), strict=True):
            lines.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
            lines.append(f'<text class="tick end" x="{_LEFT - 5}" y="{y + 3.5}">{label}</text>')
        places = ticks(self.x_low, self.x_high)
        for x, label in zip(map(self.x, places), tick_labels(places), strict=True):
            lines.append(f'<text class="tick middle" x="{x}" y="{HEIGHT - 12}">{label}</text>')
        return "".join(lines)


def _range(values: Iterable[float]) -> Point:
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if low == high:
        apart = abs(low) * 0.1 or 1.0
        return low - apart, high + apart
    return low, high


def _colours(names: Sequence[str]) -> dict[str, str]:
    """The classes of each name."""
    return {name: f"s{i % COLOURS}{' again' * (i >= COLOURS)}" for i, name in enumerate(names)}


def _chart(title: str, body: str, *, legend: Mapping[str, str] | None = None, below: str = "") -> str:
    names = "".join(f'<span class="{of}">{html.escape(name)}</span>' for name, of in (legend or {}).items())
    below = f'<text class="tick end" x="{WIDTH - _RIGHT}" y="{HEIGHT - 1}">{html.escape(below)}</text>' if below else ""
    return (
        f'<figure><figcaption>{html.escape(title)}<span class="legend">{names}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">{body}{below}</svg></figure>'
    )


def curves(
    title: str,
    series: Mapping[str, Sequence[Point]],
    *,
    spread: Mapping[str, Sequence[Band]] | None = None,
    marks: Iterable[tuple[float, str]] = (),
    places: Sequence[str] = (),
) -> str:
    """Lines over each other, each with its spread, if that is known.

    `marks` are places on the x axis with a text; `places` are all names, where several charts show the same ones, some
    of them not all, so that each keeps its colour.
    """
    colours = _colours(places or list(series))
    finite = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in series.items()}
    drawn = {name: thinned(points, (spread or {}).get(name, ())) for name, points in finite.items()}
    bands = {name: [b for b in band if all(map(math.isfinite, b))] for name, (_, band) in drawn.items()}
    every = [point for points, _ in drawn.values() for point in points]
    edges = [y for band in bands.values() for _, *both in band for y in both]
    plane = _Plane([x for x, _ in every], [*(y for _, y in every), *edges])
    body = [plane.axes()]
    for x, text in marks:
        if plane.x_low <= x <= plane.x_high:
            place = plane.x(x)
            line = f'<line class="mark" x1="{place}" x2="{place}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}">'
            body.append(f"{line}<title>{html.escape(text)}</title></line>")
    for name, (points, _) in drawn.items():
        of = colours[name]
        outline = [(x, high) for x, _, high in bands[name]] + [(x, low) for x, low, _ in reversed(bands[name])]
        if outline:
            body.append(f'<polygon class="band {of}" points="{plane.path(outline)}"/>')
        if len(points) == 1:
            x, y = points[0]
            body.append(f'<circle class="dot {of}" cx="{plane.x(x)}" cy="{plane.y(y)}" r="2.5"/>')
        body.append(f'<polyline class="line {of}" points="{plane.path(points)}"/>')
    legend = {name: colours[name] for name in series} if len(series) > 1 or places else None
    return _chart(title, "".join(body), legend=legend)


def _some(points: Sequence[Point]) -> Sequence[Point]:
    if len(points) <= _MOST_DOTS:
        return points
    return [points[i * len(points) // _MOST_DOTS] for i in range(_MOST_DOTS)]


def scatter(
    title: str, series: Mapping[str, Sequence[Point]], *, below: str = "", diagonal: bool = False, joined: bool = False
) -> str:
    """Points, of many those at equal distances in their order; `joined` in it, the last one larger; with a `diagonal`
    where both axes say the same."""
    finite = {name: [p for p in points if all(map(math.isfinite, p))] for name, points in series.items()}
    dots = {name: thinned(points)[0] if joined else _some(points) for name, points in finite.items()}
    drawn = [point for points in dots.values() for point in points]
    plane = _Plane([x for x, _ in drawn], [y for _, y in drawn])  # means of many points take less room than these
    body = [plane.axes()]
    if diagonal:
        ends = [(max(plane.x_low, plane.y_low),) * 2, (min(plane.x_high, plane.y_high),) * 2]
        body.append(f'<polyline class="mark" points="{plane.path(ends)}"/>')
    if not joined and len(drawn) < (number := sum(map(len, finite.values()))):
        title = f"{title}, {len(drawn):,} of {number:,} points"
    for i, shown in enumerate(dots.values()):
        if joined:
            body.append(f'<polyline class="line thin s{i}" points="{plane.path(shown)}"/>')
        for n, (x, y) in enumerate(shown):
            size = 4 if joined and n == len(shown) - 1 else 2
            body.append(f'<circle class="dot s{i}" cx="{plane.x(x)}" cy="{plane.y(y)}" r="{size}"/>')
    return _chart(title, "".join(body), legend=_colours(list(series)) if len(series) > 1 else None, below=below)


def histogram(title: str, series: Mapping[str, Sequence[float]], *, below: str = "") -> str:
    """How many values there are of which size, over each other."""
    finite = {name: [value for value in values if math.isfinite(value)] for name, values in series.items()}
    low, high = _range(value for values in finite.values() for value in values)
    width = (high - low) / _BINS
    counts = {}
    for name, values in finite.items():
        of = [0] * _BINS
        for value in values:
            of[min(_BINS - 1, int((value - low) / width))] += 1
        counts[name] = of
    plane = _Plane([low, high], [0.0, max(1, *(count for of in counts.values() for count in of))])
    body = [plane.axes()]
    for i, of in enumerate(counts.values()):
        for place, count in enumerate(of):
            if count:
                x, right = plane.x(low + place * width), plane.x(low + (place + 1) * width)
                top = plane.y(count)
                size = f'width="{max(0.5, round(right - x - 0.6, 1))}" height="{round(HEIGHT - _BOTTOM - top, 1)}"'
                body.append(f'<rect class="bar s{i}" x="{x}" y="{top}" {size}/>')
    return _chart(title, "".join(body), legend=_colours(list(series)), below=below)


def bars(title: str, values: Mapping[str, float], *, unit: str) -> str:
    """Each value as a bar with its share of all."""
    total = sum(values.values()) or 1.0
    rows = "".join(
        f'<tr><td>{html.escape(name)}</td><td class="n">{html.escape(short(value))} {html.escape(unit)}</td>'
        f'<td class="n">{value / total:.0%}</td>'
        f'<td class="share"><svg viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="bar s0" width="{max(0.3, 100 * value / total):.1f}" height="8"/></svg></td></tr>'
        for name, value in values.items()
    )
    return f"<table><caption>{html.escape(title)}</caption>{rows}</table>"
