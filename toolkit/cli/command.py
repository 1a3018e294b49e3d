"""How every command runs: its errors become messages, and it is divided among processes where that is asked for."""

import errno
import gc
import glob
import inspect
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

import toolkit
from toolkit.errors import PeerError, RunInterrupted, ToolkitError, printable

# How the options that a remedy names are written on a command line: see `toolkit.errors.Problem`.
IN_SHELL = {
    "run": "RUN=name, --run name",
    "runs_dir": "--runs-dir folder",
    "overwrite": "OVERWRITE=1 (--overwrite)",
    "resume": "RESUME=1 (--resume)",
    "from_run": "FROM=run, --from-run run",
    "gpu": "GPU=4090, --gpu 4090",
}

_DEBUG = "TOOLKIT_DEBUG"

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="PPO with LoRA adapters for policy, value, reward and reference on one 4-bit base.",
    epilog="Examples: toolkit ppo doubling, toolkit check llama3_8b_lora base.model=/models/Llama-3.1-8B, "
    "toolkit chat my-run",
)

_speaks = True  # but for all of several processes that are not the main one


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # whose encoding may lack what a sentence or a model says
            stream.reconfigure(errors="backslashreplace")
    if version:
        print(toolkit.__version__)
        raise typer.Exit


def command(
    example: str, *, name: str | None = None, loads: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a command of its name, its docstring the help, with `--debug` beside its own options; one that
    `loads` no library answers at once."""
    shown = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", envvar=_DEBUG)]
    debug_option = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=shown)

    def registered(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def run(*, debug: bool, **arguments: Any) -> None:
            # With a name it is part of another command, which says how to go on.
            inner = arguments.get("name") is not None
            resumable = "resume" in arguments and not inner
            # A shell expands no ~ after "=", nor within quotes.
            paths = {name: Path(os.path.expanduser(x)) for name, x in arguments.items() if isinstance(x, Path)}
            how = {"loads": loads, "divided": "processes" in arguments, "of_recipe": "recipe" in arguments}
            with _interruptible(), _debugged(debug), _errors(debug, resumable=resumable, inner=inner, **how):
                function(**{**arguments, **paths})

        own = inspect.signature(function).parameters.values()
        vars(run)["__signature__"] = inspect.Signature([*own, debug_option])
        return app.command(name or function.__name__, epilog=f"Example: {example}")(run)

    return registered


def join(number: int) -> None:
    """Divide the command among several processes, if it is to be and is not yet: each comes here again."""
    from transformers.utils import logging

    from toolkit import processes

    global _speaks
    launched = processes.launched()
    if number > 1 and launched == 1:
        from toolkit.runs.process import run_in_processes, this_toolkit

        raise typer.Exit(run_in_processes(this_toolkit(*sys.argv[1:]), number))
    if number not in (1, launched):
        wrong = f"--processes asks for {number} processes, and {launched} have been started."
        raise ToolkitError(wrong, remedy="Leave --processes out.")
    processes.join()
    if not processes.is_main():
        _speaks = False
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (as long as the process)
        logging.set_verbosity_error()
        warnings.simplefilter("ignore")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Inside, Ctrl-C is a KeyboardInterrupt, where it was to end the process: see `toolkit.__main__`."""
    ends = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    if ends:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ends:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def _debugged(debug: bool) -> Iterator[None]:
    """Inside, what is started here shows tracebacks as well: the stages that run first. Else warnings are a line each,
    without the place in the code that they come from."""
    before, usual = os.environ.get(_DEBUG), warnings.formatwarning
    if debug:
        os.environ[_DEBUG] = "1"
    else:
        warnings.formatwarning = _in_a_line
    try:
        yield
    finally:
        warnings.formatwarning = usual
        if debug and before is None:
            del os.environ[_DEBUG]


def _in_a_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"warning: {printable(str(message))}\n"


@contextmanager
def _errors(
    debug: bool, *, resumable: bool, inner: bool, loads: bool, divided: bool, of_recipe: bool
) -> Iterator[None]:
    """One message for what a user can mend; one bar, ours, with what matters on it."""
    try:
        _begin(loads=loads, divided=divided)
        yield
        if sys.stdout is not None:  # as it is where it was closed
            sys.stdout.flush()
    except RunInterrupted as stop:
        _say_once(f"{stop}{_way_on(stop) if resumable else ''}")
        raise typer.Exit(128 + stop.signal_number) from stop
    except PeerError as error:
        if debug and not error.of:
            raise
        raise typer.Exit(_say_of_the_others(error, resumable=resumable)) from error
    except ToolkitError as error:
        if debug:
            raise
        hint = _where_to_name_a_base(error, of_recipe)
        print(f"{type(error).__name__}: {error.text(IN_SHELL)}{hint}", file=sys.stderr)
        raise typer.Exit(1) from error
    except (MemoryError, RuntimeError) as error:
        of_card = type(error).__name__ == "OutOfMemoryError"  # torch's, which is imported by those who need it
        if debug or not (of_card or isinstance(error, MemoryError) or "can't allocate memory" in str(error)):
            raise
        asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
        whose = "the GPU's" if of_card else "this machine's"
        wrong = f"ToolkitError: {whose} memory does not suffice{f' for {asked[1]} at once' if asked else ''}."
        way = _way_on(error) if resumable and hasattr(error, "way_on") else ""
        print(f"{wrong} Ask for less: shorter responses, fewer rows at a time, a smaller base.{way}", file=sys.stderr)
        raise typer.Exit(1) from error
    except OSError as error:  # of what nobody has asked first: standard output, a name too long, a folder kept shut
        if debug and not (inner and isinstance(error, BrokenPipeError)):  # by its exit code the later stage knows it
            raise
        raise typer.Exit(_say_of_the_system(error, resumable=resumable, inner=inner)) from error
    except KeyboardInterrupt as error:
        _say_once(f"Interrupted.{_way_on(error) if resumable else ''}")
        raise typer.Exit(130) from error


def _where_to_name_a_base(error: ToolkitError, of_recipe: bool) -> str:
    if "base.model" not in {problem.field for problem in error.problems}:
        return ""
    if of_recipe:
        return " With make: MODEL=/path/to/checkpoint."
    return " If it was moved, add base.model=/new/place."


def _say_once(text: str) -> None:
    """What all of several processes have met."""
    if _speaks:
        print(text, file=sys.stderr)


def _say_of_the_others(error: PeerError, *, resumable: bool) -> int:
    """Of an error of another process the exit code here, and what that one does not say itself."""
    way = _way_on(error) if resumable else ""
    if error.of == KeyboardInterrupt.__name__:  # which all have met
        _say_once(f"Interrupted.{way}")
        return 130
    if not error.of:  # a broken connection, whose reason, as of a card or network of its own, NCCL tells each process
        text = error.text(IN_SHELL).rstrip(".")
        if _speaks or type(error.__cause__).__name__ == "DistBackendError":
            print(f"{text[0].upper()}{text[1:]}.{way if _speaks else ''}", file=sys.stderr)
    return 1


def _output_closed() -> int:
    """The exit code of a stage that is part of another command, which says how to go on."""
    from toolkit.runs.process import OUTPUT_CLOSED

    with suppress(OSError):  # of what is no file
        of_output = sys.stdout.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), of_output)  # what is left for it would fail again, with another code
    return OUTPUT_CLOSED


def _say_of_the_system(error: OSError, *, resumable: bool, inner: bool) -> int:
    """A sentence about an error of the system, and the exit code; it is raised again where it names no place, as a
    fault of ours, and for a closed pipe, at which typer ends in silence."""
    if inner and isinstance(error, BrokenPipeError):
        return _output_closed()
    unnamed = {errno.ENOSPC: "standard output", errno.EDQUOT: "standard output", errno.ENOENT: "the current folder"}
    place = error.filename or unnamed.get(error.errno or 0)
    if isinstance(error, BrokenPipeError) and resumable:
        print(f"Standard output was closed.{_way_on(error)}", file=sys.stderr)
    if place is None:
        raise error
    wrong = f"ToolkitError: {printable(str(place)[:200])}: {error.strerror}."
    print(f"{wrong} Check the name and its permissions, or make room there.", file=sys.stderr)
    return 1


def _begin(*, loads: bool, divided: bool) -> None:
    if divided:
        from toolkit.processes import take_card

        take_card()
    if loads:
        _import_quietly()


def _import_quietly() -> None:
    if "toolkit.recipes" not in sys.modules:  # what the commands stand on
        gc.disable()  # it would walk all that this makes, again and again, for a quarter of its time
        import_module("toolkit.recipes")
        gc.freeze()
        gc.enable()
    import datasets
    from transformers.utils import logging

    logging.disable_progress_bar()
    datasets.disable_progress_bars()


def _way_on(stop: BaseException) -> str:
    """The command that goes on where this one was stopped; the same again, where there is nothing to go on with."""
    # As `stages.run` has found; of several processes none may say. Ctrl-C before it has looked leaves all as it was.
    untouched = isinstance(stop, KeyboardInterrupt) and "--resume" not in sys.argv
    way = getattr(stop, "way_on", "" if untouched else "resume")
    by = _by_as_many(sys.argv[1:])
    again = shlex.join(["toolkit", *sys.argv[1:]])
    if way == "finished":
        return " It had finished before: nothing of it is lost."
    if not way:
        return f" Nothing of it is saved. To begin again{by}: {again}"
    if isinstance(stop, RunInterrupted) and not hasattr(stop, "way_on") and "--resume" not in sys.argv:
        # Processes that it started were ended by the signal itself: they alone knew how far they had come.
        instead = " in place of --overwrite" if "--overwrite" in sys.argv else ""
        return f" To begin again, or with --resume{instead} to go on if something is saved (make: RESUME=1): {again}"
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--overwrite", "--resume")]
    command = shlex.join(["toolkit", *arguments, f"--{way}"])
    if way == "overwrite":
        return f" It cannot go on from what it has saved. To begin again{by}: {command} (make: OVERWRITE=1)"
    return f" To go on{by}: {command} (make: RESUME=1)"


def _by_as_many(arguments: list[str]) -> str:
    """How many processes a command is to be started with where a launcher did so, and its own words do not say it."""
    joined = sys.modules.get("toolkit.processes")  # without it there is one; it takes seconds to import
    number = 1 if joined is None else joined.count()
    named = any(word.partition("=")[0] == "--processes" for word in arguments)
    return f", by {number} processes, as it was started" if number > 1 and not named else ""


def _complete_recipe(incomplete: str) -> list[str]:
    from toolkit.spec.shipped import names

    return [name for name in names() if name.startswith(incomplete)]


def complete_run(context: typer.Context, incomplete: str) -> list[str]:
    runs = Path(context.params.get("runs_dir") or "runs")
    if Path(incomplete).is_absolute():  # a folder, which the shell completes
        return []
    return sorted(
        path.parent.name for path in Path(os.path.expanduser(runs)).glob(f"{glob.escape(incomplete)}*/recipe.yaml")
    )


RecipeName = Annotated[
    str, typer.Argument(help="Name of a shipped recipe, or path of a YAML file.", autocompletion=_complete_recipe)
]
RunName = Annotated[str, typer.Argument(help="Name of a run, or its folder.", autocompletion=complete_run)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help='Any key of the recipe, e.g. "ppo.kl_coef=0.1".', metavar="[KEY=VALUE]...")
]
Run = Annotated[str | None, typer.Option(help="Name of the run; the recipe's name if not given.")]
RunsDir = Annotated[Path, typer.Option(help="Folder of all runs.")]
Processes = Annotated[
    int,
    typer.Option(
        help="Processes on this machine that share the work: one per GPU. They match one up to rounding and dropout.",
        min=1,
    ),
]
