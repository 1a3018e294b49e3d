"""Every command in the docs is run, page by page in the order of the page, with small settings and a tiny model."""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from typer.testing import CliRunner

from tests.tiny_runs import PAIRS, REPOSITORY, SMALL_DOUBLING, llama3_tokenizer, save_llama, stages_here
from toolkit import recipes
from toolkit.cli import app
from toolkit.data import TASKS
from toolkit.settings import declared
from toolkit.spec.keys import owner_fields
from toolkit.spec.sections import PLAIN_SECTIONS, STAGE_CLASSES

PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])
_PPO = [
    "ppo.max_steps=1", "ppo.num_ppo_epochs=1", "ppo.response_length=4", "ppo.per_device_train_batch_size=2",
]  # fmt: skip
_REWARD = ["reward.max_steps=1", "reward.per_device_train_batch_size=2", "reward.gradient_accumulation_steps=1"]


def _pairs(section: str) -> list[str]:
    return [f"{section}.train={PAIRS}", f"{section}.validation={PAIRS}", f"{section}.max_validation_rows=4"]


SMALL = {
    "doubling": SMALL_DOUBLING,
    "smollm2_135m_lora": [
        *_pairs("data"), "sft.max_steps=1", "sft.per_device_train_batch_size=2", *_REWARD, *_PPO,
        "ppo.gradient_accumulation_steps=1",
    ],
    "llama3_8b_lora": [*_pairs("reward_data"), *_REWARD, *_PPO[:3], "data.validation_size=4"],
    "llama3_8b_lora_fast": [*_pairs("data"), *_REWARD, *_PPO, "ppo.gradient_accumulation_steps=2"],
}  # fmt: skip
SMALL["mine"] = [*_REWARD, *_PPO]
RUN_LANGUAGES = ("", "sh", "powershell")  # a block of another language, as text, is not run
STAGES = ("sft", "reward", "ppo", "collect", "q", "check", "plan", "show")
READING = ("check", "plan", "show")  # which leave nothing: the same words once are enough
_SET = re.compile(r'^#.* SET="([^"]+)"', re.MULTILINE)
_read: set[tuple[str, ...]] = set()  # commands of the pages so far


def commands(page: Path) -> list[str]:
    """Lines of the page's code blocks that begin with make or toolkit; continued lines joined."""
    runnable, language = [], None
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            language = line.removeprefix("```") if language is None else None
        elif language in RUN_LANGUAGES and line.startswith(("make ", "toolkit ")):
            runnable.append(line.split("  #")[0].strip())
    return runnable


def as_toolkit(command: str) -> list[str] | None:
    """The arguments of `toolkit` that a line comes to; None for a target that does not call it."""
    words = shlex.split(command)
    if words[0] == "toolkit":
        return words[1:]
    dry = subprocess.run(["make", "-n", *words[1:]], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    called = [line for line in dry.stdout.splitlines() if "/toolkit " in line]
    return shlex.split(called[-1])[1:] if called else None


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder as a user has it: recipes, data and a local model."""
    folder = tmp_path_factory.mktemp("desk")
    for name in ("recipes", "data"):
        shutil.copytree(REPOSITORY / name, folder / name)
    save_llama(folder / "model", llama3_tokenizer())
    return folder


def run(words: list[str], desk: Path) -> None:
    adapter, model = desk / "runs/llama3_8b_lora_fast/reward/reward", desk / "model"
    # A path that an earlier command of the page has made is kept.
    named = [word for word in words if word.startswith("start.reward=") and not Path(word.partition("=")[2]).is_dir()]
    words = [f"start.reward={adapter}" if word in named else word for word in words]
    words = [f"base.model={model}" if word.startswith("base.model=") else word for word in words]
    words = [re.sub(r"^ppo\.max_steps=\d+$", "ppo.max_steps=3", word) for word in words]
    # Several have tests of their own, and the one that this is cannot become them.
    words = ["1" if before == "--processes" else word for before, word in zip(["", *words], words, strict=False)]
    if words[:2] == ["q", "doubling_q"]:  # which tests/runs/test_q.py runs
        words[0] = "check"
    name = Path(words[1]).stem if len(words) > 1 else ""
    if words[0] in STAGES and name in SMALL:
        named = [] if name.startswith("doubling") else [f"base.model={model}"]  # in place of the hub's
        small = [*SMALL[name], *named]
        overrides = [override for override in small if override.split("=")[0] not in " ".join(words[2:])]
        end = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
        words = [*words[:end], *overrides, *words[end:]]
    with stages_here():
        done = CliRunner().invoke(app, words, input="Hi\n/quit\n")
    assert done.exit_code == 0, f"{shlex.join(words)}\n{done.output}\n{done.exception!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_command_of_a_page_runs(page, desk, monkeypatch):
    monkeypatch.chdir(desk)
    monkeypatch.setenv("COLUMNS", "200")
    for name, recipe in re.findall(r"^```yaml\n# (\w+\.yaml)\n(.+?)^```", page.read_text("utf-8"), flags=re.M | re.S):
        Path(name).write_text(recipe, encoding="utf-8")
    for command in commands(page):
        words = as_toolkit(command)
        if words is not None and not (words[0] in READING and tuple(words) in _read):
            run(words, desk)
            _read.add(tuple(words))


def test_the_pages_have_commands():
    assert sum(len(commands(page)) for page in PAGES) > 20


def test_what_the_heads_of_recipes_change_can_be_changed():
    files = sorted((REPOSITORY / "recipes").glob("*.yaml"))
    lines = [(path, words) for path in files for words in _SET.findall(path.read_text(encoding="utf-8"))]
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    of_readme = re.findall(r' RECIPE=(\S+) .*\\\n +SET="(.+)"$', readme, re.MULTILINE)
    assert len(lines) > 5 and len(of_readme) == 1
    for path, words in [*lines, *of_readme]:
        recipes.load(path, *shlex.split(words))


def test_every_key_that_the_migration_page_names_exists():
    text = (REPOSITORY / "docs" / "coming_from.md").read_text(encoding="utf-8")
    keys = set(re.findall(r"`((?:ppo|base|adapters|start|data)\.[a-z_.0-9]+)", text))
    assert len(keys) > 30
    owners = {**PLAIN_SECTIONS, **STAGE_CLASSES}
    for key in keys:
        section, _, rest = key.partition(".")
        if section == "adapters":
            assert rest.split(".")[0] in ("policy", "value", "reward")
            assert rest.count(".") == 0 or rest.split(".")[1] in owner_fields(LoraConfig), key
        elif section == "data":
            assert any(rest in owner_fields(task) for task in TASKS.values()), key
        elif rest.startswith("quantization."):
            assert rest.split(".")[1] in owner_fields(BitsAndBytesConfig), key
        else:
            assert rest in owner_fields(owners[section]), key


def test_the_migration_page_says_what_a_silent_script_has():
    text = (REPOSITORY / "docs" / "coming_from.md").read_text(encoding="utf-8")
    of_0_11, of_1_12, of_factory = text.split("\n## ")[1:4]
    assert all("kl_coef: 0.2" in section and "kl_target: 6" in section for section in (of_0_11, of_factory))
    assert "reads: tokens" in of_1_12 and "`data.chat: false`" in of_0_11 and "`data.chat: false`" in of_1_12
    assert all("processes.md" in section for section in (of_0_11, of_1_12, of_factory))
    assert set(re.findall(r"`ppo\.(\w+)", text)) <= owner_fields(STAGE_CLASSES["ppo"]).keys()


def named_tests(page: str) -> list[tuple[str, str]]:
    """The tests that a page names; all of them exist."""
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[a-z_0-9/]+\.py)::(test_[a-z_0-9]+)`", text)
    for path, test in named:
        assert f"def {test}(" in (REPOSITORY / path).read_text(encoding="utf-8"), f"{path}::{test}"
    return named


def test_every_fault_of_trl_has_a_row_and_its_tests_exist():
    assert len(named_tests("trl_faults.md")) > 30
    text = (REPOSITORY / "docs" / "trl_faults.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| F(\d+) \| (.+?) \| (.+?) \| (.+?) \|$", text, flags=re.MULTILINE)
    assert sorted(int(number) for number, *_ in rows) == list(range(1, 35))
    for number, _, ours, held in rows:
        ways = ("Not inherited", "Does not apply", "Deliberate", "In part")
        assert ours.startswith(ways) and ("`tests/" in held or not ours.startswith("Not inherited")), number


def test_every_test_that_the_options_page_names_exists():
    text = (REPOSITORY / "docs" / "ppo_options.md").read_text(encoding="utf-8")
    assert len(named_tests("ppo_options.md")) > 20
    fields = {
        name for row in re.findall(r"^\| (`.+?) \|", text, flags=re.MULTILINE) for name in re.findall(r"`(\w+)", row)
    }
    for row in (line for line in text.splitlines() if line.startswith("| `")):
        assert re.fullmatch(r"\|( \S[^|]* \|){3} .*`tests/.* \|", row), row  # what it does, its source, its test
    words = {"k2", "k3", "bootstrap", "prefix_mean"}
    assert fields - words <= owner_fields(STAGE_CLASSES["ppo"]).keys(), fields
    assert declared(STAGE_CLASSES["ppo"]).keys() <= fields, declared(STAGE_CLASSES["ppo"]).keys() - fields


def anchors(page: Path) -> set[str]:
    """What a link can name after # on a page: its headings, as a code host writes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                linked = page.parent / target if target else page
                assert linked.exists(), f"{page.name}: {target}"
                assert not anchor or anchor in anchors(linked), f"{page.name}: {target}#{anchor}"


def test_what_the_readme_links_to_is_in_the_source_distribution():
    of_project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    included = of_project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    linked = {target.split("/")[0] for target in re.findall(r"\]\(([^)#\s:]+)", text)} - {"https"}
    assert "CONTRIBUTING.md" in linked and linked <= set(included)


def test_the_index_names_every_page():
    text = (REPOSITORY / "docs" / "index.md").read_text(encoding="utf-8")
    named = re.findall(r"^- \[.+?\]\((\w+\.md)\)", text, flags=re.MULTILINE)
    pages = [path.name for path in PAGES if path.name not in ("README.md", "index.md")]
    assert sorted(named) == sorted(pages)
