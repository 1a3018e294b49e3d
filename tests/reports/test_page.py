from matplotlib.figure import Figure

from tests.reports.examples import PAIRS, RESULT, pair
from toolkit.reports import pair_evaluation, write_report
from toolkit.reports.page import svg, table


def test_report_is_one_page_that_escapes_what_models_write(tmp_path):
    metrics = [{"step": 1, "score": 0.5, "kl": 0.0}, {"step": 2, "score": 0.7, "kl": 0.1}]
    samples = [{"prompt": "<script>", "before": "a", "before_score": 0.1, "after": "b & c", "after_score": 0.2}]
    page = write_report(tmp_path, RESULT, metrics, samples, "ppo: {}\n").read_text()
    assert page.count("<svg") == 1 and "<script>" not in page and "&lt;script&gt;" in page and "b &amp; c" in page
    assert "0.3000 – 0.4000" in page and "src=" not in page and "http://www.w3.org" in page  # no outside file is loaded
    plain = write_report(tmp_path, RESULT, metrics[:1], [], "").read_text()
    assert "<svg" not in plain and "Samples" not in plain


def test_whatever_a_result_says_is_text(tmp_path):
    """Each text of a result and each of its keys, wherever the page shows it."""
    bad = "<script>alert(1)</script>"

    def spoiled(value):
        if isinstance(value, dict):
            return {key + bad: spoiled(item) for key, item in value.items()}
        return value + bad if isinstance(value, str) else value

    names = ("peak_memory_gb", "versions", "before", "after")
    result = {**RESULT, **{name: spoiled(RESULT[name]) for name in names}}
    result |= dict.fromkeys(("recipe", "stage", "seed"), bad)
    result["after"] |= {"score": bad, bad: [bad, 1.0]}
    samples = [{"prompt": bad, "before": bad, "before_score": 0.1, "after": bad, "after_score": 0.2}]
    pairs = [{**one, **dict.fromkeys(("prompt", "chosen", "rejected"), bad)} for one in PAIRS]
    result["judgement"] = pair_evaluation(pairs)
    metrics = [{"step": step, "score": 1.0, bad: 1.0} for step in (1, 2)]
    page = write_report(tmp_path, result, metrics, samples, f"seed: {bad}", pairs).read_text()
    assert "<script" not in page and page.count("&lt;script&gt;") > 15


def test_a_table_escapes_its_cells_and_marks_figures():
    found = table(("a", "<b>"), [("x & y", 1), ("<i>", 0.5)], numbers={1})
    assert found == (
        "<table><tr><th>a</th><th>&lt;b&gt;</th></tr>"
        '<tr><td>x &amp; y</td><td class="n">1</td></tr><tr><td>&lt;i&gt;</td><td class="n">0.5</td></tr></table>'
    )


def test_a_figure_stands_in_the_page_itself():
    found = svg(Figure())
    assert found.startswith('<div class="curves"><svg') and found.rstrip().endswith("</svg>\n</div>")


def test_held_out_pairs_have_a_section(tmp_path):
    result = {**RESULT, "stage": "reward", "judgement": pair_evaluation(PAIRS)}
    page = write_report(tmp_path, result, [], [], "", PAIRS).read_text()
    assert page.count("<svg") == 1 and "Worst errors" in page and "prompt &lt;b&gt;" in page and "<b>" not in page
    assert 'the chosen response is shorter</td><td class="n">2</td><td class="n">0.000' in page
    right = [pair(1.0, 0.0, 2, 2)]
    page = write_report(tmp_path, {**result, "judgement": pair_evaluation(right)}, [], [], "", right).read_text()
    assert "Worst errors" not in page and '<td>the chosen response is longer</td><td class="n">0</td>' in page
