import json
from types import SimpleNamespace

import torch

from benchmarks import fooled, records
from toolkit import recipes
from toolkit.sampling import Evaluation


def test_a_pair_of_the_judge_is_a_response_and_that_to_another_prompt():
    rows = [{"chosen": f"\n\nHuman: q{i}\n\nAssistant: a{i}", "rejected": "unread"} for i in range(5)]
    pairs = list(fooled.belonging(rows, seed=3))
    assert [pair["chosen"] for pair in pairs] == [row["chosen"] for row in rows]
    assert [pair["rejected"].split(" a")[0] for pair in pairs] == [f"\n\nHuman: q{i}\n\nAssistant:" for i in range(5)]
    answers = [pair["rejected"].split(" a")[1] for pair in pairs]
    assert sorted(answers) == list("01234") and all(answer != str(i) for i, answer in enumerate(answers))
    assert list(fooled.belonging(rows, seed=3)) == pairs


def test_a_form_is_the_recipe_but_for_what_it_says(tmp_path):
    form, own = fooled.FORMS["fooled"], recipes.load(fooled.RECIPE).values
    was = recipes.load(fooled.RECIPE, *form.settings).values
    assert own["data"].pop("made_pairs") and was["data"].pop("made_pairs", None) is None and own == was
    assert fooled.AS_IT_WAS.keys() <= own["ppo"].keys() and fooled.FORMS["made"].settings == ()
    assert all(own["ppo"][key] != value for key, value in fooled.AS_IT_WAS.items())


def test_prompts_come_with_what_was_said():
    rollout = SimpleNamespace(prompts=["p", "q"], responses=["a", "b"])
    assert fooled.said(Evaluation({}, rollout, torch.zeros(2))) == [("p", "a"), ("q", "b")]


def test_the_page_holds_what_was_measured_and_does_not_say_which_sample_is_whose(tmp_path, monkeypatch):
    def policy(response, each=(1.0, 5.0, 3.0, 4.0), **figures):
        of = {"score": 0.0, "judge": 0.0, "third": 0.0, "kl": 0.0, "length": 5.0, "eos_share": 1.0}
        of |= {**{f"{key}_se": 0.1 for key in of}, "perplexity": 9.0, "update": 0, **figures}
        ended = [True, False, True, False] if response == "b{}" else [True, True, True, False]
        of_each = {"each": dict.fromkeys(("score", "judge", "third"), each), "ended": ended}
        return {"figures": of, "said": [response.format(i) for i in range(4)], **of_each}

    def seed(score):
        policies = {"before": policy("b{}"), "after": policy("I'm sorry.", (2.0, 6.0, 5.0, 8.0), score=score)}
        curve = [{**one["figures"], "kl": float(kl), "distinct_share": 1.0} for kl, one in enumerate(policies.values())]
        told = [{"step": 10, "name": "phrase", "text": f"They say it {score} times."}]
        return {"accuracy": 0.6, "curve": curve, "warnings": told, "policies": policies}

    about = {"machine": {"processor": "a chip", "cores": 2, "threads": 1, "memory_gb": 8.0}, "versions": {"torch": "2"}}
    result = {**about, "kind": "made", "date": "2026-01-01", "seeds": {"0": seed(1.5), "2": seed(2.5)}}
    result["judges"] = {"belongs": 0.7, "third": 0.8}
    (tmp_path / "result.json").write_text(json.dumps(result))
    page = tmp_path / "made_pairs.md"
    for name in ("table", "samples"):
        with page.open("a") as file:
            file.write(f"<!-- made {name}: made by benchmarks.fooled -->\nold\n<!-- end of made {name} -->\n")
    monkeypatch.setattr(fooled, "DOCS", tmp_path)
    monkeypatch.setattr(records, "DOCS", tmp_path)
    fooled.show("made", tmp_path / "result.json")
    text = page.read_text()
    rises = "0.00 ± 0.10 → 1.50 ± 0.10 | 0.00 ± 0.10 → 2.50 ± 0.10"
    assert f"| by the reward that PPO optimises | {rises} |" in text
    # By hand: the first gains 1 and the third 2, with a deviation of 1/√2; one of the two alone is drawn in over a
    # quarter of the draws. All gain 1, 1, 2, 4 with a deviation of √2.
    assert "| where both end, by the judge beside it | +1.50 ± 0.50 | +1.50 ± 0.50 | +1.50 (+1.00 to +2.00) |" in text
    assert "| where both end, words | +1.00 ± 0.00 | +1.00 ± 0.00 | +1.00 (+1.00 to +1.00) |" in text  # "I'm sorry."
    assert "| gain by a third that neither saw | +2.00 ± 0.71 | +2.00 ± 0.71 | +2.00 (+1.00 to +3." in text
    assert "| different responses | 4 of 4 → 1 of 4 | 4 of 4 → 1 of 4 |" in text and "old" not in text
    # 4 of 4 by hand: 1 / (1 + 1.96² / 4) = 0.51
    assert "| share with an apology | 0.00 (0.00–0.49) → 1.00 (0.51–1.00) |" in text
    assert "- seed 2, update 10, `phrase`: They say it 2.5 times." in text
    assert "0.60, 0.60 of the rewards, 0.70 and 0.80 of the judge and the third" in text
    shown = [line.split(" | ") for line in text.splitlines() if line[2:3].isdigit() and "sorry" in line]
    key = dict(
        one.split() for one in text[text.rindex("</summary>") + 10 : text.rindex("</details>")].strip().split(", ")
    )
    assert len(shown) == 8 and set(key.values()) == {"A", "B"}
    assert all(row[1 + "AB".index(key[row[0][2:]])].startswith("I'm sorry.") for row in shown)
    assert "</svg>" in (tmp_path / "figures" / "made.svg").read_text()
    # Where the judge was followed, what it likes best stands beside where the run ended.
    for one in result["seeds"].values():
        one["policies"]["last"] = policy("No", (3.0, 3.0, 3.0, 3.0), score=9.0)
    table, samples = fooled._table(result), fooled._samples("made", result["seeds"])
    assert "held-out prompts, before → the checkpoint that the judge likes best → at the end" in table
    assert "| different responses | 4 of 4 → 1 of 4 → 1 of 4 |" in table and "→ 9.00 ± 0.10 |" in table
    assert "| gain by a third that neither saw | +2.00 ± 0.71 | +2.00 ± 0.71 | +2.00 (+1.00 to +3." in table
    # The seeds' kept ones have 2, 6, 5, 8 and their ends 3, 3, 3, 3.
    assert "| what came back less the end, by the judge beside it | +2.25 ± 1.25 | +2.25 ± 1.25 |" in table
    assert "Which is the one of the end" in samples
    keys = {fooled._samples(form, result["seeds"]).partition("</summary>")[2] for form in fooled.FORMS}
    assert len(keys) == len(fooled.FORMS)  # who has seen one knows none of the others
    rows = [line.strip("| ").split(" | ")[1:] for line in samples.splitlines() if line[2:3].isdigit()]
    assert len(rows) == 8 and all(sorted(row) == ["I'm sorry.", "No"] for row in rows)


def test_another_judge_is_asked_of_what_was_said():
    def seed(before, after, ended):
        return {"policies": {"before": {"said": before, "ended": ended}, "after": {"said": after, "ended": ended}}}

    def form(*ends):
        return {"seeds": {str(number): seed(*end) for number, end in enumerate(ends)}}

    all_end, one_ends = [True, True, True], [True, True, False]
    results = {
        "plain": form((["a", "bb", "c"], ["a", "b", "c"], all_end), (["a", "b", "c"], ["a", "b", "cccc"], one_ends)),
        "made": form((["a", "b", "c"], ["aaa", "bbb", "ccc"], all_end), (["a", "b", "c"], ["aa", "bb", "c"], one_ends)),
    }
    table = fooled.judged_again(results, lambda of: [float(len(text)) for text in of["said"]], "letters")
    title, _, *rows = table.splitlines()
    assert title.startswith("| letters | seed 0 | seed 1 |")
    cells = {row.strip("| ").split(" | ")[0]: row.strip("| ").split(" | ")[1:] for row in rows}
    # Means and standard errors by hand: -1/3 ± 1/3 of (0, -1, 0), 1 ± 1 of (0, 0, 3), 2/3 ± 1/3 of (1, 1, 0)
    assert cells["`plain`, before → after"][:2] == ["1.33 → 1.00", "1.00 → 2.00"]
    assert cells["`plain`, gain, prompt by prompt"][:2] == ["-0.33 ± 0.33", "+1.00 ± 1.00"]
    assert cells["`plain`, gain where both end"][:2] == ["-0.33 ± 0.33", "+0.00 ± 0.00"]
    assert cells["`made`, gain, prompt by prompt"][:2] == ["+2.00 ± 0.00", "+0.67 ± 0.33"]
    # Beside what `plain` says after PPO: (2, 2, 2) and (1, 1, -3)
    assert cells["`made` beside `plain`, after PPO, prompt by prompt"][:2] == ["+2.00 ± 0.00", "-0.33 ± 1.33"]
    assert cells["`made` beside `plain`, after PPO, prompt by prompt"][2].startswith("+0.83 (")
    assert not any("at the end" in row for row in cells)
    followed = form((["a", "b", "c"], ["aa", "b", "cccc"], all_end), (["a"] * 3, ["aaa"] * 3, all_end))
    for one in followed["seeds"].values():
        one["policies"]["last"] = {"said": ["aaa", "bbb", "ccc"], "ended": all_end}
    rows = fooled.judged_again({"relevant": followed}, lambda of: [float(len(text)) for text in of["said"]], "letters")
    assert "| `relevant`, at the end | 3.00 | 3.00 |" in rows
    # (2, 1, 4) less 3: -2/3 ± 0.88; and nothing
    assert "| `relevant`, what came back less the end | -0.67 ± 0.88 | +0.00 ± 0.00 | -0.33 (" in rows
    fewer = {"relevant": followed, "plain": {"seeds": {"1": seed(["a"] * 3, ["aa"] * 3, all_end)}}}
    rows = fooled.judged_again(fewer, lambda of: [float(len(text)) for text in of["said"]], "letters")
    assert "| `plain`, before → after |  | 1.00 → 2.00 |  |" in rows
    assert "| `plain`, gain, prompt by prompt |  | +1.00 ± 0.00 | +1.00 (+1.00 to +1.00) |" in rows


def test_more_than_three_seeds_go_on_in_another_row():
    point = {"score": 1.0, "score_se": 0.1, "judge": 2.0, "judge_se": 0.1, "kl": 0.0, "update": 0}
    warning = {"step": 3, "name": "phrase", "text": ""}
    seeds = {str(seed): {"curve": [point, {**point, "kl": 1.0, "update": 9}], "warnings": []} for seed in range(4)}
    seeds["3"]["warnings"] = [warning]
    figure = fooled._figure(seeds)
    assert [axes.get_title() for axes in figure.axes if axes.get_title()] == [f"seed {seed}" for seed in range(4)]
    assert len(figure.axes) == 8
    (named,) = [axes for axes in figure.axes if axes.texts]
    assert named.texts[0].get_text() == "phrase" and named.get_subplotspec().rowspan.start == 3
