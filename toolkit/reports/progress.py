"""What a run is doing, shown while it runs: a panel of two lines on a terminal, plain lines elsewhere."""

import math
import queue
import sys
import threading
import time
from collections import deque
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from toolkit import phases
from toolkit.errors import printable
from toolkit.reports.charts import short
from toolkit.reports.evaluated import is_number
from toolkit.reports.files import SPREADS, peak_memory_gb

_SHOWN = {
    "score": "score {:.3f}",
    "kl": "KL {:.3f}",
    "length": "length {:.1f}",
    "eos_share": "{:.0%} end",
    "clip_fraction": "clip {:.3f}",
    "explained_variance": "critic explains {:.2f}",
    "loss": "loss {:.4f}",
    "accuracy": "accuracy {:.3f}",
    "samples_per_second": "{} samples/s",
    "eval_loss": "eval loss {:.4f}",
    "eval_score": "eval score {:.3f}",
    "eval_judge": "eval judge {:.3f}",
    "eval_exact_match": "eval exact match {:.3f}",
    "eval_accuracy": "eval accuracy {:.3f}",
    "skipped_steps": "{:.0f} steps skipped",
}
_QUIET = 60.0  # seconds without a line, where there is no terminal, after which one says what is going on
_SHORTEST_BAR, _LONGEST_BAR = 8, 20  # characters; none at all where less is left of a line
_STEPS_OF_PACE = 20  # over which seconds a step are averaged


def figures(logs: dict[str, Any]) -> dict[str, str]:
    """What matters of a line of metrics, each as it is shown."""
    numbers = {name: value for name, value in logs.items() if is_number(value) or isinstance(value, float)}
    shown = {name: form.format(numbers[name]) for name, form in _SHOWN.items() if name in numbers}
    if "samples_per_second" in numbers:
        shown["samples_per_second"] = f"{short(numbers['samples_per_second'])} samples/s"
    for name, spread in SPREADS.items():
        if name in shown and spread in numbers:
            shown[name] += f" ± {float(logs[spread]):.3f}"
    return shown


def figures_of(logs: dict[str, Any]) -> str:
    """The same on one line."""
    return " · ".join(figures(logs).values())


def clock(seconds: float) -> str:
    """`41 s`, `6:09`, `2:03:11`."""
    whole = max(0, math.floor(seconds))
    minutes, hours = whole // 60, whole // 3600
    if not minutes:
        return f"{whole} s"
    return f"{hours}:{minutes % 60:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _at_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; None is one that the shell has closed, and a user's own may have no `isatty`."""
    try:
        return bool(stream.isatty()) if hasattr(stream, "isatty") else False
    except ValueError:  # it is closed
        return False


class Pace:
    """Seconds a step, and what is left, from when the last steps ended: however slow they are."""

    def __init__(self, step: int, total: int, now: float):
        self.total, self.began = total, now
        self.ends = deque([(step, now)], maxlen=_STEPS_OF_PACE + 1)

    def ended(self, step: int, now: float) -> None:
        """A step has ended."""
        self.ends.append((step, now))

    @property
    def seconds_a_step(self) -> float | None:
        (first, began), (last, ended) = self.ends[0], self.ends[-1]
        return (ended - began) / (last - first) if last > first else None

    def left(self, now: float) -> float | None:
        """Seconds to the last step."""
        last, ended = self.ends[-1]
        each = self.seconds_a_step
        return None if each is None else max(0.0, (self.total - last) * each - (now - ended))


class _Shown(Console):
    """Standard error. Where nobody reads it any more, nothing is shown, and the run goes on: rich would close standard
    output as well, and end the thread that found it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Progress(TrainerCallback, ExportableState):
    """Shows a run as long as it is entered, or as it trains: its phases, steps, time and figures.

    Args:
        title: what runs.
        console: where to show it; standard error if None, so that standard output stays clean.
        quiet: shows nothing, as in all of several processes but the main one.
    """

    def __init__(self, title: str, console: Console | None = None, *, quiet: bool = False):
        self.title, self.quiet = title, quiet
        self.console = console or _Shown(stderr=True)
        # Not on a dumb terminal, where rich shows none, nor in a file that FORCE_COLOR makes a terminal for it.
        takes_panels = console is not None or self.console.is_jupyter or _at_terminal(sys.stderr)
        self.live = self.console.is_interactive and takes_panels
        self.seconds: dict[str, float] = {}  # by phase, in this process
        self.earlier: dict[str, float] = {}  # and before the checkpoint from which training went on
        self._open: ExitStack | None = None
        self._of_training: ExitStack | None = None
        self._sentences: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # its `put` may interrupt itself
        self._phase, self._began, self._done = "", time.monotonic(), 0
        self._between = "prepare"  # what goes on outside of phases and of training
        self._parts: int | None = None
        self._in_phases = 0.0
        self._pace: Pace | None = None
        self._unit = "step"
        self._figures: dict[str, str] = {}

    @property
    def spent(self) -> dict[str, float]:
        """Seconds that each phase has taken so far, longest first; what is left of training is "train"."""
        names = self.earlier.keys() | self.seconds.keys()
        spent = {name: self.earlier.get(name, 0.0) + self.seconds.get(name, 0.0) for name in names}
        if self._pace is not None:
            rest = time.monotonic() - self._pace.began - self._in_phases
            spent["train"] = spent.get("train", 0.0) + max(0.0, rest)
        return {name: round(spent[name], 1) for name in sorted(spent, key=lambda name: -spent[name])}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"args": {"title": self.title}, "attributes": {"earlier": self.spent}}

    # ------------------------------------------------------------------ from when to when

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if not self.quiet:
                stack.enter_context(phases.watched_by(self))
                if self.live:
                    shown: dict[str, Any] = {"refresh_per_second": 4, "transient": True}
                    # What goes to a pipe is not to land on the terminal.
                    shown["redirect_stdout"] = _at_terminal(sys.stdout)
                    stack.enter_context(Live(get_renderable=self._panel, console=self.console, **shown))
                speaker = threading.Thread(target=self._speak, daemon=True)
                speaker.start()
                stack.callback(speaker.join)
                stack.callback(self._sentences.put, None)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def by_hand(self) -> AbstractContextManager[Any]:
        """Shown inside, where it is not shown anyway."""
        return self if self._open is None else nullcontext()

    def _speak(self) -> None:
        """The thread that prints what is told, and, where there is no terminal, that something goes on."""
        while True:
            try:
                sentence = self._sentences.get(timeout=_QUIET)
            except queue.Empty:
                if not self.live:
                    self._print(self._now())
                continue
            if sentence is None:
                return
            self._print(sentence)

    def _print(self, line: str) -> None:
        try:
            self.console.print(printable(line), highlight=False, soft_wrap=True, markup=False)
        except OSError:  # a log on a full disk; of an older rich a closed pipe, too
            self.console.quiet = True

    # ------------------------------------------------------------------ what it is told

    def begun(self, phase: str, total: int | None) -> None:
        self._phase, self._began, self._done, self._parts = phase, time.monotonic(), 0, total
        if self._pace is None and not self.live:
            self.told(f"{self.title}: {phase} …")

    def ended(self) -> None:
        now = time.monotonic()
        self._add(self._phase, now - self._began)
        self._phase, self._began = "", now

    def _add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self._in_phases += seconds

    def told(self, sentence: str) -> None:
        self._sentences.put(sentence)

    def steps(self, step: int, total: int, unit: str) -> None:
        """So many of all steps have been done; the next one begins."""
        self._unit, self._pace = unit, Pace(step, total, time.monotonic())

    def step_ended(self, step: int) -> None:
        if self._pace is not None:
            self._pace.ended(step, time.monotonic())

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._figures, self._in_phases = {}, 0.0
        self.steps(state.global_step, state.max_steps, "update" if hasattr(args, "num_ppo_epochs") else "step")
        if self._open is None:
            self._of_training = ExitStack()
            self._of_training.enter_context(self)

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        fresh = figures(logs)
        self._figures.update(fresh)
        if fresh and self._pace is not None and not self.live:
            self.told(f"{self.title} {self._count()}  {' · '.join([*fresh.values(), self._memory(), *self._times()])}")

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.step_ended(state.global_step)

    def on_optimizer_step(self, *arguments: Any, **kwargs: Any) -> None:
        self._done += 1

    def on_prediction_step(self, *arguments: Any, **kwargs: Any) -> None:
        self._done += 1

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._pace is not None:
            self._add("train", max(0.0, time.monotonic() - self._pace.began - self._in_phases))
            if self.live:  # where the panel goes
                self.told(f"{self.title} {self._count()}  {' · '.join([*self._figures.values(), *self._times()])}")
            self._pace = None
        self._between, self._began = "write", time.monotonic()
        self._close_training()

    def broke_off(self) -> None:
        """An error ended training, of which nothing more is said: who trains in a notebook may go on."""
        self._pace = None
        self._close_training()

    def _close_training(self) -> None:
        if self._of_training is not None:
            self._of_training.close()
            self._of_training = None

    # ------------------------------------------------------------------ what it shows

    def _count(self) -> str:
        return "" if self._pace is None else f"{self._pace.ends[-1][0]}/{self._pace.total}"

    def _doing(self) -> str:
        """`update 3/8, 45 s`."""
        if not self._phase and self._pace is not None:
            return "train"
        done = f" {self._done}/{self._parts}" if self._parts else f" {self._done}" if self._done else ""
        doing = f"{self._phase}{done}" if self._phase else self._between
        return f"{doing}, {clock(time.monotonic() - self._began)}"

    def _times(self) -> list[str]:
        if self._pace is None:
            return []
        now, each, left = time.monotonic(), self._pace.seconds_a_step, self._pace.left(time.monotonic())
        pace = [] if each is None or left is None else [f"{short(each)} s/{self._unit}", f"{clock(left)} left"]
        return [f"{clock(now - self._pace.began)} elapsed", *pace]

    def _memory(self) -> str:
        peak = peak_memory_gb()
        return f"{peak.get('gpu', peak['resident']):.2f} GB"

    def _now(self) -> str:
        return f"{self.title} {self._count()}  {' · '.join([self._doing(), *self._times()])}"

    def _panel(self) -> Table:
        """Where the run is, and its last figures: two lines, or more where the terminal is narrow."""
        panel = Table.grid()
        line = Table.grid(padding=(0, 1))
        now = " · ".join([self._doing(), *self._times()])
        if self._pace is None:
            line.add_row(Spinner("dots"), Text(self.title), Text(now))
        elif (left := self.console.width - len(f"{self.title}  {self._count()} {now}")) < _SHORTEST_BAR:
            line.add_row(Text(f"{self.title} {self._count()}  {now}"))
        else:
            bar = ProgressBar(total=self._pace.total, completed=self._pace.ends[-1][0], width=min(left, _LONGEST_BAR))
            line.add_row(Text(self.title), bar, Text(self._count()), Text(now))
        panel.add_row(line)
        if self._figures:
            panel.add_row(Text(" · ".join([*self._figures.values(), self._memory()])))
        return panel
