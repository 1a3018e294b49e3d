"""The pages' tables are those of the newest committed results, by today's code."""

import pytest

from benchmarks import breakdown, demonstrations, fooled, reviews, reward_parity, signs, systems
from benchmarks.records import DOCS, RESULTS, fill, newest

SHOWN = [
    *((demonstrations, demonstrations.show, f"demonstration_{name}") for name in demonstrations.DEMONSTRATIONS),
    *((fooled, lambda path, name=name: fooled.show(name, path), name) for name in fooled.FORMS),
    *((reviews, reviews.show, kind) for kind in ("reviews", "own_models", "other_model")),
    (systems, lambda path: systems.show(), "systems"),
]


@pytest.mark.parametrize(("module", "show", "kind"), SHOWN, ids=[kind for *_, kind in SHOWN])
def test_a_page_has_the_tables_of_the_committed_results(module, show, kind, monkeypatch):
    filled = []
    monkeypatch.setattr(module, "fill_file", lambda *arguments: filled.append(arguments))
    monkeypatch.setattr(module, "save_figure", lambda figure, name: None)
    monkeypatch.setattr(fooled, "_figure", lambda seeds: None)  # which test_fooled draws
    show(sorted(RESULTS.glob(f"*_{kind}.json"))[-1])
    assert filled
    for page, begin, end, text in filled:
        there = page.read_text(encoding="utf-8")
        assert fill(there, begin, end, text) == there, (
            f"the show of {module.__name__} makes other tables of its results"
        )


@pytest.mark.parametrize(
    ("page", "marker", "module", "table"),
    [
        ("fooled_rewards", "signs", signs, signs.tables),
        ("benchmarks", "breakdown", breakdown, breakdown.table),
        ("comparisons", "reward", reward_parity, reward_parity.table),
    ],
)
def test_so_it_is_of_pages_without_figures(page, marker, module, table):
    there = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    begin, end = f"{marker}: made by {module.__name__}", f"end of {marker}"
    assert fill(there, begin, end, table(newest(marker))) == there
