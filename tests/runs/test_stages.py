"""Whole stages by the real entry points, on models small enough for a few seconds."""

import gc
import json
import os
import shutil
import weakref
from functools import partial
from types import SimpleNamespace

import numpy
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, TrainerCallback
from transformers.integrations import INTEGRATION_TO_CALLBACK

from tests.tiny_models import needs_trl_loop
from tests.tiny_runs import PAIRS, REPOSITORY, begun, byte_tokenizer, chat_recipe, command_here, ended, texts
from toolkit import processes, recipes
from toolkit.errors import CheckpointError, ConfigError, DataError, RecipeError, RewardError, ToolkitError
from toolkit.inference.evaluate import evaluate, trained_on
from toolkit.inference.saved_run import open_run, policy_folder
from toolkit.models import adapters as saved_roles
from toolkit.reports import Progress, append_jsonl, read_json, read_jsonl, write_jsonl
from toolkit.runs import build, stages
from toolkit.runs.lock import owner_of
from toolkit.runs.report_on_the_way import ReportAtEvaluations
from toolkit.runs.said import say_shares
from toolkit.sampling import SIGNS
from toolkit.trainers.ppo import PPOTrainer

SMALL_DOUBLING = (
    "sft.max_steps=2", "reward.max_steps=2", "ppo.max_steps=2", "ppo.per_device_train_batch_size=8", "ppo.eval_steps=1",
    "data.validation_size=8", "data.test_size=8", "base.config.n_layer=1", "ppo.num_ppo_epochs=1",
    "ppo.logging_steps=1",
)  # fmt: skip
SAME_KEYS = {"score", "score_se", "kl", "length", "eos_share", *SIGNS, "exact_match", "style_accuracy"}


@pytest.fixture(scope="module")
def doubling_run(tmp_path_factory):
    """One command from nothing: pretraining, reward, PPO, all in its process. Stages in their own: test_resume.py."""
    folder = tmp_path_factory.mktemp("elsewhere")
    done = ended(begun("ppo", "doubling", *SMALL_DOUBLING, cwd=folder, here=True), folder)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder, done


@pytest.mark.smoke
def test_the_precision_of_products_is_that_of_a_stage(tmp_path, monkeypatch):
    for module in ("transformers.training_args", "toolkit.runs.build"):
        monkeypatch.setattr(f"{module}.is_torch_tf32_available", lambda: True)
    monkeypatch.setattr(build, "_OF_THE_PROCESS", [])
    recipe = recipes.load("doubling", "sft.tf32=true", runs_dir=tmp_path)
    before = torch.backends.fp32_precision
    build.trainer_config(recipe, "sft")  # as a check reads it
    assert torch.backends.fp32_precision == before
    build._for_training(recipe, "sft")
    assert torch.backends.fp32_precision == "tf32"
    build._for_training(recipe, "ppo")
    assert torch.backends.fp32_precision == before


def test_one_command_runs_all_stages_and_leaves_what_it_says(doubling_run):
    folder, done = doubling_run
    run = folder / "runs" / "doubling"
    for stage in ("sft", "reward", "ppo"):
        result = json.loads((run / stage / "result.json").read_text())
        assert {"recipe", "stage", "seed", "seconds", "peak_memory_gb", "versions", "before", "after"} <= result.keys()
        assert result["recipe"] == "doubling" and result["stage"] == stage and result["seed"] == 0
        assert result["before"].keys() == result["after"].keys()
        assert (run / stage / "metrics.jsonl").read_text()
        assert "<svg" in (run / stage / "report.html").read_text() or stage != "ppo"
    ppo = json.loads((run / "ppo" / "result.json").read_text())
    assert ppo["after"].keys() == SAME_KEYS and ppo["evaluated_apart"] is True
    assert (run / "sft" / "model" / "model.safetensors").is_file()
    for role in ("reward/reward", "ppo/policy", "ppo/value"):
        assert (run / role / "adapter_model.safetensors").is_file(), role
    samples = [json.loads(line) for line in (run / "ppo" / "samples.jsonl").read_text().splitlines()]
    sides = {f"{side}{what}" for side in ("before", "after") for what in ("", "_score", "_length")}
    assert len(samples) == 8 and samples[0].keys() == {"prompt", *sides}
    assert "exact_match" in done.stdout and "report: runs/doubling/ppo/report.html" in done.stdout
    assert "samples before and after" in done.stdout
    assert "Warning" not in done.stderr, done.stderr
    assert not list(run.rglob("*.bin")) and not list(run.rglob("*.pt")) and not list(run.rglob("*.pth"))


def test_a_run_says_what_it_does_from_its_first_second_to_its_last(doubling_run):
    folder, done = doubling_run
    first, *_, last = (line for line in done.stderr.splitlines() if line.startswith("doubling "))
    assert (first, last) == ("doubling ppo: check …", "doubling ppo: write …")
    for stage in ("sft", "reward", "ppo"):
        begin, end = ("answers before", "answers after") if stage == "ppo" else ("measure before", "measure after")
        assert f"doubling {stage}: {begin} …" in done.stderr and f"doubling {stage}: {end} …" in done.stderr
        assert f"doubling {stage}: CPU (" in done.stdout and f"; writes to runs/doubling/{stage}" in done.stdout
        result = json.loads((folder / "runs" / "doubling" / stage / "result.json").read_text())
        phases = {"load", begin, end, "train"} | ({"rollout", "score", "update"} if stage == "ppo" else set())
        assert phases <= result["spent"].keys() and 0 < sum(result["spent"].values()) <= result["seconds"] + 1
        assert result["rows"]["train"] > 0 and result["machine"]["threads"] >= 1
        if stage == "ppo":  # of what its figures before and after are
            assert result["rows"].get("test", result["rows"]["held out"]) == 8
    assert "The score " in done.stdout and " standard errors over the same 8 prompts." in done.stdout
    page = (folder / "runs" / "doubling" / "ppo" / "report.html").read_text()
    assert "Where the time went" in page and "standard errors" in page and 'http-equiv="refresh"' not in page


def test_a_finished_stage_is_not_repeated_and_another_recipe_is_stopped(doubling_run, monkeypatch):
    folder, _ = doubling_run
    monkeypatch.chdir(folder)
    same = recipes.load("doubling", *SMALL_DOUBLING)
    before = (folder / "runs/doubling/ppo/result.json").read_text()
    assert stages.run(same, "ppo") == json.loads(before)
    other = recipes.load("doubling", *SMALL_DOUBLING, "ppo.kl_coef=0.3")
    with pytest.raises(RecipeError, match=r"other settings: ppo.kl_coef .*. Name a new run .*overwrite=True"):
        stages.run(other, "ppo")
    with pytest.raises(RecipeError, match="another recipe"):
        other.ppo_trainer()
    assert (folder / "runs/doubling/ppo/result.json").read_text() == before
    assert stages.finished(other, "ppo") is None


def test_another_ppo_begins_with_the_stages_of_a_finished_run(doubling_run, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(doubling_run[0], folder)
    arguments = ("ppo", "doubling", *SMALL_DOUBLING, "ppo.kl_coef=0.3")
    done = command_here(*arguments, "--run", "more-kl", "--from-run", "doubling", cwd=folder)
    assert done.returncode == 0, done.stderr + done.stdout
    for stage in ("sft", "reward"):
        assert f"{stage} is taken from runs/doubling/{stage}." in done.stdout
    first, second = folder / "runs" / "doubling", folder / "runs" / "more-kl"
    base = load_file(second / "sft" / "model" / "model.safetensors")
    assert all(
        torch.equal(base[name], tensor)
        for name, tensor in load_file(first / "sft" / "model" / "model.safetensors").items()
    )
    results = [json.loads((run / "ppo" / "result.json").read_text()) for run in (first, second)]
    assert results[0]["before"] == results[1]["before"] and results[0]["after"] != results[1]["after"]
    again = command_here(*arguments, "--run", "more-kl", "--from-run", "doubling", cwd=folder)
    assert again.returncode == 0 and "ppo of this run is finished" in again.stdout
    # The same settings in the first run's folder repeat ppo alone.
    kept = (first / "reward" / "result.json").read_text()
    assert command_here(*arguments, "--overwrite", cwd=folder).returncode == 0
    assert (first / "reward" / "result.json").read_text() == kept
    assert json.loads((first / "ppo" / "result.json").read_text())["after"] == results[1]["after"]


def test_a_notebook_gets_a_trainer(doubling_run, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(doubling_run[0], folder)
    monkeypatch.chdir(folder)
    with pytest.raises(RecipeError, match=r"holds a finished ppo stage. Name a new run .*overwrite=True"):
        recipes.load("doubling", *SMALL_DOUBLING).ppo_trainer()
    assert (folder / "runs/doubling/ppo/result.json").is_file()
    trainer = recipes.load("doubling", *SMALL_DOUBLING).ppo_trainer(overwrite=True)
    assert set(trainer.roles.roles) == {"policy", "reference", "reward", "value"}
    for batch in trainer.dataloader:
        responses = trainer.generate(batch)
        scores = trainer.score(batch, responses)
        stats = trainer.step(batch, responses, scores)
        break
    assert stats["score"] == pytest.approx(scores.mean().item())


def test_prompts_a_reward_and_callbacks_from_memory(tmp_path, checkpoint):
    seen = []

    class Counts(TrainerCallback):
        def on_step_end(self, *arguments, **kwargs):
            seen.append("step")

    def reward(rollout):
        seen.extend(rollout.columns["topic"])
        return [0.5] * len(rollout)

    rows = [{"prompt": f"Why {i}?", "topic": f"t{i}"} for i in range(4)]
    recipe = chat_recipe(tmp_path, checkpoint, "ppo.max_steps=1")
    trainer = recipe.ppo_trainer(reward, train_dataset=rows, callbacks=[Counts()])
    trainer.train()
    assert sorted(seen) == ["step", "t0", "t1", "t2", "t3"]
    assert (tmp_path / "runs" / "chat" / "ppo" / "metrics.jsonl").read_text()
    gc.disable()
    try:
        assert owner_of(recipe.folder)
        del trainer
        assert owner_of(recipe.folder) is None  # and the memory of its base with it
    finally:
        gc.enable()


def test_a_stage_of_objects_is_run_to_its_end(tmp_path, checkpoint, capsys):
    asked = []

    def reward(rollout):
        asked.append(rollout.columns["topic"])
        return [0.5] * len(rollout)

    rows = {split: [{"prompt": f"Why {split}{i}?", "topic": split} for i in range(n)] for split, n in SIZES.items()}
    recipe = chat_recipe(tmp_path, checkpoint, "ppo.max_steps=1", "ppo.eval_strategy=steps", "ppo.eval_steps=1")
    given = {"train_dataset": rows["train"], "eval_dataset": rows["held out"]}
    result = recipe.run_stage("ppo", reward, judge=reward, **given)
    assert result["rows"] == SIZES and result["before"]["score"] == result["after"]["judge"] == 0.5
    assert {topic for topics in asked for topic in topics} == set(SIZES)
    told = capsys.readouterr().out
    assert "data: train: 4 prompts, given | validation: 3 prompts, given" in told and "Why held out" in told
    opened = open_run("chat", runs_dir=tmp_path / "runs")
    assert opened.values["scorer"]["kind"] == "function" and policy_folder(opened).is_dir()
    told = (
        "data: the run was trained on prompts that were given in Python. Whether some of these are among them is not "
    )
    assert trained_on(opened) == ({"other_prompts": True}, [f"{told}known."])
    calls = len(asked)
    again = recipe.run_stage("ppo", reward, judge=reward, **given)
    assert again == result and len(asked) == calls  # it is finished
    with pytest.raises(RecipeError, match="^reward and train_dataset would have no effect on the stage sft: only ppo"):
        recipe.run_stage("sft", reward, train_dataset=rows["train"])
    assert result["given"].keys() == given.keys()
    assert "Prompts were given in Python, in place of those of the recipe: train_dataset, eval_dataset." in (
        (recipe.stage_folder("ppo") / "report.html").read_text()
    )
    capsys.readouterr()
    recipe.run_stage("ppo", reward, judge=reward, train_dataset=rows["train"], eval_dataset=rows["train"])
    told = "ppo. Its figures are those of another eval_dataset, with which it was run. overwrite=True repeats it."
    assert told in capsys.readouterr().out
    with pytest.raises(DataError, match="row 1: a prompt is in the column .*; present: topic"):
        recipe.run_stage("ppo", reward, judge=reward, eval_dataset=[{"topic": "none"}], overwrite=True)

    def broken(rollout):
        raise ValueError("in the middle")

    with pytest.raises(RewardError, match="in the middle"):
        recipe.run_stage("ppo", broken, **given, overwrite=True)
    assert read_json(recipe.stage_folder("ppo") / "result.json") == result  # which came back


def test_a_stage_of_objects_goes_on_with_the_same_ones(tmp_path, checkpoint, monkeypatch):
    calls, train = [], [{"prompt": f"Why {i}?", "topic": "a"} for i in range(4)]

    def reward(rollout):
        calls.append(rollout.columns["topic"])
        if len(calls) == 4:  # before, in two updates
            raise ValueError("away")
        return [0.5] * len(rollout)

    recipe, given = chat_recipe(tmp_path, checkpoint, "ppo.max_steps=3"), {"eval_dataset": train[:2]}
    trainer, made, make = recipe.ppo_trainer(reward, train_dataset=train, **given), [], build.MAKERS["ppo"]

    def remembered(*arguments, **named):
        ours = make(*arguments, **named)
        made.append(weakref.ref(ours))
        return ours

    monkeypatch.setitem(build.MAKERS, "ppo", remembered)
    with pytest.raises(RewardError, match="All up to update 2 is saved in") as kept:  # as a notebook keeps it
        recipe.run_stage("ppo", reward, train_dataset=train, **given)
    assert kept.value.__traceback__ is not None and made[0]() is None
    with pytest.raises(ToolkitError, match="a later trainer of this process has taken"):
        trainer.save_model()
    others = [{**row, "prompt": f"{row['prompt']}!"} for row in train]
    with pytest.raises(CheckpointError, match="data"):
        recipe.run_stage("ppo", reward, train_dataset=others, **given, resume=True)
    result = recipe.run_stage("ppo", reward, train_dataset=train, **given, resume=True)
    assert result["resumed_at"] == [2] and result["given"].keys() == {"train_dataset", "eval_dataset"}


@pytest.mark.parametrize(
    ("stage", "given", "wrong"),
    [
        (
            "reward",
            {"judge": len, "eval_dataset": ["a"]},
            "^judge and eval_dataset would have no effect on the stage r",
        ),
        ("collect", {"callbacks": [TrainerCallback()]}, "^callbacks would have no effect on the stage collect"),
    ],
)
def test_what_a_stage_does_not_take(stage, given, wrong, tmp_path, checkpoint):
    with pytest.raises(RecipeError, match=wrong):
        chat_recipe(tmp_path, checkpoint).run_stage(stage, **given)


def test_held_out_prompts_that_the_task_cannot_measure(tmp_path):
    recipe = recipes.load("doubling", runs_dir=tmp_path)
    told = (
        "^eval_dataset: the task \"doubling\" measures responses by a column 'style', which these prompts do not have"
    )
    with pytest.raises(DataError, match=told):
        recipe.run_stage("ppo", train_dataset=["S小写:5487x2="] * 200, eval_dataset=["S小写:5487x2="])


@needs_trl_loop
def test_held_out_prompts_are_nothing_to_the_loop_of_trl(tmp_path):
    with pytest.raises(RecipeError, match="ppo.loop: trl is TRL's own loop, which evaluates nothing"):
        changes = "ppo.loop=trl", "ppo.eval_strategy='no'"
        recipes.load("doubling", *changes, runs_dir=tmp_path).ppo_trainer(eval_dataset=["S小写:5487x2="])
    with pytest.raises(RecipeError, match="ppo.loop: trl is TRL's own loop, so that trainer_class has no effect"):
        recipes.load("doubling", *changes, runs_dir=tmp_path).ppo_trainer(trainer_class=PPOTrainer)


SIZES = {"train": 4, "held out": 3}


class Remembering(dict):
    """A reward that is falsy at first."""

    def __call__(self, rollout):
        return [0.5] * len(rollout)


def test_what_is_handed_over_is_taken_as_it_is_now(tmp_path, checkpoint, capsys):
    path = tmp_path / "told.jsonl"
    write_jsonl(
        path, [{"prompt": f"Why {i}?", "completion": "So."} for i in range(4)] + [{"prompt": "", "completion": "a"}]
    )
    data = {"task": "demonstrations", "train": str(path), "validation": str(path)}
    given = {"sft_data": data, "sft": {"max_steps": 1, "per_device_train_batch_size": 4, "save_strategy": "no"}}
    recipe = chat_recipe(tmp_path, checkpoint, "start.policy=null", **given, name="now")
    assert len(recipe.sft_trainer().train_dataset) == 4
    assert "sft_data: train: 4 demonstrations; 1 left out: 1 × an empty prompt" in capsys.readouterr().out
    write_jsonl(path, [{"prompt": f"Why {i}?", "completion": "So."} for i in range(5)])
    assert len(recipe.sft_trainer(overwrite=True).train_dataset) == 5
    with pytest.raises(ConfigError, match="trainer_class: a subclass of .*PPOTrainer is needed, got <class 'dict'>"):
        chat_recipe(tmp_path, checkpoint, reward=None).ppo_trainer(trainer_class=dict)
    reward, mine = Remembering(), type("Mine", (PPOTrainer,), {})
    trainer = chat_recipe(tmp_path, checkpoint, reward=None).ppo_trainer(reward=reward, trainer_class=mine)
    assert trainer.reward is reward and type(trainer) is mine


def test_no_room_to_merge_is_an_error_of_its_section_before_anything_is_sampled(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000, total=2**40))
    with pytest.raises(ConfigError, match="^ppo.generation: merged needs .* GB for a copy of the weights"):
        chat_recipe(tmp_path, checkpoint, "ppo.generation=merged").ppo_trainer(lambda rollout: [0.5] * len(rollout))


def test_errors_are_one_line_and_debug_shows_more(tmp_path):
    done = command_here("ppo", "doublin", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith(
        'RecipeError: no recipe "doublin". Did you mean doubling or doubling_q or doubling_seed?'
    )
    assert "Traceback" not in done.stderr
    assert "Traceback" in command_here("ppo", "doublin", "--debug", cwd=tmp_path).stderr


def test_the_list_of_recipes_and_the_version():
    listed = command_here("recipes").stdout.splitlines()
    assert [line.split()[0] for line in listed] == recipes.names()
    assert any(line.startswith("doubling ") and "Doubles numbers" in line for line in listed)
    assert command_here("--version").stdout.strip() == "0.1.0"


# ---------------------------------------------------------------------- preference pairs on a tiny Llama


@pytest.mark.parametrize("value", ["separate", "shared"])
def test_reward_and_ppo_on_a_real_nf4_base(value, tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr(saved_roles, "FEWEST_SCORES", 12)  # the six pairs have as many
    overrides = ["ppo.num_ppo_epochs=2", "ppo.value=shared" if value == "shared" else "start.value=reward"]
    adapters = {role: {"r": 4, "target_modules": "all-linear"} for role in ("policy", "value", "reward")}
    if value == "shared":
        del adapters["value"]
    recipe = chat_recipe(tmp_path, checkpoint, *overrides, adapters=adapters)
    reward = stages.run(recipe, "reward")
    assert reward["after"]["rows"] == 6 and len(reward["after"]["accuracy_ci"]) == 2
    assert reward["left_out"] == {"train": {}, "validation": {}}
    folder = recipe.stage_folder("reward")
    scores = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    wrong = [json.loads(line) for line in (folder / "errors.jsonl").read_text().splitlines()]
    right = sum(row["chosen_score"] > row["rejected_score"] for row in scores)
    assert len(scores) == 6 and right / 6 == pytest.approx(reward["after"]["accuracy"])
    assert len(wrong) == sum(row["chosen_score"] < row["rejected_score"] for row in scores)
    assert scores[0]["chosen"] == "Paris." and scores[0]["chosen_length"] == len("Paris.") + 1  # with its end
    assert scores[0]["prompt"] == "<s>What is the capital of France?</s><s>"
    assert reward["judgement"]["length"]["equal"].keys() == {"pairs", "accuracy", "accuracy_ci"}
    assert "Held-out pairs" in (folder / "report.html").read_text()
    result = stages.run(recipe, "ppo")
    assert result["after"].keys() == {"score", "score_se", "kl", "length", "eos_share", *SIGNS, "beyond_share"}
    high = numpy.quantile([row[f"{side}_score"] for row in scores for side in ("chosen", "rejected")], 0.99)
    said = read_jsonl(recipe.stage_folder("ppo") / "samples.jsonl")
    assert result["after"]["beyond_share"] == pytest.approx(sum(row["after_score"] > high for row in said) / len(said))
    assert result["before"]["kl"] == pytest.approx(0.0, abs=1e-3)
    if value == "separate":  # judged by the reward of another seed than the one that it was trained against
        other = chat_recipe(tmp_path, checkpoint, "seed=1", *overrides, adapters=adapters, name="other")
        stages.run(other, "reward")
        named = f"start.reward={other.stage_folder('reward') / 'reward'}"
        again = evaluate(open_run("chat", named, runs_dir=tmp_path / "runs"))
        assert again["after"]["length"] == result["after"]["length"]  # the same answers
        assert again["before"]["score"] != result["before"]["score"]
    saved = "adapter_model.safetensors" if value == "separate" else "value_head.safetensors"
    assert (recipe.stage_folder("ppo") / "value" / saved).is_file()


def test_start_from_named_adapters_and_score_by_a_function(tmp_path, checkpoint, monkeypatch):
    (tmp_path / "rule_for_test.py").write_text(
        "def rule(rollout):\n    return [float(len(t)) for t in rollout.responses]\n"
    )
    monkeypatch.chdir(tmp_path)
    first = chat_recipe(
        tmp_path, checkpoint, scorer={"kind": "function", "function": "rule_for_test:rule"}, reward=None, name="first"
    )
    assert first.plan.needs("ppo") == []
    stages.run(first, "ppo")
    second = chat_recipe(
        tmp_path,
        checkpoint,
        scorer={"kind": "function", "function": "rule_for_test:rule"},
        reward=None,
        start={role: str(first.stage_folder("ppo") / role) for role in ("policy", "value")},
        name="second",
    )
    trainer = second.ppo_trainer()
    # The reference is a frozen copy of where the policy starts: KL to the bare base would not be 0.
    assert "reference" not in trainer.roles.trained_roles and trainer.roles.adapter_config("reference").r == 4
    policy, reference = trainer.roles.parameters_of("policy"), trainer.roles.parameters_of("reference")
    assert all(torch.equal(a, b) for a, b in zip(policy, reference, strict=True)) and any(p.any() for p in policy[1::2])
    metrics, _, scores, *_ = trainer.evaluate_rollout(second.task.prompts("validation"))
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-4)
    assert scores.tolist() == [
        float(len(t)) for t in trainer.evaluate_rollout(second.task.prompts("validation"))[1].responses
    ]


@needs_trl_loop
def test_trls_own_loop_from_a_recipe(tmp_path, checkpoint, stages_here):
    with_pad = tmp_path / "with_pad"
    LlamaForCausalLM.from_pretrained(checkpoint).save_pretrained(with_pad)
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "<pad>"  # TRL masks by pad id, so that pad == eos is refused
    tokenizer.save_pretrained(with_pad)
    recipe = chat_recipe(tmp_path, with_pad, "ppo.loop=trl", "ppo.gradient_checkpointing=false")
    trainer = recipe.ppo_trainer()
    trainer.train()
    trainer.save_model(_internal_call=True)  # as transformers calls it, too
    for role in ("policy", "value"):
        assert (recipe.stage_folder("ppo") / role / "adapter_model.safetensors").is_file()
    assert not (recipe.stage_folder("ppo") / "model.safetensors").exists()
    del trainer
    gc.collect()
    result = stages.run(recipe, "ppo", overwrite=True)
    assert "evaluated_apart" not in result and "held out" not in result["rows"]  # TRL's loop evaluates nothing
    assert result["before"]["kl"] == pytest.approx(0.0, abs=1e-3) and result["after"].keys() == result["before"].keys()
    assert (recipe.stage_folder("ppo") / "value" / "adapter_model.safetensors").is_file()
    metrics = (recipe.stage_folder("ppo") / "metrics.jsonl").read_text()
    assert "objective/kl" in metrics  # TRL's own names: it was TRL's loop
    rows = [json.loads(line) for line in metrics.splitlines()]
    assert all(row["score"] == row["objective/scores"] and row["kl"] == row["objective/kl"] for row in rows)
    assert "<h2>Curves</h2>" in (recipe.stage_folder("ppo") / "report.html").read_text()
    refused = chat_recipe(tmp_path, checkpoint, "ppo.loop=trl", "ppo.gradient_checkpointing=false", name="refused")
    with pytest.raises(RecipeError, match="pad and eos are one token"):
        stages.run(refused, "ppo")


def test_sft_of_a_checkpoint_is_where_policy_and_reference_start(tmp_path, checkpoint, monkeypatch, capsys):
    monkeypatch.setattr("toolkit.runs.build.slow_here", lambda dtype: "nine times as slow.")  # which a run says
    (tmp_path / "rule2_for_test.py").write_text("def rule(rollout):\n    return rollout.lengths\n")
    monkeypatch.chdir(tmp_path)
    recipe = chat_recipe(
        tmp_path,
        checkpoint,
        sft={"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_strategy": "no"},
        reward=None,
        scorer={"kind": "function", "function": "rule2_for_test:rule"},
    )
    assert recipe.plan.needs("ppo") == ["sft"]
    result = stages.run(recipe, "sft")
    assert ": nine times as slow. base.dtype=auto takes" in capsys.readouterr().out
    assert result["after"]["loss"] < result["before"]["loss"]
    roles = recipe.ppo_trainer().roles
    assert ": nine times as slow. base.dtype=auto takes" in capsys.readouterr().out
    policy, reference = roles.parameters_of("policy"), roles.parameters_of("reference")
    assert all(torch.equal(a, b) for a, b in zip(policy, reference, strict=True)) and any(p.any() for p in policy[1::2])


def test_a_tracker_is_told_of_sft_s_training_and_of_nothing_before_or_after(tmp_path, checkpoint, monkeypatch):
    told = []

    class Tracker(TrainerCallback):
        def on_train_begin(self, *_, **__):
            told.append("begin")

        def on_log(self, *_, logs, **__):
            told.extend(key for key in logs if key in ("loss", "eval_loss"))

        def on_train_end(self, *_, **__):
            told.append("end")

    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "tensorboard", Tracker)
    monkeypatch.setattr("toolkit.spec.stage.get_available_reporting_integrations", lambda: ["tensorboard"])
    sft = {"max_steps": 2, "per_device_train_batch_size": 4, "save_strategy": "no", "report_to": "tensorboard"}
    sft |= {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
    recipe = chat_recipe(tmp_path, checkpoint, sft=sft, reward=None, ppo=None)
    stages.run(recipe, "sft")
    assert told == ["begin", "loss", "loss", "eval_loss", "end"]
    rows = read_jsonl(recipe.stage_folder("sft") / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval_loss" in row] == [0, 2, 2]  # before, on the way and after
    # Where the best weights come back, here those of the highest loss, what is measured last is not of the last step.
    worse = sft | {"report_to": "none", "learning_rate": 0.01, "eval_steps": 1, "load_best_model_at_end": True}
    worse |= {"save_strategy": "steps", "save_steps": 1, "metric_for_best_model": "loss", "greater_is_better": True}
    recipe = chat_recipe(
        tmp_path,
        checkpoint,
        sft=worse | {"save_strategy": "steps", "save_steps": 1},
        reward=None,
        ppo=None,
        name="best",
    )
    result = stages.run(recipe, "sft")
    rows = read_jsonl(recipe.stage_folder("sft") / "metrics.jsonl")
    losses = [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]
    assert [step for step, _ in losses] == [0, 1, 2] and losses[1][1] > losses[2][1]
    assert result["after"]["loss"] == pytest.approx(losses[1][1], rel=1e-3)


def test_prerequisites(tmp_path, checkpoint):
    doubling = recipes.load("doubling")
    assert doubling.plan.needs("ppo") == ["sft", "reward"]
    assert doubling.plan.needs("reward") == ["sft"]
    assert doubling.plan.needs("sft") == []
    assert recipes.load("smollm2_135m_lora").plan.needs("ppo") == ["sft", "reward"]
    assert recipes.load("smollm2_135m_lora").plan.needs("reward") == []
    assert recipes.load("llama3_8b_lora").plan.needs("ppo") == ["reward"]
    with pytest.raises(RecipeError, match='the recipe has no section "sft"'):
        recipes.load("llama3_8b_lora").plan.needs("sft")
    with pytest.raises(RecipeError, match='no stage "pretrain"; the stages are sft, reward, ppo'):
        doubling.plan.needs("pretrain")
    both = chat_recipe(tmp_path, checkpoint, sft={"max_steps": 2}, start={"policy": "x"}, name="both").plan
    assert both.needs("ppo") == ["reward"]
    assert both.stages["ppo"].source("policy").folder == both.stages["ppo"].source("reference").folder == "x"
    lacking = chat_recipe(tmp_path, checkpoint, reward=None)
    with pytest.raises(
        RecipeError, match='stage "ppo" needs a trained reward role, and the recipe has no section "reward"'
    ):
        stages.run(lacking, "ppo")


def test_while_a_run_goes_on_figures_of_other_prompts_are_not_compared(tmp_path):
    """Of doubling the prompts before and after are others than those of the evaluations on the way."""
    recipe = recipes.load("doubling", runs_dir=tmp_path)
    state = SimpleNamespace(global_step=0, max_steps=9, is_world_process_zero=True)
    held_out = recipe.task.prompts("validation")
    trainer = SimpleNamespace(eval_dataset=held_out, train_dataset=held_out, state=state, is_in_train=True)
    before, folder = {"score": 0.0, "score_se": 0.1}, recipe.stage_folder("ppo")
    so_far = ReportAtEvaluations(recipe, "ppo", 0.0, before, trainer, Progress("x", quiet=True))
    folder.mkdir(parents=True)
    write_jsonl(folder / "metrics.jsonl", [])
    for step, score in ((0, 0.5), (5, 0.9)):
        state.global_step, found = step, {"eval_score": score, "eval_score_se": 0.1}
        append_jsonl(folder / "metrics.jsonl", [{"step": step, **found}])  # logged before it is told
        so_far.on_evaluate(None, None, None, metrics=found)
        if step == 0:
            page = (folder / "report.html").read_text()
            assert "standard errors" not in page and "did not change" not in page and page.count("0.5000") == 1
            state.global_step = 3
            so_far.stopped()
            page = (folder / "report.html").read_text()
            assert "Stopped: step 3 of 9" in page and "standard errors" not in page and page.count("0.5000") == 1
    assert "+0.4 ± 0.14, 2.8 standard errors" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (8, ""),
        (6, "4 processes divide the 6 rows of a step, to the same result, but not evenly: some have 2. Numbers that "
            "divide them: 1, 2, 3, 6.\n"),
        (2, "but not evenly: 2 have none. Numbers that divide them: 1, 2.\n"),
    ],
)  # fmt: skip
def test_processes_that_do_not_come_out_even_are_told_of(rows, said, monkeypatch, capsys):
    monkeypatch.setattr(processes, "count", lambda: 4)
    monkeypatch.setattr(processes, "rank", lambda: 0)
    say_shares("sft", rows)
    found = capsys.readouterr().out
    assert found.endswith(said) and bool(found) == bool(said)


def test_a_failing_prerequisite_is_named(tmp_path, checkpoint, stages_here, capsys):
    """By what no check before it can see: a checkpoint with a weight that is no number."""
    shutil.copytree(checkpoint, tmp_path / "odd")
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"].fill_(float("nan"))
    save_file(weights, tmp_path / "odd" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ToolkitError, match='stage "reward", which "ppo" needs, failed'):
        stages.run(chat_recipe(tmp_path, tmp_path / "odd"), "ppo")
    assert "what a LlamaForCausalLM makes of a few tokens is not finite: a weight is damaged" in capsys.readouterr().err


def test_a_mistake_of_the_last_stage_is_found_before_the_first_one_runs(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr(stages, "run_stage", lambda *args: pytest.fail("a stage began"))
    for overrides in (("start.value=runs/nope/value",), ("data.validation=nope.jsonl",)):
        recipe = chat_recipe(tmp_path, checkpoint, *overrides, sft={"max_steps": 2}, name="early")
        with pytest.raises(RecipeError, match=overrides[0].split("=")[1]):
            stages.run(recipe, "ppo")
        assert not recipe.folder.exists()


def test_a_reward_that_fails_after_the_last_update_costs_no_update(tmp_path, checkpoint, monkeypatch):
    (tmp_path / "gone_for_test.py").write_text(
        "calls = []\ndef rule(rollout):\n    calls.append(1)\n"
        "    assert len(calls) != 4, 'gone'\n    return rollout.lengths\n"
    )
    scorer = {"kind": "function", "function": f"{tmp_path / 'gone_for_test.py'}:rule"}
    recipe = chat_recipe(tmp_path, checkpoint, reward=None, scorer=scorer)  # before, two updates, after
    with pytest.raises(RewardError, match="gone.*All up to update 2 is saved in .*checkpoint-2"):
        stages.run(recipe, "ppo")
    assert stages.run(recipe, "ppo", resume=True)["after"]["score"] > 0


def test_a_reward_from_python_need_not_be_found_by_name(tmp_path, checkpoint, monkeypatch):
    began = []
    monkeypatch.setattr(stages, "run_stage", lambda command, earlier, stage: began.append(earlier))
    monkeypatch.setitem(build.MAKERS, "ppo", lambda recipe, reward, callbacks: reward)

    def local(rollout):
        return [0.0] * len(rollout)

    local.last_saved = ()  # it stands for its trainer, too
    recipe = chat_recipe(tmp_path, checkpoint, sft={"max_steps": 2}, reward=None)
    with pytest.raises(ConfigError, match="callbacks: a list of them is needed, got TrainerCallback"):
        recipe.ppo_trainer(reward=local, callbacks=TrainerCallback())
    assert not began
    assert recipe.ppo_trainer(reward=local) is local and began == ["sft"]
    with pytest.raises(DataError, match="batch"):
        chat_recipe(tmp_path, checkpoint).ppo_trainer(train_dataset=["Why?"])
    assert began == ["sft"]

    def made(recipe, callbacks):
        rows = recipe.task.prompts("train")
        rows.last_saved = ()
        return rows

    monkeypatch.setitem(build.MAKERS, "ppo", made)
    many = chat_recipe(tmp_path, checkpoint, "ppo.per_device_train_batch_size=20", name="many")  # of 24 prompts
    mine = [f"Why {i}?" for i in range(40)]
    assert len(many.ppo_trainer(train_dataset=mine)) == 40 and began == ["sft", "reward"]
    data = {"task": "preferences", "train": str(PAIRS), "validation": str(PAIRS), "max_validation_rows": 6}
    all_taken = chat_recipe(tmp_path, checkpoint, data={**data, "parts": {"reward": 24}}, name="taken")
    assert len(all_taken.ppo_trainer(train_dataset=mine)) == 40 and began == ["sft", "reward", "reward"]


def test_a_reward_of_classes_from_a_file(tmp_path, checkpoint):
    asked, labelled = tmp_path / "asked.jsonl", REPOSITORY / "data" / "labelled.jsonl"
    write_jsonl(asked, [{"prompt": f"Why {i}?", "wanted": 1} for i in range(6)])
    settings = {
        "data": {"task": "prompts", "train": str(asked), "validation": str(asked)},
        "reward_data": {"task": "labelled", "train": str(labelled), "validation_size": 4},
        "reward_head": {"num_labels": 2},
        "scorer": {"kind": "adapter", "class_column": "wanted"},
    }
    recipe = chat_recipe(tmp_path, checkpoint, **settings)
    assert not texts(recipes.check(recipe))
    reward = recipe.run_stage("reward")
    assert reward["rows"] == {"train": 12, "held out": 4} and reward["after"]["rows"] == 4
    after = recipe.run_stage("ppo")["after"]
    assert -5 < after["score"] < 0  # log-probability of class 1
    rows = [{**row, "label": 2 * row["label"]} for row in read_jsonl(labelled)]
    write_jsonl(tmp_path / "others.jsonl", rows)
    others = chat_recipe(tmp_path, checkpoint, f"reward_data.train={tmp_path}/others.jsonl", **settings, name="others")
    (problem,) = texts(recipes.check(others))
    assert "a row has the label 2, and the head has 2 outputs, for 0 to 1. Set reward_head.num_labels to 3" in problem
    with pytest.raises(DataError, match="a row has the label 2, and the head has 2 outputs"):
        others.reward_trainer()


def test_what_sft_cuts_and_which_rows_a_stage_had(tmp_path, checkpoint, capsys):
    data = REPOSITORY / "data"
    sft_data = {"task": "demonstrations", "train": str(data / "demonstrations.jsonl")}
    sft = {"max_steps": 1, "max_length": 30, "per_device_train_batch_size": 4, "save_strategy": "no"}
    pairs = {"task": "preferences", "train": str(PAIRS), "validation": str(PAIRS), "max_validation_rows": 2}
    recipe = chat_recipe(
        tmp_path, checkpoint, data={**pairs, "parts": {"reward": 16, "ppo": 8}},
        sft_data={**sft_data, "validation": sft_data["train"]}, sft=sft,
    )  # fmt: skip
    lengths = [len(ids) for ids in recipe.task_of("sft").demonstrations("train")["input_ids"]]
    kept = [[x for x in labels[:30] if x != -100] for labels in recipe.task_of("sft").demonstrations("train")["labels"]]
    result = stages.run(recipe, "sft")
    cut = sum(length > 30 for length in lengths)
    assert 0 < cut < 8
    expected = {"cut": cut, "without_loss": sum(not labels for labels in kept)}
    assert expected["without_loss"] > 0 and result["cut"] == {"train": expected, "validation": expected}
    said = f"train: {cut} of 8 rows are cut to sft.max_length (30); {expected['without_loss']} of them lose all tokens"
    assert said in capsys.readouterr().out
    stages.run(recipe, "reward")
    rows = [json.loads(line) for line in (recipe.stage_folder("reward") / "rows.jsonl").read_text().splitlines()]
    assert [row["split"] for row in rows].count("train") == 16 and len(rows) == 18
    assert rows[-1] == {"split": "validation", "place": f"{PAIRS}, line 2"}


def trained_in_a_script(folder, checkpoint):
    lora = {"r": 4, "target_modules": "all-linear"}
    rule = {"kind": "function", "function": "toolkit.rewards.rules:plain_words"}
    recipe = chat_recipe(folder, checkpoint, reward=None, scorer=rule, adapters={"policy": lora, "value": lora})
    trainer = recipe.ppo_trainer()
    found = trainer.train()
    return {name: found[name] for name in ("score", "kl", "policy_loss", "value_loss")}, recipe.folder


def test_the_trainer_of_a_recipe_in_a_script_of_several_processes(two, checkpoint, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (one, folder), (other, _) = two(trained_in_a_script, tmp_path / "two", checkpoint)
    alone, own = trained_in_a_script(tmp_path / "one", checkpoint)
    assert one == other == pytest.approx(alone, rel=1e-3, abs=1e-4)
    assert (folder / "recipe.yaml").is_file()
    steps = [[row["step"] for row in read_jsonl(run / "ppo" / "metrics.jsonl")] for run in (folder, own)]
    assert steps[0] == steps[1] != []  # written by one of them


def test_of_two_trainers_in_a_folder_the_later_one_alone_writes_there(tmp_path, checkpoint, monkeypatch):
    """As where a cell is run twice, or a run's name is forgotten."""
    first, other = (
        chat_recipe(tmp_path, checkpoint, f"ppo.kl_coef={kl}", name=name, reward=None).ppo_trainer(count)
        for kl, name in ((0.1, "chat"), (0.1, "apart"))
    )
    second = chat_recipe(tmp_path, checkpoint, "ppo.kl_coef=0.5", reward=None).ppo_trainer(count)
    within = partial(first.save_model, str(tmp_path / "runs" / "chat" / "ppo" / "policy"))
    calls = (
        first.train,
        first.evaluate,
        first.save_model,
        within,
        first.save_checkpoint,
        lambda: first.log({"a": 1.0}),
    )
    for call in calls:
        with pytest.raises(ToolkitError, match='has taken .*ppo.* name a run for each .*save_model."another folder'):
            call()
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setitem(build.MAKERS, "ppo", fails)
        chat_recipe(tmp_path, checkpoint, "ppo.kl_coef=0.7", name="apart", reward=None).ppo_trainer(count)
    with pytest.raises(ToolkitError, match="a later trainer"):  # the run has that one's recipe now
        other.save_model()
    first.save_model(str(tmp_path / "elsewhere"))
    assert (tmp_path / "elsewhere" / "policy").is_dir()
    second.log({"a": 1.0})
    monkeypatch.setitem(build.MAKERS, "ppo", fails)
    with pytest.raises(MemoryError):  # the same once more, by mistake
        chat_recipe(tmp_path, checkpoint, "ppo.kl_coef=0.5", reward=None).ppo_trainer(count)
    second.save_model()
    with pytest.raises(MemoryError):
        chat_recipe(tmp_path, checkpoint, "ppo.kl_coef=0.5", reward=None).ppo_trainer(count, overwrite=True)
    second.log({"a": 1.0})
    assert second.evaluate() and (tmp_path / "runs" / "chat" / "ppo" / "policy").is_dir()
    with pytest.raises(MemoryError):  # whose settings are those of the run by now
        chat_recipe(tmp_path, checkpoint, "ppo.kl_coef=0.7", reward=None).ppo_trainer(count, overwrite=True)
    second.save_model()


def test_a_stage_that_a_trainer_replaces_does_not_come_back_under_it(tmp_path, checkpoint, monkeypatch):
    """A notebook that overwrites a finished stage by a loop of its own, and asks for stages meanwhile."""
    recipe = chat_recipe(tmp_path, checkpoint, "ppo.max_steps=1", reward={"max_steps": 1})
    recipe.run_stage("ppo", count)
    folder = recipe.stage_folder("ppo")
    finished = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def makes_no_other():
        with monkeypatch.context() as patched, pytest.raises(MemoryError):
            patched.setitem(build.MAKERS, "ppo", fails)
            recipe.ppo_trainer(count, overwrite=True)

    def asks_for_another():
        with pytest.raises(RecipeError, match="holds a run of another recipe"):  # one without that reward
            recipe.reward_trainer()

    def asks_for_it():
        assert recipe.run_stage("ppo", count)["stage"] == "ppo"  # the one that is finished

    for meanwhile in (makes_no_other, asks_for_another, asks_for_it):
        ours = recipe.ppo_trainer(count, overwrite=True)
        assert not (folder / "result.json").exists()
        meanwhile()
        for call in (ours.train, ours.save_model, lambda ours=ours: ours.log({"a": 1.0})):
            with pytest.raises(ToolkitError, match="has its earlier, finished stage again"):
                call()
        ours.save_model(str(tmp_path / "elsewhere"))
        assert {path: path.read_bytes() for path in finished} == finished
    ours = recipe.ppo_trainer(count, overwrite=True)
    ours.save_model()
    makes_no_other()
    ours.save_model()  # whose model is the run's by now
    assert not (folder / "result.json").exists()


def fails(*_, **__):
    raise MemoryError


def count(rollout):
    return [float(n) for n in rollout.lengths]


def test_cublas_is_told_before_its_first_product(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr(os, "environ", {name: x for name, x in os.environ.items() if not name.startswith("CUBLAS")})
    seen = []
    monkeypatch.setitem(build.MAKERS, "ppo", lambda recipe: seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
    for change in (False, True):
        build.make_trainer(chat_recipe(tmp_path, checkpoint, f"ppo.full_determinism={change}"), "ppo")
    assert seen == [None, ":4096:8"]
