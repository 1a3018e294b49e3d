import re
import runpy
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest

from docs.make_reference import described, main, reference, summary, table
from tests.test_versions import is_installed
from toolkit.data import TASKS
from toolkit.rewards import SCORERS
from toolkit.settings import AT_LEAST_1, setting
from toolkit.spec.refused import OF_NO_RECIPE, WITHOUT_EFFECT
from toolkit.spec.sections import PLAIN_SECTIONS, TOP_LEVEL
from toolkit.trainers.ppo_config import PPOConfig

COMMITTED = Path(__file__).parents[1] / "docs" / "recipe_reference.md"


@dataclass
class Example:
    """Section `example`: a class made for this test.

    More about it.

    Args:
        size: how large; with a
            second line. See note: below.
        names: of things | others.

    Raises:
        ValueError: never.
    """

    size: int
    names: list[str] = field(default_factory=lambda: ["a"])
    share: float | None = field(default=0.5, metadata={"help": "part of  it, in 10%% steps"})
    depth: int = setting(1, "How deep.", AT_LEAST_1, only_with={"size": 3})


@pytest.mark.skipif(not is_installed("pinned"), reason="the page is made with the set of constraints.txt")
def test_the_committed_reference_is_the_generated_one():
    assert COMMITTED.read_text(encoding="utf-8") == reference(), "run: make docs"


def test_a_table_says_what_the_class_says():
    assert summary(Example) == "A class made for this test.\n\nMore about it."
    assert described(Example) == {
        "size": "How large; with a second line. See note: below.",
        "names": "Of things | others.",
    }
    assert table(Example, ["size", "names", "share", "depth"])[2:] == [
        "| `size` | a whole number |  | How large; with a second line. See note: below. |",
        "| `names` | a list | `[a]` | Of things \\| others. |",
        "| `share` | a number or null | `0.5` | Part of it, in 10% steps |",
        "| `depth` | a whole number: at least 1 | `1` | With size: 3. How deep. |",
    ]


def test_it_has_every_section_task_and_field():
    text = reference()
    for section in TOP_LEVEL:
        assert f"## {section}\n" in text or f"`{section}`" in text, section
    for task in TASKS:
        assert f"### data, task: {task}\n" in text
    for kind in SCORERS:
        assert f"### scorer, kind: {kind}\n" in text
    for owner in (*PLAIN_SECTIONS.values(), *TASKS.values(), *SCORERS.values()):
        for name in {each.name for each in fields(owner)} - {"tokenizer", "weight"}:
            assert name.startswith("_") or f"| `{name}` |" in text, f"{owner.__name__}.{name}"
    before, refused = text.split("### ppo: refused")
    ppo = before.split("\n## ppo\n")[1]
    honoured = {f.name for f in fields(PPOConfig) if f.init} - WITHOUT_EFFECT["ppo"].keys() - OF_NO_RECIPE.keys()
    assert set(re.findall(r"^\| `(\w+)` \|", ppo, re.MULTILINE)) == honoured
    assert WITHOUT_EFFECT["ppo"].keys() | OF_NO_RECIPE.keys() <= set(re.findall(r"`(\w+)`", refused))
    assert "| `sft_model_path` | The base is base.model |" in refused
    assert "whatever the number of processes" in ppo and not re.search("num_devices|per device for train", ppo)


@pytest.mark.skipif(not is_installed("pinned"), reason="fields of PPO are described by TRL 1.12")
def test_every_field_of_ours_is_described():
    rows = [line for line in reference().splitlines() if re.match(r"\| `\w+` \|.*\|.*\|.*\|$", line)]
    assert len(rows) > 60
    assert not [row for row in rows if row.endswith("|  |")]


def test_it_is_written_to_a_file_or_to_standard_output(tmp_path, capsys):
    main([str(tmp_path / "docs" / "x.md")])
    assert (tmp_path / "docs" / "x.md").read_text(encoding="utf-8") == reference()
    main([])
    assert capsys.readouterr().out == reference()


def test_as_make_calls_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["docs/make_reference.py"])
    monkeypatch.delitem(sys.modules, "docs.make_reference")
    runpy.run_module("docs.make_reference", run_name="__main__")
    said = capsys.readouterr()
    assert said.out.startswith("# Recipe reference\n") and said.err == ""
