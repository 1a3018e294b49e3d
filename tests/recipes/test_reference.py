import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.data import TASKS
from toolkit.recipes.reference import described, main, reference, summary, table
from toolkit.recipes.sections import PLAIN_SECTIONS, TOP_LEVEL
from toolkit.trainers.ppo_config import HONOURED, INSTEAD

COMMITTED = Path(__file__).parents[2] / "docs" / "recipe_reference.md"


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


def test_the_committed_reference_is_the_generated_one():
    assert COMMITTED.read_text(encoding="utf-8") == reference(), "run: make docs"


def test_a_table_says_what_the_class_says():
    assert summary(Example) == "A class made for this test."
    assert described(Example) == {
        "size": "How large; with a second line. See note: below.",
        "names": "Of things | others.",
    }
    assert table(Example, ["size", "names", "share"])[2:] == [
        "| `size` | a whole number |  | How large; with a second line. See note: below. |",
        "| `names` | list | `[a]` | Of things \\| others. |",
        "| `share` | a number or null | `0.5` | Part of it, in 10% steps |",
    ]


def test_it_has_every_section_task_and_field():
    text = reference()
    for section in TOP_LEVEL:
        assert f"## {section}\n" in text or f"`{section}`" in text, section
    for task in TASKS:
        assert f"### data, task: {task}\n" in text
    for owner in (*PLAIN_SECTIONS.values(), *TASKS.values()):
        for name in set(owner.__dataclass_fields__) - {"tokenizer"}:
            assert name.startswith("_") or f"| `{name}` |" in text, f"{owner.__name__}.{name}"
    before, refused = text.split("### ppo: refused")
    ppo = before.split("\n## ppo\n")[1]
    assert set(re.findall(r"^\| `(\w+)` \|", ppo, re.MULTILINE)) == HONOURED - {"output_dir", "seed"}
    assert set(INSTEAD) | {"output_dir", "seed", "neftune_noise_alpha"} <= set(re.findall(r"`(\w+)`", refused))
    assert "| `sft_model_path` | The base is base.model |" in refused


def test_every_field_of_ours_is_described():
    rows = [line for line in reference().splitlines() if re.match(r"\| `\w+` \|.*\|.*\|.*\|$", line)]
    assert len(rows) > 60
    assert not [row for row in rows if row.endswith("|  |")]


def test_it_is_written_to_a_file_or_to_standard_output(tmp_path, capsys):
    main([str(tmp_path / "docs" / "x.md")])
    assert (tmp_path / "docs" / "x.md").read_text(encoding="utf-8") == reference()
    main([])
    assert capsys.readouterr().out == reference()


def test_as_make_calls_it():
    done = subprocess.run(
        [sys.executable, "-m", "toolkit.recipes.reference"],
        capture_output=True,
        encoding="utf-8",
        cwd=COMMITTED.parents[1],
        check=True,
    )
    assert done.stdout.startswith("# Recipe reference\n") and done.stderr == ""
