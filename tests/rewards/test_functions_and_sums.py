import asyncio
import builtins
import functools
import importlib
import inspect
import io
import json
import os
import pickle
import py_compile
import re
import sys
import threading
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny_models import tiny_model
from tests.tolerances import EXACT
from tests.trainers.helpers import Counting, rollout
from toolkit.errors import RewardError, RewardStateError
from toolkit.rewards import (
    DenseScores,
    RemoteReward,
    RemoteScorer,
    WeightedSum,
    check_reward,
    load_function,
    score_with,
    state_of,
)
from toolkit.rewards.function import beside, check_function

RESPONSES = [[12, 13, 2], [9, 9, 8, 8, 7, 7], [20, 2], [5, 6, 7]]
LENGTHS = [3.0, 6.0, 2.0, 3.0]


# ---------------------------------------------------------------------- a file


def test_a_function_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "statistics.py").write_text(  # an installed module has the same name
        "from dataclasses import dataclass\n\n@dataclass\nclass Rule:\n    factor: float = 1.0\n\n"
        "def brevity(rollout):\n    return [-Rule().factor * n for n in rollout.lengths]\n"
    )
    for name in ("statistics.py:brevity", f"{tmp_path}/statistics.py:brevity"):
        check_function(name)
        assert score_with(load_function(name), rollout(RESPONSES)).tolist() == [-n for n in LENGTHS]
    import statistics

    assert statistics.fmean([1, 2]) == 1.5  # the file took nobody's place


def test_a_file_is_run_once_for_all_that_is_taken_from_it(tmp_path):
    """It may hold a model."""
    path = tmp_path / "rules.py"
    path.write_text("MADE = object()\ndef a(rollout):\n    return MADE\ndef b(rollout):\n    return MADE\n")
    (tmp_path / "link.py").symlink_to(path)
    first, *others = [load_function(f"{tmp_path}/{name}") for name in ("rules.py:a", "rules.py:b", "link.py:a")]
    assert all(first(None) is other(None) for other in others)
    path.write_text("MADE = object()\nraise ValueError\ndef a(rollout):\n    return MADE\n")
    for _ in range(2):
        with pytest.raises(RewardError, match="cannot be loaded"):
            load_function(f"{path}:a")


def test_each_run_has_a_reward_with_a_state_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "norm_of_a_test.py"
    path.write_text(
        "import builtins\nbuiltins.RUN_IN_A_TEST = getattr(builtins, 'RUN_IN_A_TEST', 0) + 1\n"
        "class Norm:\n    seen = ()\n"
        "    def __call__(self, rollout):\n        self.seen += (1,)\n        return [0.0]\n"
        "    def state_dict(self):\n        return {}\n"
        "    def load_state_dict(self, state):\n        pass\nnorm = Norm()\n"
    )
    for number, place in enumerate((path, "norm_of_a_test")):
        check_function(f"{place}:norm")
        first = load_function(f"{place}:norm")
        assert 2 * number + 1 == builtins.RUN_IN_A_TEST  # it may hold a model
        first(None)
        second = load_function(f"{place}:norm")
        assert second is not first and second.seen == () and 2 * number + 2 == builtins.RUN_IN_A_TEST
    (tmp_path / "other_of_a_test.py").write_text("from norm_of_a_test import norm\n")
    monkeypatch.setattr(sys.modules["__main__"], "norm_of_a_test", type(second)(), raising=False)
    for name in ("other_of_a_test:norm", f"{tmp_path}/other_of_a_test.py:norm", "__main__:norm_of_a_test"):
        first = load_function(name)
        with pytest.warns(UserWarning, match=r"has the state in which an earlier run of this process has left it"):
            assert load_function(name) is first
    del builtins.RUN_IN_A_TEST


def test_a_changed_file_is_read_anew(tmp_path):
    path = tmp_path / "rule.py"
    for value in (1, 22):
        path.write_text(f"def rule(rollout):\n    return [{value}] * len(rollout)\n")
        assert score_with(load_function(f"{path}:rule"), rollout(RESPONSES)).tolist() == [value] * 4


@pytest.mark.parametrize(
    "mode", [py_compile.PycInvalidationMode.TIMESTAMP, py_compile.PycInvalidationMode.UNCHECKED_HASH]
)
def test_so_is_one_whose_compiled_file_seems_to_be_of_it(mode, tmp_path, monkeypatch):
    """Of the same size and second, or without a check: the digest of a run is of the text."""
    path = tmp_path / "rule.py"
    path.write_text("def rule(rollout):\n    return [1.0] * len(rollout)\n")
    then = path.stat().st_atime_ns, path.stat().st_mtime_ns
    py_compile.compile(str(path), invalidation_mode=mode)
    path.write_text(new := "def rule(rollout):\n    return [2.0] * len(rollout)\n")
    os.utime(path, ns=then)
    reward = load_function(f"{path}:rule")
    assert score_with(reward, rollout(RESPONSES)).tolist() == [2.0] * 4
    assert inspect.getsource(reward) == new and pickle.loads(pickle.dumps(reward)) is reward


def test_so_is_a_changed_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for value in (1, 22):
        (tmp_path / "rule_of_a_test.py").write_text(f"def rule(rollout):\n    return [{value}] * len(rollout)\n")
        assert score_with(load_function("rule_of_a_test:rule"), rollout(RESPONSES)).tolist() == [value] * 4
    import rule_of_a_test

    rule_of_a_test.rule.mark = "kept"  # run once as long as its text stays
    assert load_function("rule_of_a_test:rule").mark == "kept"
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "rule", rule_of_a_test.rule, raising=False)
    monkeypatch.setattr(main, "__file__", str(tmp_path / "rule_of_a_test.py"), raising=False)
    monkeypatch.setattr(main, "__text_read__", b"before", raising=False)  # nothing can run a script's text again
    assert load_function("__main__:rule").mark == "kept"


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled by another process"])
def test_so_is_one_that_a_notebook_has_imported_and_edited_and_no_other(compiled, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    sys.modules.pop("imported_by_hand", None)
    path = tmp_path / "imported_by_hand.py"
    text = "MODEL = None\ndef rule(rollout):\n    return [{}] * len(rollout)\n"
    path.write_text(text.format(1))
    module = importlib.import_module("imported_by_hand")
    module.MODEL = "of the notebook"
    load_function("imported_by_hand:rule")
    assert module.MODEL == "of the notebook"
    del sys.modules["imported_by_hand"]
    importlib.import_module("imported_by_hand")
    path.write_text(text.format(22))
    if compiled:
        py_compile.compile(str(path))
    assert score_with(load_function("imported_by_hand:rule"), rollout(RESPONSES)).tolist() == [22] * 4


@pytest.mark.parametrize("before", [b"\xef\xbb\xbf", b"# coding: latin-1\n# \xe9\n"], ids=["mark", "coding"])
def test_a_file_is_read_as_python_reads_it(before, tmp_path):
    path = tmp_path / "rule.py"
    path.write_bytes(before + b"def rule(rollout):\n    return [3] * len(rollout)\n")
    check_function(f"{path}:rule")
    assert score_with(load_function(f"{path}:rule"), rollout(RESPONSES)).tolist() == [3] * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r'no file "rule.py", looked for at .*rule.py'),
        ("def rule(:\n", r"rule.py"),
        ("other = 1\n", 'rule.py has no function "rule"'),
    ],
)
def test_a_file_that_cannot_be_used(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "rule.py").write_text(text)
    for find in (load_function, check_function):
        with pytest.raises(RewardError, match=message):
            find("rule.py:rule")


def test_a_check_reads_a_file_and_does_not_run_it(tmp_path):
    path = tmp_path / "rule.py"
    path.write_text(
        "raise RuntimeError('was run')\ntry:\n    from fast import rule\nexcept ImportError:\n    rule = len\n"
    )
    check_function(f"{path}:rule")
    with pytest.raises(RewardError, match=r"cannot be loaded: RuntimeError: was run \(.*rule.py, line 1\)"):
        load_function(f"{path}:rule")
    path.write_text("def rule(rollout, other, **named): ...\n")
    for find in (check_function, load_function):
        with pytest.raises(RewardError, match=r"missing a required argument: 'other' \(.*rule.py, line 1\)"):
            find(f"{path}:rule")
    # Of GRPO's, some would fail with the first rollout alone.
    for arguments in ("prompts, completions, **named", "completions, **named", "completions, answer"):
        path.write_text(f"def rule({arguments}): ...\n")
        for find in (check_function, load_function):
            with pytest.raises(RewardError, match=r"TRL's GRPOTrainer does \(.*rule.py, line 1\)\. Wrap it: docs"):
                find(f"{path}:rule")
    for arguments in ("queries, prompts, labels", "queries, prompts, labels, **kwargs"):
        path.write_text(f"def rule({arguments}): ...\n")
        for find in (check_function, load_function):
            with pytest.raises(RewardError, match=r"'prompts' .*rule.py, line 1\)\. Wrap it: docs"):
                find(f"{path}:rule")
    path.write_text("async def rule(rollout, /, *, needed, given=1): ...\n")
    with pytest.raises(RewardError, match="missing a required .*argument: 'needed'"):
        check_function(f"{path}:rule")
    for text in (
        "def rule(rollout, scale=2.0, *, more=1, **named): ...\n",
        "def rule(*rollouts): ...\n",
        "def rule(completions): ...\n",
        "def rule(rollout, completions=None, **named): ...\n",
        "def rule(a, b): ...\nrule = lambda rollout: a\n",  # what it is shows once it runs
        "def rule(a, b): ...\ndef rule(a): ...\n",
        "import functools\n@functools.cache\ndef rule(a, b): ...\n",
        "def rule(a, b): ...\nfrom x import y as rule\n",
        "def rule(a, b): ...\nglobals()['rule'] = lambda rollout: a\n",
    ):
        path.write_text(text)
        check_function(f"{path}:rule")
    path.write_text("from base_rules import *\n")
    check_function(f"{path}:rule")  # what that has is known once it runs
    path.write_text("import no_such_module_here\n")
    with pytest.raises(RewardError, match=r"rule.py cannot be loaded: .*'no_such_module_here' \(.*rule.py, line 1\)"):
        load_function(f"{path}:rule")  # as of its other errors, by file and line


def coming_from(what):
    """The block of the page in which that is said."""
    page = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")
    (lines,) = (x for x in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if what in x)
    return lines


OF_OPENRLHF = """import torch

asked = []


def reward_func(queries, prompts, labels):
    asked.append((queries, prompts, labels))
    return {"rewards": torch.arange(4.0), "scores": torch.zeros(4), "extra_logs": {}}
"""


def test_a_reward_function_of_openrlhf_is_wrapped_as_the_page_has_it(tmp_path, monkeypatch):
    for name, text in (("reward_func", OF_OPENRLHF), ("my_rewards", coming_from("def of_openrlhf"))):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setitem(sys.modules, name, None)  # and it is taken out again after the test
        del sys.modules[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    check_function("my_rewards:rewarded")
    rewarded, asked = load_function("my_rewards:rewarded"), sys.modules["reward_func"].asked
    check_reward(rewarded, "scorer")
    batch = replace(rollout(RESPONSES), prompts=list("abcd"), responses=list("wxyz"), gaps=["", " ", "", ""])
    for columns, labels in (({"answer": list("1234")}, list("1234")), ({"number": [1] * 4}, [""] * 4)):
        assert score_with(rewarded, replace(batch, columns=columns)).tolist() == [0, 1, 2, 3]
        assert asked.pop() == (["aw", "b x", "cy", "dz"], list("abcd"), labels)


def test_a_server_of_llama_factory_is_asked_as_the_page_has_it():
    asked = []
    exec(coming_from("def served"), made := {})

    def urlopen(request, timeout):
        asked.append((request.full_url, request.get_method(), request.headers, json.loads(request.data)))
        return io.BytesIO(b'{"scores": [0.5, 1, 1.5, 2]}')

    made["urlopen"] = urlopen
    check_reward(made["served"], "scorer")
    batch = replace(rollout(RESPONSES), prompts=list("abcd"), responses=list("wxyz"), gaps=["", " ", "", ""])
    assert score_with(made["served"], batch).tolist() == [0.5, 1, 1.5, 2]
    texts = {"model": "model", "messages": ["aw", "b x", "cy", "dz"]}
    assert asked == [(made["URL"], "POST", {"Content-type": "application/json"}, texts)]


def test_a_reward_function_of_grpo_is_wrapped_as_the_page_has_it():
    exec(coming_from("def of_grpo"), made := {})
    check_reward(made["thinks"], "scorer")
    check_reward(functools.wraps(made["think_format_reward"])(made["thinks"]), "scorer")
    for handed_on in (functools.cache, lambda f: functools.wraps(f)(lambda *a, **k: f(*a, **k))):
        with pytest.raises(RewardError, match="Wrap it: docs"):
            check_reward(handed_on(made["think_format_reward"]), "scorer")
    batch = replace(rollout(RESPONSES), responses=["<think>a</think>b", "<think>a", "b", "<think></think>"])
    asked = [[{"role": "user", "content": str(n)}] for n in range(4)]
    batch.columns.update(prompt=list("abcd"), messages=asked)
    assert score_with(made["thinks"], batch).tolist() == [1, 0, 0, 1]

    async def seen(prompts, completions, **named):
        given.append({"prompts": prompts, "completions": completions, **named})
        return [1.0] * 4

    given, reward = [], made["of_grpo"](seen)
    for columns in (batch.columns, {"number": [0, 1, 2, 3], "prompt": list("abcd")}, {"number": [0, 1, 2, 3]}):
        assert score_with(reward, replace(batch, columns=columns)).tolist() == [1] * 4
    said = [[{"role": "assistant", "content": text}] for text in batch.responses]
    ways = ((asked, said), (list("abcd"), batch.responses), (batch.prompts, batch.responses))
    also = {"completion_ids": RESPONSES, "number": [0, 1, 2, 3]}
    assert given == [{"prompts": prompts, "completions": completions, **also} for prompts, completions in ways]


def test_a_file_beside_the_recipe(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    (there / "rule.py").write_text("")
    assert beside("rule.py:f", there) == f"{there}/rule.py:f"
    assert beside("other.py:f", there) == "other.py:f" and beside("rule:f", there) == "rule:f"
    (here / "rule.py").write_text("")
    assert beside("rule.py:f", there) == "rule.py:f"  # the current folder's comes first


# ---------------------------------------------------------------------- async


class Slow:
    """Waits for all responses at once, and notes how often, and in which loop and thread, it was called."""

    def __init__(self):
        self.calls, self.loops, self.threads = 0, set(), set()

    async def __call__(self, rollout):
        self.calls += 1
        self.loops.add(id(asyncio.get_running_loop()))
        self.threads.add(threading.current_thread())
        return await asyncio.gather(*(self.one(n) for n in rollout.lengths))

    async def one(self, length):
        await asyncio.sleep(0.001 * (10 - length))
        return float(length)


def test_an_async_reward_is_awaited_once_for_the_whole_rollout():
    slow = Slow()
    for _ in range(2):
        assert score_with(slow, rollout(RESPONSES)).tolist() == LENGTHS
    # One loop for all calls: an HTTP session belongs to the loop that it was made in.
    assert slow.calls == 2 and len(slow.loops) == 1


def test_an_async_reward_in_a_running_loop():
    """As in a notebook, whose main thread runs one."""
    slow = Slow()

    async def cell():
        return score_with(slow, rollout(RESPONSES)).tolist()

    assert asyncio.run(cell()) == LENGTHS and threading.current_thread() not in slow.threads


def test_an_async_reward_may_call_others():
    """Which cannot be waited for in the loop that it runs in itself."""
    inner, found = WeightedSum({"slow": Slow(), "length": lambda r: r.lengths}), []

    async def middle(batch):
        return inner(batch)

    async def outer(batch):
        return score_with(middle, batch) + 1

    asked = threading.Thread(target=lambda: found.append(score_with(outer, rollout(RESPONSES))), daemon=True)
    asked.start()
    asked.join(timeout=20)
    assert found and found[0].tolist() == [2 * n + 1 for n in LENGTHS]


def test_an_async_function_of_a_file_that_fails(tmp_path):
    path = tmp_path / "judge.py"
    path.write_text("import asyncio\n\nasync def judge(rollout):\n    await asyncio.sleep(0)\n    return 1 / 0\n")
    check_function(f"{path}:judge")
    with pytest.raises(RewardError, match=r"the reward raised ZeroDivisionError: .*judge.py, line 5"):
        score_with(load_function(f"{path}:judge"), rollout(RESPONSES))


def test_prompts_without_a_column_that_a_reward_reads_are_told(tmp_path):
    """As where a run's reward scores the answers to other prompts."""
    batch, path = replace(rollout(RESPONSES), columns={"topic": ["x"] * len(RESPONSES)}), tmp_path / "judge.py"
    for read, said in (
        ('rollout.columns["answer"]', r"Mend it there, or give prompts with a column \"answer\": these have topic\.$"),
        ('{}["answer"]', r"Mend it there\.$"),
    ):
        path.write_text(f"def judge(rollout):\n    return {read}\n")
        with pytest.raises(RewardError, match=rf"the reward raised KeyError: 'answer' \(.*judge.py, line 2\)\. {said}"):
            score_with(load_function(f"{path}:judge"), batch)


async def asks(batch):
    return batch.lengths


async def exits(batch):
    sys.exit(3)


async def exits_in_a_task(batch):
    return await asyncio.gather(*(exits(batch) for _ in range(2)))


async def is_interrupted(batch):
    raise KeyboardInterrupt


async def stops_the_loop(batch):
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)
    return batch.lengths


async def is_cancelled(batch):
    asyncio.current_task().cancel()
    await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("ends", "error", "said"),
    [
        (exits, RewardError, r"the reward raised SystemExit: 3 \(.*test_functions_and_sums.py, line \d+\)"),
        (exits_in_a_task, RewardError, "the reward raised SystemExit: 3"),
        (lambda batch: sys.exit("enough"), RewardError, "the reward raised SystemExit: enough"),
        (is_interrupted, KeyboardInterrupt, None),
        (is_cancelled, RewardError, "the reward raised CancelledError"),
    ],
)
def test_one_that_ends_the_process_leaves_nobody_waiting(ends, error, said):
    for _ in range(2):
        with pytest.raises(error, match=said):
            score_with(ends, rollout(RESPONSES))
        assert score_with(asks, rollout(RESPONSES)).tolist() == LENGTHS
        assert score_with(stops_the_loop, rollout(RESPONSES)).tolist() == LENGTHS


def test_the_line_that_is_named_is_the_users_own(tmp_path):
    """Neither the standard library's nor torch's, where the error is raised."""
    path = tmp_path / "rule.py"
    path.write_text(
        "import json\nimport torch\n\ndef parses(rollout):\n    return json.loads(rollout.responses[0] + '{')\n\n"
        "def adds(rollout):\n    return torch.nn.functional.linear(torch.ones(3), torch.ones(2, 2))\n"
    )
    for name, line in (("parses", 5), ("adds", 8)):
        with pytest.raises(RewardError, match=rf"\({re.escape(str(path))}, line {line}\)\. Mend it there"):
            score_with(load_function(f"{path}:{name}"), rollout(RESPONSES))
    with pytest.raises(RewardError, match=r"\(.*json.decoder.py, line \d+\)"):  # where there is none of the user's
        score_with(json.JSONDecoder().decode, rollout(RESPONSES))


# ---------------------------------------------------------------------- sums


def test_a_weighted_sum_by_hand():
    async def ended(rollout):
        return rollout.ended

    parts = {"length": lambda r: r.lengths, "ended": ended, "seen": lambda r: torch.tensor([1.0, 2, 3, 4])}
    both = WeightedSum(parts, {"length": -0.5, "ended": 10.0, "seen": 0.0})
    scores = score_with(both, rollout(RESPONSES))
    torch.testing.assert_close(scores, torch.tensor([-1.5 + 10, -3.0, -1 + 10, -1.5]), **EXACT)
    assert {name: part.tolist() for name, part in both.last_parts.items()} == {
        "length": LENGTHS, "ended": [1, 0, 1, 0], "seen": [1, 2, 3, 4],
    }  # fmt: skip
    assert WeightedSum({"a": lambda r: r.lengths})(rollout(RESPONSES)).tolist() == LENGTHS
    served = RemoteReward("http://127.0.0.1:9/score", weight=0.0)
    assert WeightedSum({"a": ended, "b": served}).weights == {"a": 1.0, "b": 0.0}
    assert WeightedSum({"b": served}, {"b": 2}).weights == {"b": 2.0}


def test_a_sum_less_the_spread_of_its_parts():
    """Of parts that have a weight and a mean score, beyond this, by NumPy's standard deviation."""

    class Rated:
        def __init__(self, mean_score, scores):
            self.mean_score, self.scores = mean_score, scores

        def __call__(self, batch):
            return self.scores

    given = {"a": [1.0, 2.0, 3.0, 4.0], "b": [1.0, 4.0, -3.0, 4.5], "seen": [9.0] * 4, "rule": [50.0, -50.0, 0.0, 9.0]}
    levels = {"a": 0.5, "b": -2.0, "seen": 1.0}
    parts = {name: Rated(levels[name], given[name]) for name in levels} | {"rule": Rated(None, given["rule"])}
    parts["rule"].scores_class = True  # as rewards of classes have, whose level says nothing
    weights = {"a": 0.25, "b": 0.75, "seen": 0}
    spread = np.std([np.array(given[name]) - levels[name] for name in "ab"], axis=0)
    plain = 0.25 * np.array(given["a"]) + 0.75 * np.array(given["b"]) + np.array(given["rule"])
    for coef in (1.5, 0.0):
        both = WeightedSum(parts, weights, spread_coef=coef)
        scores = score_with(both, rollout(RESPONSES))
        torch.testing.assert_close(scores, torch.tensor(plain - coef * spread, dtype=torch.float32), **EXACT)
        torch.testing.assert_close(both.last_parts["spread"], torch.tensor(spread, dtype=torch.float32), **EXACT)
    without = WeightedSum(parts, weights)
    assert score_with(without, rollout(RESPONSES)).tolist() == plain.tolist() and "spread" not in without.last_parts

    tokens = DenseScores(tokens=[[0.5] * int(n) for n in LENGTHS])
    both = WeightedSum({"a": parts["a"], "tokens": Rated(1.0, tokens)}, spread_coef=2.0)
    dense = score_with(both, rollout(RESPONSES))
    spread = np.std([np.array(given["a"]) - 0.5, [n / 2 - 1 for n in LENGTHS]], axis=0)
    expected = torch.tensor(np.array(given["a"]) - 2 * spread, dtype=torch.float32)
    torch.testing.assert_close(dense.scores, expected, **EXACT)
    assert [row.tolist() for row in dense.tokens] == [[0.5] * int(n) for n in LENGTHS]

    with pytest.raises(
        RewardError, match="^spread_coef: would have no effect: a spread needs two or more parts with a weight"
    ):
        WeightedSum({"a": parts["a"], "rule": parts["rule"]}, spread_coef=1.0)
    with pytest.raises(RewardError, match="^parts.c: its mean score is not known"):
        WeightedSum({"a": parts["a"], "c": Rated(None, given["b"])}, spread_coef=1.0)
    with pytest.raises(RewardError, match='^spread_coef: logs the spread of the scores as "spread", which a part is'):
        WeightedSum({"spread": parts["a"], "b": parts["b"]}, spread_coef=0.0)


def test_a_part_without_a_weight_makes_no_sum_dense():
    seen = DenseScores(tokens=[[0.5] * int(n) for n in LENGTHS])
    both = WeightedSum({"plain": lambda r: r.lengths, "seen": lambda r: seen}, {"seen": 0.0})
    assert score_with(both, rollout(RESPONSES)).tolist() == LENGTHS
    assert both.last_parts["seen"].tolist() == [n / 2 for n in LENGTHS]
    alone = WeightedSum({"seen": lambda r: seen}, {"seen": 0.0})
    assert score_with(alone, rollout(RESPONSES)).tolist() == [0.0] * 4


def test_a_part_that_fails_is_named():
    huge = WeightedSum(dict.fromkeys("ab", lambda r: [3e38] * 4))
    with pytest.raises(RewardError, match="^weights: the reward gave inf to the response"):
        huge(rollout(RESPONSES))
    both = WeightedSum({"fine": lambda r: r.lengths, "bad": lambda r: [float("nan")] * 4})
    with pytest.raises(RewardError, match="^parts.bad: the reward gave nan to the response"):
        score_with(both, rollout(RESPONSES))
    assert both.last_parts == {}
    with pytest.raises(RewardError, match=r"^parts\.served: a function of a rollout is needed, got RemoteScorer"):
        WeightedSum({"served": RemoteScorer(url="http://127.0.0.1:9/score")})  # the settings of one
    with pytest.raises(RewardError, match="a sum has no part fin; it has fine"):
        WeightedSum({"fine": lambda r: r.lengths}, {"fin": 2.0})
    with pytest.raises(RewardError, match="a sum needs at least one part"):
        WeightedSum({})


def test_the_state_of_the_parts_is_the_sums():
    parts = {"counting": Counting(), "plain": lambda r: r.lengths, "network": torch.nn.Linear(1, 1)}
    both = WeightedSum(parts)
    parts["counting"](rollout(RESPONSES))
    assert both.state_dict() == {"counting": {"calls": 1}}
    other = WeightedSum({"counting": Counting(), "plain": lambda r: r.lengths})
    other.load_state_dict(both.state_dict())
    assert other(rollout(RESPONSES)).tolist() == [2 + n for n in LENGTHS]
    other.load_state_dict({})  # of a sum none of whose parts had one
    assert other.state_dict() == {"counting": {"calls": 2}}


def test_a_class_is_told_of_before_it_is_called(tmp_path):
    """Its methods would be there, and lack the object that they are of."""
    path = tmp_path / "classes.py"
    path.write_text(
        "class Mean:\n    def __init__(self, momentum=0.9):\n        pass\n"
        "    def __call__(self, rollout):\n        return [0.0] * len(rollout)\n"
        "    def state_dict(self):\n        return {}\n    def load_state_dict(self, state):\n        pass\n"
        "reward = Mean()\n"
    )
    told = r"function: Mean is a class, and an object is needed, or a function \(.*, line 1\)\. Make one, by reward = "
    with pytest.raises(RewardError, match=told):
        check_function(f"{path}:Mean")
    check_function(f"{path}:reward")
    model = tiny_model("gpt2")
    with pytest.raises(RewardError, match=f"reward: a {type(model).__name__} takes token ids .* Give RewardModel"):
        check_reward(model, "reward")
    with pytest.raises(RewardError, match="reward: Fraction is a class, and an object is needed"):
        check_reward(Fraction, "reward")


class Failing:
    def __call__(self, rollout):
        return [0.0] * len(rollout)

    def state_dict(self):
        return self.missing

    def load_state_dict(self, state):
        raise ValueError(f"not {state}")


def test_an_error_of_a_reward_s_state_has_its_place():
    state = state_of(Failing())
    with pytest.raises(
        RewardStateError, match=r"state_dict of the reward raised AttributeError: .*missing.*test_fun.*, line"
    ):
        state.state_dict()
    with pytest.raises(
        RewardStateError, match=r"load_state_dict of the reward raised ValueError: not 3 \(.*test_functions"
    ):
        state_of(WeightedSum({"a": Failing()}, {"a": 1.0})).load_state_dict({"a": 3})
