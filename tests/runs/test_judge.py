"""A judge beside the reward: what is refused, what a check finds, and runs that it watches."""

import json
import shutil

import pytest
import yaml

from tests.runs.test_resume import SAVING
from tests.spec.test_load import load_changed
from tests.spec.test_refusals import BEST
from tests.tiny_models import lora, needs_trl_loop, randomize
from tests.tiny_runs import chat_recipe, command_here, cut_short, texts
from toolkit.errors import CheckpointError, RecipeError
from toolkit.models import SharedBase, load_base, save_role
from toolkit.reports import read_jsonl
from toolkit.runs import stages
from toolkit.runs.check import check
from toolkit.trainers.guards import Watch

RULE = {"kind": "function", "function": "statistics:fmean"}
EVALUATED = {**SAVING, "eval_strategy": "steps", "eval_steps": 1}
PPO = {
    "max_steps": 3, "num_ppo_epochs": 1, "per_device_train_batch_size": 2, "response_length": 6, "logging_steps": 1,
    "learning_rate": 3e-2, **EVALUATED,
}  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"judge": {}}, "start.judge — is missing: a judge of kind adapter"),
        ({"judge": {"kind": "sum", "parts": {"a": {"kind": "adapter"}}}}, "start.judge — is missing"),
        (
            {"judge": RULE, "start": {"judge": "x"}},
            "start.judge — would have no effect: no judge reads an adapter. Take it",
        ),
        ({"start": {"judge": "x"}}, "start.judge — would have no effect: no judge reads an adapter. Add judge.kind"),
        ({"judge": RULE, "ppo": None}, "judge — would have no effect: there is no section ppo or q."),
        ({"judge": {"kind": "model"}}, "judge.model — is needed for a judge (a folder or hub id)."),
        ({"judge": {"kind": "modl"}}, "judge.kind — 'adapter' or 'function'"),
        ({"judge": {**RULE, "weight": 2}}, "judge.weight — kind: function has no such field."),
        ({"judge": 3}, "judge — a section with keys is needed, got 3."),
        (
            {"ppo": {**BEST, "metric_for_best_model": "judge"}},
            "ppo.metric_for_best_model — 'judge' is nothing that is measured.",
        ),
    ],
)
def test_problems(sections, message, tmp_path):
    with pytest.raises(RecipeError) as error:
        load_changed(tmp_path, **sections)
    assert message in str(error.value)


def test_what_decides_a_stage(tmp_path):
    """A judge is no part of what the reward stage or collect do; ppo and q are measured by it."""
    start, collect = {"judge": "x"}, {"batch_size": 1}
    recipe = load_changed(tmp_path, judge={"kind": "adapter"}, start=start, collect=collect, q={"max_steps": 1},
                          adapters={role: {"r": 4} for role in ("policy", "value", "reward", "q")})  # fmt: skip
    reads = {name: [plan.reads_key(key) for key in ("judge.kind", "start.judge")] for name, plan in
             recipe.plan.stages.items()}  # fmt: skip
    assert reads == {name: [name in ("ppo", "q")] * 2 for name in ("reward", "collect", "ppo", "q")}
    assert recipe.plan.stages["ppo"].source("judge").folder == "x" and recipe.plan.needs("ppo") == ["reward"]
    assert recipe.stage_config("ppo", **BEST, metric_for_best_model="judge").greater_is_better
    least = {"metric_for_best_model": "judge_se", "greater_is_better": False}
    load_changed(tmp_path, judge=RULE, ppo={**BEST, **least, "early_stopping_patience": 2})


@pytest.fixture(scope="module")
def other_reward(tmp_path_factory, checkpoint):
    """The reward adapter of another run."""
    base = SharedBase(load_base(str(checkpoint), dtype="float32"))
    base.add_role("reward", lora(4))
    randomize(base, "reward", seed=4)
    return save_role(base, "reward", tmp_path_factory.mktemp("other"), pad_token_id=2, base_name="tiny")


def by_adapter(tmp_path, checkpoint, folder, name, judged=None, **ppo):
    """A run whose reward is a rule, and its judge an adapter, another one, or none."""
    (tmp_path / "varied.py").write_text("def rule(rollout):\n    return [len(set(t)) for t in rollout.responses]\n")
    scorer = {"kind": "function", "function": f"{tmp_path}/varied.py:rule"}
    parts = {"other": {"kind": "adapter"}, "rule": {**scorer, "weight": 0}}
    if folder:
        judged = {"judge": {"kind": "sum", "parts": parts}, "start": {"judge": str(folder)}}
    return chat_recipe(tmp_path, checkpoint, name=name, reward=None, scorer=scorer, ppo={**PPO, **ppo}, **judged or {})


def test_a_run_is_measured_by_a_judge_and_not_trained_on_it(tmp_path, checkpoint, other_reward):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "judge", "early_stopping_patience": 3}
    judged = by_adapter(tmp_path, checkpoint, other_reward, "judged", **best)
    plain = by_adapter(tmp_path, checkpoint, None, "plain")
    report = check(judged)
    assert texts(report) == () and "from " in next(facts.start for facts in report.roles if facts.role == "judge")
    result, without = stages.run(judged, "ppo"), stages.run(plain, "ppo")
    folder = judged.stage_folder("ppo")
    for side in ("before", "after"):
        figures = result[side]
        assert figures["judge/rule"] == figures["score"] and figures["judge"] == figures["judge/other"] != 0
        assert {"judge", "judge_se", "judge/rule", "judge/other"} == figures.keys() - without[side].keys()
    assert result["before"]["score"] == without["before"]["score"]
    rows = {recipe.run: read_jsonl(recipe.stage_folder("ppo") / "metrics.jsonl") for recipe in (judged, plain)}
    evaluations = [row for row in rows["judged"] if "eval_judge" in row]
    assert len(evaluations) == 3 and all("eval_judge_se" in row for row in evaluations)
    learnt = [[row["policy_loss"] for row in rows[run] if "policy_loss" in row] for run in ("judged", "plain")]
    assert learnt[0] == learnt[1]
    state = json.loads((folder / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["best_metric"] == max(row["eval_judge"] for row in evaluations)
    samples = read_jsonl(folder / "samples.jsonl")
    assert sum(row["after_judge"] for row in samples) / len(samples) == pytest.approx(
        result["after"]["judge"], abs=1e-3
    )
    assert "gain in standard errors vs. KL" in (folder / "report.html").read_text()
    assert not (folder / "judge").exists()
    best = int(state["best_model_checkpoint"].rsplit("-")[-1])
    assert ("ended" in result) is (best < 3) and (best == 3 or f"are those of step {best} of 3" in result["ended"])


def test_a_run_ends_where_its_judge_falls_and_warns_of_what_came_back_by_its_step(tmp_path, checkpoint, monkeypatch):
    told = []
    monkeypatch.setattr(Watch, "evaluated", lambda self, step, *_: told.append(step) or [])
    falls = "asked = []\n\ndef falls(rollout):\n    asked.append(0)\n    return [-len(asked)] * len(rollout)\n"
    (tmp_path / "falls.py").write_text(falls)
    best = {"max_steps": 4, "load_best_model_at_end": True, "metric_for_best_model": "judge"}
    best["early_stopping_patience"] = 1
    judged = {"judge": {"kind": "function", "function": f"{tmp_path}/falls.py:falls"}}
    recipe = by_adapter(tmp_path, checkpoint, None, "best", judged, **best)
    ended = stages.run(recipe, "ppo")["ended"]
    assert "stopped early, at step 2 of 4: no better judge" in ended and "of step 1 of 2, the best by judge" in ended
    assert told == [0, 1, 2, 1]


def test_a_resumed_run_keeps_its_judge_and_its_first_answers(tmp_path, checkpoint, other_reward):
    folder = shutil.copytree(other_reward, tmp_path / "judge")
    recipe = by_adapter(tmp_path, checkpoint, folder, "judged")
    cut_short(recipe, "ppo", at=2)
    trainer = recipe.ppo_trainer(resume=True)
    trainer.load_checkpoint(recipe.stage_folder("ppo") / "checkpoint-2")
    before = json.loads((recipe.stage_folder("ppo") / "before.json").read_text())
    ((asked, first),) = trainer.watch.first.items()
    assert first == {"metrics": before["metrics"], "responses": before["answers"]["responses"]}
    assert trainer.watch.best[asked]["judge"] >= before["metrics"]["judge"] and len(before["answers"]["judged"]) == 6
    del trainer
    result = stages.run(recipe, "ppo", resume=True)
    rows = read_jsonl(recipe.stage_folder("ppo") / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval_judge" in row] == [1, 2, 3] and "judge" in result["after"]


@pytest.mark.parametrize("beside", ["none", "an adapter"])
def test_a_judge_of_python_s_own(beside, tmp_path, checkpoint, other_reward):
    """It comes before that of the recipe, is written into the run's recipe, and is not looked for by its name."""
    seen = []

    def judge(rollout):
        seen.append(len(rollout))
        return [7.0] * len(rollout)

    recipe = by_adapter(tmp_path, checkpoint, other_reward if beside == "an adapter" else None, "by-hand")
    trainer = recipe.ppo_trainer(judge=judge)
    assert trainer.evaluate()["eval_judge"] == 7.0 and sum(seen) == len(trainer.eval_dataset)
    kept = yaml.safe_load((recipe.folder / "recipe.yaml").read_text())
    assert kept["judge"]["function"].endswith("<locals>.judge") and "judge" not in kept.get("start", {})


@needs_trl_loop
def test_trl_s_own_loop_has_no_judge(tmp_path):
    with pytest.raises(RecipeError, match="ppo.loop: trl is TRL's own loop, which evaluates nothing"):
        load_changed(tmp_path, ppo={"loop": "trl"}).ppo_trainer(judge=len)


def test_another_judge_is_no_way_on(tmp_path, checkpoint, other_reward):
    folder = shutil.copytree(other_reward, tmp_path / "judge")
    recipe = by_adapter(tmp_path, checkpoint, folder, "judged")
    cut_short(recipe, "ppo", at=1)
    base = SharedBase(load_base(str(checkpoint), dtype="float32"))
    base.add_role("reward", lora(4))
    save_role(base, "reward", folder, pad_token_id=2, base_name="tiny")
    with pytest.raises(CheckpointError, match="the judge adapter is not the one that this run began with"):
        stages.run(recipe, "ppo", resume=True)


def test_a_check_finds_what_a_judge_names(tmp_path, checkpoint):
    recipe = by_adapter(tmp_path, checkpoint, tmp_path / "nowhere", "missing")
    (problem,) = texts(check(recipe))
    assert problem.startswith("start.judge — ") and "there is no folder" in problem
    rule = chat_recipe(tmp_path, checkpoint, judge={"kind": "function", "function": "nowhere.py:f"})
    (problem,) = texts(check(rule))
    assert problem.startswith('judge.function — no file "nowhere.py"')


def test_a_judge_in_the_folder_of_the_recipe_is_shown(tmp_path, checkpoint):
    (tmp_path / "mine.py").write_text("def judge(rollout):\n    return [1.0] * len(rollout)\n")
    recipe = chat_recipe(tmp_path, checkpoint, judge={"kind": "function", "function": "mine.py:judge"}, name="mine")
    assert recipe.values["judge"]["function"] == f"{tmp_path}/mine.py:judge"
    said = command_here("show", tmp_path / "mine.yaml").stdout
    assert yaml.safe_load(said)["judge"] == recipe.values["judge"] and "  kind: function  # default: adapter\n" in said
