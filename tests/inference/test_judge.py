"""Finished runs by a judge that they were trained without."""

import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from tests.tiny_runs import command_here
from toolkit.checkpoints import whole_folder
from toolkit.errors import CheckpointError, ModelError, RecipeError, ToolkitError
from toolkit.inference.judge import _table, judge


def test_runs_are_judged_on_one_page(trained, tmp_path, monkeypatch):
    folder, recipe = trained
    monkeypatch.chdir(folder)  # where its reward is found
    (tmp_path / "longer.py").write_text("def rule(rollout):\n    return [2.0 * n for n in rollout.lengths]\n")
    runs = tmp_path / "runs"
    shutil.copytree(recipe.folder, runs / "copy")
    kept = json.loads((runs / "copy" / "ppo" / "before.json").read_text())
    (runs / "copy" / "ppo" / "before.json").write_text(json.dumps({**kept, "held_out": "of other rows"}))
    had = sorted(runs.rglob("*"))
    words = ["judge.kind=function", f"judge.function={tmp_path}/longer.py:rule"]
    page = tmp_path / "page.html"
    done = command_here("judge", recipe.folder, runs / "copy", *words, "--output", page, cwd=folder)
    assert done.returncode == 0, done.stderr
    figures = json.loads(page.with_suffix(".json").read_text())
    result = json.loads((recipe.stage_folder("ppo") / "result.json").read_text())
    assert figures.keys() == {"chat", "copy"} and figures["chat"] | {"other_prompts": True} == figures["copy"]
    assert figures["chat"]["judge"]["function"] == f"{tmp_path}/longer.py:rule"
    for side in ("before", "after"):
        found = figures["chat"][side]
        assert found["judge"] == pytest.approx(-2 * found["score"]) and found["judge_se"] == 2 * found["score_se"]
        assert found["score"] == pytest.approx(result[side]["score"], rel=1e-3, abs=1e-3)
    shown = f"{figures['chat']['after']['judge']:.3f} ± {figures['chat']['after']['judge_se']:.3f}"
    assert shown in done.stdout and "copy" in done.stdout and f"written: {page}" in done.stdout
    text = page.read_text()
    warned = len(result.get("warnings", []))
    said = "copy: data: these are not the prompts that the run held out"
    assert said in text and said in done.stdout and "chat: data" not in text + done.stdout
    assert "longer.py:rule" in text and "<td>seconds</td>" not in text
    assert f'<td>warnings</td><td class="n">{warned}</td><td class="n">{warned}</td>' in text
    assert "<h1>judge: chat, copy</h1>" in text and "The judge" in text and text.count("gain in standard errors") >= 2
    assert sorted(runs.rglob("*")) == had  # nothing is written into a run


def test_the_checkpoints_that_a_run_has_kept_are_judged_between_before_and_after(trained, tmp_path, monkeypatch):
    folder, recipe = trained
    monkeypatch.chdir(folder)  # where its reward is found
    (tmp_path / "longer.py").write_text("def rule(rollout):\n    return [2.0 * n for n in rollout.lengths]\n")
    words = ["judge.kind=function", f"judge.function={tmp_path}/longer.py:rule"]
    ppo = shutil.copytree(recipe.folder, tmp_path / "runs" / "chat") / "ppo"
    for step, factor in ((1, 1.0), (3, 0.0), (7, 2.0)):  # of the first it is the policy at the end, of the second none
        with whole_folder(ppo / f"checkpoint-{step}") as aside:
            shutil.copytree(ppo / "policy", aside / "policy")
            weights = aside / "policy" / "adapter_model.safetensors"
            state = {name: factor * tensor for name, tensor in load_file(weights).items()}
            save_file(state, weights, {"format": "pt"})
            (aside / "trainer_state.json").write_text("{}")
    page = tmp_path / "page.html"
    (found,) = judge(["chat"], *words, output=page, runs_dir=tmp_path / "runs", checkpoints=True).values()
    third, seventh = (found["checkpoints"][step] for step in (3, 7))
    assert len(found["checkpoints"]) == 2 and third == found["before"] and seventh != found["after"]
    assert seventh["judge"] == pytest.approx(-2 * seventh["score"]) and seventh["kl"] > third["kl"] == 0
    assert json.loads(page.with_suffix(".json").read_text())["chat"]["checkpoints"].keys() == {"3", "7"}
    drawn = page.read_text().partition("chat: gain in standard errors vs. KL")[2].partition("</svg>")[0]
    assert drawn.count("<circle") == 2 * 4, drawn
    (ppo / "checkpoint-3" / "policy" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="checkpoint-3: .*adapter_model.safetensors has 0 bytes.* Delete it"):
        judge(["chat"], *words, output=page, runs_dir=tmp_path / "runs", checkpoints=True)


def test_adapters_of_two_folders_are_two_judges(tmp_path, monkeypatch):
    def opened(name, **_):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        values = {"judge": {"kind": "adapter"}, "start": {"judge": f"other_{name}/reward"}}
        return SimpleNamespace(run=name, folder=folder, values=values, judge=1, stage_folder=folder.joinpath)

    found = {"score": 1.0, "score_se": 0.1, "judge": 2.0, "judge_se": 0.1, "kl": 0.5}
    sides = {
        "before": found,
        "after": found,
        "made_with": {},
        "changed": {"start.judge": "other_b/reward", "judge.kind": "adapter"},
    }
    monkeypatch.setattr("toolkit.inference.judge.open_run", opened)
    monkeypatch.setattr("toolkit.inference.judge.measured", lambda *_: (sides, []))
    monkeypatch.setattr("toolkit.inference.judge.as_trained", lambda *_: ({}, []))
    figures = judge(["a", "b"], output=tmp_path / "page.html")
    assert [figures[run]["judge"]["start.judge"] for run in "ab"] == ["other_a/reward", "other_b/reward"]
    text = (tmp_path / "page.html").read_text()
    assert text.index("The judge") < text.index("other_a/reward") < text.index("other_b/reward")
    assert "had otherwise" not in text  # it is the judge
    sides["changed"]["data.validation"] = "other.jsonl"
    assert judge(["c", "d"], output=tmp_path / "page.html")["c"]["changed"] == sides["changed"]
    text = (tmp_path / "page.html").read_text()
    assert "What the recipes had otherwise: data.validation=&quot;other.jsonl&quot;." in text
    assert judge(["e", "e"], output=tmp_path / "page.html").keys() == {"e"}  # once


def test_a_run_may_have_an_equals_sign_in_its_name(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr("toolkit.inference.judge.judge", lambda *words, **named: given.append((*words, named)))
    folder = tmp_path / "runs" / "lr=1e-4"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("seed: 0\n")
    long = f"judge.words={'a' * 300}"  # no name of a file, either
    words = ("lr=1e-4", str(folder), "other", "judge.kind=rules", long)
    done = command_here("judge", *words, "--runs-dir", tmp_path / "runs", "--checkpoints")
    assert done.returncode == 0, done.stderr
    named = {"output": Path("judged.html"), "runs_dir": tmp_path / "runs", "checkpoints": True}
    assert given == [(["lr=1e-4", str(folder), "other"], "judge.kind=rules", long, named)]


def test_what_was_judged_before_a_run_that_fails_is_kept(trained, tmp_path, monkeypatch):
    folder, recipe = trained
    monkeypatch.chdir(folder)  # where its reward is found
    runs = tmp_path / "runs"
    shutil.copytree(recipe.folder, runs / "second")
    path = runs / "second" / "recipe.yaml"
    path.write_text(path.read_text().replace(str(recipe.base.model), "/moved/away"))
    page = tmp_path / "page.html"
    with pytest.raises(ModelError, match=r'(?s)^the run "second" has 1 problem.*base.model — .*/moved/away'):
        judge(
            ["chat", str(runs / "second")], "judge.kind=function", "judge.function=shorter_for_test:rule", output=page
        )
    assert json.loads(page.with_suffix(".json").read_text()).keys() == {"chat"} and "chat" in page.read_text()


def test_what_cannot_be_judged(trained, tmp_path, monkeypatch):
    folder, recipe = trained
    monkeypatch.chdir(folder)
    monkeypatch.setattr("toolkit.inference.judge.measured", lambda *_: pytest.fail("it was loaded"))
    for names, overrides, wrong in (
        ([], [], "judge needs at least one run"),
        (["chat"], [], 'judge: the run "chat" has no section judge. Give one: judge.kind=adapter'),
        (["nope"], ["judge.kind=adapter"], 'no run "nope"|start.judge'),
        (["chat"], ["judge.kind=adapter"], "start.judge — is missing"),
    ):
        with pytest.raises(RecipeError, match=wrong):
            judge(names, *overrides, output=tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine.json").write_text("mine")
    for name in ("mine.html", "page.json"):
        with pytest.raises(ToolkitError, match="figures go to .*(mine|page).json, which is"):
            judge(["chat"], "judge.kind=function", "judge.function=rule:rule", output=tmp_path / name)
    assert (tmp_path / "mine.json").read_text() == "mine" and not (tmp_path / "page.json").exists()
    report = recipe.stage_folder("ppo") / "report.html"
    had = report.read_text()
    with pytest.raises(ToolkitError, match="report.html is a file of the run .*, and would be overwritten"):
        judge(["chat"], "judge.kind=function", "judge.function=rule:rule", output=report)
    assert report.read_text() == had


def test_the_table_has_each_figure_under_its_name():
    def side(first):
        return {"score": first, "score_se": 0.1, "judge": first + 1, "judge_se": 0.2, "kl": first + 2}

    stream = io.StringIO()
    Console(file=stream, width=200).print(_table({"a": {"before": side(1.0), "after": side(5.0)}}))
    names = re.findall("score before|judge before|after|KL", stream.getvalue())
    assert names == ["score before", "after", "judge before", "after", "KL"]
    cells = re.findall(r"\d\.\d{3} ± \d\.\d{3}|\d\.\d{3}", stream.getvalue())
    assert cells == ["1.000 ± 0.100", "5.000 ± 0.100", "2.000 ± 0.200", "6.000 ± 0.200", "7.000"]


def test_a_run_is_known_by_its_name_in_a_narrow_terminal():
    sides = {when: dict.fromkeys(("score", "score_se", "judge", "judge_se", "kl"), 1.0) for when in ("before", "after")}
    stream = io.StringIO()
    Console(file=stream, width=80).print(_table({"smollm2_135m_instructions-12": sides}))
    first = [line.split("│")[1].strip() for line in stream.getvalue().splitlines() if line.count("│") > 2]
    assert "".join(first) == "smollm2_135m_instructions-12"
