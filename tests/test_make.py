"""make hands on what it is given, and refuses what its target does not read; nothing is run."""

import os
import re
import subprocess
import sys
from itertools import product

from tests.test_versions import pins
from tests.tiny_runs import REPOSITORY

TARGETS = ("sft", "reward", "ppo", "collect", "q", "show", "validate", "plan", "chat", "generate", "eval", "judge")
TARGETS += (
    "export",
    "recipes",
    "test",
    "smoke",
    "bench",
    "bench-apart",
    "bench-slice",
    "bench-growth",
    "bench-agilerl",
    "bench-gpu",
)
NEEDED = {
    "export": ("OUTPUT=folder",),
    "bench": ("MODEL=model",),
    "bench-apart": ("MODEL=model",),
    "bench-slice": ("MODEL=model",),
    "bench-growth": ("MODEL=model",),
    "bench-agilerl": ("MODEL=model", "AGILERL=environment"),
}
BECOMES = {"OVERWRITE": "--overwrite", "RESUME": "--resume", "MERGE": "--merge", "CPU": "ATEN_CPU_CAPABILITY"}
"""By variable what is on the command; of others their value is."""


def dry(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"cwd": REPOSITORY, "capture_output": True, "text": True, "env": {**os.environ, **environment}}
    return subprocess.run(["make", "-n", "--no-print-directory", *words], check=False, **settings)


def test_a_variable_is_on_the_command_or_refused():
    names = re.search(r"the names are (.*?)\. Keys", dry("ppo", "LR=1").stderr)[1].split()
    assert {"GPU", "GPUS", "RECIPE", "VERSIONS"} < set(names)
    read = set()
    for target, name in product(TARGETS, [name for name in names if name not in ("PYTHON", "VENV", "VERSIONS")]):
        value = {"CPU": "plain", "OVERWRITE": "1", "RESUME": "1", "MERGE": "1"}.get(name, "odd-value")
        others = [word for word in NEEDED.get(target, ()) if not word.startswith(f"{name}=")]
        done = dry(target, *others, f"{name}={value}")
        if done.returncode == 0:
            read.add((target, name))
            assert BECOMES.get(name, value) in done.stdout, (target, name)
        else:
            assert f"make {target} does not read {name}, which is for make " in done.stderr, (target, name)
    assert {("ppo", "GPUS"), ("plan", "GPU"), ("export", "MERGE")} < read
    assert not {("ppo", "GPU"), ("plan", "GPUS"), ("generate", "RESUME")} & read


def test_tests_as_on_another_cpu_and_with_what_is_newer():
    assert "ATEN_CPU_CAPABILITY=default " in dry("test", "CPU=plain").stdout
    assert "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 " in dry("test", "CPU=avx2").stdout
    assert "ATEN" not in dry("test").stdout
    assert "CPU is plain or avx2" in dry("test", "CPU=old").stderr
    (newer,) = (line for line in dry("smoke").stdout.splitlines() if "--target" in line)
    assert f"trl=={pins('newest')['trl']}" in newer and (
        ("torch==" in newer) == (pins("newest")["torch"] != pins("pinned")["torch"])
    )


def test_the_run_of_a_file_has_its_name():
    for command, words in (("eval", ()), ("chat", ()), ("judge", ()), ("export", ("OUTPUT=folder",))):
        said = dry(command, "RECIPE=recipes/my.own.yaml", *words).stdout.replace('"', "")
        assert f"toolkit {command} my.own" in said and "my.own.yaml" not in said
        assert f'toolkit {command} "a|b"' in dry(command, "RECIPE=a|b.yaml", *words).stdout
        assert f'toolkit {command} "my own"' in dry(command, "RECIPE=its dir/my own.yml", *words).stdout
    assert 'toolkit eval "doubling"' in dry("eval", "RECIPE=doubling").stdout


def test_a_remark_in_set_takes_no_option_away():
    for words in (("ppo", "RUN=odd", "RESUME=1"), ("plan", "GPU=odd"), ("eval", "GPUS=8"), ("judge", "OUTPUT=odd")):
        alone, remarked = dry(*words).stdout, dry(*words, "SET=ppo.kl_coef=0.4 # more").stdout
        assert remarked.partition("#")[0].split() == [*alone.split(), "ppo.kl_coef=0.4"]


def test_what_make_and_the_shell_would_take_for_their_own_is_refused():
    assert "SET has a ${...} in it" in dry("ppo", "SET=data.seed=${seed}").stderr
    assert "base.model=" in dry("ppo", "SET=base.model=$(HOME)/model").stdout
    for name, value in (("RUN", "v$2"), ("MODEL", "/m/cash$money"), ("RECIPE", "a`b`.yaml"), ("FROM", 'a"b')):
        assert f"{name} has a " in dry("ppo", f"{name}={value}").stderr


def test_a_switch_is_1_or_not_given():
    for words in (("ppo", "OVERWRITE=no"), ("q", "RESUME=false"), ("export", "OUTPUT=folder", "MERGE=no")):
        name = words[-1].partition("=")[0]
        assert f"{name} is 1, or not given" in dry(*words).stderr
    assert "--overwrite" not in dry("ppo", "OVERWRITE=0").stdout


def test_what_the_shell_exports_is_another_s():
    assert dry("test", CPU="x86_64").stdout == dry("test").stdout != ""
    alone = dry("ppo")
    for name, value in {"OVERWRITE": "1", "RUN": "other", "SET": "ppo.kl_coef=9", "RECIPE": "other"}.items():
        found = dry("ppo", **{name: value})
        assert found.stdout == alone.stdout and f"does not read the exported {name}: give it after" in found.stderr
    assert "--overwrite" in dry("ppo", "OVERWRITE=1", OVERWRITE="0").stdout
    for name, value in {"VENV": "/another", "VERSIONS": "newest"}.items():  # clean would delete it
        found = dry("clean", **{name: value})
        assert found.stdout == dry("clean").stdout and f"does not read the exported {name}" in found.stderr


def test_an_environment_keeps_its_python(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    for version, refused in (("3.10", True), (".".join(map(str, sys.version_info[:2])), False)):
        python.write_text(f"#!/bin/sh\necho {version}\n")
        python.chmod(0o755)
        said = dry("test", f"VENV={tmp_path}", f"PYTHON={sys.executable}").stderr
        assert (f"{tmp_path} has Python 3.10 and {sys.executable} is 3." in said) == refused


def test_an_environment_that_is_there_is_not_made_again(tmp_path):
    (line,) = [line for line in dry("env", f"VENV={tmp_path}").stdout.splitlines() if " -m venv " in line]
    assert line == f"{tmp_path}/bin/python -m pip --version >/dev/null 2>&1 || python3 -m venv {tmp_path}"


def test_what_is_one_word_is_one_word():
    for name in ("VENV", "GPUS", "PROCESSES"):
        goal = "clean" if name == "VENV" else "ppo"
        assert f'{name} is one word, without spaces, and "4 2" is given' in dry(goal, f"{name}=4 2").stderr
    assert "GPUS and PROCESSES are two names of one number" in dry("ppo", "GPUS=4", "PROCESSES=2").stderr


def test_a_benchmark_says_what_it_needs():
    assert "make bench needs a checkpoint: add MODEL=/path/to/SmolLM2-135M-Instruct." in dry("bench").stderr
    assert "add AGILERL=/path/to/environment" in dry("bench-agilerl", "MODEL=model").stderr
    said = dry("bench-agilerl", "MODEL=model", "AGILERL=its/own").stdout
    assert 'benchmarks.run agilerl --model "model" --agilerl "its/own"' in said


def test_a_benchmark_of_the_cpu_does_not_take_the_precision_of_a_card():
    for kind in ("bench", "bench-slice", "bench-growth"):
        (line,) = [line for line in dry(kind, "MODEL=model").stdout.splitlines() if "benchmarks.run" in line]
        assert line.startswith("CUDA_VISIBLE_DEVICES= ")
