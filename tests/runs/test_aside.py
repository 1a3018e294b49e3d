"""Run folders with files of others, links, and a kill between any two operations of the disk."""

import io
import json
import os
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from toolkit.checkpoints import whole_folder
from toolkit.cli import app
from toolkit.disk import REPLACED, RESULT_FILE, UNFINISHED
from toolkit.errors import RecipeError, ToolkitError
from toolkit.runs import aside, owned
from toolkit.runs.folder import check_whole, run_folder
from toolkit.runs.listing import all_runs

STAGE = {"metrics.jsonl": "metrics", "policy/adapter_model.safetensors": "weights"}


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def made(run, name, mark, *, finished=True):
    """A stage as the toolkit leaves it."""
    owned.begin(run / name)
    write(run / name, {file: f"{mark} {text}" for file, text in STAGE.items()})
    with whole_folder(run / name / "checkpoint-2") as checkpoint:
        (checkpoint / "state.json").write_text(f"{mark} checkpoint")
    if finished:
        owned.seal_weights(run / name)
        (run / name / RESULT_FILE).write_text(f"{mark} result")


def content(folder):
    """Every file by name, hidden ones too, without those that only say whose the others are."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_text() for name, path in files.items() if Path(name).name != "manifest.json"}


@pytest.fixture
def run(tmp_path):
    made(tmp_path / "run", "sft", "old")
    made(tmp_path / "run", "ppo", "old")
    made(tmp_path / "run", "eval", "old")
    write(tmp_path / "run", {"recipe.yaml": "old recipe", "notes.md": "mine"})
    return tmp_path / "run"


def begin_anew(run, *, finished=False):
    aside.make_room(run, ["ppo", "eval"], wanted="ppo")
    (run / "recipe.yaml").write_text("new recipe")
    made(run, "ppo", "new", finished=finished)


# ---------------------------------------------------------------------- aside and back


def test_what_a_notebook_replaces_goes_once_all_of_its_model_is_saved(run):
    aside.make_room(run, ["ppo", "eval"], wanted="ppo")
    write(run, {"recipe.yaml": "new recipe"})
    owned.begin(run / "ppo")
    aside.train_by_hand(run, ["policy/role.json", "value/role.json"])
    for name in ("policy/adapter_config.json", "policy/role.json", "value/adapter_config.json"):
        write(run / "ppo", {name: "{}"})
    assert aside.settle(run) and (run / REPLACED / "ppo" / RESULT_FILE).is_file()  # a kill while it saved
    with pytest.raises(ToolkitError, match="keeps its earlier ppo aside"):
        check_whole(run)
    write(run / "ppo", {"value/role.json": "{}"})
    check_whole(run)  # which deletes nothing
    assert (run / REPLACED).exists() and not aside.settle(run) and not (run / REPLACED).exists()


@pytest.mark.parametrize("stored", ["", REPLACED, UNFINISHED])
@pytest.mark.parametrize(
    "text",
    ["{}", '{"into": null, "moves": 5}', '{"into": null, "moves": [["a"]]}', '{"into": "elsewhere", "moves": []}',
     '{"into": null, "moves": [["../mine.txt", "ppo/mine.txt"]], "names": ["ppo"], "wanted": "ppo"}',
     '{"into": ".replaced", "moves": [], "names": ["../x"], "wanted": "ppo"}',
     '{"into": ".replaced", "moves": [], "names": ["ppo"], "wanted": "ppo", "last_saved": ["../x"]}',
     '{"into": ".replaced", "moves": [], "names": ["ppo"], "wanted": 5}',
     '{"into": null, "moves": [], "names": ["ppo"]}', '{"into": ".replaced", "moves": []}'],
)  # fmt: skip
def test_a_list_of_moves_that_is_damaged_moves_nothing(stored, text, run):
    write(run / stored, {".moves.json": text, "../mine.txt": "mine"})
    before = content(run.parent)
    with pytest.raises(ToolkitError, match=r"\.moves\.json is damaged"):
        aside.changing(run, stored) if stored else aside.settle(run)
    assert content(run.parent) == before


def test_what_is_replaced_comes_back_as_it_was(run):
    before = content(run)
    begin_anew(run)
    assert content(run)["ppo/metrics.jsonl"] == "new metrics" and not (run / "ppo" / RESULT_FILE).exists()
    assert content(run)[".replaced/ppo/result.json"] == "old result" and content(run)["sft/result.json"] == "old result"
    assert aside.settle(run) and aside.changing(run, REPLACED) == ["eval", "ppo"]
    aside.put_back(run, keep=True)
    after = content(run)
    assert {name: text for name, text in after.items() if not name.startswith(".")} == before
    assert after[".unfinished/recipe.yaml"] == "new recipe" and after[".unfinished/ppo/metrics.jsonl"] == "new metrics"
    assert not (run / ".replaced").exists()
    aside.take_up(run)
    assert content(run)["ppo/metrics.jsonl"] == "new metrics" and content(run)["recipe.yaml"] == "new recipe"
    assert not (run / "eval").exists() and content(run)[".replaced/eval/result.json"] == "old result"
    aside.put_back(run, keep=False)
    assert content(run) == before and sorted(os.listdir(run)) == ["eval", "notes.md", "ppo", "recipe.yaml", "sft"]


OTHERS = "scorer: {function: theirs.py:run}\nbase: {model: theirs}"


@pytest.mark.parametrize("names", [["ppo", "eval"], ["sft", "ppo", "eval"]])
@pytest.mark.parametrize("moves", [
    [],
    [["recipe.yaml", ".deleted/recipe.yaml"], [".replaced/recipe.yaml", "recipe.yaml"]],
    [["recipe.yaml", ".deleted/recipe.yaml"], [".unfinished/recipe.yaml", "recipe.yaml"]],
    [[".replaced/ppo/own.py", "ppo/own.py"]],
])  # fmt: skip
def test_who_reads_a_run_brings_nothing_back(moves, names, run):
    """Somebody else's run is used once the recipe in its folder has been read: no other one comes in its place."""
    aside.make_room(run, names, wanted="ppo")
    write(run, {"recipe.yaml": "base: {model: known}", ".replaced/recipe.yaml": OTHERS, ".replaced/ppo/own.py": "code"})
    if moves:
        journal = {"into": ".deleted", "from": ".replaced", "names": names, "wanted": "ppo", "moves": moves}
        write(run, {".moves.json": json.dumps(journal), ".unfinished/recipe.yaml": OTHERS})
    before = content(run)
    of = "sft and ppo" if "sft" in names else "ppo"
    why = "run: files were being moved there" if moves else f"run keeps its earlier {of} aside: "
    told = rf"{why}.*Run the ppo stage of .*/run/recipe.yaml in it .*here \"run\"; .*, here {run.parent}\)"
    with pytest.raises(ToolkitError, match=told):
        check_whole(run)
    if moves:
        with pytest.raises(ToolkitError, match=told):  # half of anything may be there
            check_whole(run, ["reward"])
    else:
        check_whole(run, ["reward"])
    (listed,) = all_runs(run.parent)
    assert re.search(told, listed.told.text()) and content(run) == before


def test_a_run_is_found_where_a_kill_has_left_its_recipe(run):
    """But a command that runs a stage takes no recipe that nobody has named."""
    again = ["ppo", str(run / "recipe.yaml"), "--resume", "--runs-dir", str(run.parent)]
    aside.make_room(run, ["ppo", "eval"], wanted="ppo")
    assert not (run / "recipe.yaml").exists() and run_folder("run", run.parent) == run
    assert [one.name for one in all_runs(run.parent)] == ["run"]
    ran = CliRunner().invoke(app, again)
    assert ran.exit_code == 1 and "keeps its earlier ppo aside" in ran.output
    assert f"Run the ppo stage of {run}/.replaced/recipe.yaml in it" in ran.output  # which nobody has read
    assert not (run / "recipe.yaml").exists()
    with pytest.raises(ToolkitError, match="keeps its earlier ppo aside"):
        check_whole(run, ())
    begin_anew(run)
    assert "aside: what" not in CliRunner().invoke(app, again).output


def test_what_lies_aside_is_told_while_another_stage_is_placed(run):
    begin_anew(run)
    moves = [[".taken/metrics.jsonl", "sft/metrics.jsonl"]]
    write(run, {".moves.json": json.dumps({"into": None, "moves": moves})})
    told = "files were being moved there when a kill came. Run {} of .*/recipe.yaml in it .*: {}"
    with pytest.raises(ToolkitError, match=told.format("the ppo stage", "with resume=True what was begun goes on")):
        check_whole(run)
    shutil.rmtree(run / REPLACED)
    with pytest.raises(ToolkitError, match=told.format("a stage", "which moves the rest")):
        check_whole(run, ["sft"])


def test_the_stage_that_is_to_be_run_is_the_one_that_was_begun(run):
    aside.make_room(run, ["sft", "ppo", "eval"], wanted="sft")
    write(run, {"recipe.yaml": "of sft alone"})
    with pytest.raises(ToolkitError, match="keeps its earlier sft and ppo aside: .*Run the sft stage"):
        check_whole(run)


@pytest.mark.parametrize("moved", [
    ["ppo/samples.jsonl", "recipe.yaml"], ["recipe.yaml", "ppo/samples.jsonl"],
    [".replaced/RECIPE.yaml", "recipe.yaml"], [".replaced/recipe.yaml", "Recipe.yaml"],
    ["ppo/samples.jsonl", "reward.py"], ["reward.py", "ppo/samples.jsonl"],
])  # fmt: skip
def test_no_list_moves_a_recipe_from_elsewhere_or_what_is_none_of_a_stage(moved, run):
    write(run, {".moves.json": json.dumps({"moves": [moved], "into": None}), "ppo/samples.jsonl": "theirs"})
    with pytest.raises(ToolkitError, match=r"\.moves\.json is damaged"):
        aside.settle(run)


def test_what_is_none_of_a_stage_does_not_come_back(run):
    begin_anew(run)
    write(run / REPLACED, {"reward.py": "theirs"})
    aside.put_back(run, keep=False)
    assert not (run / "reward.py").exists() and content(run)["ppo/result.json"] == "old result"


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
    """Which may have a bin by the name under which the toolkit deletes."""
    write(tmp_path / "photos", {".deleted/a.jpg": "mine", ".taken/b.jpg": "mine"})
    assert [*all_runs(tmp_path)] == [] and not aside.settle(tmp_path / "photos")
    assert content(tmp_path) == {"photos/.deleted/a.jpg": "mine", "photos/.taken/b.jpg": "mine"}


def test_what_has_finished_lets_what_it_replaces_go(run):
    begin_anew(run, finished=True)
    assert not aside.settle(run)
    assert sorted(os.listdir(run)) == ["notes.md", "ppo", "recipe.yaml", "sft"]
    assert content(run)["ppo/result.json"] == "new result"


def test_a_second_try_replaces_the_first_one_and_not_what_both_replace(run):
    before = content(run)
    begin_anew(run)
    aside.make_room(run, ["sft", "ppo", "eval"], wanted="ppo")
    assert not (run / "ppo").exists() and not (run / "sft").exists()
    made(run, "sft", "second")
    aside.put_back(run, keep=False)
    assert content(run) == before


# ---------------------------------------------------------------------- files of others


def test_files_of_others_stay_where_they_are(run):
    mine = dict.fromkeys(("ppo/notes.md", "eval/judge.py", "ppo/policy/diary.txt", "ppo/policy/x.json"), "mine")
    write(run, mine)
    begin_anew(run, finished=True)
    assert not aside.settle(run)
    after = content(run)
    assert {name: after[name] for name in mine} == mine and after["ppo/result.json"] == "new result"
    owned.delete(run / "ppo")
    left = {name for name in content(run) if name.startswith("ppo/")}
    assert left == {name for name in mine if name.startswith("ppo/")}


def test_what_a_kill_left_of_a_write_goes_and_files_of_similar_names_stay(run):
    left = [run / name / f".toolkit-{16 * '0'}.partial" for name in ("", "ppo", "ppo/policy", "new")]
    mine = dict.fromkeys(("report.html.partial", "ppo/report.html.partial", "ppo/.toolkit-x.partial"), "mine")
    (run / "new").mkdir()
    write(run, mine | {path.relative_to(run).as_posix(): "cut" for path in left})
    aside.settle(run)
    owned.delete(run / "ppo")
    owned.delete(run / "new")
    assert not any(path.exists() for path in left) and not (run / "new").exists()
    assert {name: (run / name).read_text() for name in mine} == mine


def test_a_folder_without_a_manifest_is_not_the_toolkit_s(tmp_path):
    theirs = {"ppo/result.json": "mine", "ppo/policy/adapter_model.safetensors": "mine", "ppo/notes.md": "mine"}
    write(tmp_path, theirs)
    assert owned.written(tmp_path / "ppo") == []
    owned.delete(tmp_path / "ppo")
    aside.make_room(tmp_path, ["ppo"], wanted="ppo")
    with pytest.raises(RecipeError, match=r"ppo/(policy/adapter_model.safetensors|result.json) is not known to be the"):
        owned.refuse_others(tmp_path / "ppo")
    assert {name: text for name, text in content(tmp_path).items() if not name.startswith(".")} == theirs
    write(tmp_path, {"eval/judge.py": "mine"})
    owned.refuse_others(tmp_path / "eval")  # nothing there has the name of a file that an evaluation writes
    assert content(tmp_path)["eval/judge.py"] == "mine"


def test_what_a_kill_leaves_of_a_stage_that_it_deletes_is_still_the_toolkit_s(run, monkeypatch):
    deleted, unlink = [], Path.unlink

    def killed(path, missing_ok=False):
        if len(deleted) == 3:
            raise KeyboardInterrupt
        deleted.append(path)
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", killed)
        owned.delete(run / "ppo")
    assert len(deleted) == 3 and owned.written(run / "ppo")
    owned.refuse_others(run / "ppo")
    owned.delete(run / "ppo")
    assert not (run / "ppo").exists()


@pytest.mark.parametrize("link", ["run", "run/ppo", "run/recipe.yaml", "run/ppo/policy", "run/ppo/result.json"])
def test_nothing_is_written_or_deleted_through_a_link(link, tmp_path):
    outside = tmp_path / "outside"
    if link in ("run/recipe.yaml", "run/ppo/result.json"):
        write(tmp_path, {"outside": "mine"})
    else:
        write(outside, {"ppo/result.json": "mine", "result.json": "mine", "manifest.json": '{"files": {}}'})
    (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / link).symlink_to(outside)
    before = {path: path.read_bytes() for path in [outside, *outside.rglob("*")] if path.is_file()}
    with pytest.raises(ToolkitError, match="is a link to .*outside, and a run is not written through links"):
        owned.refuse_others(tmp_path / "run" / "ppo")
    owned.delete(tmp_path / "run" / "ppo")
    assert before and before == {path: path.read_bytes() for path in before}
    assert (tmp_path / link).is_symlink()


def test_the_folder_of_all_runs_may_be_a_link(run, tmp_path):
    (tmp_path / "all").symlink_to(tmp_path)
    begin_anew(tmp_path / "all" / "run", finished=True)
    assert not aside.settle(tmp_path / "all" / "run")
    assert (run / "ppo" / "metrics.jsonl").read_text() == "new metrics" and not (run / REPLACED).exists()


@pytest.mark.parametrize(
    "moves",
    [
        '{"into": null, "moves": [["sft/rows.jsonl", "ppo/rows.jsonl"], ["ppo/README.md", "sft/README.md"]]}',
        '{"into": ".replaced", "moves": [], "names": ["sft"], "wanted": "sft"}',
        '{"into": null, "from": ".replaced", "moves": []}',
        '{"into": null, "moves": [["", "taken"]]}',
    ],
)
def test_no_move_goes_through_a_link(moves, tmp_path):
    write(tmp_path / "outside", {"README.md": "mine", ".moves.json": "mine"})
    write(tmp_path / "runs/x", {"recipe.yaml": "seed: 1", "sft/rows.jsonl": "theirs", ".moves.json": moves})
    for name in ("ppo", ".replaced"):
        (tmp_path / "runs/x" / name).symlink_to(tmp_path / "outside")
    before = content(tmp_path / "runs/x")
    assert [line.name for line in all_runs(tmp_path / "runs")] == ["x"]
    assert content(tmp_path / "outside") == {"README.md": "mine", ".moves.json": "mine"}
    assert content(tmp_path / "runs/x") == before


def test_what_was_replaced_waits_until_a_link_in_its_place_is_gone(run):
    before = content(run)
    begin_anew(run)
    made(run.parent, "outside", "mine")
    shutil.rmtree(run / "ppo")
    (run / "ppo").symlink_to(run.parent / "outside")
    outside = content(run.parent / "outside")
    for steps in (lambda: aside.put_back(run, keep=True), lambda: aside.settle(run)):
        with pytest.raises(ToolkitError, match="ppo is a link to .*outside, and a run is not written through links"):
            steps()
    assert content(run.parent / "outside") == outside
    (run / "ppo").unlink()
    aside.settle(run)
    assert {name: text for name, text in content(run).items() if not name.startswith(".")} == before


# ---------------------------------------------------------------------- kills


class Killed(BaseException):
    """In place of SIGKILL: whoever catches it finds that nothing on the disk can be changed any more."""


def killed_before(number, steps):
    """Whether steps were ended before their operation of that number on the disk, which is left as it was then."""
    left = [number]

    def counted(operation, writes=lambda *arguments, **named: True):
        def counting(*arguments, **named):
            if writes(*arguments, **named):
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
            return operation(*arguments, **named)

        return counting

    with ExitStack() as patches:
        for name in ("rename", "replace", "unlink", "mkdir", "rmdir"):
            patches.enter_context(mock.patch.object(os, name, counted(getattr(os, name))))
        writes = counted(os.open, lambda path, flags, *_, **__: flags & (os.O_WRONLY | os.O_RDWR))
        patches.enter_context(mock.patch.object(os, "open", writes))
        writes = counted(io.open, lambda path, mode="r", *_, **__: "r" not in mode)
        patches.enter_context(mock.patch.object(io, "open", writes))
        try:
            steps()
        except Killed:
            return True
    return False


def in_its_place(run):
    begin_anew(run, finished=True)
    aside.settle(run)


def put_back_and_taken_up(run):
    aside.put_back(run, keep=True)
    aside.take_up(run)


def given_up(run):
    aside.put_back(run, keep=False)


@pytest.mark.parametrize(("steps", "fewest"), [(in_its_place, 50), (put_back_and_taken_up, 70), (given_up, 40)])
def test_a_kill_before_any_operation_leaves_the_old_or_the_new(steps, fewest, run, tmp_path):
    old = content(run)
    if steps is not in_its_place:  # of which the kills while something is begun are
        begin_anew(run)
    stage = {name: text.replace("old", "new", 1) for name, text in old.items() if name.startswith("ppo/")}
    new = {name: text for name, text in old.items() if not name.startswith("eval/")} | stage
    new["recipe.yaml"], seen = "new recipe", []
    for number in range(1000):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(run, copy)
        killed = killed_before(number, lambda copy=copy: steps(copy))
        if aside.settle(copy):
            aside.put_back(copy, keep=False)
        found = {name: text for name, text in content(copy).items() if not name.startswith(".unfinished")}
        seen.append("old" if found == old else "new" if found == new else found)
        shutil.rmtree(copy)
        if not killed:
            break
    assert [state.items() ^ old.items() for state in seen if state not in ("old", "new")] == []
    assert len(seen) > fewest and seen[0] == "old" and (seen[-1] == "new") == (steps is in_its_place)


def test_checkpoints_behind_a_link_are_not_the_run_s(run):
    made(run.parent, "outside", "mine")
    (run / "q").symlink_to(run.parent / "outside")
    assert owned.written(run / "q") == []
