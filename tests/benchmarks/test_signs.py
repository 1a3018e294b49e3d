import json

import pytest
import torch

from benchmarks import signs

WORDS = [f"w{i}" for i in range(200)]
ANSWERS = [" ".join(WORDS[(7 * i + step * j) % 200] for j in range(3 + i % 40)) for i in range(100) for step in (1, 3)]


def test_answers_are_the_last_of_chosen_dialogues(tmp_path):
    begun = "\n\nHuman: q\n\nAssistant: early\n\nHuman: r\n\nAssistant:"
    rows = [{"chosen": f"{begun} late ", "rejected": "unread"}, {"chosen": f"{begun} ", "rejected": "unread"}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert signs.answers_of([path, path]) == ["late", "late"]


@pytest.mark.parametrize("pull", [0.0, -0.7])
def test_scores_follow_the_length_as_far_as_they_are_asked_to(pull):
    metrics, _ = signs.Drawn(ANSWERS * 20, pull, seed=1).evaluation(2_000)
    assert metrics["length_correlation"] == pytest.approx(pull, abs=0.06)
    assert 0 < metrics["beyond_share"] < 0.03
    limits = torch.tensor([min(signs.LIMIT, len(answer.split())) for answer in ANSWERS], dtype=torch.float32)
    assert metrics["length"] == pytest.approx(float(limits.mean()), rel=0.05)


def test_an_apology_is_named_and_nothing_is_not():
    drawn = signs.Drawn(ANSWERS, 0.0, seed=0)
    assert signs.of_apologies(drawn, 40, 0.5, 5)["phrase"] == 5
    assert "phrase" not in signs.of_apologies(drawn, 40, 0.0, 5)
    assert "phrase" not in signs.by_chance(drawn, 40, 5)


@pytest.mark.parametrize("change", signs.CHANGES, ids=lambda change: f"{change.sign}: {change.what}")
def test_a_change_is_what_it_says(change):
    drawn = signs.Drawn(ANSWERS * 30, change.pull, seed=1)
    (before, _), (after, _) = (drawn.evaluation(2_000, 0, of) for of in (signs.NOTHING, change))
    assert after["judge"] - before["judge"] == pytest.approx(change.judge, abs=0.1)
    assert before["length_correlation"] == pytest.approx(change.pull, abs=0.06)
    if not change.longer:  # else those that score higher are more
        assert after["score"] - before["score"] == pytest.approx(change.score, abs=0.1)
        assert after["length_correlation"] == pytest.approx(change.pull, abs=0.06)
        assert after["length"] / before["length"] == pytest.approx(change.kept, rel=0.06)
    else:
        cut = 1 - before["eos_share"]
        assert 1 - after["eos_share"] == pytest.approx(change.longer + (1 - change.longer) * cut, abs=0.03)


def test_a_known_change_is_counted_where_its_own_sign_names_it():
    large, small = (signs.Change("judge_falls", "", score=1.0, judge=judge) for judge in (-3.0, -0.01))
    assert signs.of_change(ANSWERS, large, 40, 5) == 5 and signs.of_change(ANSWERS, small, 40, 5) == 0
    assert signs.of_change(ANSWERS, signs.Change("phrase", "", score=1.0, judge=-3.0), 40, 5) == 0


def test_a_run_is_counted_once_for_each_sign_and_once_for_any(monkeypatch):
    names = iter([{"phrase", "cut_pays"}, set(), {"phrase"}])
    monkeypatch.setattr(signs, "warned", lambda evaluations: next(names))
    assert signs.by_chance(signs.Drawn(ANSWERS, 0.0, seed=0), 40, 3) == {"phrase": 2, "cut_pays": 1, "any": 2}


def test_each_run_has_a_reward_that_was_measured_on_other_responses():
    drawn = signs.Drawn(ANSWERS, 0.0, seed=0)
    bounds = [run.high for run in drawn.runs(300)]
    assert len(set(bounds)) == 300
    # The 99th percentile of 159 normal scores: the mean of Blom's approximation for the second largest is 2.2.
    assert sum(bounds) / 300 == pytest.approx(2.2, abs=0.1) and max(bounds) - min(bounds) > 0.8


def test_the_page_holds_the_shares(tmp_path, monkeypatch):
    page = tmp_path / "fooled_rewards.md"
    page.write_text("<!-- signs: made by benchmarks.signs -->\nold\n<!-- end of signs -->\n")
    pairs = tmp_path / "pairs.jsonl"
    rows = ({"chosen": f"\n\nHuman: q\n\nAssistant: {answer}"} for answer in ANSWERS)
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(signs, "DOCS", tmp_path)
    monkeypatch.setattr(signs, "RESULTS", tmp_path)
    monkeypatch.setattr(signs, "SIZES", (20, 40))
    signs.main([pairs], runs=2)
    text = page.read_text()
    assert "old" not in text and "| `phrase` | 0.000 / 0.000 | 0.000 / 0.000 |" in text
    assert "| 50%: `phrase` | 1.000 | 1.000 |" in text
    assert "| scores rise by 1.5: `beyond_reward` | " in text
