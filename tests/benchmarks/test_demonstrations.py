import json
from dataclasses import fields

import pytest
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from benchmarks import demonstrations, records
from benchmarks.demonstrations import COMPARISONS, DEMONSTRATIONS, PAGE, recipe_of_arm
from benchmarks.records import fill
from benchmarks.systems import OF_THE_TASK
from toolkit import recipes
from toolkit.spec.sections import STAGE_CLASSES
from toolkit.spec.validate import check_recipe


@pytest.mark.parametrize("name", DEMONSTRATIONS)
def test_each_arm_of_a_demonstration_is_a_recipe_that_differs_in_what_it_says(name):
    demonstration = DEMONSTRATIONS[name]
    start = recipes.load(demonstration.recipe, runs_dir="nowhere")
    seen = []
    for arm in demonstration.arms.values():
        values = recipe_of_arm(start, arm, demonstration)
        assert check_recipe(values) == []
        assert values.keys() & STAGE_CLASSES.keys() == {"ppo"}  # what comes before is there, once for all arms
        assert ("policy" in values["start"]) == (start.base.model is not None and "sft" in start.values)
        config = STAGE_CLASSES["ppo"](output_dir="unused", use_cpu=True, bf16=False, **values["ppo"])
        assert config.max_steps == arm.ppo.get("max_steps", demonstration.updates)
        assert all(getattr(config, key) == value for key, value in arm.ppo.items())
        seen.append(values)
    assert all(one != other for i, one in enumerate(seen) for other in seen[:i])


@pytest.mark.parametrize(("arm", "name"), [("script", "llama3_8b_lora"), ("fast", "llama3_8b_lora_fast")])
def test_the_steps_begin_and_end_with_the_settings_of_the_recipes(arm, name):
    demonstration, theirs = DEMONSTRATIONS["script"], recipes.load(name).values["ppo"]
    start = recipes.load(demonstration.recipe, runs_dir="nowhere")
    values = recipe_of_arm(start, demonstration.arms[arm], demonstration)
    ours, theirs = (
        STAGE_CLASSES["ppo"](output_dir="unused", use_cpu=True, bf16=False, **of) for of in (values["ppo"], theirs)
    )
    of_task = (*OF_THE_TASK, "activation_checkpointing", "eval_steps", "eval_strategy", "do_eval", "max_steps")
    batches = ("per_device_train_batch_size", "gradient_accumulation_steps", "local_rollout_forward_batch_size")
    keys = {one.name for one in fields(theirs)} - {*of_task, *batches}
    other = {key for key in keys if getattr(ours, key) != getattr(theirs, key)}
    assert other <= {"num_train_epochs", "kl_horizon"}  # max_steps says how long; without kl_target nothing reads it
    assert ours.per_device_train_batch_size * ours.gradient_accumulation_steps == (
        theirs.per_device_train_batch_size * theirs.gradient_accumulation_steps
    )
    assert values["value_head"] == {}


@pytest.mark.parametrize("name", DEMONSTRATIONS)
def test_the_page_has_a_place_for_each_demonstration(name):
    page = (COMPARISONS if DEMONSTRATIONS[name].arms else PAGE).read_text(encoding="utf-8")
    markers = (f"{name}: made by benchmarks.demonstrations", f"end of {name}")
    assert "here" in fill(page, *markers, "here")


def test_a_demonstration_s_figure_and_table_hold_what_was_measured(tmp_path, monkeypatch):
    curve = [{"update": u, "score": 0.1 * u, "kl": 0.2 * u, "exact_match": u / 10} for u in (5, 10)]
    one = {"after": {"exact_match": 0.5, "score": -1.0, "kl": 2.0}, "curve": curve, "value_loss": [[5, 1.0], [10, 0.5]]}
    two = {**one, "after": {"exact_match": 0.7, "score": -2.0, "kl": 4.0}}
    arms = {name: {"0": one, "1": two} for name in DEMONSTRATIONS["value"].arms}
    about = {"machine": {"processor": "a chip", "threads": 1}, "date": "2026-01-01", "demonstration": "value"}
    (tmp_path / "value.json").write_text(json.dumps({**about, "arms": arms}))
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- value: made by benchmarks.demonstrations -->\nold\n<!-- end of value -->\nAfter.\n")
    monkeypatch.setattr(records, "DOCS", tmp_path)
    monkeypatch.setattr(demonstrations, "COMPARISONS", page)
    demonstrations.show(tmp_path / "value.json")
    text = page.read_text()
    assert "| 0.600 (0.500–0.700) | -1.500 (-2.000–-1.000) | 3.000 (2.000–4.000) |" in text and "old" not in text
    assert text.startswith("Before.\n") and text.endswith("After.\n") and "a chip, 2026-01-01." in text
    assert "</svg>" in (tmp_path / "figures" / "value.svg").read_text()


def test_a_gain_has_student_s_interval_over_the_seeds():
    # The mean is 2 and the standard deviation 1; the 0.975 quantile with two degrees of freedom is 4.3027.
    assert demonstrations.gain([1.0, 2.0, 3.0], digits=2) == "+2.00 (-0.48 to +4.48)"
    assert demonstrations.gain([-0.25]) == "-0.250" and demonstrations.gain([]) == ""
    assert demonstrations.gain([0.0, 1.0] * 10, digits=2) == "+0.50 (+0.24 to +0.76)"  # 2.262 × 0.513 / √20


def test_apologies_and_silence_are_counted_by_updates_beside_the_warnings(tmp_path):
    said = {1: ["I'm sorry.", " \n"], 2: ["Fine.", "No apologies"], 3: ["Fine.", "Yes."]}
    rows = [{"step": step, "response": text} for step, texts in said.items() for text in texts]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert demonstrations.said_by(tmp_path) == {
        "apologies": [[1, 0.5], [2, 0.5], [3, 0.0]],
        "empty": [[1, 0.5], [2, 0.0], [3, 0.0]],
    }
    after = dict.fromkeys(("score", "kl", "length", "distinct_share"), 0.25)
    each = [[update, update / 50] for update in range(1, 51)]
    none = [[update, 0.0] for update in range(1, 51)]
    warned = [{"step": 45, "name": "phrase", "text": "They are sorry."}]
    one = {"after": after, "value_loss": each, "apologies": each, "empty": none, "warnings": warned}
    found = {arm: {"0": one} for arm in DEMONSTRATIONS["critic"].arms}
    table = demonstrations._critic_table(DEMONSTRATIONS["critic"], found)
    assert "| value loss in updates | 1–10 |" in table and "| fresh adapter and head, seed 0 | 0.110 | 0.310 |" in table
    assert (
        "| of four responses an update: apologise / are empty | 1–5 | 6–10 |" in table
        and "| 0.06 / 0.00 | 0.16 / 0.00 |" in table
    )
    assert "- a copy of the reward role, seed 0, update 45, `phrase`: They are sorry." in table


def test_a_recipe_s_table_pools_its_seeds_and_shows_what_was_said(tmp_path, monkeypatch):
    base = {"score": 0.2, "kl": 0.0, "satisfied": 0.1, "satisfied_one": 0.2, "satisfied_unseen": 0.0}
    base |= {"kept_no_comma": 0.25}
    before = {**base, "kept_no_comma": 0.5}
    after = {"score": 0.6, "kl": 3.0, "satisfied": 0.5, "satisfied_one": 0.8, "satisfied_unseen": 0.2}
    after |= {"kept_no_comma": 1.0}
    samples = [{"prompt": "<|im_start|>user\nWhy?\n<|im_end|>\n", "base": "b", "before": "a | b\nc", "after": ""}]
    said = {"prompts": 30, "samples": samples, **{when: {"perplexity": 9.0} for when in ("base", "before", "after")}}
    curve = [{"update": u, **after} for u in (5, 10)]
    one = {"base": base, "before": before, "after": after, "curve": curve, "score": [[1, 0.2], [2, 0.3]]}
    one |= {
        "language": said,
        "asked": {"no_comma": 8},
        "best_of": [[1, 0.0, 0.2], [2, 0.19, 0.3], [3, 0.4, 0.35], [4, 0.6, 0.4]],
    }
    one |= {"of_these": 0.55}
    two = {**one, "after": {**after, "score": 0.8, "satisfied": 0.7, "kept_no_comma": 0.5}, "asked": {"no_comma": 4}}
    two |= {"best_of": [[1, 0.0, 0.1], [2, 0.19, 0.2], [3, 0.4, 0.25], [4, 0.6, 0.3]], "of_these": 0.75}
    about = {"machine": {"processor": "a chip", "threads": 1}, "date": "2026-01-01", "demonstration": "instructions"}
    result = tmp_path / "instructions.json"
    result.write_text(json.dumps({**about, "arms": {"recipe": {"0": one, "1": two}}}))
    page = tmp_path / "page.md"
    page.write_text("<!-- instructions: made by benchmarks.demonstrations -->\n<!-- end of instructions -->\n")
    monkeypatch.setattr(records, "DOCS", tmp_path)
    monkeypatch.setattr(demonstrations, "PAGE", page)
    demonstrations.show(result)
    text = page.read_text()
    assert "| all rules kept | 0.100 (0.100–0.100) | 0.100 (0.100–0.100) | 0.600 (0.500–0.700) |" in text
    # 8 + 2 of 12: Wilson's interval, by hand (n + z² = 15.8416)
    kept = next(line for line in text.splitlines() if line.startswith("| `no_comma` |"))
    assert kept.endswith("| 0.833 (0.552–0.953) |") and kept.startswith("| `no_comma` | 0.250 (")
    assert "| score | 0.200 (0.200–0.200) | 0.200 (0.200–0.200) | 0.700 (0.600–0.800) |" in text and "| 9.000" in text
    best = [
        "| best of 1 before PPO | at most 0.00 | 0.200 | 0.100 |",
        "| best of 4 before PPO | at most 0.60 | 0.400 | 0.300 |",
    ]
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("| best of")] == best
    assert "| after PPO | 3.00 (3.00–3.00) | 0.550 | 0.750 |" in lines
    assert "| Why? | b | a \\| b c | (nothing) |" in text and "2 seed(s) of 30 prompts" in text
    assert "</svg>" in (tmp_path / "figures" / "instructions.svg").read_text()
    axes = Figure().subplots()
    demonstrations._draw_shares(axes, [one, two])
    heights = [bar.get_height() for bars in axes.containers if isinstance(bars, BarContainer) for bar in bars]
    assert heights == pytest.approx([0.1, 0.2, 0.0, 0.1, 0.2, 0.0, 0.6, 0.8, 0.2])  # base, before and after PPO
    assert [*axes.lines[6].get_ydata()] == [0.5, 0.7]  # each seed, after PPO


def test_a_curve_is_drawn_as_means_of_ten_updates():
    points = [[update, float(update)] for update in range(1, 13)]
    assert demonstrations._running_mean(points) == [[10, 5.5], [11, 6.5], [12, 7.5]]
    assert demonstrations._running_mean(points[:2]) == [[2, 1.5]]  # of fewer all


def test_responses_of_no_word_are_certain():
    tokenizer = type("Characters", (), {"encode": staticmethod(lambda text, **named: [ord(letter) for letter in text])})
    assert demonstrations.perplexity(None, tokenizer, [("Why?", ""), ("How?", "")]) == 1.0
