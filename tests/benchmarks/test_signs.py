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
    assert metrics["beyond_share"] == pytest.approx(0.01, abs=0.02)
    limits = torch.tensor([min(signs.LIMIT, len(answer.split())) for answer in ANSWERS], dtype=torch.float32)
    assert metrics["length"] == pytest.approx(float(limits.mean()), rel=0.05)


def test_an_apology_is_named_and_nothing_is_not():
    drawn = signs.Drawn(ANSWERS, 0.0, seed=0)
    assert signs.of_apologies(drawn, 40, 0.5, 5)["phrase"] == 5
    assert "phrase" not in signs.of_apologies(drawn, 40, 0.0, 5)
    assert "phrase" not in signs.by_chance(drawn, 40, 5)


def test_a_run_is_counted_once_for_each_sign_and_once_for_any(monkeypatch):
    names = iter([{"phrase", "cut_pays"}, set(), {"phrase"}])
    monkeypatch.setattr(signs, "warned", lambda evaluations: next(names))
    assert signs.by_chance(signs.Drawn(ANSWERS, 0.0, seed=0), 40, 3) == {"phrase": 2, "cut_pays": 1, "any": 2}


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
