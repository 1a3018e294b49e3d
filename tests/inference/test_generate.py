"""Responses to prompts of all kinds, by the command line and from Python."""

import contextlib
import errno
import itertools
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import TextStreamer

from tests.tiny_runs import command_here
from toolkit import processes, recipes
from toolkit.errors import ColumnError, DataError, RewardError, SelfCheckError, ToolkitError, printable
from toolkit.inference import evaluate as evaluation
from toolkit.inference.evaluate import evaluate
from toolkit.inference.generate import converse, generate, generate_best, prompts_of, respond
from toolkit.inference.judge import judge
from toolkit.inference.saved_run import open_run, trained_sampler
from toolkit.models import SharedBase
from toolkit.reports import read_jsonl
from toolkit.sampling import Sampler, best_of


def test_the_best_of_several_responses(trained, tmp_path):
    folder, _ = trained
    done = command_here(
        "generate", "chat", "Hello", "Bye", "--num-samples", "4", "--temperature", "1.5", "--output",
        tmp_path / "out.jsonl", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(len(row["candidates"]) == 4 for row in rows)
    for row in rows:
        best = max(row["candidates"], key=lambda candidate: candidate["score"])
        assert row["policy"] == best["response"] and row["score"] == best["score"]
    assert "the best of 4" in done.stdout and "KL at most" in done.stdout and "0.6363" in done.stdout
    means = [sum(c["score"] for c in row["candidates"]) / 4 for row in rows]
    assert f"{sum(means) / 2:.4f}" in done.stdout and f"{sum(row['score'] for row in rows) / 2:.4f}" in done.stdout
    refused = command_here("generate", "chat", "Hello", "--num-samples", "4", "--compare", cwd=folder)
    assert refused.returncode == 1 and "leave out --compare" in refused.stderr


def test_the_best_of_several_may_be_longer_than_training_allowed(trained, monkeypatch):
    folder, recipe = trained
    lengths, few = [], len(recipe.task.prompt_ids([{"role": "user", "content": "Hi"}])) + 3

    def noted(*arguments, **named):
        sampled = best_of(*arguments, **named)
        lengths.extend(sampled.candidates.lengths)
        return sampled

    monkeypatch.chdir(folder)  # where its reward is found
    monkeypatch.setattr("toolkit.inference.generate.best_of", noted)
    monkeypatch.setattr(SharedBase, "stop_token_ids", lambda self, tokenizer: [len(tokenizer)])  # nothing ends
    generate_best(open_run("chat", f"ppo.max_length={few}", "ppo.response_length=8"), num_samples=2, texts=["Hi"])
    assert lengths == [8, 8]


def test_a_file_that_is_not_there_is_told_of_before_anything_is_loaded(trained, monkeypatch):
    monkeypatch.setattr("toolkit.runs.build.placed_roles", lambda *_, **__: pytest.fail("it was loaded"))
    for ask in (generate, partial(generate_best, num_samples=2)):
        with pytest.raises(DataError, match="typo.jsonl: there is no such file"):
            ask(trained[1], file=Path("typo.jsonl"))


def test_a_reward_that_lacks_a_column_of_given_prompts_says_what_to_give(trained, monkeypatch):
    def lacks(*_, **__):
        raise ColumnError('the prompts have no column "style"; present: prompt.', field="class_column")

    monkeypatch.chdir(trained[0])  # where its reward is found
    monkeypatch.setattr("toolkit.inference.generate.best_of", lacks)
    with pytest.raises(RewardError, match="^scorer.class_column: .*name a .jsonl file with it, or no prompts.$"):
        generate_best(open_run("chat"), num_samples=2, texts=["Hi"])
    with pytest.raises(RewardError, match="present: prompt.$"):
        generate_best(open_run("chat"), num_samples=2, number=1)


def test_each_prompt_has_its_best_score_and_its_mean_beside_it(trained, monkeypatch):
    """Of scores that count up over all that is sampled."""
    folder, _ = trained
    counted, shown = itertools.count(), []

    def by_count(*arguments, reward, **named):
        return best_of(*arguments, reward=lambda rollout: [float(next(counted)) for _ in rollout.lengths], **named)

    monkeypatch.chdir(folder)  # where its reward is found
    monkeypatch.setattr("toolkit.inference.generate.best_of", by_count)
    monkeypatch.setattr("toolkit.inference.generate.texts_table", lambda rows, *_, **__: shown.extend(rows) or "")
    generate_best(open_run("chat"), num_samples=2, texts=["Hi", "Bye"])
    assert [row["score: best, mean"] for row in shown] == ["1.000, 0.500", "3.000, 2.500"]


def test_answers_are_on_the_disk_before_they_are_shown(trained, tmp_path, monkeypatch):
    """And in a file that nothing can replace, as one that is a mount of its own."""
    (output := tmp_path / "out.jsonl").touch()

    def fails(error):
        raise error

    monkeypatch.setattr("toolkit.inference.generate.Output.print", lambda *_: fails(BrokenPipeError()))
    monkeypatch.setattr(Path, "replace", lambda *_: fails(OSError(errno.EBUSY, "Device or resource busy")))
    with pytest.raises(BrokenPipeError):  # as by a pager that is quit
        generate(trained[1], number=2, output=output)
    assert len(output.read_text().splitlines()) == 2


def test_generate_shows_and_writes_both(trained, tmp_path):
    folder, _ = trained
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Is it late?\n")
    done = command_here(
        "generate", "chat", "Hello", "--file", prompts, "--compare", "--output", tmp_path / "out.jsonl", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["Hello", "Is it late?"]
    assert all(row.keys() == {"prompt", "policy", "reference"} for row in rows)
    assert "policy" in done.stdout and "reference" in done.stdout
    assert len(generate(open_run("chat", runs_dir=folder / "runs"), number=3)) == 3


def answered(folder, output, page):
    with contextlib.chdir(folder):  # where its reward is found
        changes = ("ppo.temperature=1.3", "judge.kind=function", "judge.function=shorter_for_test:rule")
        recipe = open_run("chat", *changes)
        rows = generate(recipe, number=6, compare=True, temperature=1.3, seed=5, output=output)
        best = generate_best(recipe, number=3, num_samples=3, seed=5)
        assert [row["prompt"] for row in best] == [one.text for one in prompts_of(recipe, (), None, 3)]
        return rows, best, evaluate(recipe)["after"], judge(["chat"], *changes, output=page)["chat"]["after"]


def test_several_processes_answer_and_measure_as_one(trained, two, tmp_path):
    folder, _ = trained
    rows, best, figures, judged = answered(folder, None, tmp_path / "alone.html")
    assert len({row["policy"] for row in rows}) > 1 and figures["judge"] == figures["score"] == judged["judge"]
    for found, found_best, measured, asked in two(answered, folder, tmp_path / "out.jsonl", tmp_path / "both.html"):
        assert found == rows and [row["policy"] for row in found_best] == [row["policy"] for row in best]
        assert measured == pytest.approx(figures, rel=1e-3, abs=1e-3)
        assert asked == pytest.approx(judged, rel=1e-3, abs=1e-3)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 6


def measured_by_another(folder):
    """What a process says of a policy that is another one on the second machine."""
    load = evaluation.load_weights

    def of_this_machine(roles, role, path):
        load(roles, role, path)
        if processes.rank():
            with torch.no_grad():
                roles.parameters_of(role)[0].mul_(1.5)

    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "load_weights", of_this_machine)
        try:
            evaluation.measured(open_run("chat"))
        except SelfCheckError as error:
            return str(error)


def test_several_processes_measure_the_same_policy(trained, two):
    folder, _ = trained
    said = "the processes do not begin with the same adapters. Give all machines the same settings, checkpoint"
    assert all(one is not None and said in one for one in two(measured_by_another, folder))


def open_nowhere(runs):
    return open_run("nowhere", runs_dir=runs)


def test_a_run_that_is_not_there_is_told_once(trained, two):
    folder, _ = trained
    (whole, first), (_, second) = two.answers(open_nowhere, folder / "runs")
    assert not whole and first.splitlines()[-1].startswith("toolkit.errors.RecipeError")
    assert second.splitlines()[-1].startswith("toolkit.errors.PeerError: process 0 of 2: RecipeError")


def test_a_file_of_prompts_has_the_columns_of_the_recipe_s_data(trained, tmp_path):
    _, recipe = trained
    asked = recipe.values["data"] | {"columns": {"prompt": "question"}}
    recipe = replace(recipe, values={**recipe.values, "data": asked})
    path = tmp_path / "ask.csv"
    path.write_text("question,topic\nCapital?,towns\n")
    (asked,) = prompts_of(recipe, (), path, 5)
    ids = recipe.task.prompt_ids([{"role": "user", "content": "Capital?"}])
    read = {"prompt": recipe.tokenizer.decode(ids), "messages": [{"role": "user", "content": "Capital?"}]}
    assert asked.text == "Capital?" and asked.row == {
        "topic": "towns",
        "input_ids": list(ids),
        **read,
    }  # as in training
    assert [one.row for one in prompts_of(recipe, ["Capital?"], None, 5)] == [{"input_ids": list(ids), **read}]
    other = tmp_path / "ask.jsonl"
    other.write_text('{"prompt": "a", "style": 1, "topic": "x"}\n{"prompt": "b", "style": 2}\n')
    both = [one.row for one in prompts_of(recipe, (), other, 5)]
    assert [(row["style"], row["topic"]) for row in both] == [(1, "x"), (2, None)]  # as in training
    path.write_text("question,topic\nCapital?,towns\n")
    assert [one.row["topic"] for one in prompts_of(recipe, ["Hi"], path, 5)] == [None, "towns"]
    path.write_text("query,question\nRiver?,Capital?\n")
    assert [one.text for one in prompts_of(recipe, (), path, 5)] == ["Capital?"]  # and no other
    path.write_text("prompt,topic\nRiver?,towns\n")  # and those that every file may have
    assert [one.text for one in prompts_of(recipe, (), path, 5)] == ["River?"]


@pytest.mark.parametrize("respond_to", [generate, partial(generate_best, num_samples=2)], ids=["one", "the best"])
def test_a_prompt_without_room_is_named_before_anything_is_answered(respond_to, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(trained[0])  # where its reward is found
    monkeypatch.setattr(Sampler, "__call__", lambda *_, **__: pytest.fail("it was answered"))
    path = tmp_path / "ask.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hi", "x" * 600)))
    with pytest.raises(DataError, match=r"ask.jsonl, line 2: a prompt has \d+ tokens, and the base has positions for"):
        respond_to(open_run("chat"), file=path)
    with pytest.raises(DataError, match=r'the prompt "xxx.*": a prompt has \d+ tokens'):
        respond_to(open_run("chat"), texts=["Hi", "x" * 600])


def test_a_file_s_prompts_are_read_as_those_that_were_trained_on(trained, tmp_path):
    _, recipe = trained
    turns = [("user", "A river?"), ("assistant", "The Rhine."), ("user", "Another?")]
    dialogue = "\n\nHuman: A river?\n\nAssistant: The Rhine.\n\nHuman: Another?\n\nAssistant:"
    rows = [{"prompt": dialogue}, {"input_ids": [5, 6, 7]}, {"prompt": [{"role": "user", "content": "Hi"}]}]
    path = tmp_path / "ask.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = prompts_of(recipe, (), path, 5)
    tokenizer, chat = recipe.tokenizer, [{"role": role, "content": text} for role, text in turns]
    written = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert asked[0].row["input_ids"] == tokenizer.encode(written, add_special_tokens=False)
    assert asked[1].row["input_ids"] == [5, 6, 7]
    assert [one.text for one in asked] == ["Another?", tokenizer.decode([5, 6, 7]), "Hi"]
    pair = [{"chosen": f"{dialogue} The {river}.", "rejected": f"{dialogue} No."} for river in ("Elbe", "Ems")]
    path.write_text("".join(json.dumps(row) + "\n" for row in pair))
    assert [(one.text, one.row) for one in prompts_of(recipe, (), path, 5)] == [
        ("Another?", {"input_ids": asked[0].row["input_ids"], "prompt": written, "messages": chat})
    ] * 2
    # What has a prompt of its own is asked that, whatever the responses beside it are.
    beside = {"chosen": "Yes.", "rejected": "Yes.", "answer": 3}
    path.write_text(json.dumps({"prompt": dialogue, **beside}) + "\n")
    (own,) = prompts_of(recipe, (), path, 5)
    assert own.row == {**asked[0].row, **beside}
    path.write_text(json.dumps({"system": "Be brief.", **pair[0]}) + "\n")
    with pytest.raises(DataError, match=r"ask.jsonl, line 1: .*system"):  # which training leaves out, too
        prompts_of(recipe, (), path, 5)
    path.write_text(json.dumps({"chosen": f"{dialogue} No.", "rejected": f"{dialogue} No."}) + "\n")
    with pytest.raises(DataError, match=r"ask.jsonl, line 1: chosen and rejected are equal. Mend or remove the row."):
        prompts_of(recipe, (), path, 5)
    path.write_text('{"prompt": ""}\n')
    with pytest.raises(DataError, match=r"ask.jsonl, line 1: an empty prompt. Mend or remove the row."):
        prompts_of(recipe, (), path, 5)
    path.write_text("")
    with pytest.raises(DataError, match=r"ask.jsonl"):
        prompts_of(recipe, (), path, 5)


def test_a_setting_is_no_prompt(trained, tmp_path):
    """Of a run whose base has moved it is the way to use it; one of training would have no effect."""
    said = command_here("generate", "chat", "ppo.temperature=0.5", cwd=trained[0]).stderr
    assert '"ppo.temperature=0.5" is a setting of training, which is done. Options say how responses are' in said
    shutil.copytree(trained[1].base_path, moved := tmp_path / "another place")
    file, now = tmp_path / "out.jsonl", f"base.model={moved}"
    done = command_here("generate", "chat", "Why?", now, "--max-new-tokens", 3, "--output", file, cwd=trained[0])
    assert done.returncode == 0 and [row["prompt"] for row in read_jsonl(file)] == ["Why?"], done.stderr
    assert done.stdout.endswith(f"written: {file}\n")
    (tmp_path / "my prompts.jsonl").write_text('{"prompt": "How?"}\n')  # with a space in its name
    read = f"data.validation={tmp_path / 'my prompts.jsonl'}"
    words = (now, "data.task=prompts", read, "--max-new-tokens", 3, "--output", file)
    done = command_here("generate", "chat", *words, cwd=trained[0])
    assert done.returncode == 0 and [row["prompt"] for row in read_jsonl(file)] == ["<s>How?</s><s>"], done.stderr
    said = command_here("export", "chat", tmp_path / "out", "base.model=/nowhere/at/all", cwd=trained[0]).stderr
    assert "base.model" in said and "there is no such folder" in said
    for word in ("ppo.temperature=0.5", "seed=7", "adapters[policy]={r: 4}"):
        assert "is a setting of training" in command_here("chat", "chat", word, cwd=trained[0]).stderr
    said = command_here("chat", "chat", "bas.model=/x", cwd=trained[0]).stderr
    assert "bas — no such section. Did you mean base?" in said


def test_the_best_of_one_is_sampled_and_scored(trained, tmp_path):
    """As the best of more is: the beginning of a curve."""
    file = tmp_path / "out.jsonl"
    done = command_here("generate", "chat", "--number", 1, "--num-samples", 1, "--output", file, cwd=trained[0])
    assert done.returncode == 0, done.stderr
    (row,) = read_jsonl(file)
    assert len(row["candidates"]) == 1 and row["score"] == row["candidates"][0]["score"]


@pytest.mark.parametrize("respond_to", [generate, partial(generate_best, num_samples=2)], ids=["one", "the best"])
def test_prompts_are_not_written_over(respond_to, trained, tmp_path, monkeypatch):
    monkeypatch.setattr("toolkit.runs.build.placed_roles", lambda *_, **__: pytest.fail("it was loaded"))
    file = tmp_path / "prompts.txt"
    file.write_text("5x2=\n")
    (tmp_path / "same.txt").symlink_to(file)
    for output in (file, tmp_path / "same.txt"):
        with pytest.raises(
            ToolkitError, match="is the file of the prompts, which would be overwritten. Name another one"
        ):
            respond_to(trained[1], file=file, output=output)
    assert file.read_text() == "5x2=\n"
    recipe = trained[1]
    for own in (recipe.folder / "recipe.yaml", recipe.stage_folder("ppo") / "metrics.jsonl"):
        before = own.read_text()
        with pytest.raises(ToolkitError, match="is a file of the run .*, and would be overwritten"):
            respond_to(recipe, output=own)
        assert own.read_text() == before


def test_a_streamed_response_is_the_response(trained):
    _, recipe = trained
    sampler = trained_sampler(recipe, temperature=0.0, max_new_tokens=5)
    row = {"input_ids": recipe.task.prompt_ids([{"role": "user", "content": "Hi"}])}

    class Kept(TextStreamer):
        text = ""

        def on_finalized_text(self, text, stream_end=False):
            self.text += text

    kept = Kept(recipe.tokenizer, skip_prompt=True, skip_special_tokens=True)
    sampler(sampler.collator([row]), streamer=kept)
    assert respond(sampler, [row]) == [kept.text]


def test_each_of_many_prompts_is_answered():
    class Echo:
        collator = list

        def __call__(self, rows):
            return SimpleNamespace(responses=[f"{row['input_ids']}" for row in rows])

    assert respond(Echo(), [{"input_ids": n} for n in range(19)]) == [f"{n}" for n in range(19)]


def test_a_conversation_is_remembered_until_reset(trained, capsys):
    _, recipe = trained
    sampler = trained_sampler(recipe, temperature=0.0, max_new_tokens=4)
    asked = []
    real = type(recipe.task).prompt_ids

    def watched(self, messages):
        asked.append([(m["role"], m["content"]) for m in messages])
        return real(self, messages)

    lines = iter(["Hi", "", "/compare", "And you?", "/nonsense", "/reset", "Again", "/quit", "never read"])
    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(recipe.task), "prompt_ids", watched)
        converse(recipe, sampler, read=lambda _: next(lines), write=shown.append)
    (response,) = respond(sampler, [{"input_ids": recipe.task.prompt_ids([{"role": "user", "content": "Hi"}])}])
    assert asked == [
        [("user", "Hi")],
        [("user", "Hi"), ("assistant", response), ("user", "And you?")],
        [("user", "Again")],
    ]
    assert shown.count("[policy]") == 2 and shown.count("[reference]") == 2  # from /compare on
    assert "no command /nonsense; there are /reset, /compare and /quit" in shown
    assert printable(response) in capsys.readouterr().out  # streamed
    assert shown.count(f"(cut at {sampler.response_length} tokens; a larger --max-new-tokens lets it say more)") >= 1
    assert next(lines) == "never read"


def test_a_response_that_ends_at_the_limit_is_not_called_cut(trained, monkeypatch):
    _, recipe = trained
    sampler, sample = trained_sampler(recipe, temperature=0.0, max_new_tokens=4), Sampler.__call__
    for ended in (False, True):
        monkeypatch.setattr(Sampler, "__call__", lambda *a, e=ended, **k: replace(sample(*a, **k), ended=[e]))
        lines, shown = iter(["Hi", "/quit"]), []
        converse(recipe, sampler, read=lambda _, lines=lines: next(lines), write=shown.append)
        assert any("(cut " in one for one in shown) is not ended


def test_a_response_that_the_positions_end_is_told_so(trained, monkeypatch):
    _, recipe = trained
    sampler, shown, few, sample = trained_sampler(recipe, temperature=0.0, max_new_tokens=16), [], 1, Sampler.__call__
    monkeypatch.setattr(Sampler, "__call__", lambda *a, **k: replace(sample(*a, **k), ended=[False]))
    empty = len(recipe.task.prompt_ids([{"role": "user", "content": "x"}])) - 1  # a byte a token
    lines = iter(["x" * (512 - few - empty), "/quit"])
    converse(recipe, sampler, read=lambda _: next(lines), write=shown.append)
    assert f"(cut after {few} tokens, where the base's positions end; /reset makes room)" in shown


def test_typed_prompts_are_rows_as_of_a_file(trained, tmp_path):
    _, recipe = trained
    path, dialogue = tmp_path / "ask.jsonl", "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: A river?\n\nAssistant:"
    kinds = {
        "prompts": {"task": "prompts", "train": str(path), "chat": False},
        "chats": {"task": "prompts", "train": str(path)},
        "pairs": {**recipe.values["data"], "chat": False},
    }
    for name, data in kinds.items():
        other = replace(recipe, values={**recipe.values, "data": data})
        for text in (dialogue, "Capital?"):
            path.write_text(json.dumps({"prompt": text}) + "\n")
            (typed,), (read,) = (
                [one.row for one in prompts_of(other, *given, 1)] for given in (([text], None), ((), path))
            )
            if name == "pairs" and text != dialogue:  # a question is one of a conversation there
                assert typed["messages"] == [{"role": "user", "content": text}]
                assert typed["prompt"] == "\n\nHuman: Capital?\n\nAssistant:"
            else:
                assert typed == read


def test_a_conversation_of_dialogues_without_a_template_is_remembered(trained):
    _, recipe = trained
    recipe = replace(recipe, values={**recipe.values, "data": {**recipe.values["data"], "chat": False}})
    asked, real = [], type(recipe.task).prompt_ids
    lines, shown = iter(["Hi", "And you?", "/quit"]), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(recipe.task), "prompt_ids", lambda self, messages: asked.append(real(self, messages)) or asked[-1]
        )
        sampler, sample = trained_sampler(recipe, temperature=0.0, max_new_tokens=4), Sampler.__call__
        patch.setattr(Sampler, "__call__", lambda *a, **k: replace(sample(*a, **k), responses=[" Yes."]))
        converse(recipe, sampler, read=lambda _: next(lines), write=shown.append)
    written = [recipe.tokenizer.decode(ids, skip_special_tokens=True) for ids in asked]
    first = "\n\nHuman: Hi\n\nAssistant:"
    assert written == [first, f"{first} Yes.\n\nHuman: And you?\n\nAssistant:"]
    assert not any("plain text" in one for one in shown)


def test_a_conversation_ends_with_the_input(trained):
    def closed(_):
        raise EOFError

    converse(trained[1], trained_sampler(trained[1]), read=closed, write=lambda _: None)


def test_a_line_that_is_too_long_is_no_end_of_a_conversation(trained, monkeypatch):
    lines, shown = iter(["x" * 600, " ", "Hi", "/quit"]), []

    def too_small(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Sampler, "_generate", too_small)
    converse(trained[1], trained_sampler(trained[1]), read=lambda _: next(lines), write=shown.append)
    (long,) = [one for one in shown if "and the base has positions for 512. Shorten" in one]
    assert "/reset" not in long  # by itself it is too long
    assert shown[-1] == "the GPU's memory does not suffice for this conversation; /reset makes room"


def test_a_conversation_that_has_become_too_long_is_told_what_makes_room(trained):
    lines, shown = iter(["Hi", "x" * 600, "/quit"]), []
    sampler = trained_sampler(trained[1], max_new_tokens=4)
    converse(trained[1], sampler, read=lambda _: next(lines), write=shown.append)
    assert shown[-1].endswith("or less. /reset makes room.")


def test_a_prompt_that_the_data_cannot_take_is_an_error_not_an_end(trained):
    doubling = recipes.load("doubling")
    with pytest.raises(ValueError, match="not in the vocabulary"):
        doubling.task.prompt_ids([{"role": "user", "content": "What is 2 × 5487?"}])
    assert not doubling.task.chats


def test_what_the_policy_said_goes_on_where_the_reference_is_shown_too(trained, monkeypatch):
    _, recipe = trained
    asked, real, sample = [], type(recipe.task).prompt_ids, Sampler.__call__

    def watched(self, messages):
        asked.append([message["content"] for message in messages])
        return real(self, messages)

    by_name = lambda self, *a, **k: replace(sample(self, *a, **k), responses=[self.role])  # noqa: E731
    monkeypatch.setattr(type(recipe.task), "prompt_ids", watched)
    monkeypatch.setattr(Sampler, "__call__", by_name)
    lines = iter(["Hi", "And you?", "/quit"])
    sampler = trained_sampler(recipe, temperature=0.0, max_new_tokens=2)
    converse(recipe, sampler, read=lambda _: next(lines), write=lambda _: None, compare=True)
    assert asked == [["Hi"], ["Hi", "policy", "And you?"]]


OPENED = {"open_run": (("run",), {"runs_dir": Path("runs"), "by_q": True, "checkpoint": None})}
SHORTER = ("ppo.response_length=3", "ppo.min_response_length=1", "ppo.drop_short_responses=false",
           "ppo.short_response_penalty=null")  # fmt: skip


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (
            ("generate", "run", "Hi", "--number=2", "--seed=7", "--temperature=0", "--max-new-tokens=3", "--compare"),
            OPENED | {"generate": (("open_run",), {
                "texts": ["Hi"], "file": None, "number": 2, "seed": 7, "output": None, "compare": True,
                "max_new_tokens": 3, "temperature": 0.0,
            })},
        ),
        (
            ("generate", "run", "--num-samples=4", "--seed=7", "--temperature=0.5", "--max-new-tokens=3",
             "--checkpoint=2"),
            {
                "open_run": (("run", "ppo.temperature=0.5", *SHORTER), {"runs_dir": Path("runs"), "checkpoint": 2}),
                "generate_best": (("open_run",), {
                    "num_samples": 4, "texts": [], "file": None, "number": 5, "seed": 7, "output": None,
                }),
            },
        ),
        (
            ("chat", "run", "--seed=7", "--temperature=0.5", "--max-new-tokens=3", "--compare"),
            OPENED | {
                "trained_sampler": (("open_run",), {"max_new_tokens": 3, "temperature": 0.5, "compare": True}),
                "set_seed": ((7,), {}),
                "converse": (("open_run", "trained_sampler"), {"compare": True}),
            },
        ),
    ],
    ids=["generate", "the best", "chat"],
)  # fmt: skip
def test_what_a_command_is_told_is_what_is_asked_for(words, asked, monkeypatch):
    told = {}

    def noted(name):
        return lambda *given, **named: told.update({name: (given, named)}) or name

    places = ("saved_run.open_run", "saved_run.trained_sampler", "generate.generate", "generate.generate_best",
              "generate.converse")  # fmt: skip
    for place in places:
        monkeypatch.setattr(f"toolkit.inference.{place}", noted(place.partition(".")[2]))
    monkeypatch.setattr("transformers.set_seed", noted("set_seed"))
    done = command_here(*words)
    assert done.returncode == 0, done.stderr
    assert told == asked


def test_a_policy_answers_greedily_where_nothing_is_said(trained, monkeypatch):
    asked, seeds = [], []
    monkeypatch.setattr("toolkit.inference.generate.set_seed", seeds.append)
    sampler = SimpleNamespace(limits=lambda prompts: None)
    monkeypatch.setattr("toolkit.inference.generate.trained_sampler", lambda _, **named: asked.append(named) or sampler)
    monkeypatch.setattr("toolkit.inference.generate.respond", lambda _, rows: [""] * len(rows))
    generate(trained[1], number=1, seed=7)
    assert asked == [{"of_policy": 0.0, "max_new_tokens": None, "temperature": None, "compare": False}]
    assert seeds == [7]
