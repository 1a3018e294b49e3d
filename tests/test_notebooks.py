"""Every notebook is executed whole, with small settings in its cell of parameters."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.tiny_runs import PAIRS, QUERIES, REPOSITORY, SMALL_DOUBLING, llama3_tokenizer, save_llama

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
SMALL_LLAMA = [
    "reward.max_steps=2", "reward.per_device_train_batch_size=2", "reward.gradient_accumulation_steps=1",
    f"reward_data.train={PAIRS}", f"reward_data.validation={PAIRS}", "reward_data.max_validation_rows=4",
    "ppo.max_steps=2", "ppo.response_length=8", "data.validation_size=4",
]  # fmt: skip

SMALL_REWARDS = [
    "ppo.max_steps=1", "ppo.response_length=6", "ppo.per_device_train_batch_size=4", "ppo.num_mini_batches=1",
    "data.validation_size=6",
]  # fmt: skip


# As in a kernel of its own, and the stages before ppo in the same process.
BEFORE = """
%reset -f
import os, sys
os.chdir({folder!r})
sys.path.insert(0, {repository!r})
from tests.tiny_runs import stages_here
here = stages_here()
here.__enter__()
"""


@pytest.fixture(scope="module")
def kernel():
    """One for all notebooks, since most of its time it would import the toolkit."""
    client = NotebookClient(nbformat.v4.new_notebook(), kernel_name="python3", shutdown_kernel="immediate")
    with client.setup_kernel():
        yield client.km


def execute(kernel, path: Path, folder: Path, parameters: dict) -> str:
    """Run a notebook with other parameters; returns all that it printed."""
    notebook = nbformat.read(path, as_version=4)
    tagged = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    names = {line.split(" = ")[0] for line in notebook.cells[tagged[0]].source.splitlines() if line}
    assert set(parameters) <= names
    notebook.cells.insert(tagged[0] + 1, nbformat.v4.new_code_cell(source))
    notebook.cells.insert(0, nbformat.v4.new_code_cell(BEFORE.format(folder=str(folder), repository=str(REPOSITORY))))
    NotebookClient(notebook, km=kernel, timeout=600).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    return "".join(output.get("text", "") + str(output.get("data", {})) for output in outputs)


def test_the_custom_loop_on_a_tiny_llama(kernel, tmp_path):
    model = save_llama(tmp_path / "model", llama3_tokenizer())
    shown = execute(
        kernel,
        REPOSITORY / "notebooks" / "llama3_custom_loop.ipynb",
        tmp_path,
        {"MODEL": str(model), "QUERIES": str(QUERIES), "OVERRIDES": SMALL_LLAMA},
    )
    assert shown.count("KL coefficient") == 2 and "reference             0 parameters" in shown
    assert (tmp_path / "rl_model" / "policy" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "rl_model" / "value" / "value_head.safetensors").is_file()


def test_six_lines_with_plots(kernel, tmp_path):
    shown = execute(kernel, REPOSITORY / "notebooks" / "six_lines.ipynb", tmp_path, {"OVERRIDES": SMALL_DOUBLING})
    assert "eval_exact_match" in shown and "image/png" in shown


def test_rewards_that_a_program_computes_on_a_tiny_llama(kernel, tmp_path):
    model = save_llama(tmp_path / "model", llama3_tokenizer())
    parameters = {"MODEL": str(model), "SFT_STEPS": 1, "OVERRIDES": SMALL_REWARDS}
    shown = execute(kernel, REPOSITORY / "notebooks" / "rewards.ipynb", tmp_path, parameters)
    assert 'Use the word "bread" at least 2 times. True False' in shown and "satisfied_unseen" in shown
    assert "[1, -1]" in shown and "mood " in shown
    assert not (tmp_path / "runs" / "mood" / "reward").exists()  # no reward stage
    assert "__main__:mood" in (tmp_path / "runs" / "mood" / "recipe.yaml").read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_carry_no_outputs_and_are_tested(path):
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)
    assert path.name in Path(__file__).read_text(encoding="utf-8")
