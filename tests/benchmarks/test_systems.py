"""Other systems on instructions: each is a recipe, and what is measured is what the page says."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import records, systems
from benchmarks.systems import LABELS, RECIPE, SAMPLES, UPDATES
from toolkit import recipes
from toolkit.spec.validate import check_recipe


@pytest.fixture(scope="module")
def begun():
    return recipes.load(RECIPE, runs_dir="nowhere")


@pytest.mark.parametrize("name", [name for name in UPDATES if name != RECIPE])
def test_ppo_has_the_settings_of_the_other_recipe_and_the_batches_that_are_said(begun, name):
    values = systems.with_ppo_of(name, begun)
    assert check_recipe(values) == []
    ppo, theirs = values["ppo"], recipes.load(name).values["ppo"]
    for key in ("learning_rate", "num_mini_batches", "value", "value_pooling", "kl_coef", "old_policy_kl_coef"):
        assert ppo.get(key) == theirs.get(key)
    assert ppo["temperature"] == begun.values["ppo"]["temperature"] != theirs["temperature"]
    batch = ppo["per_device_train_batch_size"] * ppo["gradient_accumulation_steps"] * ppo.get("rollouts_per_update", 1)
    assert (ppo["max_steps"], batch) == UPDATES[name]


def test_q_learning_and_cloning_learn_from_the_same_responses(begun, tmp_path):
    values = systems.with_q(begun)
    assert check_recipe(values) == []
    assert values["collect"]["max_prompts"] * values["collect"]["samples_per_prompt"] == SAMPLES
    collected, kept = tmp_path / "responses.jsonl", tmp_path / "kept.jsonl"
    rows = [("a", [None, 1.0], True), ("b", [None, 0.75], True), ("c", [1.0], False), ("d", [None, None, 1.0], True)]
    lines = [{"prompt": "p", "response": r, "rewards": given, "ended": ended} for r, given, ended in rows]
    collected.write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = systems.with_cloning(begun, collected, kept, "a_folder")
    assert check_recipe(values) == []
    assert values["base"] == {**begun.values["base"], "model": "a_folder"}
    assert [json.loads(line) for line in kept.read_text().splitlines()] == [
        {"prompt": "p", "completion": "a"},
        {"prompt": "p", "completion": "d"},
    ]


@pytest.mark.parametrize("name", ["cloning", "cloning_on"])
def test_cloning_is_measured_on_what_it_trained_and_from_where_it_began(begun, name, tmp_path, monkeypatch):
    """On the base from sft's adapter, whose responses it learns; or on the checkpoint that has it, as that is."""
    collected, ran, measured = tmp_path / "responses.jsonl", [], []
    collected.write_text(json.dumps({"prompt": "p", "response": "r", "rewards": [1.0], "ended": True}) + "\n")

    def untrained(recipe, folder, **start):
        measured.append((recipe.values["base"]["model"], start))
        return SimpleNamespace(evaluate_rollout=lambda prompts: SimpleNamespace(metrics={"satisfied": 0.5, "kl": 1.0}))

    monkeypatch.setattr(type(begun), "task", SimpleNamespace(prompts=lambda split: [split]))
    monkeypatch.setattr(systems, "_run", lambda *given: ran.append(given) or tmp_path / "run" / "sft")
    monkeypatch.setattr(systems, "_merged", lambda begun, folder: str(folder))
    monkeypatch.setattr(systems, "untrained", untrained)
    end = {"satisfied": 0.5}
    assert systems._cloned(name, begun, collected, tmp_path, 3) == {"before": end, "after": end, "kept": 1}
    after = {"policy": str(tmp_path / "run" / "sft" / "policy")}
    model = str(tmp_path / "merged-3") if name == "cloning_on" else begun.base_path
    before = {"policy": str(begun.stage_folder("sft") / "policy")} if name == "cloning" else {}
    assert measured == [(model, before), (model, after)]
    assert [(stage, arm, values["base"]["model"]) for stage, arm, values, *_ in ran] == [("sft", name, model)]


def test_what_is_run_is_added_to_the_arms_and_seeds_of_the_day(tmp_path, monkeypatch):
    ran = []
    prompts = SimpleNamespace(prompts=lambda split: [split] * 7)
    monkeypatch.setattr(recipes.Recipe, "task", prompts)
    monkeypatch.setattr(systems, "RESULTS", tmp_path)
    monkeypatch.setattr(systems, "run_stage", lambda stage, recipe, name, *given: ran.append((stage, name)))
    monkeypatch.setattr(systems, "_run", lambda stage, name, values, runs, seed: tmp_path / f"{name}-{seed}")
    monkeypatch.setattr(systems, "measured", lambda folder: {"of": folder.name})
    systems.run(tmp_path, (), (0, 1), ["actor_critic_lora", "q"])
    path = systems.run(tmp_path, (), (1, 2), ["actor_critic_lora", RECIPE])
    arms = json.loads(path.read_text())["arms"]
    assert {arm: list(seeds) for arm, seeds in arms.items()} == {
        "actor_critic_lora": ["0", "1", "2"], "q": ["0", "1"], RECIPE: ["1", "2"]
    }  # fmt: skip
    assert arms["actor_critic_lora"]["2"] == {"of": "actor_critic_lora-2", "responses": 1600}
    assert arms["q"]["0"] == {"of": "q-0", "responses": SAMPLES}
    names = [f"systems-{RECIPE}-{seed}" for seed in (0, 1, 1, 2)]
    assert [name for stage, name in ran if stage == "sft"] == names
    assert [name for stage, name in ran if stage == "ppo"] == names[2:]


def test_a_gain_is_told_of_seeds_whose_beginning_is_known():
    def one(satisfied, **before):
        return {"after": {"satisfied": satisfied, "score": satisfied}, "responses": 1600, **before}

    arms = {RECIPE: {"0": one(0.5, before={"satisfied": 0.4, "score": 0.4})}, "q": {"0": one(0.7), "1": one(0.9)}}
    assert systems._table(arms, 30).splitlines()[4].endswith("| +0.300 |")


def test_the_page_has_a_line_for_each(tmp_path, monkeypatch):
    end = {"score": 0.5, "kl": 2.0, "length": 20.0, "satisfied": 0.5, "satisfied_unseen": 0.2}
    logged = [[update, float(update > 25)] for update in range(1, 51)]
    one = {"before": end, "after": {**end, "satisfied": 0.6}, "score": logged, "responses": 1600}
    arms = {name: dict.fromkeys(("0", "1"), one) for name in LABELS}
    cloned = {key: value for key, value in end.items() if key != "kl"}
    arms["cloning"] = {
        seed: {"after": {**cloned, "satisfied": share}, "kept": 7, "responses": 1600}
        for seed, share in (("0", 0.2), ("1", 0.7))
    }
    begun_at = {"0": {**end, "satisfied": 0.1}, "1": {**end, "satisfied": 0.4}}
    later = {"cloning_on": {seed: {**one, "before": begun_at[seed]} for seed, one in arms["cloning"].items()}}
    result = {"arms": arms, "prompts": 30, "date": "2026-01-01", "machine": {"processor": "a chip", "threads": 1}}
    (tmp_path / "2026-01-01_systems.json").write_text(json.dumps(result))
    result |= {"date": "2026-01-02", "arms": later}
    (tmp_path / "2026-01-02_systems.json").write_text(json.dumps(result))
    page = tmp_path / "page.md"
    page.write_text("<!-- systems: made by benchmarks.systems -->\n<!-- end of systems -->\n")
    monkeypatch.setattr(records, "DOCS", tmp_path)
    monkeypatch.setattr(systems, "COMPARISONS", page)
    systems.show(tmp_path)
    text = page.read_text()
    unseen = "0.200 (0.200–0.200)"
    assert f"| where all begin |  | 0.500 (0.500–0.500) | {unseen} | 0.500 | 2.000 | 20.000 |  |" in text
    assert f"| Q-learning | 1,600 | 0.600 (0.600–0.600) | {unseen} | 0.500 | 2.000 | 20.000 | +0.100, +0.100 |" in text
    cloning = "| cloning of what kept all rules | 1,600 | 0.450 (0.200–0.700) |"
    assert f"{cloning} {unseen} | 0.500 |  | 20.000 | -0.300, +0.200 |" in text
    cloning = "| cloning of it on top of what sampled it | 1,600 | 0.450 (0.200–0.700) |"
    assert f"{cloning} {unseen} | 0.500 |  | 20.000 | +0.100, +0.300 |" in text
    of_days = "a chip, 2026-01-01. cloning of it on top of what sampled it: a chip, 2026-01-02."
    assert text.rstrip().splitlines()[-2].endswith(of_days)
    assert "</svg>" in (tmp_path / "figures" / "systems.svg").read_text()
    assert list(systems._curve(1600, logged)) == [(160 * n, mean) for n, mean in enumerate([0] * 5 + [1] * 5, 1)]
