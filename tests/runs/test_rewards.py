"""The kinds of the section `scorer`: what is refused, what a check finds, and runs from recipes."""

import ast
import inspect
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForSequenceClassification

from tests.rewards.server import Server, lengths
from tests.spec.test_load import load_changed
from tests.tiny_models import lora, randomize, shared_base
from tests.tiny_runs import REPOSITORY, byte_tokenizer, chat_recipe, command_here, texts
from toolkit.data import Rollout
from toolkit.errors import CheckpointError, RecipeError, RewardError
from toolkit.models import SharedBase, load_base, save_level, save_role
from toolkit.rewards import (
    LEVELS,
    SCORERS,
    Prompts,
    RemoteReward,
    RewardAdapter,
    RewardModel,
    ScorerContext,
    WeightedSum,
    code_digests,
    score_with,
    scorer_of,
)
from toolkit.rewards.model import ModelScorer
from toolkit.runs import build, stages
from toolkit.runs.check import check
from toolkit.spec.load import with_reward_files
from toolkit.spec.plan import adapter_roles, same_rewards
from toolkit.spec.validate import check_recipe, check_scorer

REMOTE = {"kind": "remote", "url": "http://127.0.0.1:1/"}
RULE = {"kind": "function", "function": "statistics:fmean"}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        (
            {"kind": "modl"},
            f"scorer.kind — {' or '.join(map(repr, SCORERS))} is needed, got 'modl'",
        ),
        (
            {"kind": "model"},
            "scorer.model — belongs to kind: model, and is needed there (a folder or hub id). Or add the "
            "section reward_model, for a model",
        ),
        (
            {"kind": "remote"},
            "scorer.url — is needed by kind: remote (where batches are sent by POST: http:// or https://).",
        ),
        (
            {"kind": "function"},
            'scorer.function — is needed by kind: function ("module:function" or "file.py:function").',
        ),
        ({"kind": "function", "function": "x"}, 'scorer.function — "x" is not of the form module:function'),
        ({"kind": "sum"}, "scorer.parts — is needed by kind: sum (by a name of yours, each a scorer"),
        ({"kind": "sum", "parts": {}}, "scorer.parts — a sum needs at least one part."),
        ({**REMOTE, "url": ""}, "scorer.url — http:// or https:// with a host is needed, got ''."),
        (
            {**RULE, "url": "http://a/", "class_column": "c"},
            "scorer.class_column — belongs to kind: adapter and model, and would have no effect with kind",
        ),
        ({**REMOTE, "ur": "x"}, "scorer.ur — kind: remote has no such field. Did you mean url?"),
        ({**REMOTE, "weight": 2}, "scorer.weight — kind: remote has no such field."),
        ({"class_score": "logit"}, "scorer.class_score — would have no effect: class_column or wanted_class, which"),
        (
            {"class_column": "c", "wanted_class": 0},
            "scorer.wanted_class — would have no effect: class_column names the wanted class of each row. Remove one",
        ),
        ({"wanted_class": True}, "scorer.wanted_class — text or a whole number or null is needed, got True."),
        (
            {"kind": "model", "model": "m", "reads": "response", "prompt_column": "p"},
            "scorer.prompt_column — would have no effect: the response alone is read.",
        ),
        ({**REMOTE, "batch_size": 0}, "scorer.batch_size — must be at least 1, got 0."),
        ({**REMOTE, "retries": -1}, "scorer.retries — must be 0 or more, got -1."),
        ({**REMOTE, "timeout": 0}, "scorer.timeout — must be positive and finite, got 0."),
        ({**REMOTE, "deadline": -1}, "scorer.deadline — must be positive and finite or null, got -1."),
        (
            {**REMOTE, "url": "localhost:8000"},
            "scorer.url — http:// or https:// with a host is needed, got 'localhost:80",
        ),
        ({**REMOTE, "url": "http://host:port/"}, "scorer.url — http:// or https:// with a host is needed"),
        (
            {**REMOTE, "url": "https://me:pw@host/"},
            "scorer.url — holds a user or password, and the recipe is saved with",
        ),
        (
            {**REMOTE, "token_variable": "sk-123"},
            "scorer.token_variable — the name of an environment variable is needed",
        ),
        (
            {"kind": "model", "model": "m", "quantization": {"load_in_4bits": True}},
            "scorer.quantization.load_in_4bits — BitsAndBytesConfig",
        ),
        (
            {"kind": "sum", "parts": {"a b": RULE}},
            "scorer.parts — 'a b' cannot name a part: its mean is logged as score/",
        ),
        (
            {"kind": "sum", "parts": {"a": {}, "b": RULE, "c": {"adapter": "x", "weight": 0}}, "spread_coef": 1.0},
            "scorer.spread_coef — would have no effect: a spread needs two or more parts with a weight that were",
        ),
        (
            {"kind": "sum", "parts": {"a": {}, "b": {"kind": "model", "model": "x"}}, "spread_coef": 1.0},
            "scorer.parts.b — its mean score is not known, and the spread needs it: rewards trained on pairs",
        ),
        (
            {"kind": "sum", "parts": {"a": {}, "b": {"adapter": "x", "class_column": "c"}}, "spread_coef": 1.0},
            "scorer.spread_coef — would have no effect: a spread needs two or more parts with a weight that were",
        ),
        (
            {"kind": "sum", "parts": {"a": {}, "b": {"adapter": "x", "wanted_class": 0}}, "spread_coef": 1.0},
            "scorer.spread_coef — would have no effect: a spread needs two or more parts with a weight that were",
        ),
        (
            {"kind": "sum", "parts": {"a": {}, "b": {"adapter": "x"}, "c": {"adapter": ""}}, "spread_coef": 1.0},
            "scorer.parts.c — is the same reward as scorer.parts.a, so that the two have no spread. Name another.",
        ),
        (
            {"kind": "sum", "parts": {"a": {"adapter": "x/"}, "b": {"adapter": f"{Path.cwd()}/x"}}, "spread_coef": 0.0},
            "scorer.parts.b — is the same reward as scorer.parts.a",
        ),
        (
            {"kind": "sum", "parts": {"a": {"kind": "adaptor", "adapter": "x"}, "b": {}}},
            "scorer.parts.a.kind — 'adapter' or",
        ),
        (
            {"kind": "sum", "parts": {"a": {**RULE, "adapter": "x"}}},
            "scorer.parts.a.adapter — belongs to kind: adapter",
        ),
        ({**RULE, "adapter": "x"}, "scorer.adapter — belongs to kind: adapter"),
        (
            {"kind": "sum", "parts": {"a": {}, "spread": {"adapter": "x"}}, "spread_coef": 0.0},
            'scorer.spread_coef — logs the spread of the scores as "spread", which a part is called.',
        ),
        (
            {"kind": "sum", "parts": {"a": RULE, "b": RULE}, "spread_coef": -1.0},
            "scorer.spread_coef — must be 0 or more and finite or null, got -1",
        ),
        (
            {"kind": "adapter", "adapter": "x"},
            "scorer.adapter — is for parts of a sum, which can name more than one; a scorer alone has "
            "start.reward. Write start.reward in its place.",
        ),
        ({"kind": "sum", "parts": {"a": "x"}}, "scorer.parts.a — a section with keys is needed, got 'x'."),
        (
            {"kind": "sum", "parts": {"a": {**RULE, "wieght": 1}}},
            "scorer.parts.a.wieght — kind: function has no such field. Did you mean weight?",
        ),
        (
            {"kind": "sum", "parts": {"a": {**RULE, "weight": float("inf")}}},
            "scorer.parts.a.weight — a finite number below 2^63 is needed, got inf",
        ),
        ({"kind": "sum", "parts": {"a": {"kind": "remote"}}}, "scorer.parts.a.url — is needed by kind: remote"),
        (
            {"kind": "sum", "parts": {"a": {"kind": "sum", "parts": {"b": RULE}}}},
            "scorer.parts.a — is a sum within a sum.",
        ),
    ],
)
def test_problems(scorer, message, tmp_path):
    with pytest.raises(RecipeError) as error:
        load_changed(tmp_path, scorer=scorer)
    assert message in str(error.value) and "sk-123" not in str(error.value)


def test_two_classes_of_a_model_are_two_rewards():
    for named in ({"wanted_class": 0}, {"class_column": "mood"}):
        parts = {"a": {"kind": "model", "model": "m"}, "b": {"kind": "model", "model": "m", **named}}
        assert same_rewards({"scorer": {"kind": "sum", "parts": parts}}, "scorer", "start.reward") == []


def test_which_scorers_read_the_reward_role(tmp_path):
    parts = {"model": {"kind": "adapter"}, "rule": {**RULE, "weight": -1}}
    for scorer, needed in (
        ({}, True),
        (RULE, False),
        (REMOTE, False),
        ({"kind": "sum", "parts": parts}, True),
        ({"kind": "sum", "parts": {"rule": RULE, "server": REMOTE}}, False),
    ):
        read = load_changed(tmp_path, scorer=scorer).plan.stages["ppo"].source("reward")
        assert (read is not None) == needed
        if needed:
            load_changed(tmp_path, scorer=scorer, start={"value": "reward"})
            continue
        with pytest.raises(RecipeError, match="start.value — is reward, but with scorer.kind: .* there is no reward"):
            load_changed(tmp_path, scorer=scorer, start={"value": "reward"})
    with pytest.raises(RecipeError, match="ppo.loop — trl scores with the reward adapter alone, not with a sum"):
        load_changed(tmp_path, scorer={"kind": "sum", "parts": parts}, ppo={"max_steps": 1, "loop": "trl"})


def test_a_file_in_the_folder_of_the_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "there"
    there.mkdir()
    (there / "rule.py").write_text("")
    rule = {"kind": "function", "function": "rule.py:f"}
    found = f"{there}/rule.py:f"
    assert with_reward_files({"scorer": rule, "seed": 1}, there) == {"scorer": {**rule, "function": found}, "seed": 1}
    both = {"scorer": {"kind": "sum", "parts": {"a": rule, "b": REMOTE}}}
    assert with_reward_files(both, there)["scorer"]["parts"] == {"a": {**rule, "function": found}, "b": REMOTE}
    for unusable in ({"seed": 1}, {"scorer": None}, {"scorer": {"function": 1, "parts": [1]}}):
        assert with_reward_files(unusable, there) == unusable  # the check of the recipe says what is wrong


# ---------------------------------------------------------------------- check


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """Two random classifiers, of one output and of two classes, with a tokenizer of their own."""
    folder, tokenizer = tmp_path_factory.mktemp("classifiers"), byte_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<s>", "")
    for name, labels in (("one", 1), ("two", 2)):
        torch.manual_seed(labels)
        model = LlamaForSequenceClassification(
            LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0,
                initializer_range=0.3, num_labels=labels,
            )
        )  # fmt: skip
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [{"prompt": f"What is {i} + {i}?", "plain": f"{i} + {i}", "mood": "LABEL_1"} for i in range(12)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return {"task": "prompts", "train": str(path), "validation": str(path), "max_validation_rows": 4}


def test_a_check_of_each_kind(checkpoint, classifiers, questions, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rule.py").write_text("raise RuntimeError\ndef rule(rollout): ...\n")

    def problems(**parts):
        (one, *_) = parts.values()
        scorer = one if len(parts) == 1 else {"kind": "sum", "parts": parts}
        return texts(check(chat_recipe(tmp_path, checkpoint, data=questions, scorer=scorer, reward=None)))

    model = {"kind": "model", "model": str(classifiers / "one"), "prompt_column": "plain"}
    classes = {**model, "model": str(classifiers / "two"), "class_column": "mood"}
    rule = {"kind": "function", "function": "rule.py:rule"}
    assert problems(one=model) == problems(two=classes) == problems(rule=rule) == problems(server=REMOTE) == ()
    assert problems(a=model, b={**classes, "weight": 0.5}, c=rule, d=REMOTE) == ()
    always = {**model, "model": str(classifiers / "two"), "wanted_class": "LABEL_1"}
    assert problems(one=always) == ()
    (found,) = problems(one={**always, "wanted_class": 2})
    assert found == "scorer.wanted_class — the class 2 is wanted, and the head has 0 to 1 or LABEL_0, LABEL_1."

    for settings, key, message in (
        ({"model": "no/where"}, "model", 'no checkpoint could be loaded from the folder or hub id "no/where"'),
        ({"model": str(checkpoint)}, "model", "is a LlamaForCausalLM, which has no head for scores"),
        ({"class_column": "mood"}, "class_column", "has 1 output(s) and class_column is 'mood'"),
        ({"max_length": 513}, "max_length", "513 tokens, and the model takes 512"),
        ({"prompt_column": "plane"}, "prompt_column", "the prompts have no column plane; present: input_ids, prompt"),
    ):
        (alone,) = problems(one={**model, **settings})
        (part,) = problems(a={**model, **settings}, b=rule)
        assert alone.startswith(f"scorer.{key} — ") and part.startswith(f"scorer.parts.a.{key} — ")
        assert message in alone and message in part
    (found,) = problems(a={**classes, "class_column": "mod"}, b=rule)
    assert found.startswith('scorer.parts.a.class_column — the prompts have no column "mod"; present: ')
    file, whole = tmp_path / "questions.jsonl", (tmp_path / "questions.jsonl").read_text()
    file.write_text(whole.replace("LABEL_1", "LABEL_7", 1))
    (found,) = problems(one=classes)
    assert found.startswith("scorer.class_column — ") and "line 1: column \"mood\" names the class 'LABEL_7'" in found
    file.write_text(whole)
    (found,) = problems(a={**rule, "function": "rule.py:rul"}, b=model)
    assert found == 'scorer.parts.a.function — rule.py has no function "rul".'
    (found,) = problems(a=model, b={**REMOTE, "token_variable": "NO_SUCH_VARIABLE_HERE"})
    assert found.startswith("scorer.parts.b.token_variable — the environment has no variable NO_SUCH_VARIABLE_HERE")
    damaged = tmp_path / "damaged"
    shutil.copytree(classifiers / "one", damaged)
    (damaged / "model.safetensors").write_bytes(b"\0" * 40)
    (found,) = problems(one={**model, "model": str(damaged)})
    assert found.startswith("scorer.model — ") and "model.safetensors is damaged" in found
    weights = load_file(classifiers / "one" / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    (found,) = problems(one={**model, "model": str(damaged)})
    assert found.startswith("scorer.model — ") and "has no weights for score.weight, where the model would be" in found
    changed = byte_tokenizer()
    changed.add_tokens(["<new>"])
    changed.save_pretrained(damaged)
    (found,) = problems(one={"kind": "model", "model": str(damaged), "reads": "tokens"})
    assert found.startswith("scorer.model — ") and "has another tokenizer than base (1 entries differ)" in found


def test_text_with_the_template_of_the_base_is_not_given_to_another_model(checkpoint, questions, tmp_path):
    scorer = {"kind": "model", "model": "m"}

    def text_for(*columns, chat=True, **changes):
        data = {**questions, "chat": chat}
        recipe = chat_recipe(tmp_path, checkpoint, data=data, scorer={**scorer, **changes}, reward=None)
        present = ["input_ids", *columns]
        return recipe.scorer.column_of(present, chats=recipe.task.chats)

    assert text_for("prompt", "messages") == "messages"
    assert text_for("prompt", chat=False) == "prompt"
    assert text_for("prompt", "plain", prompt_column="plain") == "plain"
    assert text_for(reads="response") is text_for(reads="tokens") is None
    with pytest.raises(
        RewardError, match="^prompt_column: the column prompt is already in the base's chat template, and this"
    ):
        text_for("prompt")
    with pytest.raises(RewardError, match="^prompt_column: the prompts have no column messages or prompt; present"):
        text_for("style")


def test_parts_with_classes_of_an_adapter(checkpoint, tmp_path):
    adapter = {"kind": "adapter", "class_column": "mood"}
    recipe = chat_recipe(tmp_path, checkpoint, scorer={"kind": "sum", "parts": {"a": adapter, "b": RULE}})
    found = texts(check(recipe))
    assert any(line.startswith("scorer.parts.a.class_column — the reward head has 1 output(s)") for line in found)


# ---------------------------------------------------------------------- runs


def save_reward(checkpoint, folder, seed, scores=()):
    base = SharedBase(load_base(str(checkpoint), dtype="float32"))
    base.add_role("reward", lora(4))
    randomize(base, "reward", seed=seed)
    saved = save_role(base, "reward", folder, pad_token_id=2, base_name="tiny")
    save_level(saved, scores)
    return saved


def test_a_run_with_a_sum_of_all_kinds(checkpoint, classifiers, questions, tmp_path, monkeypatch):
    """The reward stage is replaced by a saved adapter; one part of each kind, another model among them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server(lengths)
    (tmp_path / "rule.py").write_text(
        "async def rule(rollout):\n    return [float(len(t)) for t in rollout.responses]\n"
    )
    base = SharedBase(load_base(str(checkpoint), dtype="float32"))
    base.add_role("reward", lora(4))
    save_role(base, "reward", tmp_path / "reward", pad_token_id=2, base_name="tiny")
    parts = {
        "adapter": {"kind": "adapter", "weight": 2.0},
        "rule": {"kind": "function", "function": "rule.py:rule", "weight": -0.5},
        "mood": {
            "kind": "model", "model": str(classifiers / "two"), "prompt_column": "plain", "class_column": "mood",
            "dtype": "float32", "quantization": NF4,
        },
        "server": {"kind": "remote", "url": server.url, "batch_size": 3, "weight": 0.25},
    }  # fmt: skip
    start = {"reward": str(tmp_path / "reward")}
    scorer = {"kind": "sum", "parts": parts}
    recipe = chat_recipe(tmp_path, checkpoint, data=questions, scorer=scorer, reward=None, start=start)
    assert texts(check(recipe)) == ()
    assert recipe.plan.needs("ppo") == []
    result = stages.run(recipe, "ppo")
    assert all(torch.tensor(result[when]["score"]).isfinite() for when in ("before", "after"))

    trainer = recipe.ppo_trainer(overwrite=True)
    reward = trainer.reward
    kinds = {name: type(part) for name, part in reward.parts.items()}
    assert isinstance(reward, WeightedSum) and reward.weights == {"adapter": 2, "rule": -0.5, "mood": 1, "server": 0.25}
    assert (kinds["adapter"], kinds["mood"], kinds["server"]) == (RewardAdapter, RewardModel, RemoteReward)
    _, rollout, scores, *_ = trainer.evaluate_rollout(recipe.task.prompts("validation"))
    again = score_with(reward, rollout)
    torch.testing.assert_close(again, scores, rtol=1e-3, atol=1e-3)  # of a base in bfloat16, in batches of other sizes
    parts = reward.last_parts
    assert parts["rule"].tolist() == parts["server"].tolist() == [float(len(text)) for text in rollout.responses]
    assert (parts["mood"] <= 0).all()
    expected = 2 * parts["adapter"] - 0.5 * parts["rule"] + parts["mood"] + 0.25 * parts["server"]
    torch.testing.assert_close(again, expected)
    server.stop()


def identity_of(recipe):
    return code_digests(recipe.ppo_trainer(overwrite=True).reward)


def test_several_reward_adapters_on_one_base(checkpoint, tmp_path, monkeypatch):
    """Each part of the sum, and each of the judge, scores as its folder does alone; two parts may share a role."""
    folders = [
        save_reward(checkpoint, tmp_path / f"reward-{seed}", seed, [seed - 1.0, seed + 1.0]) for seed in range(3)
    ]
    own, first, second = ({"kind": "adapter"}, *({"kind": "adapter", "adapter": str(one)} for one in folders[1:]))
    again = {"kind": "adapter", "adapter": f"{folders[1]}/", "weight": 0}
    parts = {"own": own, "first": first, "second": {**second, "weight": 0.5}, "again": again}
    scorer = {"kind": "sum", "parts": parts, "spread_coef": 0.5}
    judge = {"kind": "sum", "parts": {"first": second, "second": first}}
    start = {"reward": str(folders[0])}
    base = {"base": {"model": str(checkpoint), "dtype": "float32", "quantization": NF4}}
    recipe = chat_recipe(tmp_path, checkpoint, **base, reward=None, start=start, scorer=scorer, judge=judge)
    assert recipe.plan.needs("ppo") == []
    report = check(recipe)
    roles = ["policy", "reward", "reward_1", "reward_2", "judge_1", "judge_2", "value", "reference"]
    assert [one.role for one in report.roles] == roles and texts(report) == ()
    trainer = recipe.ppo_trainer()
    turned = {**scorer, "parts": {name: parts[name] for name in ("second", "first", "own", "again")}}
    assert adapter_roles({"scorer": turned}) == adapter_roles({"scorer": scorer})
    assert LEVELS in code_digests(trainer.reward)
    best = {"metric_for_best_model": "score/spread", "load_best_model_at_end": True, "eval_strategy": "steps",
            "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}  # fmt: skip
    watched = {**recipe.values, "ppo": {**recipe.values["ppo"], **best, "greater_is_better": False}}
    assert check_recipe(watched) == []
    undecided = {**watched, "ppo": {**recipe.values["ppo"], **best}}
    assert [problem.field for problem in check_recipe(undecided)] == ["ppo.greater_is_better"]
    watched["scorer"] = {**scorer, "spread_coef": None}
    assert "metric_for_best_model" in check_recipe(watched)[0].field
    assert {*trainer.roles.roles} == {*roles} and {*trainer.roles.trained_roles} == {"policy", "value"}
    evaluation = trainer.evaluate_rollout(recipe.task.prompts("validation"))
    alone = []
    for number, folder in enumerate(folders):
        one = chat_recipe(
            tmp_path, checkpoint, name=f"alone-{number}", **base, reward=None, start={"reward": str(folder)}
        )
        alone.append(one.ppo_trainer().reward(evaluation.rollout))
    assert not torch.allclose(alone[0], alone[1]) and not torch.allclose(alone[1], alone[2])
    spread = torch.stack([scores - level for level, scores in enumerate(alone)]).std(dim=0, correction=0)
    near = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(evaluation.scores, alone[0] + alone[1] + 0.5 * alone[2] - 0.5 * spread, **near)
    torch.testing.assert_close(evaluation.judged, alone[1] + alone[2], **near)
    expected = {"own": alone[0], "first": alone[1], "second": alone[2], "again": alone[1], "spread": spread}
    logged = {f"score/{name}": scores.mean().item() for name, scores in expected.items()}
    assert {name: evaluation.metrics[name] for name in logged} == pytest.approx(logged, rel=1e-3, abs=1e-4)

    result = stages.run(recipe, "ppo", overwrite=True)
    evaluated = command_here("eval", recipe.run, "--runs-dir", recipe.runs_dir)
    assert evaluated.returncode == 0, evaluated.stderr
    again = json.loads((recipe.folder / "eval" / "result.json").read_text(encoding="utf-8"))
    for when in ("before", "after"):
        same = {name: of for name, of in result[when].items() if name.startswith(("score", "judge"))}
        assert {name: again[when][name] for name in same} == pytest.approx(same, rel=1e-3, abs=1e-4)
    assert "not_as_trained" not in again
    command_here("eval", recipe.run, f"judge.parts.second.adapter={folders[0]}", "--runs-dir", recipe.runs_dir)
    again = json.loads((recipe.folder / "eval" / "result.json").read_text(encoding="utf-8"))
    assert "judge.parts.second.adapter" in again["changed"] and "not_as_trained" not in again
    assert again["before"]["judge/second"] != pytest.approx(result["before"]["judge/second"], rel=1e-3)
    best = command_here("generate", recipe.run, "--runs-dir", recipe.runs_dir, "--num-samples", "2", "--number", "1")
    assert best.returncode == 0 and "the best of 2" in best.stdout, best.stderr


def test_an_adapter_of_a_sum_that_cannot_be_had(checkpoint, tmp_path):
    """By the place where it is named first; and that of another run, under which a run cannot go on."""
    folders = [save_reward(checkpoint, tmp_path / f"reward-{seed}", seed) for seed in range(2)]
    named = [{"kind": "adapter", "adapter": str(one)} for one in (*folders, tmp_path / "none")]

    def recipe(*parts, **given):
        scorer = {"kind": "sum", "parts": dict(zip("abc", parts, strict=False))}
        return chat_recipe(tmp_path, checkpoint, reward=None, scorer=scorer, **given)

    wrong = f'scorer.parts.b.adapter — role "reward_2": there is no folder {tmp_path / "none"}.'
    assert any(line.startswith(wrong) for line in texts(check(recipe(named[0], named[2], named[2]))))
    with pytest.raises(RecipeError, match="needs a trained reward role, and the recipe has no section"):
        recipe(named[0], {"kind": "adapter"}).plan.needs("ppo")
    spread = {"scorer": {"kind": "sum", "spread_coef": 0.0, "parts": dict(zip("ab", named[:2], strict=True))}}
    found = texts(check(chat_recipe(tmp_path, checkpoint, reward=None, **spread)))
    assert [line.partition(" — ")[0] for line in found] == ["scorer.parts.a", "scorer.parts.b"]
    save_level(folders[1], [1.0])
    parts = {"a": {"kind": "adapter"}, "b": named[1]}
    spread = {"scorer": {"kind": "sum", "spread_coef": 0.0, "parts": parts}}
    started = chat_recipe(tmp_path, checkpoint, reward=None, start={"reward": str(folders[0])}, **spread)
    assert [line.partition(" — ")[0] for line in texts(check(started))] == ["scorer.parts.a"]
    assert texts(check(chat_recipe(tmp_path, checkpoint, **spread))) == ()  # whose stage reward has yet to run
    save_level(folders[0], [1.0])
    before = identity_of(started)
    save_level(folders[0], [2.0])
    assert identity_of(started) != before
    saving = {"max_steps": 2, "num_ppo_epochs": 1, "per_device_train_batch_size": 2, "response_length": 4,
              "save_strategy": "steps", "save_steps": 1}  # fmt: skip
    begun = recipe(*named[:2], ppo=saving)
    assert "reward" not in [source.role for source in begun.plan.stages["ppo"].roles]
    stages.run(begun, "ppo")
    save_reward(checkpoint, folders[1], 7)
    with pytest.raises(CheckpointError, match="the reward_2 adapter"):
        stages.run(recipe(*named[:2], ppo={**saving, "max_steps": 3}), "ppo", resume=True)


def test_another_model_from_a_recipe(checkpoint, classifiers, questions, tmp_path):
    scorer = {"kind": "model", "model": str(classifiers / "one"), "prompt_column": "plain", "dtype": "float32"}
    recipe = chat_recipe(tmp_path, checkpoint, data=questions, scorer=scorer, reward=None)
    trainer = recipe.ppo_trainer()
    assert "reward" not in trainer.roles.roles
    one = Rollout(["x"], ["4"], [[1]], [[2]], [True], {"prompt": ["<s>2 + 2</s>"], "plain": ["2 + 2"]})
    assert trainer.reward.texts(one) == [("2 + 2</s>4</s>",)]  # in its own template
    model = LlamaForSequenceClassification.from_pretrained(classifiers / "one").eval()
    with torch.no_grad():
        ids = byte_tokenizer()("2 + 2</s>4</s>", return_tensors="pt", add_special_tokens=False)["input_ids"]
        expected = model(ids).logits.item()
    assert score_with(trainer.reward, one).item() == pytest.approx(expected, rel=1e-4)
    wrong = chat_recipe(tmp_path, checkpoint, data=questions, scorer={**scorer, "prompt_column": "no"}, reward=None)
    with pytest.raises(RewardError, match="scorer.prompt_column — the prompts have no column no; present: input_ids"):
        wrong.ppo_trainer(overwrite=True)


def test_a_run_ends_clearly_when_a_server_stays_away(checkpoint, questions, tmp_path):
    recipe = chat_recipe(tmp_path, checkpoint, data=questions, scorer={**REMOTE, "retries": 0}, reward=None)
    with pytest.raises(RewardError, match=r"url: http://127.0.0.1:1/ gave no answer in 1 tries"):
        stages.run(recipe, "ppo")


# ---------------------------------------------------------------------- the page

PAGE = (REPOSITORY / "docs" / "rewards.md").read_text(encoding="utf-8")


def test_the_recipes_of_the_page_are_right():
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)]
    judges = [block.pop("judge") for block in blocks if "judge" in block]
    assert [judge["kind"] for judge in judges] == ["adapter", "function"]
    assert all(check_scorer(judge, "judge") == [] for judge in judges)
    blocks = [block for block in blocks if "scorer" in block]
    kinds = {block["scorer"]["kind"] for block in blocks}
    assert kinds == SCORERS.keys() - {"adapter"}  # which needs no section of its own
    assert all(f"| `{kind}` " in PAGE for kind in SCORERS)
    for block in blocks:
        assert check_scorer(block["scorer"]) == []
        if block.keys() != {"scorer"}:
            assert "reward_model" in block and check_recipe({**block, "data": {"task": "doubling"}}) == []


def test_the_python_of_the_page_is_right():
    """Every call of a reward has arguments that it takes."""
    made = {"RewardModel.load": ModelScorer, "RemoteReward": RemoteReward, "WeightedSum": WeightedSum}
    seen = set()
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        for call in (node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            if name in made:
                seen.add(name)
                known = inspect.signature(made[name]).parameters
                assert all(keyword.arg in known for keyword in call.keywords), ast.unparse(call)
    assert seen == made.keys()


# ---------------------------------------------------------------------- with stages.py and loading.py


def test_a_sum_with_an_adapter_runs_the_reward_stage_first(checkpoint, tmp_path):
    parts = {"model": {"kind": "adapter"}, "rule": {**RULE, "weight": -1}}
    recipe = chat_recipe(tmp_path, checkpoint, scorer={"kind": "sum", "parts": parts})
    assert recipe.plan.needs("ppo") == ["reward"]
    rules = {"kind": "sum", "parts": {"rule": RULE}}
    assert chat_recipe(tmp_path, checkpoint, scorer=rules, reward=None).plan.needs("ppo") == []


def test_a_recipe_finds_the_file_beside_it(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "rule.py").write_text("def rule(rollout):\n    return rollout.lengths\n")
    recipe = chat_recipe(tmp_path, checkpoint, scorer={"kind": "function", "function": "rule.py:rule"}, reward=None)
    assert recipe.scorer.function == f"{tmp_path}/rule.py:rule"  # the run's own copy of the recipe finds it too
    assert texts(check(recipe)) == ()


def test_another_model_reads_the_conversation_itself(checkpoint, classifiers, questions, tmp_path):
    scorer = {"kind": "model", "model": str(classifiers / "one")}
    recipe = chat_recipe(tmp_path, checkpoint, data=questions, scorer=scorer, reward=None)
    assert texts(check(recipe)) == ()
    trainer = recipe.ppo_trainer()
    _, rollout, *_ = trainer.evaluate_rollout(recipe.task.prompts("validation"))
    assert trainer.reward.texts(rollout)[1] == (f"What is 1 + 1?</s>{rollout.responses[1]}</s>",)


def test_a_scorer_is_held_to_all_prompts_and_a_judge_to_the_held_out_ones(checkpoint, tmp_path):
    rules, bad = [{"rule": "no_comma"}], [{"rule": "no_commas"}]
    files = {"plain": [None] * 8, "ruled": [rules] * 8, "broken": [*[rules] * 6, bad, rules]}
    for name, of_rows in files.items():
        lines = (json.dumps({"prompt": f"q{n}"} | ({"rules": of} if of else {})) for n, of in enumerate(of_rows))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

    def problems(train, held_out, **section):
        data = {"task": "prompts", "train": str(tmp_path / f"{train}.jsonl"), "chat": False}
        data["validation"] = str(tmp_path / f"{held_out}.jsonl")
        sections = {"reward": None, "scorer": {"kind": "rules", "rules": rules}, **section}
        adapters = {role: {"r": 4, "target_modules": "all-linear"} for role in ("policy", "value")}
        return texts(check(chat_recipe(tmp_path, checkpoint, data=data, adapters=adapters, **sections)))

    by_column = {"kind": "rules", "column": "rules"}
    assert problems("plain", "ruled", judge=by_column) == () == problems("ruled", "ruled", scorer=by_column)
    for train, held_out, section in (("ruled", "plain", "scorer"), ("ruled", "plain", "judge")):
        (found,) = problems(train, held_out, **{section: by_column})
        assert found.startswith(f"{section}.column — the prompts have no column")
    for train, held_out in (("broken", "ruled"), ("ruled", "broken")):
        (found,) = problems(train, held_out, scorer=by_column)
        assert f'{tmp_path / "broken.jsonl"}, line 7, column "rules"' in found


def test_a_saved_reward_is_read_with_its_own_pad_token(tmp_path, checkpoint):
    base = SharedBase(load_base(str(checkpoint), dtype="float32"))
    base.add_role("reward", lora(4))
    for name, pad in (("reward", 0), ("judge", 1)):  # the checkpoint's own is 2
        save_role(base, "reward", tmp_path / name, pad_token_id=pad, base_name="tiny")
    start = {name: str(tmp_path / name) for name in ("reward", "judge")}
    recipe = chat_recipe(tmp_path, checkpoint, reward=None, start=start, judge={"kind": "adapter"})
    roles, pads = build.placed_roles(recipe, "ppo")
    assert pads == {"reward": 0, "judge": 1}
    assert build.make_reward(recipe, roles, pads, 8).pad_token_id == 0
    assert build.make_reward(recipe, roles, pads, 8, role="judge").pad_token_id == 1


@pytest.mark.parametrize("asked", ["null", "true", "false"])
def test_rows_are_packed_as_the_base_of_a_recipe_says(asked, tmp_path, checkpoint):
    recipe = chat_recipe(
        tmp_path,
        checkpoint,
        f"base.pack_rows={asked}",
        scorer={"kind": "function", "function": "builtins:len"},
        reward=None,
    )
    assert build.placed_roles(recipe, "ppo", wanted=())[0].packs_rows == (asked != "false")


def test_prompts_of_token_ids_have_no_text_for_another_model(classifiers):
    rows = Dataset.from_dict({"input_ids": [[5]], "prompt": ["<s>Why?</s><s>"]})
    context = ScorerContext(
        roles=None, tokenizer=byte_tokenizer(), prompts=lambda: [Prompts(rows, ["x, line 1"])], chats=True
    )
    scorer = scorer_of({"kind": "model", "model": str(classifiers / "one")})
    (problem,) = scorer.check(context)
    assert problem.field == "prompt_column" and "already in the base's chat template" in problem.wrong
    assert scorer.check(replace(context, chats=False)) == []


def _rows(**columns):
    """Three prompts, the last of them in another file."""
    rows, later = (Dataset.from_dict({name: values[part] for name, values in columns.items()}) for part in _PARTS)
    return [Prompts(rows, ["a.jsonl, line 1", "a.jsonl, line 4"]), Prompts(later, ["b.jsonl, line 2"])]


_PARTS = (slice(0, 2), slice(2, 3))
_USER, _SYSTEM = {"role": "user", "content": "Why?"}, {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    ("scorer", "columns", "field", "wrong", "place"),
    [
        (
            {"class_column": "mood"},
            {"mood": ["LABEL_1", "0", "LABEL"]},
            "class_column",
            "names the class 'LABEL'",
            "b.jsonl, line 2",
        ),
        (
            {"class_column": "mood"},
            {"mood": ["1", None, "0"]},
            "class_column",
            "names the class None",
            "a.jsonl, line 4",
        ),
        (
            {"prompt_column": "asked"},
            {"asked": ["a", "", "b"]},
            "prompt_column",
            "column \"asked\" holds ''",
            "a.jsonl, line 4",
        ),
        (
            {"prompt_column": "asked"},
            {"asked": ["a", "b", None]},
            "prompt_column",
            'column "asked" holds None',
            "b.jsonl, line 2",
        ),
        ({}, {"messages": [[_USER], [_SYSTEM, _USER], [_USER]]}, "reads", "no system here", "a.jsonl, line 4"),
        (
            {"kind": "remote", "url": "http://a/"},
            {"n": [1.0, 2.0, math.nan]},
            "",
            'column "n" of the prompts cannot',
            "b.jsonl, line 2",
        ),
    ],
)
def test_what_a_row_has_for_a_reward_is_known_before_a_run(classifiers, tmp_path, scorer, columns, field, wrong, place):
    model = "two" if "class_column" in scorer else "one"
    folder = tmp_path / "model"
    shutil.copytree(classifiers / model, folder)
    template = folder / "chat_template.jinja"
    refused = "{{ raise_exception('no system here') if messages[0].role == 'system' }}"
    template.write_text(template.read_text() + refused)
    settings = scorer if "kind" in scorer else {"kind": "model", "model": str(folder), **scorer}
    columns = {"prompt": ["Why?"] * 3, **columns}
    context = ScorerContext(roles=None, tokenizer=byte_tokenizer(), prompts=lambda: _rows(**columns), reads_rows=True)
    (problem,) = scorer_of(settings).check(context)
    assert problem.field == field and problem.wrong.startswith(place) and wrong in problem.wrong
    # Where other rows are scored than the recipe's, these are not looked at.
    assert scorer_of(settings).check(replace(context, reads_rows=False)) == []
    whole = {name: [values[0]] * 3 for name, values in columns.items()}
    assert scorer_of(settings).check(replace(context, prompts=lambda: _rows(**whole))) == []


def test_classes_that_rows_name_for_an_adapter_are_known_before_a_run():
    base = shared_base(labels=3)
    context = ScorerContext(roles=base, tokenizer=None, prompts=lambda: _rows(style=[0, 2, 3]), reads_rows=True)
    (problem,) = scorer_of({"kind": "adapter", "class_column": "style"}).check(context)
    wrong = 'b.jsonl, line 2: column "style" names the class 3, and the head has 0 to 2.'
    assert (problem.field, problem.wrong) == ("class_column", wrong)
