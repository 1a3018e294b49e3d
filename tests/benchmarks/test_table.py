import pytest

from benchmarks import records, table


def test_the_page_is_filled_from_the_newest_result_of_each_kind(result, tmp_path):
    found, _, _ = result
    page = "".join(f"<!-- {kind} results -->\nold\n<!-- end of {kind} results -->\n" for kind in table.KINDS)
    records.write_result({**found, "date": "2020-01-01T00:00:00+00:00"}, tmp_path)
    records.write_result({**found, "date": "2020-01-02T00:00:00+00:00"}, tmp_path)
    filled = table.filled(page, tmp_path)
    assert "2020-01-02" in filled and "2020-01-01" not in filled and "old" not in filled
    assert "<!-- gpu results -->\nNo result yet.\n<!-- end" in filled
    row = next(line for line in filled.splitlines() if line.startswith("| ours, shared value, bf16"))
    assert (
        row
        == "| ours, shared value, bf16 | 3.00 | 3.00 | 6.00 | 12.00 | 0.17 | 2 / 5 / 2 | 2.40 | 1.67 | 0.60 | 4.00 |"
    )
    assert table._spread({"median": 1.5, "min": 1.0, "max": 2.0}) == "1.50 (1.00–2.00)"
    assert "| floor, separate value | 1.00 | 1.00 | 3.00 | 5.00 |" in filled
    assert "The fastest stock form: stock TRL, whole value and reward models, bf16. Asked of ours: speed of 2" in filled
    assert "; a square product reaches " in filled and " GFLOP/s in bfloat16." in filled
    with pytest.raises(ValueError, match='lacks the markers "cpu results" and "end of cpu results"'):
        table.filled("no markers")


def test_each_machine_has_its_newest_result_the_fastest_first(result, tmp_path):
    found, _, _ = result
    # A twentieth is noise, a half another machine.
    for day, rate in ((1, 400.0), (2, 420.0), (3, 840.0), (4, 400.0)):
        cpu = {"capability": "AVX512", "gigaoperations_per_second": {"float32": 200.0, "bfloat16": rate}}
        machine = {**found["machine"], "processor": "another" if day == 4 else "a chip"}
        of_day = {**found, "date": f"2020-01-0{day}T00:00:00+00:00", "cpu": cpu, "machine": machine}
        records.write_result(of_day, tmp_path)
    assert [one["date"][9] for one in table._newest("cpu", tmp_path)] == ["3", "2", "4"]


def test_growth_is_seconds_and_memory_by_tokens(result):
    found, _, _ = result
    base = found["sizes"]["base"]
    names = ("ours-separate", "stock-full")
    base = {**base, "summary": {**base["summary"], "contenders": {n: base["summary"]["contenders"][n] for n in names}}}
    grown = {**base, "work": {**base["work"], "rollouts": 4, "tokens": {**base["work"]["tokens"], "score": 28}}}
    growth = {**found, "kind": "growth", "sizes": {"few": base, "many": grown}}
    text = table.section("growth", growth)
    assert "| few | 2 × 4 | 14 | 2 | 20.0 (1428.6) | 2.20 | 1.00 | 4.00 | 20.0 (1428.6) | 4.00 |" in text
    assert "| many | 4 × 4 | 28 | 2 | 20.0 (714.3) | 2.20 | 1.00 | 4.00 | 20.0 (714.3) | 4.00 |" in text
    assert "Missed at 2 × 4 by ours, separate value, bf16: speed 1.00, memory 0.55, × floor 4.00; " in text
    seconds, memory = table.growth_figure(growth).axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in memory.get_lines()}
    assert len(lines) == 4
    assert lines["ours, separate value, bf16, more rollouts"] == ([14, 28], [2.2, 2.2])
    assert lines["ours, separate value, bf16, longer responses"] == ([14], [2.2])
    assert [list(line.get_ydata()) for line in seconds.get_lines()] == [[20, 20], [20]] * 2


def test_the_docs_have_the_tables_of_the_committed_results():
    page = table.PAGE.read_text(encoding="utf-8")
    assert page == table.filled(page), "run python -m benchmarks.table"
