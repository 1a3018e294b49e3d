"""A collection whose disk fails between the responses of a batch and the state of its reward."""

import errno

import pytest

from tests.tiny_runs import chat_recipe
from tests.trainers.helpers import Counting
from toolkit.errors import ToolkitError
from toolkit.reports import read_jsonl
from toolkit.runs import collect

RULE = {"kind": "function", "function": "toolkit.rewards.rules:plain_words"}


def test_a_reward_has_no_state_of_a_batch_that_is_not_written(tmp_path, checkpoint, monkeypatch):
    adapters = {role: {"r": 4, "target_modules": "all-linear"} for role in ("policy", "value")}
    few = {"response_length": 4, "batch_size": 2, "max_prompts": 6}
    recipe = chat_recipe(tmp_path, checkpoint, collect=few, scorer=RULE, reward=None, adapters=adapters)
    path, written = tmp_path / "responses.jsonl", []
    monkeypatch.setattr(collect.build, "make_reward", lambda *_: Counting())

    def full(file, rows):
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(file)
        append(file, rows)

    append = collect.append_jsonl
    with monkeypatch.context() as patch, pytest.raises(ToolkitError, match=r"No space left .*Make room, then go on"):
        patch.setattr(collect, "append_jsonl", full)
        collect.collect(recipe, path)
    assert collect.collect(recipe, path)["responses"] == 6
    assert [row["rewards"][-1] for row in read_jsonl(path)] == [1, 1, 2, 2, 3, 3]  # its calls, as it counts them
