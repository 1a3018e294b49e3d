"""Prompts in every form; ids are worked out from the vocabulary, a character or a byte a token."""

import copy
import json
from datetime import datetime
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from transformers.utils import chat_template_utils

from tests.tiny_runs import byte_tokenizer
from toolkit.data import TASKS, GivenPrompts, PromptCollator, Prompts, Rollout, doubling, sources
from toolkit.data.messages import checked_messages, read_prompt
from toolkit.data.rows import Unusable
from toolkit.data.sources import read_rows
from toolkit.errors import DataError
from toolkit.rewards.model_text import conversation

DATA = Path(__file__).parents[2] / "data"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}_{% elif m.role == 'assistant' %}小{% elif m.role == 'system' %}大"
    "{% else %}{{ raise_exception('no role ' + m.role) }}{% endif %}:{{ m.content }}={% endfor %}"
    "{% if add_generation_prompt %}x:{% endif %}"
)


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def ids(text):
    """The doubling tokenizer has one token a character, numbered as in the vocabulary."""
    return [doubling.VOCABULARY.index(character) for character in text]


def user(text):
    return {"role": "user", "content": text}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def task_of(tmp_path, tokenizer, rows, **arguments):
    path = write(tmp_path / "x.jsonl", rows)
    return Prompts(tokenizer, path, **{"validation": path, **arguments})


# ---------------------------------------------------------------------- where the prompt is, and what becomes of it


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"query": "12"}, "_:12=x:"),
        ({"prompt": "12"}, "_:12=x:"),
        ({"prompt": [user("12")]}, "_:12=x:"),
        ({"messages": [user("1"), {"role": "assistant", "content": "2"}, user("3")]}, "_:1=小:2=_:3=x:"),
        ({"messages": [{"role": "system", "content": "0"}, user("3")]}, "大:0=_:3=x:"),
        # What the assistant said earlier may have its end.
        ({"messages": [user("1"), {"role": "assistant", "content": "2E"}, user("3")]}, "_:1=小:2E=_:3=x:"),
        ({"input_ids": [1, 5, 6]}, "S23"),
    ],
)
def test_every_column_that_can_be_the_prompt(row, text, tmp_path, chat_tokenizer):
    (prompt,) = task_of(tmp_path, chat_tokenizer, [row]).prompts("train")
    messages = prompt.pop("messages", None)
    assert prompt == {"input_ids": ids(text), "prompt": text}
    # The conversation itself, for a reward model with another template; token ids have none.
    (value,) = row.values()
    asked = [user(value)] if isinstance(value, str) else value
    assert messages == (None if "input_ids" in row else asked)


def test_the_first_row_decides_in_a_fixed_order(tmp_path, chat_tokenizer):
    row = {"query": "1", "prompt": "2", "messages": [user("3")], "input_ids": [4]}
    for column, text in (("input_ids", "1"), ("messages", "_:3=x:"), ("prompt", "_:2=x:"), ("query", "_:1=x:")):
        assert task_of(tmp_path, chat_tokenizer, [row]).prompts("train")["prompt"][0] == text
        del row[column]
    # A later row has a column of higher rank, which is not its prompt.
    task = task_of(tmp_path, chat_tokenizer, [{"query": "1"}, {"query": "2", "messages": [user("3")]}])
    assert task.prompts("train")["prompt"][:] == ["_:1=x:", "_:2=x:"]
    with pytest.raises(
        DataError, match=r'x.jsonl, line 2: no column "query", which the first row has; present: a, b. Gi'
    ):
        task_of(tmp_path, chat_tokenizer, [{"query": "1"}, {"a": "2", "b": 0}]).prompts("train")


def test_columns_are_mapped_ours_first(tmp_path, chat_tokenizer):
    rows = [{"question": "1", "talk": [user("2")], "tokens": [3], "query": "4"}]
    for columns, text in (
        ({"prompt": "question"}, "_:1=x:"),
        ({"prompt": "talk"}, "_:2=x:"),
        ({"messages": "talk"}, "_:2=x:"),
        ({"input_ids": "tokens"}, "0"),
        ({"prompt": "question", "messages": "absent"}, "_:1=x:"),
        ({"prompt": "question", "messages": "talk"}, "_:2=x:"),
        ({}, "_:4=x:"),
    ):
        data = task_of(tmp_path, chat_tokenizer, rows, columns=columns).prompts("train")
        assert data["prompt"][0] == text
    assert data.column_names == ["input_ids", "prompt", "question", "talk", "tokens", "messages"]
    (tmp_path / "lines.txt").write_text("9\n")  # which has no columns to be named
    beside = {"columns": {"prompt": "question"}, "validation": str(tmp_path / "lines.txt")}
    lines = task_of(tmp_path, chat_tokenizer, rows, **beside)
    assert lines.prompts("test")["prompt"][0] == "_:9=x:"
    # What is mapped comes before a column that merely has one of our names.
    named = task_of(tmp_path, chat_tokenizer, [{"q": "1", "prompt": "2", "input_ids": [3]}], columns={"prompt": "q"})
    (row,) = named.prompts("train")
    assert row == {"input_ids": ids("_:1=x:"), "prompt": "_:1=x:", "messages": [user("1")]}


def test_text_as_it_is_has_the_special_tokens_of_the_tokenizer(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    (row,) = task_of(tmp_path, tokenizer, [{"query": " ab"}], chat=False).prompts("train")
    vocabulary = tokenizer.get_vocab()
    assert row == {"input_ids": [1, vocabulary["Ġ"], vocabulary["a"], vocabulary["b"]], "prompt": " ab"}
    # But a prompt does not end before its response.
    ends = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.backend_tokenizer.post_processor = ends
    task = task_of(tmp_path, tokenizer, [{"query": "ab"}, {"query": "ab</s>"}], chat=False)
    own = [1, vocabulary["a"], vocabulary["b"]]
    assert task.prompts("train")["input_ids"][:] == [own, [*own, 2]] and task.typed("ab")["input_ids"] == own
    assert task.prompt_ids([user("ab")]) == own
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    # In a chat template stand all that are wanted.
    tokenizer.chat_template = "{{ messages[0].content }}"
    (row,) = task_of(tmp_path, tokenizer, [{"query": "ab"}]).prompts("train")
    assert row["input_ids"] == [vocabulary["a"], vocabulary["b"]]


@pytest.mark.parametrize(
    ("system", "texts"),
    [
        (None, ["_:1=x:", "大:0=_:2=x:"]),
        ("", ["大:=_:1=x:", "大:0=_:2=x:"]),
        ("9", ["大:9=_:1=x:", "大:0=_:2=x:"]),
    ],
)
def test_a_system_message_for_prompts_that_have_none(system, texts, tmp_path, chat_tokenizer):
    rows = [{"prompt": "1"}, {"prompt": [{"role": "system", "content": "0"}, user("2")]}]
    assert task_of(tmp_path, chat_tokenizer, rows, system=system).prompts("train")["prompt"][:] == texts


def test_other_columns_are_passed_on(tmp_path, chat_tokenizer):
    rows = [{"query": "1", "score": 1.5, "tags": ["a"]}, {"query": "2", "about": {"b": 1}, "tags": []}]
    data = task_of(tmp_path, chat_tokenizer, rows).prompts("train")
    assert data.column_names == ["input_ids", "prompt", "score", "tags", "messages", "about"]
    batch = PromptCollator(0)([data[i] for i in range(2)])
    assert batch["columns"] == {
        "prompt": ["_:1=x:", "_:2=x:"],
        "score": [1.5, None],
        "tags": [["a"], []],
        "about": [None, {"b": 1}],
        "messages": [[user("1")], [user("2")]],
    }
    told = r"^train: .*x.jsonl: column .score. .* of one type; in .*x.jsonl, line 4 it is 'high' \(.*Mend"
    with pytest.raises(DataError, match=told):  # the third has no token that is known, and is left out
        unread, odd = {"query": ""}, {"query": "4", "score": "high"}
        task_of(tmp_path, chat_tokenizer, [*rows, unread, odd, {"query": "5", "score": 2.0}]).prompts("train")


def test_a_part_of_the_prompt_in_another_column_is_told_of(tmp_path, chat_tokenizer):
    """A reward may read it, so that the row stays."""
    rows = [
        {"query": "12", "input": "34", "system": ""}, {"query": "12345", "input": "34"},
        {"query": "5", "input": "", "system": "67"}, {"query": "8", "system": "9", "history": ["1", "2"]},
    ]  # fmt: skip
    task = task_of(tmp_path, chat_tokenizer, rows)
    assert len(task.prompts("train")) == 4
    report, *told = task.report().partition("trained on, too")[2].split("; ")
    assert report == "" and told == [
        f'{rows} have a column "{name}" that is no part of the prompt: if it should be, write it there'
        for name, rows in (("input", 2), ("system", 4), ("history", 2))  # of both splits, which are one file
    ]
    assert task_of(tmp_path, chat_tokenizer, rows, on_long="cut").report().endswith("trained on, too")
    with_system = task_of(tmp_path, chat_tokenizer, rows[2:3], system="67")
    assert with_system.report().endswith("trained on, too")


@pytest.mark.parametrize("content", ["from", None, ["1"]])
def test_messages_without_text_beside_token_ids_are_passed_over(content, tmp_path, chat_tokenizer):
    talk = [{"from": "human", "value": "1"}] if content == "from" else [{"role": "user", "content": content}]
    row = {"input_ids": [1, 5], "messages": talk, "system": "Be brief.", "tools": "[]"}
    said = task_of(tmp_path, chat_tokenizer, [row]).report()
    assert said.endswith('; 2 have a column "system" that is no part of the prompt: if it should be, write it there')


def test_an_answered_conversation_beside_its_prompt_is_not_passed_on(tmp_path, tokenizer):
    """A reward model would read it as the prompt."""
    row = {"prompt": "1", "messages": [user("1"), {"role": "assistant", "content": "2"}], "topic": "a"}
    task = task_of(tmp_path, tokenizer, [row], chat=False, columns={"prompt": "prompt"})
    assert task.prompts("train")[0] == {"input_ids": ids("1"), "prompt": "1", "topic": "a"}
    assert "messages" not in task.prompts_of([row]).column_names and "messages" not in task.prompt_of("x", row)[1]
    # Of token ids they are the only conversation that there is.
    row = {"input_ids": ids("1"), "messages": [user("1")]}
    assert task_of(tmp_path, tokenizer, [row]).prompts("train")["messages"][0] == row["messages"]


def test_tables_do_not_add_keys_to_messages(tmp_path, tokenizer):
    """In parquet every message has the keys of all."""
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% if m.name is defined %}x{% endif %}{% endfor %}"
    talk = [{"role": "user", "content": "1"}, {"role": "user", "content": "2", "name": "n"}]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"messages": [talk]}), path)
    assert Prompts(tokenizer, str(path), str(path)).prompts("train")["prompt"][0] == "12x"
    tokenizer.chat_template = "{{ raise_exception('a call') if 'tool_calls' in messages[0] }}{{ messages[0].content }}"
    task = task_of(tmp_path, tokenizer, [{"messages": [{**user("1"), "tool_calls": []}]}])
    assert task.prompts("train")["prompt"][:] == ["1"]


def test_a_template_that_writes_the_day_makes_the_same_prompt_on_every_day(tmp_path, monkeypatch):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}"
    for day in (3, 4):
        clock = type("Clock", (datetime,), {"now": classmethod(lambda cls, day=day: cls(2031, 2, day))})
        monkeypatch.setattr(chat_template_utils, "datetime", clock)
        task = task_of(tmp_path, tokenizer, [{"query": "a"}])
        assert task.prompts("train")["prompt"][:] == ["26 Jul 2024a"]
        assert tokenizer.decode(task.prompt_ids([user("b")])) == "26 Jul 2024b"
        # For all others the clock goes on.
        assert tokenizer.apply_chat_template([user("c")], tokenize=False) == f"0{day} Feb 2031c"


# ---------------------------------------------------------------------- rows left out


def test_rows_left_out_with_place_and_reason(tmp_path, chat_tokenizer):
    rows = [
        ({"prompt": "1"}, None),
        ({"prompt": ""}, "an empty prompt"),
        ({"prompt": " \n"}, "an empty prompt"),
        ({"prompt": None}, "an empty prompt"),
        ({"prompt": []}, "an empty prompt"),
        ({"prompt": [user(" ")]}, "an empty prompt"),
        ({"prompt": "\n\nHuman: \n\nAssistant:"}, "an empty prompt"),
        ({"prompt": "1" * 15}, None),  # and 5 of the template: as many tokens as are allowed
        ({"prompt": "1" * 16}, "a prompt over 20 tokens"),
        ({"prompt": 5}, "a prompt that is no text"),
        ({"prompt": ["1"]}, "a message that is no object with role and content"),
        ({"prompt": [{"content": "1"}]}, 'a message without text as "role"'),
        ({"prompt": [{"role": "user", "content": [{"text": "1"}]}]}, 'a message without text as "content"'),
        ({"prompt": [{"from": {"name": "human"}, "value": "1"}]}, 'a message without text as "role"'),
        ({"prompt": [{"from": ["human"], "value": "1"}]}, 'a message without text as "role"'),
        ({"prompt": [user("1"), {"role": "assistant", "content": "2"}]}, "its last turn is the assistant's "
                                                                         "(drop_answer: true takes it off)"),
        ({"prompt": [{"role": "system", "content": "1"}]}, "messages without a turn of the user (roles: system)"),
        ({"prompt": [user("1"), {"role": "tool", "content": "2"}]}, "the chat template refuses it: no role tool"),
        ({"prompt": "S_:1E小:"}, "a prompt with an end of turn inside, as if in a chat template already (chat: "
                                "false takes it so)"),
    ]  # fmt: skip
    task = task_of(tmp_path, chat_tokenizer, [row for row, _ in rows], max_prompt_length=20)
    assert task.prompts("train")["prompt"][:] == ["_:1=x:", f"_:{'1' * 15}=x:"]
    expected = [(f"{task.train}, line {n}", reason) for n, (_, reason) in enumerate(rows, 1) if reason]
    assert [(row["place"], row["reason"]) for row in task.left_out_rows() if row["split"] == "train"] == expected
    assert len(task.left_out_rows()) == 2 * len(expected)  # the same file is the validation split
    assert task.left_out["validation"] == task.left_out["train"]
    assert task.left_out["train"]["an empty prompt"] == 6 and task.left_out["train"].total() == 17
    start = f"train: 2 prompts; 17 left out: 6 × an empty prompt (first: {task.train}, line 2), 3 × a message without"
    assert task.report().startswith(start)
    assert " | validation: 2 prompts; 17 left out: " in task.report()


def test_ids_left_out(tmp_path, tokenizer):
    rows = [
        ({"input_ids": [41]}, None),
        ({"input_ids": []}, "an empty prompt"),
        ({"input_ids": [3, 42]}, "ids that are not in the vocabulary"),
        ({"input_ids": [-1]}, "ids that are not in the vocabulary"),
        ({"input_ids": [True]}, "input_ids that are no list of whole numbers"),
        ({"input_ids": "3 4"}, "input_ids that are no list of whole numbers"),
        ({"input_ids": [3] * 5}, "a prompt over 4 tokens"),
    ]
    task = task_of(tmp_path, tokenizer, [row for row, _ in rows], max_prompt_length=4)
    assert task.prompts("train")["input_ids"][:] == [[41]]
    assert [row["reason"] for row in task.left_out_rows()] == [reason for _, reason in rows if reason] * 2


@pytest.mark.parametrize("pad", ["own", "eos"])
def test_padding_in_ids_is_not_read_as_text(pad, tmp_path, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    if pad == "eos":
        tokenizer.pad_token = tokenizer.eos_token
    of_pad, fine = [tokenizer.pad_token_id] * 2, [[41, 7], [tokenizer.eos_token_id, 41]]
    rows = [*fine, [*of_pad, 41], [41, *of_pad], of_pad, [41, of_pad[0], 7]]
    task = task_of(tmp_path, tokenizer, [{"input_ids": ids} for ids in rows])
    assert task.prompts("train")["input_ids"][:] == [*fine, rows[-1]]
    assert task.left_out["train"] == {f"input_ids with padding ({tokenizer.pad_token})": 3}
    with pytest.raises(DataError, match="^train_dataset: row 2: input_ids has padding .* Give the ids without it"):
        task.prompts_of(Dataset.from_dict({"input_ids": [[41], rows[3]]}))


def test_prompts_that_are_given_stand_beside_those_that_are_read(tmp_path, chat_tokenizer):
    task = task_of(tmp_path, chat_tokenizer, [{"query": "1"}, {"query": ""}])
    given = copy.deepcopy(GivenPrompts(task, {"train_dataset": ["2", "3"]}))
    assert given.prompts("train")["prompt"][:] == ["_:2=x:", "_:3=x:"]
    assert given.dataset("prompts", "test")["prompt"][:] == ["_:1=x:"]
    assert given.left_out == {"validation": {"an empty prompt": 1}}
    assert [row["split"] for row in given.left_out_rows()] == ["validation"]
    assert given.row_places("ppo") == [{"split": "validation", "place": f"{task.validation}, line 1"}]
    assert given.prompt_places("train") == () and [*given.prompt_places("validation")] == [f"{task.validation}, line 1"]
    assert given.report().startswith("train: 2 prompts, given | validation: 1 prompts; 1 left out")
    both = GivenPrompts(task, {"train_dataset": ["2"], "eval_dataset": ["4"]})
    assert both.left_out == {} and both.row_places("ppo") == both.left_out_rows() == []
    assert (
        both.digests.keys() == {"train_dataset", "eval_dataset"}
        and both.digests["train_dataset"] != given.digests["train_dataset"]
    )
    with pytest.raises(AttributeError):
        _ = both.nothing


def test_other_kinds_in_other_columns(tmp_path, chat_tokenizer):
    task = task_of(tmp_path, chat_tokenizer, [{"query": "1"}, {"query": [user("1")]}])
    assert len(task.prompts("train")) == 1 and list(task.left_out["train"]) == ["a query that is no text"]
    task = task_of(tmp_path, chat_tokenizer, [{"messages": [user("1")]}, {"messages": "1"}])
    assert len(task.prompts("train")) == 1 and list(task.left_out["train"]) == ["messages that are no list"]


@pytest.mark.parametrize("of_user", [user("1"), {"from": "human", "value": "1"}])
def test_messages_in_a_cell_of_a_csv_file_are_no_text(of_user, tmp_path, chat_tokenizer):
    backwards = dict(reversed(of_user.items()))
    cells = [{"query": "1"}, {"query": str([of_user])}, {"query": json.dumps([backwards], indent=1)}, {"query": "2"}]
    task = task_of(tmp_path, chat_tokenizer, cells)
    assert len(task.prompts("train")) == 2
    assert task.left_out["train"] == {"messages that are written as text: keep them in a .jsonl or .parquet file": 2}
    for other in ('[{"value": 12, "unit": "kg"}]', '[{"role": "engineer", "name": "Ada"}]'):
        assert read_prompt(other) == other


def test_nothing_is_left(tmp_path, chat_tokenizer):
    with pytest.raises(DataError, match=r"^train: no row can be used \(the file is empty\). Mend .*x.jsonl, or name"):
        task_of(tmp_path, chat_tokenizer, []).prompts("train")
    message = r"no row can be used \(2 × an empty prompt \(first: .*x.jsonl, line 1\)\)"
    with pytest.raises(DataError, match=message):
        task_of(tmp_path, chat_tokenizer, [{"query": ""}, {"query": ""}]).prompts("validation")


def test_a_template_that_renders_nothing(tmp_path, chat_tokenizer):
    chat_tokenizer.chat_template = "{{ messages[0].content if messages[0].content != '1' }}"
    task = task_of(tmp_path, chat_tokenizer, [{"query": "1"}, {"query": "2"}])
    assert task.prompts("train")["prompt"][:] == ["2"] and task.left_out["train"] == {"an empty prompt": 1}


def test_what_a_template_passes_over_is_not_lost_in_silence(tmp_path, chat_tokenizer):
    chat_tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    turns = [[{"role": role, "content": "2"}] for role in ("developer", "assistant", "system")]
    talks = [[*turn, user("1")] for turn in turns] + [[user("1"), *turn, user("3")] for turn in turns]
    empty = [{"role": "system", "content": ""}, user("1")]  # of which nothing is lost
    task = task_of(tmp_path, chat_tokenizer, [{"prompt": talk} for talk in [[user("1"), user("3")], empty, *talks]])
    assert task.prompts("train")["prompt"][:] == ["13", "1"]
    reasons = [f"the chat template leaves out a message of the {turn[0]['role']}" for turn in turns]
    assert task.left_out["train"] == dict.fromkeys(reasons, 2)
    with pytest.raises(DataError, match="^system: no prompt can have a system message: the chat template leaves out a"):
        task_of(tmp_path, chat_tokenizer, [{"query": "1"}], system="0").prompts("train")
    # By the place: some know a system message at the beginning alone.
    first = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    chat_tokenizer.chat_template = first + chat_tokenizer.chat_template
    task = task_of(tmp_path, chat_tokenizer, [{"prompt": talk} for talk in talks])
    assert task.prompts("train")["prompt"][:] == ["21"] and task.left_out["train"][reasons[2]] == 1
    # And by its keys: some leave out what stands beside tool calls.
    chat_tokenizer.chat_template = "{% for m in messages %}{{ m.content if not m.tool_calls }}{% endfor %}"
    said = {"role": "assistant", "content": "2"}
    talks = [[user("1"), one, user("3")] for one in (said, {**said, "tool_calls": [{"id": "1"}]})]
    task = task_of(tmp_path, chat_tokenizer, [{"prompt": talk} for talk in talks])
    assert task.prompts("train")["prompt"][:] == ["123"] and task.left_out["train"] == {reasons[1]: 1}
    # A call may be all that a message has.
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "4"}}]}
    calls = "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
    for shown, kept in ((calls, ["143"]), ("", [])):
        chat_tokenizer.chat_template = "{% for m in messages %}{{ m.content }}" + shown + "{% endfor %}"
        task = task_of(tmp_path, chat_tokenizer, [{"prompt": [user("1"), call, user("3")]}, {"prompt": [user("1")]}])
        assert task.prompts("train")["prompt"][:] == [*kept, "1"]
        assert task.left_out["train"] == ({} if kept else {"the chat template leaves out a tool call": 1})


def test_a_system_message_that_is_written_only_where_the_user_has_the_last_turn(tmp_path, chat_tokenizer):
    """As in Mistral's templates."""
    chat_tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role != 'system' %}"
        "{{ messages[0].content if loop.last and m.role == 'user' }}{{ m.content }}{% endif %}{% endfor %}"
    )
    asked = [{"role": "system", "content": "0"}, user("1")]
    rows = [{"prompt": asked}, {"prompt": [*asked, {"role": "tool", "content": "2"}]}]
    for given in (rows, rows[::-1]):
        task = task_of(tmp_path, chat_tokenizer, given)
        assert task.prompts("train")["prompt"][:] == ["01"]
        assert task.left_out["train"] == {"the chat template leaves out a message of the system": 1}


CALLS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or () %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}"
)


def call(arguments, **content):
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}], **content}


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "saved"])
def test_tool_calls_are_read_as_they_were_made(ending, tmp_path):
    """A call may stand alone, tables give each the arguments of all, and one name may have values of two types."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CALLS
    talks = [
        [user("1"), call({"n": 0.123456789012}), {"role": "tool", "content": "6"}],
        [user("2"), call({"m": [{"k": 0}]}, content=None), {"role": "tool", "content": "7"}],
    ]
    prompts = ['1f{"n": 0.123456789012}6', '2f{"m": [{"k": 0}]}7']
    rows, path = [{"messages": talk} for talk in talks], str(tmp_path / f"x.{ending}")
    if ending == "jsonl":
        prompts.append('3f{"n": "five", "k": null}8')
        talks.append([user("3"), call({"n": "five", "k": None}), {"role": "tool", "content": "8"}])
        write(tmp_path / "x.jsonl", [{"messages": talk} for talk in talks])
    elif ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        Dataset.from_list(rows).save_to_disk(path)
    read = Prompts(tokenizer, path, path).prompts("train")
    assert read["prompt"][:] == prompts
    # So does a reward model read them, but for a null, which may be that of a table.
    shown = [conversation(tokenizer, talk, "!") for talk in read["messages"]]
    assert shown == [f"{prompt}!".replace(', "k": null', "") for prompt in prompts]
    if ending == "jsonl":
        assert read["messages"][2] == [talks[2][0], {**talks[2][1], "content": ""}, talks[2][2]]
        for odd in (2**70, float("nan")):  # which datasets' reader of JSON refuses, or takes for null
            some = [{"messages": [user("1"), call({"n": n}), user("2")]} for n in ("five", odd)]
            with pytest.raises(DataError, match='column "messages" does not hold values of one type; in row 2 it is'):
                Prompts(tokenizer, path, path).prompts_of(some)
    else:  # one type holds them, as it does the values of any column; and a table is read alike where it is given
        usual = Dataset.from_dict({"messages": list(map(checked_messages, talks))}).features["messages"]
        assert read.features["messages"] == usual
        assert Prompts(tokenizer, path, path).prompts_of(Dataset.from_list(rows))["prompt"][:] == prompts
    with pytest.raises(Unusable, match="a response with tool calls, which are not learnt"):
        checked_messages([user("1"), call({"n": 5})], answered=True)


def test_what_stands_beside_tool_calls_keeps_its_nulls(tmp_path):
    references = [{"tool_calls": [{"a": 1, "b": None}], "score": None}, {"tool_calls": [{"b": 2}], "score": 3}]
    path = str(tmp_path / "x.parquet")
    pq.write_table(pa.Table.from_pylist([{"reference": one} for one in references]), path)
    assert [row["reference"] for _, row in read_rows(path, field="train")] == [
        {"tool_calls": [{"a": 1}], "score": None}, {"tool_calls": [{"b": 2}], "score": 3}
    ]  # fmt: skip


def test_a_second_try_after_an_error_counts_anew(tmp_path, chat_tokenizer):
    task, path = task_of(tmp_path, chat_tokenizer, [{"query": ""}, {"other": "1"}]), tmp_path / "x.jsonl"
    for _ in range(2):
        with pytest.raises(DataError, match="line 2"):
            task.prompts("train")
    path.write_text(path.read_text().replace("other", "query"))
    assert task.left_out["train"] == {"an empty prompt": 1}


# ---------------------------------------------------------------------- splits


def rows_of(*numbers):
    return [{"query": str(number), "n": number} for number in numbers]


def test_validation_is_held_out_of_train(tmp_path, chat_tokenizer):
    def numbers(split, **arguments):
        task = task_of(tmp_path, chat_tokenizer, rows_of(*range(20)), validation=None, **arguments)
        return task.prompts(split)["n"][:]

    train, validation = numbers("train", validation_size=6), numbers("validation", validation_size=6)
    assert len(validation) == 6 and sorted(train + validation) == list(range(20))
    assert numbers("test", validation_size=6) == validation and validation != list(range(6))
    assert numbers("validation", validation_size=6, seed=1) != validation
    # The draw does not depend on how many are trained on.
    assert numbers("validation", validation_size=6, max_train_rows=3) == validation
    assert numbers("train", validation_size=6, max_train_rows=3) == train[:3]
    assert numbers("validation", validation_size=6, max_validation_rows=2) == validation[:2]


def test_held_out_rows_that_are_trained_on_are_said(tmp_path, chat_tokenizer):
    train = write(tmp_path / "train.jsonl", [{"prompt": str(n)} for n in (1, 2, 3)])
    other = write(tmp_path / "other.jsonl", [{"prompt": str(n)} for n in (3, 3, 4)])
    said = Prompts(chat_tokenizer, train, validation=other).report()
    assert said.endswith("validation: 3 prompts; 2 of these have a prompt that is trained on, too")
    assert "trained on" not in Prompts(chat_tokenizer, train, validation_size=1).report()


def test_rows_with_the_same_prompt_are_held_out_together(tmp_path, chat_tokenizer):
    rows = [{"query": str(n // 5), "n": n} for n in range(20)]
    for seed in range(5):
        task = task_of(tmp_path, chat_tokenizer, rows, validation=None, validation_size=6, seed=seed)
        train, validation = set(task.prompts("train")["prompt"]), set(task.prompts("validation")["prompt"])
        assert not train & validation and len(task.prompts("validation")) == 10


def test_too_much_held_out(tmp_path, chat_tokenizer):
    task = task_of(tmp_path, chat_tokenizer, rows_of(1, 2, 3), validation=None, validation_size=3)
    message = r"^validation_size: 3 leaves no training rows: .*x.jsonl has 3 that can be used. Lower it, or name"
    with pytest.raises(DataError, match=message):
        task.prompts("train")
    task = task_of(tmp_path, chat_tokenizer, rows_of(1, 2, 3), validation=None, validation_size=2)
    assert len(task.prompts("train")) == 1 and task.left_out == {"train": {}, "validation": {}}
    assert task.report() == "train: 1 prompts | validation: 2 prompts"
    with pytest.raises(DataError, match="^validation_size: 100 leaves no training rows"):
        task_of(tmp_path, chat_tokenizer, rows_of(1, 2), validation=None).prompts("train")
    for rows, said in (
        (
            rows_of(1, 1, 1),
            "that can be used; of 1 different prompt, whose rows stay together. See that columns.prompt",
        ),
        (rows_of(1, 1, 2), "that can be used; of 2 different prompts, whose rows stay together. Lower it, or name"),
    ):
        with pytest.raises(DataError, match=said):
            task_of(tmp_path, chat_tokenizer, rows, validation=None, validation_size=3).prompts("train")


def test_limits_count_rows_that_can_be_used_and_end_the_reading(tmp_path, chat_tokenizer):
    rows = [{"query": ""}, *rows_of(1, 2), {"query": ""}, *rows_of(3)]
    task = task_of(tmp_path, chat_tokenizer, rows, max_train_rows=2, max_validation_rows=1)
    assert task.prompts("train")["n"][:] == [1, 2] and task.prompts("validation")["n"][:] == [1]
    assert [row["place"] for row in task.left_out_rows()] == [f"{task.train}, line 1"] * 2


def test_a_hub_id_and_its_splits(chat_tokenizer, monkeypatch):
    data = DatasetDict(train=Dataset.from_dict({"query": ["1", ""]}), test=Dataset.from_dict({"query": ["2"]}))
    seen = []
    monkeypatch.setattr(
        sources, "load_dataset", lambda path, name, data_dir: seen.append((path, name, data_dir)) or data
    )
    task = Prompts(chat_tokenizer, "some/prompts", "some/prompts", subset="part", name="main")
    assert task.prompts("train")["prompt"][:] == ["_:1=x:"] and task.prompts("test")["prompt"][:] == ["_:2=x:"]
    assert task.left_out_rows() == [
        {"split": "train", "place": "some/prompts/part (train), row 2", "reason": "an empty prompt"}
    ]
    assert seen == [("some/prompts", "main", "part")] * 2
    data = DatasetDict(train=Dataset.from_dict({"query": [1, 2]}))  # not read before what is wrong is told
    with pytest.raises(DataError, match="^train: some/prompts has no split test or validation; it has train. Ho"):
        _ = Prompts(chat_tokenizer, "some/prompts", validation_size=None).prompts("train")


# ---------------------------------------------------------------------- what a recipe can get wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"columns": {"promt": "q"}}, '^columns: the task has no column "promt". Did you mean prompt?'),
        ({"columns": {"x": "q"}}, 'has no column "x". The names are prompt, messages, input_ids. The file\'s own name'),
        ({"columns": {"prompt": 3}}, "^columns.prompt: the name of a column is needed, got 3"),
        ({"chat": False, "system": ""}, "^system: it has no effect where chat is false. Remove one of them"),
        (
            {"subset": "a"},
            "^subset: subset would have no effect: only a hub id has that, and no such file is none. Remove it",
        ),
        ({"subset": []}, "^subset: it names no part. Name one."),
        ({"name": "a"}, "^name: name would have no effect: .* Remove it."),
        ({"subset": "a", "name": "a"}, "^subset: subset and name would have no effect"),
        ({"validation_size": 0}, "^validation_size: a number from 1 is needed, got 0"),
        ({"max_prompt_length": 0}, "^max_prompt_length: a number from 1"),
        ({"max_train_rows": 0}, "^max_train_rows: a number from 1"),
        ({"max_validation_rows": -1}, "^max_validation_rows: a number from 1 is needed, got -1"),
    ],
)
def test_arguments_that_contradict(arguments, message, tokenizer):
    with pytest.raises(DataError, match=message):
        Prompts(tokenizer, "no such file", **arguments)
    Prompts(tokenizer, "no such file")  # nothing is read yet
    Prompts(tokenizer, "no such file", "nor this", validation_size=0)  # it has no effect here


@pytest.mark.parametrize(
    ("row", "arguments", "message"),
    [
        (
            {"text": "1", "id": 2},
            {},
            'line 1: a prompt is in the column "input_ids", "messages", "prompt", "query"; pres',
        ),
        (
            {"text": "1", "id": 2},
            {},
            "present: text, id. Rename the column of the prompt, or name it as columns.",
        ),
        ({"query": "1"}, {"columns": {"prompt": "q"}}, 'line 1: a prompt is in the column "q"; present: query'),
        ({}, {}, "present: none"),
        (
            {"input_ids": [3]},
            {"system": "0"},
            "^system: .*line 1: it has no effect on prompts that are token ids. Remove",
        ),
        (
            {"messages": []},
            {"chat": False},
            "^chat: .*line 1: messages need the chat template. Set it to true, or name a",
        ),
        ({"prompt": [user("1")]}, {"chat": False}, "line 1: messages need the chat template"),
        (
            {"prompt": "1", "messages": [user("1"), {"role": "assistant", "content": "2"}]},
            {},
            r"its last turn is the assistant's \(drop_answer: true takes it off; there is a column prompt, too: col",
        ),
    ],
)
def test_sources_that_do_not_fit_the_recipe(row, arguments, message, tmp_path, chat_tokenizer):
    with pytest.raises(DataError, match=message):
        task_of(tmp_path, chat_tokenizer, [row], **arguments).prompts("train")


def test_a_tokenizer_without_chat_template(tmp_path, tokenizer):
    message = (
        "^chat: the tokenizer has no chat template, .* Use an instruction-tuned checkpoint, .* or set chat to false"
    )
    for row in ({"query": "1"}, {"prompt": "1"}):
        with pytest.raises(DataError, match=message):
            task_of(tmp_path, tokenizer, [row]).prompts("train")
    with pytest.raises(DataError, match=message):
        task_of(tmp_path, tokenizer, [{"messages": [user("1")]}]).prompts("train")
    assert task_of(tmp_path, tokenizer, [{"query": "1"}], chat=False).prompts("train")["input_ids"][0] == ids("1")


# ---------------------------------------------------------------------- the interface of a task


def test_a_prompt_that_is_typed(chat_tokenizer):
    talk = [user("1"), {"role": "assistant", "content": "2"}, user("3")]
    task = Prompts(chat_tokenizer, "x.jsonl", system="0")
    assert task.chats and task.prompt_ids(talk) == ids("大:0=_:1=小:2=_:3=x:")
    with pytest.raises(DataError, match='the prompt "1": the chat template refuses it: no role tool'):
        task.prompt_ids([{"role": "tool", "content": "1"}])
    plain = Prompts(chat_tokenizer, "x.jsonl", chat=False)
    assert not plain.chats and plain.prompt_ids(talk) == ids("3")


def test_it_is_a_task_without_metrics_of_its_own(chat_tokenizer):
    rollout = Rollout(prompts=[""], responses=[""], prompt_ids=[[1]], response_ids=[[2]], ended=[True])
    assert TASKS["prompts"] is Prompts and Prompts(chat_tokenizer, "x.jsonl").metrics(rollout) == {}


# ---------------------------------------------------------------------- the examples in data/


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("queries.json", {}),
        ("queries.jsonl", {}),
        ("prompts.json", {}),
        ("questions.csv", {"columns": {"prompt": "question"}}),
        ("prompts.parquet", {}),
        ("prompts.txt", {}),
        ("prompts_dataset", {"validation": str(DATA / "prompts_dataset")}),
    ],
)
def test_every_example_gives_the_same_prompts(name, arguments):
    task = Prompts(byte_tokenizer(), str(DATA / name), **{"validation_size": 6, **arguments})
    train, validation = task.prompts("train"), task.prompts("validation")
    assert (len(train), len(validation)) == (18, 6) and task.left_out_rows() == []
    lines = (DATA / "prompts.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert set(train["prompt"]) | set(validation["prompt"]) == {f"<s>{line}</s><s>" for line in lines}
    assert len(train["input_ids"][0]) == len(train["prompt"][0].encode("utf-8")) - len("<s></s><s>") + 3
    assert ("topic" in train.column_names) == (name not in ("queries.json", "prompts.txt"))


def test_the_examples_of_conversations_and_token_ids(tokenizer):
    talks = Prompts(byte_tokenizer(), str(DATA / "messages.jsonl"), str(DATA / "messages.jsonl")).prompts("train")
    assert len(talks) == 8 and talks["prompt"][2] == "<s>Answer in one word.</s><s>What do cows drink?</s><s>"
    path = str(DATA / "token_ids.jsonl")
    questions = Prompts(tokenizer, path, path).prompts("train")
    assert len(questions) == 12 and questions[1] == {
        "input_ids": ids("S小写:4567x2="), "prompt": "S小写:4567x2=", "answer": "九一三四",
    }  # fmt: skip


def test_the_openings_of_reviews_are_continued_as_they_stand():
    path = str(DATA / "review_openings.txt")
    task = Prompts(byte_tokenizer(), path, validation_size=40, chat=False)
    assert (len(task.prompts("train")), len(task.prompts("validation"))) == (80, 40)
    assert "The film was" in [*task.prompts("train")["prompt"], *task.prompts("validation")["prompt"]]


def test_every_file_in_data_has_a_test_and_a_line_in_its_readme():
    listed = (DATA / "README.md").read_text(encoding="utf-8")
    tested = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    names = [entry.name for entry in DATA.iterdir() if entry.name != "README.md"]
    assert len(names) == 14
    for name in names:
        assert f"`{name}" in listed and name in tested, name


# ---------------------------------------------------------------------- too long, and in memory


def test_a_long_prompt_is_cut_where_that_is_asked_for(tmp_path, chat_tokenizer):
    rows = [{"query": "1234"}, {"query": "5"}, {"input_ids": [1, 5, 6, 7, 8, 9], "query": "6"}]
    task = task_of(tmp_path, chat_tokenizer, rows[:2], max_prompt_length=6, on_long="cut")
    # "_:1234=x:" without its beginning: the end asks for the response
    assert [row["prompt"] for row in task.prompts("train")] == ["234=x:", "_:5=x:"]
    assert task.prompts("train")["input_ids"][0] == ids("234=x:") and not task.left_out["train"]
    cut = task_of(tmp_path, chat_tokenizer, rows[2:], max_prompt_length=2, on_long="cut")
    assert cut.prompts("train")["input_ids"][0] == [8, 9]


def test_prompts_in_memory_are_in_the_column_of_a_file(tmp_path, chat_tokenizer):
    task = task_of(tmp_path, chat_tokenizer, [{"question": "1"}], columns={"prompt": "question"})
    assert task.prompts_of([{"question": "12", "prompt": "3"}])["prompt"][:] == ["_:12=x:"]
    assert task.prompts_of([{"question": "12"}])["prompt"][:] == ["_:12=x:"]
    assert task.prompts_of(["12"])["prompt"][:] == ["_:12=x:"]


def test_prompts_in_memory(tmp_path, chat_tokenizer, caplog):
    task = task_of(tmp_path, chat_tokenizer, [{"query": "1"}], max_prompt_length=8)
    given = task.prompts_of([{"query": "12", "topic": "a"}, {"query": "9" * 20}, {"query": "3"}])
    assert given["prompt"][:] == ["_:12=x:", "_:3=x:"] and given["topic"][:] == ["a", None]
    assert given["input_ids"][0] == ids("_:12=x:")
    assert "2 prompts; 1 left out: 1 × a prompt over 8 tokens (first: row 2)" in caplog.text
    assert "no part of the prompt" not in caplog.text
    task.prompts_of([{"query": "1", "context": "2"}, {"query": "34", "context": "3"}], field="eval_dataset")
    assert 'eval_dataset: 2 prompts; 1 have a column "context" that is no part of the prompt' in caplog.text
    assert task.prompts_of(["12"])["prompt"][:] == ["_:12=x:"]
    ready = Dataset.from_dict({"input_ids": [[1, 5]]})
    assert task.prompts_of(ready.with_format("torch")).to_list() == ready.to_list()
    formatted = Dataset.from_list([{"messages": [user("12")]}]).with_format("numpy")
    assert task.prompts_of(formatted)["prompt"][:] == ["_:12=x:"]
    for odd in ([], 5, [7.5], ["a"], [-1], [10**6]):
        with pytest.raises(
            DataError, match="train_dataset: row 1: input_ids is .*, and ids of known tokens are needed"
        ):
            task.prompts_of(Dataset.from_dict({"input_ids": [odd]}))
    none = Dataset.from_dict({"input_ids": [[1]]}).select([])
    tables = [Path("data/queries.jsonl"), {"prompt": ["a"]}, DatasetDict(train=ready), pd.DataFrame({"prompt": ["a"]})]
    of_ours = doubling.Doubling()
    for one in (task, of_ours):
        for odd in ("data/queries.jsonl", 7, *tables):
            with pytest.raises(DataError, match="train_dataset: a .* is no list of rows. Give texts"):
                one.prompts_of(odd)
        for odd in ([], none):
            with pytest.raises(DataError, match="train_dataset: it has no rows"):
                one.prompts_of(odd)
    with pytest.raises(DataError, match='the rows given: column "topic" .* of one type; in row 3 it is 3 '):
        task.prompts_of([{"query": ""}, {"query": "1", "topic": "a"}, {"query": "2", "topic": 3}])
    with pytest.raises(DataError, match='column "n" holds a number of over 64 bits; in row 1 it is a number '):
        task.prompts_of([{"query": "1", "n": 10**5000}])
    with pytest.raises(DataError, match="row 1: no column messages, prompt or query; present: text"):
        of_ours.prompts_of([{"text": "1"}])
    given = of_ours.prompts_of(["S小写:5487x2=", {"prompt": "S大写:1234x2=", "topic": "b"}])
    asked = of_ours.tokenizer
    assert [asked.decode(row) for row in given["input_ids"]] == ["S小写:5487x2=", "S大写:1234x2="]
    assert given["topic"][:] == [None, "b"]


def test_a_prompt_with_what_the_template_writes_behind_a_question_is_in_it_already(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    task = task_of(tmp_path, tokenizer, [{"prompt": "[INST] q [/INST]"}, {"prompt": "[INST"}])
    assert task.prompts("train")["prompt"][:] == ["[INST] [INST [/INST]"]
    assert task.left_out["train"].total() == 1


def test_the_answer_at_the_end_of_data_for_sft_is_dropped_where_that_is_asked_for(tmp_path, chat_tokenizer):
    answer = {"role": "assistant", "content": "2"}
    talks = [
        [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}], [user("1"), answer], [user("1")],
        [user("1"), answer, user("1"), answer], [answer], "Human: 1\n\nAssistant: 2", "1", None,
    ]  # fmt: skip
    rows = [{"prompt": talk, "n": n} for n, talk in enumerate(talks)]
    task = task_of(tmp_path, chat_tokenizer, rows, drop_answer=True, columns={"prompt": "prompt"})
    read = task.prompts("train")
    assert read["n"][:] == [0, 1, 2, 3, 5, 6] and task.left_out["train"] == {"an empty prompt": 2}
    assert read["prompt"][:] == ["_:1=x:"] * 3 + ["_:1=小:2=_:1=x:"] + ["_:1=x:"] * 2
    assert read["messages"][0] == [user("1")] and read["messages"][3] == [user("1"), answer, user("1")]
    named = task_of(tmp_path, chat_tokenizer, [{"conversations": talks[0]}], columns={"messages": "conversations"})
    with pytest.raises(DataError, match=r"its last turn is the assistant's \(drop_answer: true takes it off\)"):
        named.prompts("train")
    assert task.prompts_of([{"prompt": talks[1]}])["prompt"][:] == ["_:1=x:"]
    # What a finished run is asked from a file, too; there ids are what they are.
    assert task.prompt_of("x", {"prompt": talks[1]})[0] == "1" and task.prompt_of("x", {"input_ids": [3]})
    plain = task_of(tmp_path, byte_tokenizer(), rows[5:6], drop_answer=True, chat=False)
    assert plain.prompt_of("x", {"prompt": talks[5]})[1]["prompt"] == "\n\nHuman: 1\n\nAssistant:"
    with pytest.raises(DataError, match="^drop_answer: .*line 1: it has no effect on prompts that are token ids"):
        task_of(tmp_path, chat_tokenizer, [{"input_ids": [3]}], drop_answer=True).prompts("train")


def test_a_speaker_that_is_not_known_is_named_and_a_name_beside_a_role_is_none():
    turns = [{"from": "human", "value": "What is 2 + 2?"}, {"from": "observation", "value": "4"}]
    with pytest.raises(Unusable, match='a message from "observation", a speaker that is not known'):
        checked_messages(turns)
    assert checked_messages([{"role": "user", "content": "Hi", "from": "Alice"}])[0]["content"] == "Hi"


@pytest.mark.parametrize("role", ["bot", "human", "gpt", "ai", "model", "chatbot", "User", "SYSTEM"])
def test_a_role_that_no_template_means_is_named(role):
    said = f'^a message with the role "{role}"; a role is user, assistant, system or another one of the chat template'
    with pytest.raises(Unusable, match=said):
        checked_messages([{"role": role, "content": "1"}, user("2")])
    for known in ("tool", "developer", "ipython"):
        assert len(checked_messages([user("1"), {"role": known, "content": "2"}])) == 2
