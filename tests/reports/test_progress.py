import errno
import io
import os
import signal
import time
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

from toolkit import phases
from toolkit.checkpoints import stop_requests
from toolkit.reports import Progress
from toolkit.reports.progress import Pace, clock, figures

LOGS = {
    "score": 1.25, "score_se": 0.125, "kl": 0.5, "length": 9.0, "eos_share": 0.75, "clip_fraction": 0.0625,
    "explained_variance": 0.5, "samples_per_second": 0.0123, "ratio": 1.0,
}  # fmt: skip
FIGURES = "score 1.250 ± 0.125 · KL 0.500 · length 9.0 · 75% end · clip 0.062 · critic explains 0.50 · 0.0123 samples/s"


def shown(terminal):
    return Progress("run ppo", Console(file=io.StringIO(), force_terminal=terminal, width=200))


def text(progress):
    return progress.console.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_is_named_from_loading_to_its_last_figures(terminal, tmp_path):
    progress, state, control = shown(terminal), TrainerState(), TrainerControl()
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    state.max_steps, state.global_step = 4, 2
    with progress:
        with phases.phase("load"), phases.phase("a part of it"):
            pass
        progress.on_train_begin(args, state, control)
        state.global_step = 3
        progress.on_step_end(args, state, control)
        progress.on_log(args, state, control, logs=LOGS)
        if terminal:
            progress.console.print(progress._panel())
        progress.on_train_end(args, state, control)
    said = text(progress)
    assert FIGURES in said and "3/4" in said and "run ppo" in said and "s/step" in said and "0 s left" in said
    assert "a part of it" not in said and " GB" in said and "elapsed" in said
    assert ("run ppo: load …" in said) is not terminal
    assert set(progress.seconds) == {"load", "train"}


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.ENOSPC, "No space left on device")])
def test_where_nobody_reads_progress_any_more_the_run_goes_on_and_is_heard_elsewhere(error, monkeypatch):
    """As of `2>&1 | head`. rich by itself would close standard output, too, and end the thread."""

    class Closed(io.StringIO):
        def write(self, text):
            raise error

    monkeypatch.setattr("sys.stderr", Closed())
    with monkeypatch.context() as patched:
        patched.setattr("os.dup2", lambda *_: pytest.fail("standard output is closed"))
        with Progress("run ppo") as progress:
            progress.told("nobody reads this")
            progress.told("nor this")
    assert progress.console.quiet and progress._sentences.empty()


def test_where_no_panel_can_be_seen_there_are_lines(tmp_path, monkeypatch):
    dumb = Console(file=io.StringIO(), force_terminal=True, width=200, _environ={"TERM": "dumb"})
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes a file for a terminal
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setattr("sys.stdout", None)  # `>&-`
    args, state = TrainingArguments(output_dir=str(tmp_path), use_cpu=True), TrainerState()
    state.max_steps = 4
    for console in (dumb, None):
        with Progress("run ppo", console) as progress:
            with phases.phase("load"):
                pass
            progress.on_train_begin(args, state, TrainerControl())
            progress.on_log(args, state, TrainerControl(), logs=LOGS)
        said = text(progress)
        assert "run ppo: load …" in said and "KL 0.500" in said and "\x1b" not in said
    with shown(True):
        pass
    monkeypatch.setattr("sys.stderr", SimpleNamespace(write=str, flush=int))  # a user's own, to a log
    assert not Progress("run ppo").live


@pytest.mark.parametrize(("width", "lines"), [(80, 2), (100, 1), (200, 1)])
def test_the_panel_fits_its_terminal(width, lines):
    progress = Progress("smollm2_135m_lora ppo", Console(file=io.StringIO(), force_terminal=True, width=width))
    progress.steps(12, 80, "update")
    progress._pace.ends[0] = (11, progress._pace.began - 1234.5)
    progress._pace.ended(12, progress._pace.began)
    with phases.watched_by(progress), phases.phase("update", 8):
        progress.console.print(progress._panel())
    said = [line for line in text(progress).splitlines() if line.strip()]
    assert len(said) == lines and "1,234 s/update" in text(progress) and ("━" in text(progress)) is (width > 80)


def test_within_an_update_its_phase_and_parts_are_named():
    progress = shown(True)
    progress.steps(11, 100, "update")
    with progress, phases.phase("update", 8):
        progress.on_optimizer_step()
        progress.on_optimizer_step()
        now = progress._now()
    assert now.startswith("run ppo 11/100  update 2/8, 0 s · 0 s elapsed")
    assert progress._doing() == "train" and list(progress.seconds) == ["update"]


def test_what_is_between_the_phases_has_a_name_too(tmp_path):
    progress, state, control = shown(False), TrainerState(), TrainerControl()
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    state.max_steps = 1
    with progress:
        between = [progress._doing()]
        with phases.phase("load"):
            pass
        between.append(progress._doing())
        progress.on_train_begin(args, state, control)
        between.append(progress._doing())
        progress.on_train_end(args, state, control)
        between.append(progress._doing())
    assert between == ["prepare, 0 s", "prepare, 0 s", "train", "write, 0 s"]


def test_time_left_of_updates_that_take_minutes():
    """Of rich's own column, whose window is 30 s, it would never come."""
    pace = Pace(10, 16, now=0.0)
    assert pace.seconds_a_step is None and pace.left(50.0) is None
    pace.ended(11, 100.0)
    pace.ended(12, 240.0)
    assert pace.seconds_a_step == 120.0
    assert pace.left(240.0) == 480.0 and pace.left(300.0) == 420.0 and pace.left(2000.0) == 0.0
    for i in range(30):  # the pace is that of the last steps
        pace.ended(13 + i, 250.0 + 10 * i)
    assert pace.seconds_a_step == 10.0


def test_times_are_short():
    assert [clock(x) for x in (0, 41.9, 60, 369, 7391)] == ["0 s", "41 s", "1:00", "6:09", "2:03:11"]


def test_a_checkpoint_keeps_where_the_time_went():
    before = shown(False)
    before.seconds = {"rollout": 10.0, "load": 2.0}
    after = shown(False)
    vars(after).update(before.state()["attributes"])
    after.seconds = {"rollout": 5.0}
    assert after.spent == {"rollout": 15.0, "load": 2.0} and list(after.spent) == ["rollout", "load"]


def test_nobody_shows_a_process_that_is_not_the_main_one():
    progress = Progress("run", Console(file=io.StringIO()), quiet=True)
    with progress, phases.phase("load"):
        pass
    assert text(progress) == ""


def test_ctrl_c_is_answered_at_once():
    progress = shown(False)
    with progress, stop_requests(lambda: "step 3 of 9 is finished and saved, then it stops."):
        os.kill(os.getpid(), signal.SIGINT)
    assert text(progress) == (
        "Ctrl-C: step 3 of 9 is finished and saved, then it stops. A second Ctrl-C ends it at once, without this.\n"
    )


def test_ctrl_c_is_answered_where_nobody_watches(caplog):
    with stop_requests(lambda: "the step is finished."):
        os.kill(os.getpid(), signal.SIGTERM)
    assert caplog.messages[0].startswith("SIGTERM: the step is finished. A second")


def test_long_silence_without_a_terminal_is_broken(monkeypatch):
    monkeypatch.setattr("toolkit.reports.progress._QUIET", 0.05)
    progress = shown(False)
    progress.steps(1, 3, "update")
    with progress, phases.phase("rollout"):
        time.sleep(0.3)
    assert "run ppo 1/3  rollout, 0 s · 0 s elapsed" in text(progress)


def test_what_a_run_says_does_nothing_to_a_terminal():
    progress = shown(False)
    with progress:
        phases.tell("[bold]no markup\x1b]0;title\x07")
    assert text(progress) == "[bold]no markup\\x1b]0;title\\x07\n"


def test_only_what_is_logged_is_shown():
    assert figures({"loss": 0.5, "epoch": 1.0}) == {"loss": "loss 0.5000"}
    assert figures({"score": 1.0}) == {"score": "score 1.000"}
