"""The forms of a preference pair, of a dialogue and of a demonstration, each read to the same tokens."""

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.tiny_runs import byte_tokenizer
from toolkit.data import Demonstrations, Preferences, Prompts, RatedResponses, doubling
from toolkit.data.encoder import without_end
from toolkit.data.pairs import Pair, read_pair
from toolkit.data.rows import Unusable, draw_held_out, draw_parts
from toolkit.errors import DataError

DATA = Path(__file__).parents[2] / "data"
ASKED = [{"role": "user", "content": "Capital?"}]


def said(text):
    return [{"role": "assistant", "content": text}]


THOUGHTS = ("reasoning_content", "thinking", "reasoning")
HH = "\n\nHuman: Capital?\n\nAssistant:"
SAME_PAIR = [
    {"chosen": f"{HH} Paris.", "rejected": f"{HH} Rome."},
    {"chosen": ASKED + said("Paris."), "rejected": ASKED + said("Rome.")},
    {"prompt": ASKED, "chosen": said("Paris."), "rejected": said("Rome.")},
    {"prompt": ASKED, "chosen": "Paris.", "rejected": "Rome."},
    {"prompt": HH, "chosen": "Paris.", "rejected": "Rome."},
    {"prompt": "\n\nHuman: Capital?", "chosen": said("Paris."), "rejected": said("Rome.")},
    {"prompt": "Capital?", "chosen": ASKED + said("Paris."), "rejected": ASKED + said("Rome.")},  # UltraFeedback's
    {"prompt": ASKED, "chosen": ASKED + said("Paris."), "rejected": ASKED + said("Rome.")},
    {"prompt": HH, "chosen": f"{HH} Paris.", "rejected": f"{HH} Rome."},
    {"prompt": "Capital? ", "chosen": f"{HH} Paris.", "rejected": f"{HH} Rome."},
    {"prompt": ASKED, "chosen": "\n\nAssistant: Paris.", "rejected": "\n\nAssistant: Rome."},
    {
        "prompt": [{"from": "human", "value": "Capital?"}],  # ShareGPT's, as LLaMA-Factory ranks
        "chosen": {"from": "gpt", "value": "Paris."},
        "rejected": {"from": "gpt", "value": "Rome."},
    },
    {"prompt": HH, "chosen": ASKED + said("Paris."), "rejected": ASKED + said("Rome.")},
    {"chosen": f"{HH} Paris.".strip(), "rejected": f"{HH} Rome.".strip()},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("row", SAME_PAIR)
def test_conversational_forms(row):
    assert read_pair("x", row) == Pair(ASKED, "Paris.", "Rome.")
    if "prompt" not in row:  # as a table has it that holds other rows with one
        assert read_pair("x", {**row, "prompt": None}) == Pair(ASKED, "Paris.", "Rome.")
    assert read_pair("x", {**row, "margin": 2}).margin == 2.0
    assert read_pair("x", {**row, "margin": "0.5"}).margin == 0.5  # of CSV, which has no other numbers
    assert read_pair("x", {**row, "margin": ""}).margin is None


def test_a_prompt_with_space_around_it_that_its_conversations_repeat():
    for prompt in ("Capital?\n", "Capital?"):
        asked = [{"role": "user", "content": "Capital?\n"}]
        row = {"prompt": prompt, "chosen": asked + said("Paris."), "rejected": asked + said("Rome.")}
        assert read_pair("x", row) == Pair(asked, "Paris.", "Rome.")


def test_keys_that_a_table_gives_to_one_column_alone_make_no_other_prompt(tmp_path):
    sides = {side: [*ASKED, {**said(text)[0], "model": "m"}] for side, text in (("chosen", "a"), ("rejected", "b"))}
    path = str(tmp_path / "x.parquet")
    pq.write_table(pa.Table.from_pylist([{"prompt": [{**ASKED[0], "content": "Capital? "}], **sides}]), path)
    (pair,) = Preferences(byte_tokenizer(), path, path).pairs("train")
    assert byte_tokenizer().decode(pair["chosen_ids"]) == "<s>Capital?</s><s>a</s>"


def test_dialogues_with_the_line_ends_of_windows():
    chosen, rejected = ("\n\nHuman: Capital\nof France?\n\nAssistant: " + end for end in ("Paris.", "Rome."))
    row = {"chosen": chosen, "rejected": rejected}
    windows = {name: text.replace("\n", "\r\n") for name, text in row.items()}
    found, plain = read_pair("x", windows), read_pair("x", row)
    assert [message["role"] for message in plain.prompt] == ["user"]
    assert found.prompt == [{"role": "user", "content": "Capital\r\nof France?"}]
    assert (found.chosen, found.rejected) == (plain.chosen, plain.rejected)


def test_forms_of_text():
    explicit = {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}
    assert read_pair("x", explicit) == Pair("1 + 1 =", " 2", " 3")
    implicit = {"chosen": "It is 1 + 1 = 22 ok", "rejected": "It is 1 + 1 = 23 ok"}
    # The common beginning ends between words: "2" is not taken out of "22" and "23".
    assert read_pair("x", implicit) == Pair("It is 1 + 1 =", " 22 ok", " 23 ok")
    longer = {"chosen": "a b c", "rejected": "a b"}
    assert read_pair("x", longer) == Pair("a", " b c", " b")
    # A rendered prompt keeps the line breaks that it ends with, which are one token; a space is of the word behind it.
    for space, before in (("\n\n", "\n\n"), ("\r\n", "\r\n"), ("\n ", "\n"), (" \n", " \n"), ("\n\t", "\n")):
        rendered = {"chosen": f"assistant<|end|>{space}Paris.", "rejected": f"assistant<|end|>{space}Rome."}
        after = space.removeprefix(before)
        assert read_pair("x", rendered) == Pair(f"assistant<|end|>{before}", f"{after}Paris.", f"{after}Rome.")
    apart = {"chosen": "a:\n\n\nb", "rejected": "a:\n\nc"}  # of which neither run is the prompt's
    assert read_pair("x", apart) == Pair("a:", "\n\n\nb", "\n\nc")
    # Not every text with "Human: " is a dialogue.
    no_turn = {"chosen": "Human: a\n\nb c", "rejected": "Human: a\n\nb d"}
    assert read_pair("x", no_turn) == Pair("Human: a\n\nb", " c", " d")
    # What stands before the first turn is part of the text.
    told = {"prompt": f"Be brief.{HH}", "chosen": "a", "rejected": "b"}
    assert read_pair("x", told) == Pair(told["prompt"], "a", "b")


@pytest.mark.parametrize(
    ("chat", "read"),
    [(True, "<s>Capital of France?</s><s>Paris.</s>"), (False, "Capital of France?\n\nParis.</s>")],
)
def test_the_line_breaks_behind_common_words_are_no_part_of_a_turn(chat, read, tmp_path):
    sides = {side: f"Capital of France?\n\n{text}" for side, text in (("chosen", "Paris."), ("rejected", "Rome."))}
    path = write(tmp_path / "x.jsonl", [sides])
    task = Preferences(byte_tokenizer(), path, path, chat=chat)
    (pair,) = task.pairs("train")
    assert byte_tokenizer().decode(pair["chosen_ids"]) == read
    assert task.prompt_of("x", sides)[0] == "Capital of France?" + "\n\n" * (not chat)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"chosen": "Paris.", "rejected": "Rome."}, "texts that begin with no common words, and no column prompt"),
        ({"chosen": "a", "rejected": said("b")}, "one of chosen and rejected is text, the other messages"),
        ({"chosen": [], "rejected": said("b")}, "an empty response"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "an empty response"),
        ({"chosen": ASKED + said(" "), "rejected": ASKED + said("b")}, "an empty response"),
        ({"chosen": ASKED + said("a"), "rejected": ASKED + said("a")}, "chosen and rejected are equal"),
        ({"chosen": said("a"), "rejected": said("b")}, "an empty prompt"),
        ({"chosen": ASKED, "rejected": ASKED + said("b")}, "its last turn is not the assistant's"),
        (
            {"chosen": ASKED + said("a") + said("b"), "rejected": ASKED + said("a") + said("c")},
            "its last turn is the assistant's",
        ),
        (
            {
                "chosen": [{"role": "system", "content": "s"}, *said("a")],
                "rejected": [{"role": "system", "content": "s"}, *said("b")],
            },
            "messages without a turn of the user",
        ),
        ({"chosen": "\n\nHuman: \n\nAssistant: a", "rejected": "\n\nHuman: \n\nAssistant: b"}, "an empty prompt"),
        ({"chosen": [{"role": "assistant"}], "rejected": said("b")}, 'a message without text as "content"'),
        ({"chosen": [*ASKED, *ASKED, *said("a")], "rejected": ASKED + said("b")}, "different prompts"),
        ({"prompt": ASKED, "chosen": ASKED + said("a"), "rejected": said("b")}, "an answer of 2 messages beside its"),
        ({"prompt": "Else?", "chosen": f"{HH} a", "rejected": f"{HH} b"}, "an answer of 2 messages beside its"),
        ({"prompt": " ", "chosen": "a", "rejected": "b"}, "an empty prompt"),
        ({"prompt": None, "chosen": "It is Paris.", "rejected": "It is Rome."}, "an empty prompt"),
        (
            {"prompt": None, "question": "Capital?", "chosen": "It is a.", "rejected": "It is b."},
            "an empty prompt, and a c",
        ),
        ({**SAME_PAIR[0], "tools": [{"name": "search"}]}, "tools, which are not read"),
        (
            {"prompt": ASKED, "chosen": [{**said("a")[0], "tool_calls": [{"id": "1"}]}], "rejected": said("b")},
            "a response with tool calls",
        ),
        (
            {"prompt": ASKED, "chosen": [{**said("a")[0], "thinking": "Hm."}], "rejected": said("b")},
            "a response with a thought beside its content, which is not learnt",
        ),
        (
            {"prompt": f"{HH} Done.", "chosen": "a", "rejected": "b"},
            "a dialogue that cannot be a prompt: its last",
        ),
        ({**SAME_PAIR[0], "margin": "much"}, "a margin that is no finite number"),
        ({**SAME_PAIR[0], "margin": True}, "a margin that is no finite number"),
        ({**SAME_PAIR[0], "margin": float("nan")}, "a margin that is no finite number"),
    ],
)
def test_pairs_that_cannot_be_used(row, reason):
    with pytest.raises(Unusable, match=reason):
        read_pair("x", row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"chosen": 1, "rejected": "b"},
            r'line 2: column "chosen" is neither text nor messages, but a number; present',
        ),
        (
            {
                "conversations": [{"from": "human", "value": "Hi"}],
                "chosen": {"from": "gpt", "value": "a"},
                "rejected": {"from": "gpt", "value": "b"},
            },
            r'^columns: .*line 2: .*"conversations" beside chosen and rejected is not read. Name it \(prompt: conver',
        ),
        (
            {"instruction": "Capital?", "chosen": "It is Paris.", "rejected": "It is Rome."},
            r'line 2: there is no column "prompt", and "instruction" beside chosen and rejected is not read. Name it',
        ),
        (
            {"problem": "Capital?", "chosen": "It is Paris.", "rejected": "It is Rome."},
            r'"problem" beside chosen and rejected is not read. Name it \(prompt: problem\)',
        ),
        (
            {"Prompt": "Capital?", "chosen": "It is Paris.", "rejected": "It is Rome."},
            r'"Prompt" beside chosen and rejected is not read. Name it \(prompt: Prompt\)',
        ),
        (
            {"system": "Be brief.", "input": "Hello", "instruction": "To French.", "chosen": "Bonjour", "rejected": ""},
            r'"instruction", "input", "system" beside .* are not read. Write them into one and name it \(prompt: instr',
        ),
        (
            {"prompt": 1, "chosen": "a", "rejected": "b"},
            r'line 2: column "prompt" is neither text nor .*, but a number',
        ),
    ],
)
def test_columns_of_another_kind_name_the_line(row, message, tmp_path):
    path = write(tmp_path / "x.jsonl", [SAME_PAIR[0], row])
    with pytest.raises(DataError, match=message):
        Preferences(byte_tokenizer(), path, path).pairs("train")


@pytest.mark.parametrize(
    ("row", "columns", "unread"),
    [
        ({"instruction": "To French.", "input": "Hello"}, {"prompt": "instruction"}, "input"),
        ({"question": "Who?", "context": {"title": ["a"]}}, {"prompt": "question"}, "context"),
        ({"prompt": "Who?", "context": "a"}, None, None),  # may be anything
        ({"question": "Hello: to French.", "input": "Hello "}, {"prompt": "question"}, None),  # which has it already
        ({"instruction": "To French.", "input": ""}, {"prompt": "instruction"}, None),
        ({"prompt": "a", "System": "Be brief."}, None, "System"),
        ({"prompt": "a", "system": "Be kind."}, None, None),  # as data.system
        ({"prompt": "a", "system": 4}, None, None),
        ({"prompt": [{"role": "system", "content": "Be brief."}, *ASKED], "system": "Be brief."}, None, None),
        ({"prompt": "a", "history": [["b", "c"]]}, None, "history"),
        ({"prompt": [*ASKED, *said("b"), *ASKED], "history": [["Capital?", "b"]]}, None, None),
    ],
)
def test_a_part_of_the_prompt_in_a_column_that_is_not_read(row, columns, unread, tmp_path):
    reason = f'a column "{unread}", which is not read: write it into the prompt, or take it out'
    good = {**dict.fromkeys(row), next(iter(row)): "a"}
    rows = [{**one, "chosen": "b", "rejected": "c", "completion": "b"} for one in (good, row)]
    path = write(tmp_path / "x.jsonl", rows)
    pairs = Preferences(byte_tokenizer(), path, path, columns=columns, system="Be kind.")
    tasks = [pairs] if columns else [pairs, Demonstrations(byte_tokenizer(), path, path, system="Be kind.")]
    for task in tasks:
        assert task.left_out["train"] == ({reason: 1} if unread else {})


@pytest.mark.parametrize(
    ("columns", "unread"),
    [
        # As smoltalk2 has them.
        ({"chat_template_kwargs": {"custom_instructions": "", "enable_thinking": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"custom_instructions": "", "enable_thinking": None, "xml_tools": []}}, None),
        ({"chat_template_kwargs": '{"enable_thinking": true}'}, "chat_template_kwargs"),
        ({"chat_template_kwargs": "{}"}, None),
        ({"tools": '[{"name": "clock"}]'}, "tools"),
        *(({"tools": none}, None) for none in (" ", "[]", "{}", "null", [])),
    ],
)
def test_what_a_template_would_be_told_is_not_passed_over(columns, unread, tmp_path):
    plain = {"prompt": "a", "chosen": "b", "rejected": "c", "completion": "b"}
    path = write(tmp_path / "x.jsonl", [{**plain, **dict.fromkeys(columns)}, plain | columns])
    tasks = [kind(byte_tokenizer(), path, path) for kind in (Preferences, Demonstrations, Prompts)]
    for task in tasks[: 2 if "tools" in columns else 3]:  # prompts go to a reward, their columns with them
        assert task.left_out["train"] == ({f"{unread}, which are not read": 1} if unread else {})


def test_every_form_is_tokenised_alike_and_margins_come_along(tmp_path):
    tokenizer = byte_tokenizer()
    rows = [{**row, "margin": 0.5} for row in SAME_PAIR[:2]] + SAME_PAIR[2:]
    path = write(tmp_path / "x.jsonl", rows)
    pairs = Preferences(tokenizer, path, path).pairs("train")
    assert [tokenizer.decode(ids) for ids in pairs["chosen_ids"]] == ["<s>Capital?</s><s>Paris.</s>"] * len(rows)
    assert pairs["margin"] == [0.5, 0.5] + [0] * (len(rows) - 2)
    without = Preferences(tokenizer, (other := write(tmp_path / "y.jsonl", SAME_PAIR)), other).pairs("train")
    assert without.column_names == ["chosen_ids", "rejected_ids", "prompt_length"]
    assert without["prompt_length"][:] == [len(tokenizer.encode("<s>Capital?</s><s>"))] * len(rows)


def test_a_margin_of_another_name_that_some_rows_lack(tmp_path):
    rows = [{**SAME_PAIR[0], "margin": 9}, {**SAME_PAIR[1], "gap": 0.5}, {**SAME_PAIR[2], "gap": None}]
    path = write(tmp_path / "x.jsonl", rows)
    held_out = write(tmp_path / "y.jsonl", SAME_PAIR[:1])

    def pairs(source, name, split="train"):
        return Preferences(byte_tokenizer(), source, held_out, columns={"margin": name}).pairs(split)

    assert pairs(path, "gap")["margin"] == [0, 0.5, 0]  # of the name that is not theirs none is read
    assert "margin" not in pairs(path, "gap", "validation").column_names
    none = write(tmp_path / "z.jsonl", [{**SAME_PAIR[0], "gap": None}])
    assert "margin" not in pairs(none, "gap").column_names
    with pytest.raises(DataError, match='^columns.margin: no row of train that can be used has the column "gpa". Corr'):
        pairs(path, "gpa")


def test_where_all_are_too_long_the_limit_is_what_to_change(tmp_path):
    path = write(tmp_path / "x.jsonl", SAME_PAIR[:2])
    for limit in ("max_prompt_length", "max_response_length"):
        with pytest.raises(DataError, match=rf"^train: .* tokens \(first: .*line 1\)\). Raise {limit}, or name"):
            Preferences(byte_tokenizer(), path, path, **{limit: 2}).pairs("train")


# ---------------------------------------------------------------------- without a chat template


def plain(tokenizer):
    tokenizer.chat_template = None
    return tokenizer


def test_the_plain_form_is_hh_rlhfs_own_text(tmp_path):
    tokenizer = plain(byte_tokenizer())
    turns = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Capital?\n\nAssistant:"
    rows = [
        {"chosen": f"{turns} Paris.", "rejected": f"{turns} Rome."},
        {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"},
    ]
    path = write(tmp_path / "x.jsonl", rows)
    task = Preferences(tokenizer, path, path, chat=False)
    pairs = task.pairs("train")
    assert tokenizer.decode(pairs[0]["chosen_ids"]) == f"{turns} Paris.</s>"
    assert tokenizer.decode(pairs[1]["rejected_ids"]) == "1 + 1 = 3</s>"
    prompts = task.prompts("train")
    assert prompts["prompt"] == [turns, "1 + 1 ="] and prompts["messages"][1] is None and not task.chats
    assert tokenizer.decode(task.prompt_ids(ASKED)) == HH
    shown = task.demonstrations("train")[0]
    assert tokenizer.decode([token for token in shown["labels"] if token != -100]) == " Paris.</s>"


@pytest.mark.parametrize("chat", [True, False])
def test_a_response_stands_in_a_conversation_as_the_form_has_it_whatever_space_is_around_it(chat, tmp_path):
    tokenizer = byte_tokenizer() if chat else plain(byte_tokenizer())
    rows = [{"prompt": HH, "chosen": f"{space}Paris.", "rejected": f"{space}Rome. "} for space in ("", " ", "\n ")]
    path = write(tmp_path / "x.jsonl", rows)
    pairs = Preferences(tokenizer, path, path, chat=chat).pairs("train")
    asked = "<s>Capital?</s><s>" if chat else f"{HH} "
    assert {tokenizer.decode(ids) for ids in pairs["chosen_ids"]} == {f"{asked}Paris.</s>"}
    assert {tokenizer.decode(ids) for ids in pairs["rejected_ids"]} == {f"{asked}Rome.</s>"}
    rows = [
        {"prompt": HH, "response": f"{row['chosen']}", "rewards": 1, "ended": row["chosen"][0] != " "} for row in rows
    ]
    rated = RatedResponses(tokenizer, write(tmp_path / "y.jsonl", rows), chat=chat).rated("train")
    read = [tokenizer.decode(row["prompt_ids"] + row["response_ids"]) for row in rated]
    assert read == [f"{asked}Paris.</s>", f"{asked}Paris.", f"{asked}Paris.</s>"]


@pytest.mark.parametrize("after", ["", "\n"])
def test_a_thought_that_the_template_opens_is_not_opened_twice(after, tmp_path, caplog):
    tokenizer, unused = byte_tokenizer(), "a response without the thought that the chat template opens"
    turns = "{% for m in messages %}{{ '<think></think>' if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
    opened = "<think>" + after.replace("\n", "\\n")
    tokenizer.chat_template = turns + "{{ '" + opened + "' if add_generation_prompt }}"
    texts = ["<think>\nHm.\n</think>\n\nParis.", "Paris.", "<think>", *(["Hm.\n</think>\n\nParis."] if after else [])]
    rows = [{"prompt": "Capital?", "completion": text} for text in texts]
    task = Demonstrations(tokenizer, path := write(tmp_path / "x.jsonl", rows), path)
    read = {tokenizer.decode(row["input_ids"]) for row in task.demonstrations("train")}
    assert read == {"Capital?<think>\nHm.\n</think>\n\nParis.</s>"} and task.left_out["train"] == {unused: 2}
    # A limit may have cut the thought.
    rows = [{"prompt": "Capital?", "response": "<think>\nHm.", "rewards": 1, "ended": False}]
    (row,) = RatedResponses(tokenizer, write(tmp_path / "y.jsonl", rows)).rated("train")
    assert tokenizer.decode(row["prompt_ids"] + row["response_ids"]) == "Capital?<think>\nHm."
    assert not caplog.text  # what the template writes of a thought is theirs to write


def test_what_the_template_writes_before_an_answer_is_refused_and_a_thought_told(tmp_path, caplog):
    row = {"prompt": "Capital?", "chosen": "Paris.", "rejected": "Rome."}
    path = write(tmp_path / "x.jsonl", [{**row, "completion": "Paris.", "response": "Paris.", "rewards": 1}])
    tokenizer, asked = byte_tokenizer(), "<s>userCapital?</s><s>assistant"

    def read(before):
        turn = "<s>{{ m.role }}{{ '" + before + "' if m.role == 'assistant' }}{{ m.content }}</s>"
        ask = "{{ '<s>assistant' if add_generation_prompt }}"
        tokenizer.chat_template = "{% for m in messages %}" + turn + "{% endfor %}" + ask
        pairs, demonstrations = (kind(tokenizer, path, path) for kind in (Preferences, Demonstrations))
        for task in (pairs, Prompts(tokenizer, path, path)):
            assert task.prompts("train")["prompt"][:] == [asked]
        yield from (pairs.pairs, pairs.demonstrations, demonstrations.demonstrations)
        yield RatedResponses(tokenizer, path).rated

    for rows in read("|final|"):  # as gpt-oss
        message = r'^chat: the chat template writes "\|final\|" between .* an answer.* already, with chat: false'
        with pytest.raises(DataError, match=message):
            rows("train")
    assert not caplog.text
    *_, demonstrations, _ = read("<think>\\n</think>")
    for split in ("train", "validation"):
        assert tokenizer.decode(demonstrations(split)[0]["input_ids"]) == f"{asked}Paris.</s>"
    assert caplog.text.count(r'writes "<think>\n</think>" before an answer: responses of the data follow its gen') == 1
    for before in ("", "\\n", " "):
        assert all(len(rows("train")) == 1 for rows in read(before))


def test_plain_or_chat_is_said_and_not_guessed(tmp_path):
    path = write(tmp_path / "x.jsonl", SAME_PAIR)
    with pytest.raises(DataError, match=r"^chat: .* no chat template, .*set chat to false for .* hh-rlhf's"):
        Preferences(plain(byte_tokenizer()), path, path)
    system = [{"role": "system", "content": "Be brief."}, *ASKED]
    path = write(tmp_path / "y.jsonl", [SAME_PAIR[0], {"prompt": system, "chosen": "a", "rejected": "b"}])
    task = Preferences(plain(byte_tokenizer()), path, path, chat=False)
    assert len(task.pairs("train")) == 1
    assert task.left_out["train"] == {"a message of the system, which the plain form has no name for": 1}


# ---------------------------------------------------------------------- prompts that are dialogues


@pytest.mark.parametrize("chat", [True, False])
def test_dialogues_as_prompts_in_a_column_of_another_name(chat):
    tokenizer = byte_tokenizer() if chat else plain(byte_tokenizer())
    source = str(DATA / "dialogue_prompts.jsonl")
    task = Prompts(tokenizer, source, columns={"prompt": "promtp"}, validation_size=2, chat=chat)
    assert len(task.prompts("train")) + len(task.prompts("test")) == 12 and not task.left_out_rows()
    found = {row["prompt"] for split in ("train", "test") for row in task.prompts(split)}
    if chat:
        assert "<s>Name a planet.</s><s>Saturn.</s><s>Does it have rings?</s><s>" in found
        messages = [row["messages"] for row in task.prompts("train")]
        assert {message["role"] for row in messages for message in row} == {"user", "assistant"}
    else:
        # The last turn is asked for, as it stands before every response of a preference pair.
        assert "\n\nHuman: What is 7 times 8?\n\nAssistant:" in found


def test_a_dialogue_that_was_answered_is_no_prompt(tmp_path):
    path = write(tmp_path / "x.jsonl", [{"prompt": HH}, {"prompt": f"{HH} Paris."}])
    task = Prompts(byte_tokenizer(), path, path)
    assert task.prompts("train")["prompt"] == ["<s>Capital?</s><s>"]
    reason = "a dialogue that cannot be a prompt: its last turn is the assistant's (drop_answer: true takes it off)"
    assert task.left_out["train"] == {reason: 1}


# ---------------------------------------------------------------------- demonstrations


def test_demonstrations_in_every_form():
    tokenizer = byte_tokenizer()
    source = str(DATA / "demonstrations.jsonl")
    task = Demonstrations(tokenizer, source, source, max_validation_rows=2)
    rows = task.demonstrations("train")
    read = [
        (tokenizer.decode(row["input_ids"]), tokenizer.decode([t for t in row["labels"] if t != -100])) for row in rows
    ]
    assert read[1][0] == "<s>Name a river.</s><s>The Loire.</s><s>And one that is longer?</s><s>The Danube.</s>"
    assert read[1][1] == "The Danube.</s>"
    assert read[3] == ("<s>What is the opposite of cold?</s><s>Hot.</s>", "Hot.</s>")
    assert read[4] == ("<s>Which planet has rings?</s><s>Saturn.</s>", "Saturn.</s>")
    assert read[5][0].startswith("<s>Who wrote Faust?</s><s>Goethe did.</s><s>In which language?</s><s>In German.")
    assert read[6][0] == read[6][1] and read[6][0].endswith("the dough holds.</s>")
    assert len(task.demonstrations("validation")) == 2 and task.report().startswith("train: 8 demonstrations | ")
    assert task.row_places("sft")[9] == {"split": "validation", "place": f"{source}, line 2"}


def test_demonstrations_that_cannot_be_used(tmp_path):
    rows = [
        {"messages": ASKED}, {"messages": said("a")}, {"messages": "a"}, {"prompt": "a", "completion": " "},
        {"prompt": "a", "completion": None}, {"prompt": None, "completion": "a"}, {"messages": None}, {"text": None},
        {"text": " "}, {"text": 1}, {"text": "good"}, {"prompt": "a", "completion": "b", "tools": [{"name": "c"}]},
        *({"messages": [*ASKED, {**said("a")[0], key: "Hm."}]} for key in THOUGHTS),
        {"messages": [*ASKED, {**said("good")[0], "reasoning_content": "", "tool_calls": []}]},
        {"messages": [{**said("earlier")[0], "thinking": "Hm."}, *ASKED, *said("good")]},
        {"messages": [*ASKED, *said("a")], "system": "Be brief."}, {"text": "good", "system": "good"},
        {"prompt": "a", "completion": str(said("b"))},
    ]  # fmt: skip
    path = write(tmp_path / "x.jsonl", rows)
    task = Demonstrations(byte_tokenizer(), path, path)
    assert len(task.demonstrations("train")) == 4
    assert task.left_out["train"] == {
        "its last turn is not the assistant's": 1, "an empty prompt": 2, "messages that are no list": 1,
        "an empty response": 3, "an empty text": 2, "a text that is no text": 1, "tools, which are not read": 1,
        "a response with a thought beside its content, which is not learnt": 3,
        'a column "system", which is not read: write it into the prompt, or take it out': 1,
        "messages that are written as text: keep them in a .jsonl or .parquet file": 1,
    }  # fmt: skip
    path = write(tmp_path / "y.jsonl", [{"prompt": "a"}])
    with pytest.raises(DataError, match=r"line 1: a demonstration is in the column messages, .*; present: prompt"):
        Demonstrations(byte_tokenizer(), path, path).demonstrations("train")
    with pytest.raises(DataError, match="^validation: it is missing. Name a source of held-out demonstrations, or"):
        Demonstrations(byte_tokenizer(), path).demonstrations("train")
    with pytest.raises(DataError, match="has no chat template"):
        Demonstrations(doubling.tokenizer(), path, path)


def test_a_completion_may_repeat_its_prompt_as_the_sides_of_a_pair_may(tmp_path):
    said_of_it = ["Paris.", f"{HH} Paris.", "\n\nAssistant: Paris.", ASKED + said("Paris."), said("Paris.")[0]]
    path = write(tmp_path / "x.jsonl", [{"prompt": HH, "completion": one} for one in said_of_it])
    rows = Demonstrations(byte_tokenizer(), path, path).demonstrations("train").to_list()
    assert rows == rows[:1] * 5 and byte_tokenizer().decode(rows[0]["input_ids"]) == "<s>Capital?</s><s>Paris.</s>"


# A template writes a line break behind an end, which rows that were rendered with one have.
@pytest.mark.parametrize(("said_with_end", "chat"), [("b", True), ("b</s>", True), ("b</s>\n", False)])
def test_a_response_that_has_its_end_gets_no_second_one(said_with_end, chat, tmp_path):
    tokenizer = byte_tokenizer()
    (b,), end = tokenizer("b", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id
    path = write(tmp_path / "x.jsonl", [{"prompt": "a", "completion": said_with_end}, {"text": said_with_end}])
    rows = Demonstrations(tokenizer, path, path, chat=chat).demonstrations("train")
    assert [[label for label in row["labels"] if label != -100] for row in rows] == [[b, end]] * 2
    path = write(tmp_path / "y.jsonl", [{"prompt": "a", "chosen": said_with_end, "rejected": "c"}])
    (pair,) = Preferences(tokenizer, path, path, chat=chat).pairs("train")
    assert pair["chosen_ids"][pair["prompt_length"] :] == [b, end]
    path = write(tmp_path / "z.jsonl", [{"prompt": "a", "response": said_with_end, "rewards": 1}])
    (rated,) = RatedResponses(tokenizer, path, chat=chat).rated("train")
    assert rated["response_ids"] == [b, end] and rated["rewards"] == [None, 1.0] and rated["ended"]


def test_a_response_that_goes_on_after_its_end_is_left_out(tmp_path):
    rows = [{"prompt": "a", "completion": "b</s>c"}, {"prompt": "a", "completion": "b"}]
    path = write(tmp_path / "x.jsonl", rows)
    task = Demonstrations(byte_tokenizer(), path, path)
    assert len(task.demonstrations("train")) == 1
    assert task.left_out["train"] == {"a response that goes on after its end (</s>)": 1}


GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def gemma():
    """Whose template ends a turn with another token than the tokenizer's end of sequence."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<start_of_turn>", "<end_of_turn>"]})
    tokenizer.chat_template = GEMMA
    return tokenizer


@pytest.mark.parametrize("chat", [True, False])
def test_the_end_that_a_template_writes_is_one_too(chat, tmp_path):
    tokenizer, asked = gemma(), "<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n"
    prompt = "a" if chat else asked
    ends = ("", "</s>", "<end_of_turn>", "<end_of_turn>\n", "<end_of_turn>\n</s>")
    goes_on = "b<end_of_turn>\n<start_of_turn>user\nMore?"
    rows = [{"prompt": prompt, "completion": text} for text in (goes_on, *(f"b{end}" for end in ends))]
    rows += [{"text": f"{asked}b{end}"} for end in ends]
    path = write(tmp_path / "x.jsonl", rows)
    task = Demonstrations(tokenizer, path, path, chat=chat)
    read = [tokenizer.decode(row["input_ids"]) for row in task.demonstrations("train")]
    assert read == [f"{asked}b</s>"] * (2 * len(ends))
    assert task.left_out["train"] == {"a response that goes on after its end (<end_of_turn>)": 1}
    # A template that cannot be used is none of those that take text as it is.
    tokenizer.chat_template = "{{ messages[0].content * 3000000 }}"
    assert chat or Demonstrations(tokenizer, path, path, chat=False).left_out["train"] == {}


def test_an_end_that_is_white_space_itself_is_one_too(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "\n"})
    path = write(tmp_path / "x.jsonl", [{"prompt": "1", "completion": f"a{end}"} for end in ("", "\n", "\n\n")])
    task = Demonstrations(tokenizer, path, path, chat=False)
    assert [tokenizer.decode(row["input_ids"]) for row in task.demonstrations("train")] == ["1a\n"] * 3
    assert task.left_out["train"] == {}
    # Of very many ends the text is not copied for each.
    assert without_end(" a " + "</s> \n" * 60_000, ["</s>"]) == " a " and without_end("a \n", ["</s>"]) == "a \n"


def test_the_end_of_a_turn_is_not_written_twice_and_tells_a_rendered_prompt(tmp_path):
    tokenizer, asked = gemma(), {"role": "user", "content": "a"}
    talks = [[asked, *said(text), asked] for text in ("b", "b<end_of_turn>", "b<end_of_turn>\n")]
    rendered = "<start_of_turn>user\na<end_of_turn>\n"  # without a generation prompt
    path = write(tmp_path / "x.jsonl", [*({"prompt": talk} for talk in talks), {"prompt": rendered}])
    task = Prompts(tokenizer, path, path)
    model = "<start_of_turn>model\n"
    assert task.prompts("train")["prompt"][:] == [f"{rendered}{model}b<end_of_turn>\n{rendered}{model}"] * 3
    assert task.prompts("train")["messages"][:] == talks[:1] * 3  # which a reward model writes in its own template
    reason = "a prompt with an end of turn inside, as if in a chat template already (chat: false takes it so)"
    assert task.left_out["train"] == {reason: 1}


def test_demonstrations_held_out_by_prompt(tmp_path):
    rows = [{"prompt": f"question {number // 2}", "completion": f"a{number}"} for number in range(12)]
    path = write(tmp_path / "x.jsonl", [*rows, {"text": "alone"}, {"text": "also alone"}])
    task = Demonstrations(byte_tokenizer(), path, validation_size=3)
    places = [
        {row["place"] for row in task.row_places("sft") if row["split"] == split} for split in ("train", "validation")
    ]
    assert len(places[0] | places[1]) == 14 and 3 <= len(places[1]) <= 4
    prompts = [{tuple(row["input_ids"][: row["labels"].count(-100)]) for row in task.demonstrations(split)} - {()}
               for split in ("train", "validation")]  # fmt: skip
    assert not prompts[0] & prompts[1] and len(prompts[0] | prompts[1]) == 6
    with pytest.raises(DataError, match="^validation_size: it has no effect with validation. Remove one of them"):
        Demonstrations(byte_tokenizer(), path, path, validation_size=3)
    with pytest.raises(DataError, match="^max_train_rows: a number from 1 is needed, got 0"):
        Demonstrations(byte_tokenizer(), path, path, max_train_rows=0)


def test_texts_that_all_begin_with_the_prompt_are_told(tmp_path):
    asked = [{"prompt": f"How far is {place}?\n"} for place in ("the sea", "the moon")]
    rows = [row | {"chosen": f"{row['prompt']}Far.", "rejected": f"{row['prompt']}Near."} for row in asked]
    other = {"prompt": "How?", "chosen": "How? So.", "rejected": "Who?"}

    def task(name, rows):
        return Preferences(byte_tokenizer(), path := write(tmp_path / name, rows), path, chat=False)

    told = "; in every row chosen and rejected begin with the text of prompt, "
    assert task("a.jsonl", rows).report().count(told) == 1
    assert told not in task("b.jsonl", [*rows, other]).report()
    # The way on that is told: without the column both sides are read as they should be.
    without = task("c.jsonl", [{name: row[name] for name in ("chosen", "rejected")} for row in rows])
    assert told not in without.report()
    alone = task("d.jsonl", [row | {"chosen": "Far.", "rejected": "Near."} for row in asked])
    assert without.pairs("train")[:] == alone.pairs("train")[:] != task("a.jsonl", rows).pairs("train")[:]


# ---------------------------------------------------------------------- groups of rows with the same prompt


def drawn(prompts, number, seed):
    """Rows held out, and those of a part, of so many."""
    held_out = draw_held_out(prompts, number, seed=seed, source="x.jsonl", left_out="")
    return held_out, draw_parts(prompts, {"reward": number}, seed=seed)["reward"]


def test_a_prompt_of_most_rows_is_passed_over_where_others_are_left():
    prompts = ["of most"] * 300 + [str(number) for number in range(100)]
    for seed in range(30):
        for rows in drawn(prompts, 40, seed):
            assert len(set(rows)) == 40 and min(rows) >= 300
        parts = draw_parts(prompts, {"reward": 40, "sft": 50}, seed=seed)
        assert [len(parts["reward"]), len(parts["sft"])] == [40, 50] and set(range(300)) < set(parts["ppo"])


def test_where_no_other_prompt_fits_that_of_the_fewest_rows_is_taken():
    prompts = ["a"] * 30 + ["b"] * 20 + ["c"] * 25
    for seed in range(6):
        assert drawn(prompts, 10, seed) == (list(range(30, 50)),) * 2
        assert {len(rows) for rows in drawn(prompts, 19, seed)} == {20}  # one more is let through
    of_most = ["of most"] * 300 + [str(number) for number in range(30)]
    for seed in range(6):
        assert drawn(of_most, 40, seed) == (list(range(300)),) * 2  # alone: all rows would leave none


def test_where_no_prompt_has_many_rows_groups_are_taken_in_the_order_of_their_shuffle():
    prompts = [str(row * row % 37) for row in range(120)]  # of 1 to 7 rows each
    groups = [[row for row, other in enumerate(prompts) if other == one] for one in dict.fromkeys(prompts)]
    for seed in range(10):
        random.Random(seed).shuffle(order := list(groups))

        def first(groups):
            taken = []
            while len(taken) < 70:  # of which seven are a tenth
                taken += groups.pop(0)
            return sorted(taken)

        assert drawn(prompts, 70, seed) == (first(order[:]), first(order[::-1]))


# ---------------------------------------------------------------------- parts


def test_parts_are_disjoint_and_drawn_by_seed(tmp_path):
    rows = [
        {"prompt": f"question {number // 2}", "chosen": f"a{number}", "rejected": "b"} for number in range(40)
    ]  # each prompt twice
    path = write(tmp_path / "x.jsonl", rows)

    def drawn(seed, **parts):
        task = Preferences(byte_tokenizer(), path, path, parts=parts, seed=seed)
        return task, {stage: [row["place"] for row in task.row_places(stage) if row["split"] == "train"] for stage in
                      ("sft", "reward", "ppo")}  # fmt: skip

    task, places = drawn(0, reward=24, ppo=8)
    assert [len(places[stage]) for stage in ("sft", "reward", "ppo")] == [8, 24, 8]
    assert len({place for stage in places.values() for place in stage}) == 40
    assert len(task.pairs("train")) == 24 and len(task.prompts("train")) == 4 and len(task.demonstrations("train")) == 8
    texts = [byte_tokenizer().decode(ids) for ids in task.pairs("train")["chosen_ids"]]
    shared = {text.split("</s>")[0] for text in texts} & {prompt.split("</s>")[0] for prompt in
                                                         task.prompts("train")["prompt"]}  # fmt: skip
    assert not shared
    assert len(task.pairs("validation")) == 40
    assert task.row_places("q") == task.row_places("collect") == task.row_places("ppo")  # their prompts are PPO's
    assert drawn(0, reward=24, ppo=8)[1] == places != drawn(1, reward=24, ppo=8)[1]


def test_parts_that_do_not_fit(tmp_path):
    path = write(tmp_path / "x.jsonl", [SAME_PAIR[0], {"prompt": "b", "chosen": "c", "rejected": "d"}])

    def task(**parts):
        return Preferences(byte_tokenizer(), path, path, parts=parts)

    with pytest.raises(DataError, match=r'^parts: no stage is called "rewards". Did you mean reward\?'):
        task(rewards=1)
    with pytest.raises(DataError, match=r"^parts.ppo: a whole number from 1 is needed, got 0"):
        task(ppo=0)
    with pytest.raises(DataError, match=r"^parts.ppo: 1 pairs are asked for, and 0 of the 2 usable ones are left"):
        task(reward=2, ppo=1).pairs("train")
    with pytest.raises(DataError, match=r"^parts: they take all 2 pairs and leave none for the sft stage.* parts.sft."):
        task(reward=1, ppo=1).demonstrations("train")
    with pytest.raises(DataError, match=r"^parts.ppo: 1 pairs .* 0 of the 3 usable ones are left, since pairs with"):
        draw_parts(["a", "b", "b"], {"reward": 2, "ppo": 1}, seed=next(
            seed for seed in range(20) if len(draw_parts(["a", "b", "b"], {"reward": 2}, seed=seed)["reward"]) == 3
        ))  # fmt: skip


def test_special_tokens_of_the_tokenizer_begin_a_text_and_no_response(tmp_path):
    tokenizer = byte_tokenizer()
    begins = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.backend_tokenizer.post_processor = begins
    # A text that was rendered has one already.
    path = write(tmp_path / "x.jsonl", [{"prompt": "a", "completion": "b"}, {"text": "c"}, {"text": "<s>c"}])
    shown = Demonstrations(tokenizer, path, path).demonstrations("train")
    assert [tokenizer.decode(ids) for ids in shown["input_ids"]] == ["<s>a</s><s>b</s>", "<s>c</s>", "<s>c</s>"]
    for text in ("Capital?", "<s>Capital?"):
        ids = Prompts(tokenizer, path, chat=False).prompt_ids([{"role": "user", "content": text}])
        assert tokenizer.decode(ids) == "<s>Capital?"


BY_LINES = (
    "{% for m in messages %}{{ m.role[0] }}:\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:\n{% endif %}"
)
BY_SPACES = (
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }} {% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.mark.parametrize(("template", "strips"), [(BY_LINES, False), (BY_LINES, True), (BY_SPACES, False)])
def test_a_response_has_the_tokens_that_it_has_behind_its_prompt(template, strips):
    """SentencePiece writes a space before a text that stands alone, and none behind a line break, unless the token
    before has taken that with it."""
    signs = dict.fromkeys(["</s>", "▁", *"\n:ua?Capitl.Prs"])
    backend = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(signs)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    if strips:
        backend.add_special_tokens([AddedToken("a:", rstrip=True), AddedToken("u:", rstrip=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template)
    encoder = Preferences(tokenizer, "none", "none")._encoder
    prompt = encoder.prompt(ASKED)
    whole = tokenizer.apply_chat_template([*ASKED, *said("Paris.")], tokenize=False).rstrip()
    found = [*prompt["input_ids"], *encoder.response("Paris.", prompt)]
    assert found == [*tokenizer.encode(whole), tokenizer.eos_token_id]
