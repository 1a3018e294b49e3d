import io
import json
import os

import pytest
import torch
from rich.console import Console

from tests.trainers.helpers import rollout
from toolkit.reports import Output, Progress, Responses, sample_rows, samples_table, write_jsonl
from toolkit.runs.said import say


def test_samples(tmp_path):
    before = Responses.of(rollout([[5, 2]] * 4), torch.tensor([0.1] * 4))
    rows = sample_rows(before, Responses.of(rollout([[6, 6, 2]] * 4), torch.tensor([0.2] * 4)))
    write_jsonl(tmp_path / "samples.jsonl", rows)
    assert [json.loads(x) for x in (tmp_path / "samples.jsonl").read_text().splitlines()] == rows
    small = torch.tensor([1e-6, 2e-6, 3e-6, 1.0])  # as its noise is computed of them, they are not rounded
    assert torch.equal(torch.tensor(Responses.of(rollout([[5, 2]] * 4), small).scores), small)
    assert rows[0]["before"] == "2" and rows[0]["after"] == "33"
    assert (rows[0]["before_length"], rows[0]["after_length"]) == (2, 3)
    stream = io.StringIO()
    rows[0]["after"] = "[bold]not markup[/bold]\x1b]0;title\x07"
    Console(file=stream, width=120).print(samples_table(rows))
    assert "[bold]not markup[/bold]\\x1b]0;title\\x07" in stream.getvalue() and "0.10 → 0.20" in stream.getvalue()


def test_what_is_said_stands_above_a_panel(monkeypatch):
    """rich by itself writes past what stands in for standard output while there is one, into the panel."""
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout", terminal)
    shown = Console(file=io.StringIO(), force_terminal=True, width=60)
    with Progress("run ppo", shown):
        say("Something [bold]to[/bold] know")
    assert "Something [bold]to[/bold] know" in shown.file.getvalue() and terminal.getvalue() == ""
    say("Later")
    assert terminal.getvalue() == "Later\n"


def test_output_that_is_closed_is_an_error():
    """rich by itself would end the process in silence."""
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError), os.fdopen(os.dup(writer), "w") as file:
        Output(file=file).print("x")
    os.close(writer)
