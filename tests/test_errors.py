"""What an error says on a terminal."""

import io

import pytest
from rich.console import Console

from toolkit.errors import ConfigError, DataError, Problem, printable
from toolkit.inference.generate import _Streamer
from toolkit.reports import texts_table
from toolkit.runs.check_report import Report, RoleFacts
from toolkit.runs.said import say


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \n\t naïve 長い\u3000👩\u200d🔬 \u200fא", "plain \n\t naïve 長い\u3000👩\u200d🔬 \u200fא"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x1b]0;title\x07\x9b2J", "\\x1b]0;title\\x07\\x9b2J"),
        ("over\rwritten\b\x00\x7f", "over\\rwritten\\x08\\x00\\x7f"),
        ("\u202eturned\u2066", "\\u202eturned\\u2066"),
        ("half \ud83d", "half \\ud83d"),
    ],
)
def test_text_of_others_is_shown_and_not_obeyed(text, shown):
    assert printable(text) == shown
    for error in (DataError(text, field=text, remedy=text), ConfigError(text, problems=[Problem(text, text, text)])):
        assert str(error).count(shown) >= 3 and not any(sign in str(error) for sign in "\x1b\x9b\r\x00\u202e\ud83d")


def test_a_check_and_what_a_model_says_do_nothing_to_the_terminal(capsys):
    bad, shown = "\x1b]0;title\x07", "\\x1b]0;title\\x07"
    note = Problem(bad, bad, bad)
    report = Report("r", None, (RoleFacts("policy", bad),), (bad,), (), (note,), ())
    stream = io.StringIO()
    Console(file=stream, width=200).print(texts_table([{"prompt": bad, "policy": bad}], ("prompt", "policy")))
    say(f"[bold]{bad}[/]")
    _Streamer(None).on_finalized_text(bad, stream_end=True)
    said = capsys.readouterr().out
    assert f"[bold]{shown}[/]" in said
    for text, times in ((report.text(), 5), (stream.getvalue(), 2), (said, 2)):
        assert text.count(shown) == times and "\x1b]" not in text and "\x07" not in text
