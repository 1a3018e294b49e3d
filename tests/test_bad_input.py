"""What a user can get wrong, by the front door: the command ends with 1 and one message, without a traceback.

Mistakes inside a recipe file are in `tests/spec/test_load.py`, those of data files in `tests/data/`, those of
adapters in `tests/models/test_adapters.py`.
"""

import contextlib
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import warnings

import pytest
import torch
import yaml
from torch.distributed import DistBackendError
from transformers import T5Config
from typer.testing import CliRunner

from tests.tiny_models import lora, tiny_model
from tests.tiny_runs import PAIRS, QUERIES, byte_tokenizer, save_llama
from toolkit import processes
from toolkit.cli import app
from toolkit.errors import PeerError, RecipeError, RunInterrupted
from toolkit.models import SharedBase, save_role
from toolkit.runs import process
from toolkit.runs.process import OUTPUT_CLOSED

REWARDS = """
def fine(rollout):
    return [float(n) for n in rollout.lengths]

def short(rollout):
    return [1.0]

def endless(rollout):
    return [float("inf")] * len(rollout)

def failing(rollout):
    return [1 / 0]
"""
RULE = ("scorer.kind=function", "scorer.function=rewards_for_test:fine")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with models, adapters and data of which each has something wrong, and a model that is right."""
    folder = tmp_path_factory.mktemp("place")
    save_llama(folder / "model", byte_tokenizer())
    without_template = byte_tokenizer()
    without_template.chat_template = None
    save_llama(folder / "no_template", without_template)
    without_end = byte_tokenizer()
    without_end.eos_token = without_end.pad_token = None
    save_llama(folder / "no_end", without_end)
    save_llama(folder / "other_tokenizer", byte_tokenizer(), vocab_size=100)
    T5Config().save_pretrained(folder / "t5")
    (folder / "multimodal").mkdir()
    (folder / "multimodal" / "config.json").write_text(json.dumps({"model_type": "llava"}))
    (folder / "empty").mkdir()
    other = SharedBase(tiny_model())
    other.add_role("policy", lora())
    save_role(other, "policy", folder / "other_policy", pad_token_id=0, base_name="other")
    (folder / "pickled").mkdir()
    (folder / "pickled" / "adapter_config.json").write_text(
        (folder / "other_policy" / "adapter_config.json").read_text()
    )
    torch.save({}, folder / "pickled" / "adapter_model.bin")
    write_data(folder)
    return folder


def write_data(folder):
    (folder / "few.jsonl").write_text('{"query": "a"}\n{"query": "b"}\n')
    (folder / "rewards_for_test.py").write_text(REWARDS)
    (folder / "secret.yaml").write_text(yaml.safe_dump({"base": {"model": "${oc.env:HOME}"}, "data": {}}))
    (folder / "in_the_way").write_text("")


def message(place, *words):
    """What the command says; it must end with 1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 1, done.output
    assert "Traceback" not in done.output
    return done.stderr


def llama(*overrides, model="model", rule=True):
    """llama3_8b_lora on the tiny model, scored by a function unless `rule` is off."""
    small = ["ppo.max_steps=1", "ppo.response_length=4", "data.validation_size=2"]
    ruled = RULE if rule else ()
    named = [f"base.model={model}", *small, *ruled, *overrides]
    if not any(override.startswith("data.train=") for override in overrides):
        named.append(f"data.train={QUERIES}")
    return ["ppo", "llama3_8b_lora", *named, "--overwrite"]


CASES = {
    "a recipe that a check finds wrong": (
        ["check", "doubling", "adapters.policy.target_modules=[q_prj]"],
        r'adapters.policy.target_modules — the base has no module "q_prj"',
    ),
    "missing checkpoint": (
        llama(model="/no/such/model"),
        r'ModelError: base.model: no checkpoint could be loaded from the folder "/no/such/model".*'
        r"Name a folder or hub id with safetensors weights and a tokenizer. With make: MODEL=/path/to/checkpoint",
    ),
    "a folder that is no checkpoint": (
        llama(model="./empty"),
        r'no checkpoint could be loaded from the folder "./empty"',
    ),
    "an encoder-decoder model": (llama(model="t5"), "is of type t5, which is not a decoder-only language model"),
    "a multimodal model": (llama(model="multimodal"), r'ModelError: base.model: "multimodal" is .*multimodal'),
    "an adapter for another base": (
        llama("start.policy=other_policy"),
        "AdapterError: start.policy: other_policy belongs to another base",
    ),
    "a reward adapter without a head": (
        llama("start.reward=other_policy", rule=False),
        r'other_policy: role "reward" needs one score head and the adapter holds 0',
    ),
    "an adapter folder that is not there": (
        llama("start.policy=nowhere"),
        'role "policy": there is no folder nowhere. Name a PEFT adapter folder.',
    ),
    "a folder without an adapter": (llama("start.policy=empty"), "empty: adapter_config.json is missing"),
    "pickled weights": (llama("start.policy=pickled"), "the weights are a pickle .* which is never opened here"),
    "a tokenizer without a chat template": (
        llama("data.chat=true", model="no_template"),
        "DataError: data.chat: .*has no chat template.*set chat to false",
    ),
    "a tokenizer without an end": (llama(model="no_end"), 'the tokenizer of "no_end" has no eos_token'),
    "a tokenizer of another checkpoint": (llama(model="other_tokenizer"), "SelfCheckError: ppo: the tokenizer"),
    "a data set smaller than the batch": (
        llama("data.train=few.jsonl", "data.validation_size=1"),
        r"DataError: ppo: 1 prompts are fewer than one batch of 2 .*Add prompts or lower these",
    ),
    "a setting of the hub for a file": (
        llama("data.name=main"),
        r"DataError: data.name: name would have no effect: only a hub id has that, and \S*queries.json is none",
    ),
    "a file that is not there": (llama("data.train=no/queries.jsonl"), "no/queries.jsonl: there is no such file"),
    "a function that is not there": (
        llama("scorer.function=rewards_for_test:gone"),
        'scorer.function — rewards_for_test has no function "gone"',
    ),
    "a module that is not there": (llama("scorer.function=gone:rule"), 'scorer.function — no module "gone"'),
    "a function of another form": (llama("scorer.function=gone"), "is not of the form module:function"),
    "a reward of another length": (
        llama("scorer.function=rewards_for_test:short"),
        r"the reward returned shape \(1,\) for 2 responses",
    ),
    "a reward that fails": (
        llama("scorer.function=rewards_for_test:failing"),
        "RewardError: the reward raised ZeroDivisionError: division by zero .*rewards_for_test.py, line 12",
    ),
    "an infinite reward": (llama("scorer.function=rewards_for_test:endless"), "the reward gave inf to the response"),
    "a stage that the recipe lacks": (
        ["sft", "llama3_8b_lora"],
        'the recipe has no section "sft", so this stage has nothing to run',
    ),
    "data that a stage lacks": (
        [
            "reward",
            "smollm2_135m_lora",
            "base.model=model",
            f"data.train={PAIRS}",
            f"data.validation={PAIRS}",
            "reward_head.num_labels=2",
            "reward.pad_to_multiple_of=null",
            "--overwrite",
        ],
        'data.task: "preferences" has no labelled data, which the reward stage needs',
    ),
    "an unknown recipe": (["ppo", "lama3_8b_lora"], r'no recipe "lama3_8b_lora". Did you mean llama3_8b_lora'),
    "a recipe file that is not there": (["ppo", "mine.yaml"], "RecipeError: mine.yaml: there is no such file"),
    "an environment variable": (["ppo", "secret.yaml"], "base.model — .* only plain values of the recipe itself"),
    "a mistyped override": (["ppo", "doubling", "ppo.kl_cof=1"], "ppo.kl_cof .*Did you mean kl_coef?"),
    "a word that YAML takes for false": (
        ["ppo", "doubling", "ppo.eval_strategy=no"],
        r"""got False. YAML takes no and off without quotes for false: .*, 'ppo.eval_strategy="no"' on the command""",
    ),
    "an override without a value": (
        ["ppo", "doubling", "seed"],
        'override "seed" is not of the form section.key=value',
    ),
    "an unwritable folder": (["sft", "doubling", "--runs-dir", "in_the_way/runs"], "runs/doubling: cannot be written"),
    "more processes than anybody has use for": (
        ["ppo", "doubling", "--processes", "1000000"],
        r"ToolkitError: 1000000 processes are asked for, and there are \d+ cores here",
    ),
    "a card without end": (["plan", "doubling", "--gpu", "9" * 400 + "GB"], "is neither a known GPU nor a size"),
    "a card of nothing": (["plan", "doubling", "--gpu", "0GB"], "'0GB' is neither a known GPU nor a size"),
    "no such run": (["chat", "nothing"], 'no run "nothing" in runs'),
    "no such run to measure": (["eval", "nothing"], 'no run "nothing" in runs'),
    "no such run to export": (["export", "nothing", "out"], 'no run "nothing" in runs'),
    "no such run to ask": (["generate", "nothing"], 'no run "nothing" in runs'),
    "no recipe to show": (["show", "doublin"], 'no recipe "doublin". Did you mean doubling'),
    "no recipe to check": (["check", "doublin"], 'no recipe "doublin". Did you mean doubling'),
}


@pytest.mark.parametrize("case", CASES)
def test_one_message_says_what_where_and_what_next(case, place):
    words, pattern = CASES[case]
    said = message(place, *words)
    assert re.search(pattern, said), said


def test_processes_that_others_have_started_are_not_started_again(monkeypatch):
    for name, value in {"WORLD_SIZE": "3", "RANK": "0", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["ppo", "doubling", "--processes", "2"])
    said = "ToolkitError: --processes asks for 2 processes, and 3 have been started. Leave --processes out.\n"
    assert (done.exit_code, done.stderr) == (1, said)


@pytest.mark.parametrize("number", ["", "0", "two", "2"])
def test_an_environment_that_no_launcher_made(number, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", number)
    done = CliRunner().invoke(app, ["eval", "run"])
    assert done.exit_code == 1 and f"WORLD_SIZE is {number!r} in the environment" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows finds no such file")
@pytest.mark.parametrize("words", [("runs", "--runs-dir", "x" * 300), ("eval", "x" * 300)])
def test_a_name_that_no_disk_takes(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1 and re.match(r"ToolkitError: x+.*: File name too long\. .", done.stderr), done.stderr


class Full(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_behind_standard_output():
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(Full()), pytest.raises(SystemExit) as stopped:
        app(["recipes"])
    assert stopped.value.code == 1
    assert said.getvalue().startswith("ToolkitError: standard output: No space left on device.")


def test_a_stage_that_memory_ends_says_how_to_go_on(monkeypatch):
    def too_large(*_, **__):
        error = MemoryError()
        error.way_on = "resume"
        raise error

    monkeypatch.setattr("toolkit.runs.stages.run", too_large)
    monkeypatch.setattr(sys, "argv", ["toolkit", "sft", "doubling"])
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit):
        app(["sft", "doubling"])
    assert "memory does not suffice. Ask for less: " in said.getvalue()
    assert said.getvalue().endswith(" To go on: toolkit sft doubling --resume (make: RESUME=1)\n")


@pytest.mark.parametrize("way", ["resume", "overwrite", "", "finished"])
def test_a_closed_pipe_ends_a_stage_with_the_command_that_goes_on(way, monkeypatch):
    def closed(*_, **__):
        error = BrokenPipeError(errno.EPIPE, "Broken pipe")
        error.way_on = way
        raise error

    monkeypatch.setattr("toolkit.runs.stages.run", closed)
    monkeypatch.setattr(sys, "argv", ["toolkit", "sft", "doubling", "--overwrite"])
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as end:
        app(["sft", "doubling"])
    assert end.value.code == 1
    told = {
        "resume": "To go on: toolkit sft doubling --resume (make: RESUME=1)",
        "overwrite": "It cannot go on from what it has saved. To begin again: toolkit sft doubling --overwrite (make: "
        "OVERWRITE=1)",
        "": "Nothing of it is saved. To begin again: toolkit sft doubling --overwrite",
        "finished": "It had finished before: nothing of it is lost.",
    }
    assert said.getvalue() == f"Standard output was closed. {told[way]}\n"
    for debug in ([], ["--debug"]):
        inner = CliRunner().invoke(app, ["sft", "doubling", "--run", "x", "--name", "x", *debug])
        assert (inner.exit_code, inner.stderr) == (
            OUTPUT_CLOSED,
            "",
        )  # it is part of a command, which says how to go on


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--overwrite"], "Nothing of it is saved. To begin again: toolkit ppo doubling --overwrite"),
        (["--resume"], "To go on: toolkit ppo doubling --resume (make: RESUME=1)"),
    ],
)
def test_ctrl_c_before_a_stage_has_looked_at_its_run_names_the_same_command(words, told, monkeypatch):
    def stopped():
        raise KeyboardInterrupt

    monkeypatch.setattr("toolkit.cli.command._import_quietly", stopped)
    monkeypatch.setattr(sys, "argv", ["toolkit", "ppo", "doubling", *words])
    done = CliRunner().invoke(app, sys.argv[1:])
    assert (done.exit_code, done.stderr) == (130, f"Interrupted. {told}\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            [],
            "To begin again, or with --resume to go on if something is saved (make: RESUME=1): "
            "toolkit ppo doubling --processes 2",
        ),
        (
            ["--overwrite"],
            "To begin again, or with --resume in place of --overwrite to go on if something is saved (make: RESUME=1): "
            "toolkit ppo doubling --processes 2 --overwrite",
        ),
        (["--resume"], "To go on: toolkit ppo doubling --processes 2 --resume (make: RESUME=1)"),
    ],
)
def test_a_signal_that_ended_all_processes_leaves_it_open_how_far_they_had_come(words, told, monkeypatch):
    def stopped(command, number):
        raise RunInterrupted(f"{number} processes were stopped.", 15)

    monkeypatch.setattr("toolkit.runs.process.run_in_processes", stopped)
    monkeypatch.setattr(sys, "argv", ["toolkit", "ppo", "doubling", "--processes", "2", *words])
    done = CliRunner().invoke(app, sys.argv[1:])
    assert (done.exit_code, done.stderr) == (143, f"2 processes were stopped. {told}\n")


@pytest.mark.parametrize("main", [True, False])
@pytest.mark.parametrize("cause", [DistBackendError, RuntimeError])
def test_a_broken_connection_is_told_by_the_main_process_and_by_whoever_knows_why(main, cause, monkeypatch):
    """Of several that a launcher has started, whose words do not say how many."""

    def breaks(*_, **__):
        monkeypatch.setattr(processes, "count", lambda: 2)
        monkeypatch.setattr("toolkit.cli.command._speaks", main)
        raise PeerError("the connection of process 0 of 2 to another is broken: NCCL error") from cause("NCCL error")

    monkeypatch.setattr("toolkit.recipes.load", breaks)
    monkeypatch.setattr(sys, "argv", ["toolkit", "ppo", "doubling"])
    done = CliRunner().invoke(app, ["ppo", "doubling"])
    told = "The connection of process 0 of 2 to another is broken: NCCL error."
    way = " To go on, by 2 processes, as it was started: toolkit ppo doubling --resume (make: RESUME=1)"
    assert done.exit_code == 1
    assert done.stderr == (f"{told}{way if main else ''}\n" if main or cause is DistBackendError else "")
    monkeypatch.setattr(processes, "count", lambda: 1)
    assert isinstance(CliRunner().invoke(app, ["ppo", "doubling", "--debug"]).exception, PeerError)


def test_a_warning_is_a_line_without_the_place_in_the_code(monkeypatch):
    shown, usual = [], warnings.formatwarning

    def fails(*arguments, **named):
        for text in ("it is so", "of a server:\x1b]0;title\x07\x1b[2J"):
            shown.append(warnings.formatwarning(UserWarning(text), UserWarning, "x.py", 3))
        raise RecipeError("nothing")

    monkeypatch.setattr("toolkit.runs.stages.run", fails)
    for words in ([], ["--debug"]):
        CliRunner().invoke(app, ["ppo", "doubling", *words])
        assert warnings.formatwarning is usual
    assert shown[:2] == ["warning: it is so\n", "warning: of a server:\\x1b]0;title\\x07\\x1b[2J\n"]
    assert shown[2] == "x.py:3: UserWarning: it is so\n"


def test_stages_that_run_first_show_tracebacks_too(monkeypatch):
    """They are processes of their own, which the environment tells."""
    seen = []

    def fails(*arguments, **named):
        seen.append(process._environment().get("TOOLKIT_DEBUG"))
        raise RecipeError("nothing")

    monkeypatch.delenv("TOOLKIT_DEBUG", raising=False)
    monkeypatch.setattr("toolkit.runs.stages.run", fails)
    for words, env in ((["--debug"], {}), ([], {}), ([], {"TOOLKIT_DEBUG": "1"})):
        found = CliRunner().invoke(app, ["ppo", "doubling", *words], env=env)
        assert isinstance(found.exception, RecipeError) == bool(words or env)
    assert seen == ["1", None, "1"] and "TOOLKIT_DEBUG" not in os.environ


_STARTS = """
import os, signal, sys, types
signal.signal(signal.SIGINT, signal.{was})
def app(prog_name):
    os.kill(os.getpid(), signal.SIGINT)
sys.modules["toolkit.cli"] = types.SimpleNamespace(app=app)
from toolkit.__main__ import main
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends processes otherwise")
@pytest.mark.parametrize(("was", "code"), [("default_int_handler", -signal.SIGINT), ("SIG_IGN", 0)])
def test_ctrl_c_before_a_command_has_begun_is_no_traceback(was, code):
    done = subprocess.run([sys.executable, "-c", _STARTS.format(was=was)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")


def test_ctrl_c_in_a_command_is_met_and_after_it_not(monkeypatch):
    seen = []
    monkeypatch.setattr("toolkit.recipes.show", lambda *_: seen.append(signal.getsignal(signal.SIGINT)) or "")
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        assert CliRunner().invoke(app, ["show"]).exit_code == 0
        assert seen == [signal.default_int_handler] and signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "words",
    [
        ("ppo", "--nonsense"),
        ("generate", "run", "--temperature", "nan"),
        ("generate", "run", "--temperature", "1e-300"),
        ("chat", "run", "--temperature", "inf"),
        ("generate", "run", "--seed", "-1"),
        ("generate", "run", "--seed", str(2**32)),
    ],
)
def test_an_argument_that_does_not_exist_or_cannot_be_ends_with_2(words):
    assert CliRunner().invoke(app, words).exit_code == 2


def test_memory_that_does_not_suffice_is_said(monkeypatch):
    def asked(*_):
        torch.empty(10**13)

    monkeypatch.setattr("toolkit.reports.environment", asked)
    done = CliRunner().invoke(app, ["env"])
    said = "ToolkitError: this machine's memory does not suffice for 40000000000000 bytes at once. Ask for less: "
    assert done.exit_code == 1 and done.stderr.startswith(said)
    of_card = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of …")
    monkeypatch.setattr("toolkit.reports.environment", lambda: raised(of_card))
    done = CliRunner().invoke(app, ["env"])
    said = "ToolkitError: the GPU's memory does not suffice for 2.50 GiB at once. Ask for less: "
    assert done.exit_code == 1 and done.stderr.startswith(said)
    monkeypatch.setattr("toolkit.reports.environment", lambda: raised(RuntimeError("another")))
    assert isinstance(CliRunner().invoke(app, ["env"]).exception, RuntimeError)


def raised(error):
    raise error


def test_a_terminal_that_lacks_a_sign_is_told_all_the_same(monkeypatch):
    monkeypatch.setattr("toolkit.spec.find.about", lambda name: "before → after")
    done = CliRunner(charset="cp1252").invoke(app, ["recipes"])
    assert done.exit_code == 0 and r"before \u2192 after" in done.stdout
    assert CliRunner(charset="iso8859-5").invoke(app, ["--help"]).exit_code == 0  # whose signs nothing replaces


@pytest.mark.parametrize(
    "tokens", [{"pad_token": None}, {"pad_token": "</s>"}, {"bos_token": "</s>", "pad_token": "</s>"}]
)
def test_tokenizers_without_pad_or_with_one_token_for_several_are_fine(tokens, tmp_path, monkeypatch):
    """No mask comes from ids: pad may be missing or be the end, and the beginning may be the end as OPT's is."""
    tokenizer = byte_tokenizer()
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
    save_llama(tmp_path / "model", tokenizer)
    (tmp_path / "rewards_for_test.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, llama())
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "runs" / "llama3_8b_lora" / "ppo" / "result.json").read_text())
    assert 1 <= result["after"]["length"] <= 4
