"""What a collection finds before its first batch, and a disk that fails between a batch and the reward's state."""

import errno
import json
import tracemalloc
from pathlib import Path

import pytest

from tests.tiny_runs import chat_recipe
from tests.trainers.helpers import Counting
from toolkit.errors import DataError, ToolkitError
from toolkit.reports import read_jsonl, write_jsonl
from toolkit.runs import collect
from toolkit.runs.result import rows_read, sources_read

ADAPTERS = {role: {"r": 4, "target_modules": "all-linear"} for role in ("policy", "value")}
BY_RULE = {
    "scorer": {"kind": "function", "function": "toolkit.rewards.rules:plain_words"},
    "reward": None,
    "adapters": ADAPTERS,
}


def test_a_reward_has_no_state_of_a_batch_that_is_not_written(tmp_path, checkpoint, monkeypatch):
    few = {"response_length": 4, "batch_size": 2, "max_prompts": 6}
    recipe = chat_recipe(tmp_path, checkpoint, collect=few, **BY_RULE)
    path, written = tmp_path / "responses.jsonl", []
    monkeypatch.setattr(collect.build, "make_reward", lambda *_: Counting())

    def full(file, mode="r", **how):
        if mode == "a":
            if written:
                raise OSError(errno.ENOSPC, "No space left on device")
            written.append(file)
        return opened(file, mode, **how)

    opened = Path.open
    with monkeypatch.context() as patch, pytest.raises(ToolkitError, match=r"No space left .*Make room"):
        patch.setattr(Path, "open", full)
        collect.collect(recipe, path)
    assert collect.collect(recipe, path)["responses"] == 6
    assert [row["rewards"][-1] for row in read_jsonl(path)] == [1, 1, 2, 2, 3, 3]  # its calls, as it counts them


def test_a_prompt_that_fills_the_positions_is_found_before_the_first_batch(tmp_path, checkpoint):
    prompts, path = tmp_path / "prompts.jsonl", tmp_path / "responses.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "a" * length}) + "\n" for length in (3, 4, 5, 6, 600)))
    data = {"task": "prompts", "train": str(prompts), "validation": str(prompts), "chat": False}
    sections = {**BY_RULE, "data": {**data, "max_prompt_length": 2000}}
    few = {"response_length": 4, "batch_size": 2}
    with pytest.raises(DataError, match="a prompt has 600 tokens, and the base has positions for 512. Shorten"):
        collect.collect(chat_recipe(tmp_path, checkpoint, collect=few, **sections), path)
    assert read_jsonl(tmp_path / "responses.jsonl.partial") == []
    asked = chat_recipe(tmp_path, checkpoint, "collect.max_prompts=4", collect=few, **sections)
    assert collect.collect(asked, path)["responses"] == 4


def test_a_collection_has_the_rows_of_the_prompts_that_it_answers(tmp_path, checkpoint):
    """And q, which learns from it, those and the held-out ones; each prompt once, however many pairs have it."""
    pairs = [{"prompt": f"p{n // 2}", "chosen": f"a{n}", "rejected": "b"} for n in range(8)]
    for name, rows in (("train", pairs), ("held_out", pairs[:3])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = {"train": str(tmp_path / "train.jsonl"), "validation": str(tmp_path / "held_out.jsonl")}
    of_q = {"collect": {"max_prompts": 3}, "q": {"max_steps": 1}, "ppo": None, "adapters": {"q": {"r": 4}}}
    recipe = chat_recipe(tmp_path, checkpoint, **{**BY_RULE, **of_q}, data={"task": "preferences", **sources})
    responses = recipe.stage_folder("collect") / "responses.jsonl"
    for stage, held_out in (("collect", []), ("q", [2, 3])):
        recipe.stage_folder(stage).mkdir(parents=True)
        read = rows_read(recipe, stage)
        assert sorted(read) == ["left_out"]
        named = {*sources.values(), *(["the run's collect/responses.jsonl"] if stage == "q" else [])}
        assert set(sources_read(recipe, stage)["sources"]) == named
        responses.write_text("collected")
        lines = [json.loads(line) for line in (recipe.stage_folder(stage) / "rows.jsonl").read_text().splitlines()]
        lines = [(row["split"], int(row["place"].rpartition(" ")[2])) for row in lines]
        assert lines == [("train", n) for n in (2, 4, 6)] + [("validation", n) for n in held_out]


def test_a_large_collection_is_not_held_in_memory(tmp_path):
    """Its figures, and, where it goes on, the check of its prompts and the cut behind its last whole batch."""
    path, number = tmp_path / "responses.jsonl", 20_000
    partial = collect.partial_file(tmp_path)
    texts = {"prompt": "p" * 200, "response": "r" * 200}
    ids = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5]}
    rows = ({**ids, **texts, "rewards": [None, None, float(i % 4)], "ended": i % 4 == 0} for i in range(number))
    write_jsonl(path, rows)
    whole = path.read_bytes()
    tracemalloc.start()
    try:
        figures = collect._figures(path, 2)
        assert collect._whole_batches(path, partial, 3, number) == 6667  # the last one is smaller
        written = partial.stat().st_ino
        collect._check_prompts(partial, {"input_ids": [[1, 2]] * (number // 2)}, 2)
        assert tracemalloc.get_traced_memory()[1] < len(whole) / 2
    finally:
        tracemalloc.stop()
    assert figures == {
        "responses": number,
        "score": 1.5,
        "score_se": pytest.approx(0.01, rel=1e-3),  # of pairs' means, 0.5 and 2.5: 1 / sqrt(10,000)
        "length": 3.0,
        "eos_share": 0.25,
    }
    assert collect._whole_batches(path, partial, 3, number) == 6667
    assert partial.stat().st_ino == written and partial.read_bytes() == whole
    partial.write_bytes(whole[:-1])  # a kill cut the last line short
    assert collect._whole_batches(path, partial, 3, number) == 6666
    assert partial.read_bytes() == b"".join(whole.splitlines(keepends=True)[:19_998])
