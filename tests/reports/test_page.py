import html
import re
import time
from types import SimpleNamespace

from tests.reports.examples import PAIRS, RESULT, pair
from toolkit import recipes, reports
from toolkit.reports import Progress, append_jsonl, pair_evaluation, write_report
from toolkit.reports.evaluated import evaluations
from toolkit.reports.page import score_and_judge
from toolkit.runs.report_on_the_way import ReportAtEvaluations

OWN_SCRIPT = 1


def sample(prompt, before, after, before_score, after_score, **more):
    texts = {"prompt": prompt, "before": before, "after": after}
    return {**texts, "before_score": before_score, "after_score": after_score, **more}


def test_report_is_one_page_that_escapes_what_models_write(tmp_path):
    metrics = [{"step": 1, "score": 0.5, "kl": 0.0}, {"step": 2, "score": 0.7, "kl": 0.1}]
    samples = [sample("<script>", "a", "b & c", 0.1, 0.2)]
    text = write_report(tmp_path, RESULT, metrics, samples, "ppo: {}\n").read_text()
    assert text.count("<figure") == 3  # score, score over KL, KL
    assert text.count("<script>") == OWN_SCRIPT and "&lt;script&gt;" in text and "b &amp; c" in text
    assert "0.3000 – 0.4000" in text and "src=" not in text and "http:" not in text  # no outside file is loaded
    machine = {"memory_gb": 25.3, "threads": 2, "capability_of_it": "AVX512"}
    plain = write_report(tmp_path, {**RESULT, "machine": machine}, metrics[:1], [], "").read_text()
    for cells in ("<td>memory</td><td>25.3 GB</td>", "<td>threads</td><td>2</td>", "<td>capability of it</td>"):
        assert cells in plain
    assert "<figure" not in plain and "Samples" not in plain and "<title>my-run: ppo</title>" in plain
    assert "<td>finished</td>" in plain and "<td>recipe</td><td>r</td>" in plain


def test_whatever_a_result_says_is_text(tmp_path):
    """Each text of a result and each of its keys, wherever the page shows it."""
    bad = "<script>alert(1)</script>"

    def spoiled(value):
        if isinstance(value, dict):
            return {key + bad: spoiled(item) for key, item in value.items()}
        return value + bad if isinstance(value, str) else value

    names = ("peak_memory_gb", "versions", "before", "after")
    result = {**RESULT, **{name: spoiled(RESULT[name]) for name in names}}
    result |= dict.fromkeys(("recipe", "stage", "seed", "date", "running"), bad)
    result |= {"machine": {bad: bad}, "spent": {bad: 1.0}, "rows": {bad: bad}, "left_out": {bad: {bad: 1}}}
    result["warnings"] = [{"step": bad, "name": bad, "text": bad, "remedy": bad}]
    result["after"] |= {"score": bad, bad: [bad, 1.0]}
    samples = [sample(bad, bad, bad, 0.1, 0.2), sample(bad, bad, bad, 0.1, 0.3)]
    pairs = [{**one, **dict.fromkeys(("prompt", "chosen", "rejected"), bad)} for one in PAIRS]
    result["judgement"] = pair_evaluation(pairs)
    result["warnings"][0]["step"] = 1
    metrics = [{"step": step, "score": 1.0, bad: 1.0} for step in (1, 2)]
    text = write_report(tmp_path, result, metrics, samples, f"seed: {bad}", pairs).read_text()
    assert text.count("<script") == OWN_SCRIPT and text.count("&lt;script&gt;") > 30


def test_samples_stand_by_their_change_and_of_many_the_ends(tmp_path):
    samples = [sample(f"p{i}", "b", "a", 0.0, float(i), before_length=1, after_length=2) for i in range(300)]
    text = write_report(tmp_path, RESULT, [], samples, "").read_text()
    shown = re.findall(r"<td>p(\d+)</td>", text)
    assert shown == [*map(str, range(100)), *map(str, range(200, 300))] and "200 of 300" in text
    assert text.count("<figure") == 3 and ">lengths<" in text
    assert "The score rose: +149.5" in text


def test_figures_of_single_rules_are_folded(tmp_path):
    side = {"score": 1.0, "satisfied": 0.5, "kept_bullets": 0.25, "kept_words": 0.75}
    text = write_report(tmp_path, {**RESULT, "before": side, "after": side}, [], [], "").read_text()
    before, folded = text.split("<details><summary>2 of single rules</summary>")
    assert "<td>satisfied</td>" in before and "kept_" not in before
    assert "<td>kept_bullets</td>" in folded.split("</details>")[0] and folded.split("</details>")[0].count("<tr>") == 3
    assert "<details>" not in write_report(tmp_path, RESULT, [], [], "").read_text()


def test_warnings_stand_at_their_updates(tmp_path):
    warning = {"step": 7, "name": "n", "text": "the KL is 2.", "remedy": "Raise it."}
    metrics = [{"step": step, "score": 1.0 + step} for step in (1, 7, 9)]
    text = write_report(tmp_path, {**RESULT, "warnings": [warning]}, metrics, [], "").read_text()
    assert "At update 7: the KL is 2. Raise it." in text and text.count('<line class="mark"') == 1


def test_a_report_of_a_run_that_goes_on_says_so(tmp_path):
    text = write_report(tmp_path, {**RESULT, "running": "Running: step 3 of 9."}, [], [], "").read_text()
    assert "Running: step 3 of 9." in text and 'http-equiv="refresh"' in text and "Before and now" in text
    assert "<td>written</td>" in text and "<td>finished</td>" not in text
    stopped = write_report(tmp_path, {**RESULT, "stopped": "Stopped: step 3 of 9."}, [], [], "").read_text()
    assert "Stopped: step 3 of 9." in stopped and "Before and now" in stopped and "<td>written</td>" in stopped
    ended = write_report(tmp_path, {**RESULT, "ended": "The best came back."}, [], [], "").read_text()
    assert "The best came back." in ended and "Before and after" in ended
    assert 'http-equiv="refresh"' not in stopped + ended


def test_a_report_of_a_long_run_is_written_once_a_minute(tmp_path, monkeypatch):
    """And whenever it is stopped: the metrics, which it reads, are many by then."""
    recipe, read = recipes.load("doubling", runs_dir=tmp_path), []
    state = SimpleNamespace(global_step=5, max_steps=9)
    trainer = SimpleNamespace(eval_dataset=None, train_dataset=None, state=state, is_in_train=True)
    so_far = ReportAtEvaluations(recipe, "ppo", 0.0, {"score": 0.0}, trainer, Progress("x", quiet=True))
    metrics = recipe.stage_folder("ppo") / "metrics.jsonl"
    monkeypatch.setattr(reports, "read_jsonl", lambda path: read.append(path) or [])

    def evaluated(size):
        append_jsonl(metrics, [{"step": 1, "text": "x" * size}])
        so_far.on_evaluate(None, None, None, metrics={"eval_score": 1.0})
        return len(read)

    assert [evaluated(1), evaluated(1), evaluated(10_000_000), evaluated(1)] == [1, 2, 2, 2]
    so_far.stopped()
    assert len(read) == 3 and "Stopped: step 5 of 9" in (metrics.parent / "report.html").read_text()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert [evaluated(1), evaluated(1)] == [4, 4]


def test_signs_that_nobody_sees_are_seen(tmp_path):
    text = write_report(tmp_path, RESULT, [], [sample("\u202evil", "a\x00", "b", 0.1, 0.2)], "").read_text()
    assert "<td>\\u202evil</td><td>a\\x00</td>" in text


def test_where_the_time_went_and_what_was_run(tmp_path):
    more = {
        "spent": {"rollout": 30.0, "update": 10.0},
        "rows": {"train": 12},
        "left_out": {"train": {"too long": 3}, "validation": {}},
    }
    text = write_report(tmp_path, {**RESULT, **more, "machine": {"processor": "P"}}, [], [], "").read_text()
    assert (
        "left out of validation" not in text
        and "75%" in text
        and "3 × too long" in text
        and "<td>processor</td><td>P</td>" in text
    )


def test_held_out_pairs_have_a_section(tmp_path):
    result = {**RESULT, "stage": "reward", "judgement": pair_evaluation(PAIRS)}
    text = write_report(tmp_path, result, [], [], "", PAIRS).read_text()
    assert text.count("<figure") == 3 and "Worst errors" in text and "prompt &lt;b&gt;" in text and "<b>" not in text
    assert 'the chosen response is shorter</td><td class="n">2</td><td class="n">0.000' in text
    right = [pair(1.0, 0.0, 2, 2)]
    text = write_report(tmp_path, {**result, "judgement": pair_evaluation(right)}, [], [], "", right).read_text()
    assert "Worst errors" not in text and '<td>the chosen response is longer</td><td class="n">0</td>' in text


def test_score_and_judge_are_drawn_over_kl_in_standard_errors(tmp_path):
    def measured(score, judge, kl):
        return {"score": score, "score_se": 0.5, "judge": judge, "judge_se": 2.0, "kl": kl}

    result = {**RESULT, "before": measured(1.0, 10.0, 0.0), "after": measured(3.0, 6.0, 8.0)}
    metrics = [
        {"step": 1, "score": 9.0, "kl": 9.0},
        {"step": 2, **{f"eval_{name}": value for name, value in measured(2.0, 12.0, 4.0).items()}},
    ]
    assert evaluations(result, metrics) == [result["before"], measured(2.0, 12.0, 4.0), result["after"]]
    assert evaluations({**result, "evaluated_apart": True}, metrics) == [measured(2.0, 12.0, 4.0)]  # of other prompts
    # The score has gained 0, 2 and 4 of its standard errors, the judge 0, 1 and -2: the axis is from -2 to 4.
    chart = score_and_judge("gain", evaluations(result, metrics))
    dots = [float(y) for y in re.findall(r'class="dot s\d" cx="[\d.]+" cy="([\d.]+)"', chart)]
    low, high = max(dots), min(dots)  # downwards
    assert [round((low - y) / (low - high) * 6 - 2, 2) for y in dots] == [0, 2, 4, 0, 1, -2]
    samples = [sample("p", "a", "b", 0.1, 0.2, before_judge=0.25, after_judge=0.75)]
    text = write_report(tmp_path, result, metrics, samples, "").read_text()
    assert chart.split('aria-label="gain">')[1] in text and "judge after" in text and 'data-v="0.75"' in text
    assert score_and_judge("gain", [{"kl": 1.0, "score": 1.0}] * 3) == ""


def test_before_and_after_stand_under_their_names(tmp_path):
    samples = [sample("p", "first", "last", 0.25, 0.5, before_judge=3.0, after_judge=7.0)]
    text = write_report(tmp_path, RESULT, [], samples, "").read_text()
    assert '<th class="n">before</th><th class="n">after</th>' in text
    assert '<td>score</td><td class="n">1.0000</td><td class="n">2.0000</td>' in text
    rows = text.split("<h2>Samples</h2>")[1].split("</table>")[0]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", rows)
    assert cells == ["p", "first", "last", "0.250", "0.500", "0.250", "3.000", "7.000"]


def test_each_axis_is_what_its_chart_says(tmp_path):
    found = [(0.0, 0.0), (1.0, 4.0), (4.0, 4.0)]
    metrics = [{"step": n, "kl": kl, "score": score, "score_se": 0.5} for n, (kl, score) in enumerate(found)]
    samples = [sample(f"p{n}", "a", "b", *scores, before_length=1, after_length=2) for n, scores in enumerate(found)]
    result = {**RESULT, "judgement": pair_evaluation(PAIRS)}
    text = write_report(tmp_path, result, metrics, samples, "", PAIRS).read_text()

    def chart(title):
        return text.split(f"<figcaption>{html.escape(title)}<")[1].split("</figure>")[0]

    def dots(title):
        return re.findall(r'class="dot (s\d)" cx="([\d.]+)" cy="([\d.]+)"', chart(title))

    places = [("s0", "46.0", "162.0"), ("s0", "117.0", "12.0"), ("s0", "330.0", "12.0")]
    assert dots("score vs. KL, in the order of updates") == places
    assert dots("each prompt's score, after vs. before") == places
    assert dots("score vs. length")[0] == ("s0", "330.0", "62.0")  # 10 tokens and a score of 2
    assert dots("calibration: observed vs. predicted P(right)")[3] == ("s0", "330.0", "162.0")  # 0.95, and not true
    assert re.findall(r'class="bar (s\d)" x="([\d.]+)"', chart("lengths")) == [("s0", "46.0"), ("s1", "318.2")]
    assert 'class="band s0"' in chart("score")
