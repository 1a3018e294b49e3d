"""Which runs there are, and runs beside each other: from files alone, as stages write them."""

import json
import os
import re
import subprocess
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.tiny_runs import REPOSITORY, chat_recipe, command_here
from toolkit.checkpoints import write_state
from toolkit.cli.command import complete_run
from toolkit.errors import RecipeError, ToolkitError
from toolkit.reports import environment
from toolkit.runs import listing
from toolkit.runs.collect import partial_file
from toolkit.runs.comparison import compare, differing
from toolkit.runs.differences import described
from toolkit.runs.folder import way_on
from toolkit.runs.listing import all_runs, state_of
from toolkit.runs.lock import at_work


def stage(folder, *, metrics=(), result=None, checkpoint=None, samples=()):
    folder.mkdir(parents=True)
    for name, rows in (("metrics.jsonl", metrics), ("samples.jsonl", samples)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    if checkpoint is not None:
        (folder / f"checkpoint-{checkpoint}").mkdir()
        (folder / f"checkpoint-{checkpoint}" / "trainer_state.json").touch()


def recipe(run, **sections):
    run.mkdir(parents=True, exist_ok=True)
    values = {"seed": 0, "reward": {"max_steps": 9}, "ppo": {"kl_coef": 0.1, "max_steps": 8}, **sections}
    (run / "recipe.yaml").write_text(yaml.safe_dump(values))


METRICS = [
    {"step": 2, "score": 0.5, "score_se": 0.25, "kl": 1.0},
    {"step": 4, "score": 1.5, "score_se": 0.25, "kl": 2.0},
]


@pytest.fixture
def runs(tmp_path):
    folder = tmp_path / "runs"
    recipe(folder / "a")
    stage(folder / "a" / "reward", result={"date": "2026-11-22", "after": {"accuracy": 0.75}})
    stage(folder / "a" / "ppo", metrics=METRICS, checkpoint=4)
    recipe(folder / "b")
    stage(folder / "b" / "ppo", metrics=METRICS, result={"after": {"score": 2.0, "score_se": 0.5}})
    recipe(folder / "c")
    (folder / "not a run").mkdir()
    return folder


def test_how_far_runs_are_and_what_goes_on(runs):
    a, b, c = all_runs(runs)
    assert [(one.stage, one.state, one.where, one.figures) for one in a.stages] == [
        ("reward", "finished", "2026-11-22", "accuracy 0.750"),
        ("ppo", "stopped", "saved up to step 4", "score 1.500 ± 0.250 · KL 2.000"),
    ]
    elsewhere = ("--runs-dir", str(runs))
    assert a.command == ("toolkit", "ppo", str(runs / "a" / "recipe.yaml"), "--resume", *elsewhere)
    assert b.command == ("toolkit", "chat", "b", *elsewhere) and b.stages[0].state == "finished"
    assert c.stages == () and c.command[1] == "ppo"
    write_state(runs / "a/ppo/checkpoint-4", {"own": {"processes": 9}, "processes": 2, "seconds": 1.0})
    assert state_of(runs / "a").command == (*a.command[:4], "--processes", "2", *elsewhere)
    with at_work(runs / "a"):
        working = state_of(runs / "a")
    assert working.stages[1].state == "at work" and working.stages[1].where == "step 4" and working.command == ()
    for doing, state in (("eval", "stopped"), ("reward", "stopped"), ("ppo", "at work")):
        with at_work(runs / "a", doing):
            assert state_of(runs / "a").stages[1].state == state and state_of(runs / "a").command == ()


def test_a_process_that_does_one_thing_within_another_is_seen_at_the_inner_one(runs):
    """As a notebook that holds a run by a trainer, and measures or trains another stage meanwhile."""
    run = runs / "a"
    with at_work(run, "reward"):
        with at_work(run, "ppo"):
            assert state_of(run).stages[1].state == "at work"
        assert state_of(run).stages[1].state == "stopped" and state_of(run).command == ()
    assert not (run / ".lock").exists()


def test_a_run_of_another_machine_that_may_have_ended_says_what_to_do(runs):
    """As one that was killed there, and copied."""
    lock = runs / "a" / ".lock"
    lock.write_text(json.dumps({"pid": 7, "host": "rented", "started": 1, "doing": "ppo"}))
    where = f"step 4, by process 7 on rented: if that has ended, delete {lock}"
    assert state_of(runs / "a").stages[1].where == where


def test_what_trl_s_own_loop_has_begun_begins_anew(runs):
    recipe(runs / "a", ppo={"max_steps": 8, "loop": "trl"})
    recipe(runs / "c", ppo={"max_steps": 8, "loop": "trl"})
    a, _, c = all_runs(runs)
    assert "--overwrite" in a.command and "--resume" not in a.command  # it saves no checkpoints
    assert "--resume" in c.command  # the stages before it do


@pytest.mark.parametrize("checkpoint", [None, 1])
def test_weights_of_an_earlier_stage_without_a_checkpoint_begin_anew(checkpoint, tmp_path):
    chat = chat_recipe(tmp_path, "some/checkpoint")
    stage(chat.stage_folder("reward"), checkpoint=checkpoint)
    (chat.stage_folder("reward") / "reward").mkdir()
    (chat.stage_folder("reward") / "reward" / "adapter_model.safetensors").touch()
    (chat.folder / "recipe.yaml").write_text(chat.to_yaml())
    way = "overwrite" if checkpoint is None else "resume"
    assert way_on(chat, "ppo") == way and f"--{way}" in state_of(chat.folder).command
    stage(chat.stage_folder("ppo"), checkpoint=1)  # of a ppo that did without that reward
    assert "--resume" in state_of(chat.folder).command


def test_a_recipe_that_only_collects_goes_on_by_collecting(runs):
    only = {"reward": None, "ppo": None, "sft": {"max_steps": 1}, "collect": {"response_length": 8}}
    (runs / "c" / "recipe.yaml").write_text(yaml.safe_dump({k: v for k, v in only.items() if v is not None}))
    for result in (None, {"after": {}}):
        stage(runs / "c" / f"{'sft' if result is None else 'collect'}", result=result)
        command = state_of(runs / "c").command
        assert command[:2] == ("toolkit", "collect") if result is None else command == ()


@pytest.mark.parametrize(("q", "named"), [({}, "collect"), ({"q": {"max_steps": 1}}, "q")])
def test_what_was_stopped_is_gone_on_with(q, named, runs):
    """And not PPO, which the recipe has too; q needs what is collected."""
    recipe(runs / "c", collect={"response_length": 8}, **q)
    stage(runs / "c" / "collect")
    partial_file(runs / "c" / "collect").write_text("{}\n")
    assert state_of(runs / "c").command[1] == named


@pytest.mark.parametrize(
    ("finished", "stopped", "named"),
    [("ppo", "q", "q"), ("ppo", "collect", "q"), ("q", "ppo", "ppo"), ("q", "sft", "chat"), ("ppo", "sft", "chat")],
)
def test_what_was_stopped_beside_what_has_finished_is_gone_on_with(finished, stopped, named, runs):
    recipe(runs / "c", collect={"response_length": 8}, q={"max_steps": 1})
    stage(runs / "c" / finished, result={"after": {"score": 1.0}})
    assert state_of(runs / "c").command[1] == "chat"
    stage(runs / "c" / stopped)
    assert state_of(runs / "c").command[1] == named


def test_a_run_that_goes_on_has_its_warnings_and_not_the_answers_of_its_earlier_end(runs, tmp_path):
    ppo = runs / "a" / "ppo"  # made longer: its result is gone, its samples are not
    (ppo / "samples.jsonl").write_text(
        json.dumps({"prompt": "p", "before": "x", "before_score": 0.0, "after": "zebra", "after_score": 1.0}) + "\n"
    )
    (ppo / "warnings.jsonl").write_text('{"step": 2, "name": "phrase"}\n{"step": 4, "name": "phrase"}\n')
    text = compare(["a", "b"], tmp_path / "page.html", runs_dir=runs).read_text()
    assert "zebra" not in text and re.search(r"<td>warnings</td><td[^>]*>2</td><td[^>]*>0</td>", text)


def test_weights_that_a_loop_of_ones_own_has_saved_are_something(runs):
    stage(runs / "c" / "ppo")
    (runs / "c" / "ppo" / "policy").mkdir()
    (runs / "c" / "ppo" / "policy" / "adapter_model.safetensors").write_text("x")
    (found,) = state_of(runs / "c").stages
    saved = f"start.policy={runs / 'c' / 'ppo' / 'policy'}"
    assert found.where == f"before its first step, weights saved by a loop of your own, for {saved}"
    assert state_of(runs / "c").command == ()  # --overwrite would delete them


def test_a_damaged_file_is_a_state(runs):
    (runs / "b" / "ppo" / "result.json").write_text("[]")
    (runs / "a" / "ppo" / "metrics.jsonl").write_text("{\n")
    a, b, _ = all_runs(runs)
    assert a.stages[1].state == b.stages[0].state == "damaged"


def test_responses_that_were_saved_are_counted(runs):
    stage(runs / "c" / "collect")
    (runs / "c" / "collect" / "responses.jsonl.partial").write_text(f"{{{' ' * 2000}}}\n" * 1200 + '{"half')
    tracemalloc.start()
    try:
        assert [one.where for one in state_of(runs / "c").stages] == ["1,200 responses saved"]
        assert tracemalloc.get_traced_memory()[1] < 1e6  # the file has 2.4 MB
    finally:
        tracemalloc.stop()
    with at_work(runs / "c"):
        (state,) = state_of(runs / "c").stages
    assert (state.state, state.where) == ("at work", "1,200 responses saved")
    (runs / "c" / "collect" / "responses.jsonl.partial").rename(runs / "c" / "collect" / "responses.jsonl")
    assert [one.where for one in state_of(runs / "c").stages] == ["1,200 responses saved"]  # killed before its result


@pytest.mark.parametrize(("text", "together"), [
    ('{"processes": 2}', ("--processes", "2")), ('{"processes": 1}', ()), ("{", ()), ('{"processes": "2"}', ()),
])  # fmt: skip
def test_a_collection_goes_on_in_as_many_processes(text, together, runs):
    recipe(runs / "c", collect={"response_length": 8})
    stage(runs / "c" / "collect")
    partial_file(runs / "c" / "collect").write_text("{}\n")
    (runs / "c" / "collect" / "begun_with.json").write_text(text)
    assert state_of(runs / "c").command[4:] == (*together, "--runs-dir", str(runs))


def test_a_folder_that_may_not_be_entered_is_passed_over(runs, monkeypatch):
    plain = os.stat
    (runs / "private").mkdir()

    def refused(path, *arguments, **named):
        if "private" in str(path) and str(path) != str(runs / "private"):
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, *arguments, **named)

    monkeypatch.setattr("os.stat", refused)
    with pytest.raises(PermissionError):
        (runs / "private" / "x").stat()
    assert [run.name for run in all_runs(runs)] == ["a", "b", "c"]
    monkeypatch.undo()

    def kept_shut(folder):
        if folder == runs / "a" / "ppo":
            raise PermissionError(13, "Permission denied", str(folder))
        return plainly(folder)

    plainly = listing.has_begun
    monkeypatch.setattr(listing, "has_begun", kept_shut)
    (a, *_) = all_runs(runs)
    assert (a.name, a.stages[0].stage, a.stages[0].state) == ("a", "ppo", "damaged")


def test_settings_that_differ(runs):
    recipe(runs / "b", ppo={"kl_coef": 0.1, "max_steps": 8, "cliprange": None})
    recipe(runs / "a", ppo={"kl_coef": 0.1, "max_steps": 8})
    assert differing([runs / "a", runs / "b"]) == {"ppo.cliprange": ["–", "null"]}


def test_long_values_are_told_by_where_they_differ():
    there, here = (f"/projects{'/checkpoints' * 6}/llama-3.1-8b-v{n}{end}" for n, end in ((1, ""), (2, "/x" * 40)))
    said = described({"base.model": (there, here)})
    assert 'llama-3.1-8b-v1" there' in said and "llama-3.1-8b-v2/x" in said and said.endswith("… here")
    assert len(said) < 160 and described({"a": (1, None)}) == "a is 1 there and null here"


def test_a_key_in_an_address_is_not_told():
    addresses = ("https://h/score?api_key=OLD", "https://h/score?api_key=NEW")
    assert described({"scorer.url": addresses}) == "scorer.url has another query (behind its ?) there than here"
    said = described({"judge.parts.a.url": (addresses[0], "https://h/other?api_key=NEW")})
    assert said == 'judge.parts.a.url is "https://h/score" there and "https://h/other" here'


def test_the_list_on_the_command_line(runs):
    said = command_here("runs", "--runs-dir", runs)
    assert said.returncode == 0 and "score 1.500 ± 0.250" in said.stdout and "--resume" in said.stdout
    (runs / "a" / "ppo" / "result.json").write_text(json.dumps({"date": "\x1b]0;title\x07", "after": {}}))
    assert "\x1b" not in command_here("runs", "--runs-dir", runs).stdout
    assert "nowhere does not exist" in command_here("runs", "--runs-dir", runs / "nowhere").stdout
    (runs / "empty").mkdir()
    assert "holds no run yet" in command_here("runs", "--runs-dir", runs / "empty").stdout


def test_what_was_measured_before_the_first_step_is_no_result(runs, tmp_path):
    at_first = {"step": 0, "eval_loss": 3.5, "eval_score": 0.25}
    for name, rows in (("d", [at_first]), ("e", [at_first, {"step": 9, "loss": 0.5}])):
        recipe(runs / name)
        stage(runs / name / "ppo", metrics=rows)
        (runs / name / "ppo" / "before.json").write_text('{"metrics": {"score": 0.25}}')
    text = compare(["d", "e"], tmp_path / "page.html", runs_dir=runs).read_text()
    assert '<td>score</td><td class="n">0.2500 → –</td><td class="n">0.2500 → –</td>' in text
    assert [state_of(runs / name).stages[0].figures for name in "de"] == [
        "eval loss 3.5000 · eval score 0.250",
        "loss 0.5000",
    ]


def test_a_run_that_has_not_finished_is_seen_as_far_as_it_is(runs, tmp_path):
    with (runs / "a/ppo/metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "eval_score": 1.25, "eval_judge": 3.0}\n{"step": 5, "score": 9.0}\n')
    (runs / "a/ppo/before.json").write_text('{"metrics": {"score": 0.5}}')
    text = compare(["a", "b"], tmp_path / "page.html", runs_dir=runs).read_text()
    assert '<th class="n">a (step 5, not finished)</th>' in text
    assert '<td>score</td><td class="n">0.5000 → 1.2500</td><td class="n">– → 2.0000</td>' in text
    assert '<td>judge</td><td class="n">– → 3.0000</td><td class="n">– → –</td>' in text


@pytest.mark.parametrize(
    ("evaluated", "section", "loss"),
    [
        ({"eval_accuracy": 0.75, "eval_loss": 0.1}, {}, None),
        ({"eval_loss": 0.1}, {}, "0.7000 → 0.1000"),  # of classes
        ({"eval_loss": 0.1}, {"label_smoothing_factor": 0.2}, None),
    ],
)
def test_the_loss_that_a_reward_is_trained_by_is_not_held_against_a_plain_one(evaluated, section, loss, tmp_path):
    for name in ("a", "b"):
        recipe(tmp_path / name, reward={"max_steps": 9, **section})
        stage(tmp_path / name / "reward", metrics=[{"step": 2, **evaluated}])
        (tmp_path / name / "reward" / "before.json").write_text('{"metrics": {"loss": 0.7, "accuracy": 0.5}}')
    text = compare(["a", "b"], tmp_path / "page.html", runs_dir=tmp_path, stage="reward").read_text()
    assert f'<td>loss</td><td class="n">{loss or "0.7000 → –"}</td>' in text


def test_runs_are_completed_where_they_are(runs):
    context = SimpleNamespace(params={"runs_dir": str(runs)})
    assert complete_run(context, "") == ["a", "b", "c"] and complete_run(context, "b") == ["b"]
    assert complete_run(SimpleNamespace(params={}), "a run that is not in runs") == []
    assert complete_run(context, f"{runs}/") == [] == complete_run(context, "**")


def test_recipes_are_completed_without_loading_a_library():
    text = "import sys; from toolkit.cli.command import _complete_recipe as of; "
    text += "print(of('doubling_s'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout == "['doubling_seed'] False\n"


def test_runs_beside_each_other(runs, tmp_path):
    bad = "<script>alert(1)</script>"
    recipe(runs / "b", ppo={"kl_coef": 0.2, "max_steps": 8, "note": bad})
    (runs / "a" / "ppo" / "result.json").write_text(json.dumps({"after": {"score": 1.5}}))
    for name, answer in (("a", "one"), ("b", bad)):
        rows = [{"prompt": "p", "before": "x", "before_score": 0.0, "after": answer, "after_score": 1.0}]
        (runs / name / "ppo" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = compare(["a", "b"], tmp_path / "page.html", runs_dir=runs)
    text = page.read_text()
    assert text.count("<script") == 1 and "&lt;script&gt;" in text
    assert "<td>ppo.kl_coef</td><td>0.1</td><td>0.2</td>" in text and "ppo.max_steps" not in text
    assert text.count("<figure") == 2  # score and KL, both runs in each
    assert text.count('class="band ') == 2  # the score of both, whose error is known
    assert text.count('class="s0">a<') == text.count('class="s1">b<') == 2
    assert '<td>p</td><td>one</td><td class="n" data-v="1.0">1.000</td>' in text and "<h1>ppo: a, b</h1>" in text
    done = command_here("compare", runs / "a", "b", "--runs-dir", runs, "--output", tmp_path / "again.html")
    assert done.returncode == 0 and (tmp_path / "again.html").read_text() == text


def test_what_cannot_be_compared(runs, tmp_path):
    for names, wanted, wrong in (
        (["a", "nope"], None, 'no run "nope"'),
        (["a", "a"], None, "at least two runs"),
        (["a", "c"], None, "no stage in common"),
        (["a", "b"], "reward", "not all of these runs have a reward stage"),
    ):
        with pytest.raises(RecipeError, match=wrong):
            compare(names, tmp_path / "page.html", runs_dir=runs, stage=wanted)
    assert not (tmp_path / "page.html").exists()
    said = command_here("compare", "a", "b", "--runs-dir", runs, "--output", tmp_path / "nowhere" / "page.html")
    assert said.returncode == 1 and "cannot be written" in said.stderr and "Traceback" not in said.stderr
    page = tmp_path / "other.html"
    said = command_here("compare", "a", "b", "--stage", "reward", "--runs-dir", runs, "--output", page)
    assert said.returncode == 1 and "not all of these runs have a reward stage" in said.stderr


ALIASES = "a: &a [x]\n" + "\n".join(f"{name}: &{name} [{9 * f'*{above},'}]" for above, name in pairwise("abcdefghi"))


@pytest.mark.parametrize("text", ["about: &a {b: *a}", ALIASES], ids=["of itself", "of aliases"])
def test_a_recipe_of_aliases_is_none_that_can_be_read(text, runs, tmp_path):
    (runs / "b" / "recipe.yaml").write_text(text)
    assert [run.name for run in all_runs(runs)] == ["a", "b", "c"]
    page = compare(["a", "b"], tmp_path / "page.html", runs_dir=runs).read_text()
    assert "<td>ppo.kl_coef</td><td>0.1</td><td>–</td>" in page


def test_a_bug_report_names_versions_and_no_secret(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    said = command_here("env").stdout
    assert "transformers" in said and "OMP_NUM_THREADS" in said and "processor" in said
    assert "hf_secret" not in said and "can use" not in said
    monkeypatch.setattr(sys.modules[environment.__module__], "finds_no_gpu", lambda: True)
    assert environment()["GPUs"].startswith("none that this torch can use (see nvidia-smi;")


@pytest.mark.parametrize(
    "text", ["3", "[]", '{"after": 3, "before": [1], "warnings": 1, "rows": [1]}', '{"after": {"score": "x"}}', "{"]
)
def test_whatever_a_file_holds_is_no_traceback(text, runs, tmp_path):
    for name in ("result.json", "metrics.jsonl", "samples.jsonl"):
        path = runs / "b" / "ppo" / name
        before = path.read_text()
        path.write_text(text + "\n")
        for words in (("runs",), ("compare", "a", "b", "--output", tmp_path / "page.html")):
            done = command_here(*words, "--runs-dir", runs)
            assert done.returncode == 0 or re.match(r"\w+Error: ", done.stderr), (words, done.stderr)
        path.write_text(before)


def test_a_number_that_no_float_can_hold_hides_no_other_run(runs, tmp_path):
    """A float of such a size is infinite in JSON; a whole number has no end there."""
    huge = 10**400
    figures = {"score": huge, "score_se": huge, "kl": 1.0, "samples_per_second": huge}
    rows = [{"step": step, **figures} for step in (2, huge)]
    sides = {side: {"score": huge, "score_se": huge, "kl": huge, "judge": 1.0} for side in ("before", "after")}
    scores = {"before_score": 0.0, "after_score": 1.0, "before_judge": huge, "after_judge": 1.0}
    asked = [{"prompt": prompt, "before": "a", "after": "b", **scores} for prompt in "pq"]
    recipe(runs / "d")
    stage(runs / "d" / "ppo", metrics=rows, result=sides | {"seconds": huge}, samples=asked)
    recipe(runs / "e")
    stage(runs / "e" / "ppo", metrics=rows)
    _, b, _, d, e = all_runs(runs)
    assert (b.stages[0].figures, d.stages[0].figures) == ("score 2.000 ± 0.500", "")
    assert e.stages[0].figures == "KL 1.000"
    page = compare(["b", "d", "e"], tmp_path / "page.html", runs_dir=runs).read_text()
    assert "<b>d</b>: The score changed by +1 over the same 2 prompts, which are too few for a standard error." in page


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
@pytest.mark.parametrize("name", ["ppo/result.json", "ppo/metrics.jsonl", "recipe.yaml", ".lock"])
def test_a_pipe_in_a_run_is_not_waited_for(name, runs, tmp_path):
    (runs / "b" / name).unlink(missing_ok=True)
    os.mkfifo(runs / "b" / name)
    said = command_here("runs", "--runs-dir", runs)
    assert said.returncode == 0 and ("damaged" in said.stdout) == (name == "ppo/result.json")
    done = command_here("compare", "a", "b", "--output", tmp_path / "page.html", "--runs-dir", runs)
    assert done.returncode == 0 or re.match(r"\w+Error: ", done.stderr), done.stderr


def test_a_page_is_written_to_files_alone_and_through_links(runs, tmp_path):
    (tmp_path / "kept.html").write_text("mine")
    (tmp_path / "link.html").symlink_to("kept.html")
    compare(["a", "b"], tmp_path / "link.html", runs_dir=runs)
    assert (tmp_path / "link.html").is_symlink() and "<h1>" in (tmp_path / "kept.html").read_text()
    for name in (tmp_path, Path(os.devnull), Path("")):  # which a rename would replace, were it a device
        with pytest.raises(ToolkitError, match="is no file"):
            compare(["a", "b"], name, runs_dir=runs)
    assert not Path(os.devnull).is_file()


def test_runs_of_one_name_are_told_apart_by_their_folders(runs, tmp_path):
    other = tmp_path / "other" / "a"
    recipe(other)
    stage(other / "ppo", metrics=METRICS)
    text = compare([str(runs / "a"), str(other)], tmp_path / "page.html", runs_dir=runs).read_text()
    for one in (runs / "a", other):
        assert f'<th class="n">{one.resolve()} (step 4, not finished)</th>' in text
