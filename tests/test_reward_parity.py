"""The comparison of rewards: its arithmetic by hand, its arms and its driver on a tiny checkpoint."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import reward_arms, reward_parity, reward_table
from benchmarks.errors import BenchmarkError
from benchmarks.paired import bootstrap, compare, correctness, log_loss, mcnemar
from benchmarks.reward_arms import ARMS, Job
from tests.conftest import tiny_model
from tests.recipes.helpers import byte_tokenizer

EXAMPLE = str(Path(__file__).parents[1] / "data" / "preferences_example.jsonl")


def test_mcnemar_by_hand():
    # 10 pairs that one judge alone has right, 2 of them the first: 2·(1 + 10 + 45)/1024.
    assert mcnemar(2, 8) == mcnemar(8, 2) == pytest.approx(0.109375)
    assert mcnemar(0, 0) == 1.0 and mcnemar(5, 5) == 1.0


def test_a_tie_is_half_right():
    margins = torch.tensor([2.0, -1.0, 0.0])
    assert correctness(margins).tolist() == [1, 0, 0.5]
    assert log_loss(margins).tolist() == pytest.approx([0.126928, 1.313262, 0.693147], abs=1e-6)


def test_the_interval_is_that_of_the_normal_approximation_for_many_pairs():
    generator = torch.Generator().manual_seed(1)
    differences = torch.randn(1, 400, generator=generator, dtype=torch.float64) + 0.2
    low, high = bootstrap(differences)
    half = 1.96 * float(differences.std()) / 20
    mean = float(differences.mean())
    assert low == pytest.approx(mean - half, abs=0.01) and high == pytest.approx(mean + half, abs=0.01)
    # Seeds that disagree widen it, where the mean over all stays what it was.
    apart = torch.cat([differences + 0.5, differences - 0.5])
    assert bootstrap(apart)[1] - bootstrap(apart)[0] > 4 * (high - low)


def test_a_comparison_by_hand():
    # 100 pairs of one seed: both right on 60, the first alone on 10, the second alone on 10, neither on 20.
    first = [1.0] * 60 + [1.0] * 10 + [-1.0] * 10 + [-1.0] * 20
    second = [1.0] * 60 + [-1.0] * 10 + [1.0] * 10 + [-1.0] * 20
    found = compare([first], [second], margin=0.1)
    assert found["accuracy"]["first"] == found["accuracy"]["second"] == pytest.approx(0.7)
    assert found["mcnemar"] == [{"only_first": 10, "only_second": 10, "p": 1.0}]
    low, high = found["accuracy"]["interval"]  # √(0.2/100) · 1.96 = 0.0877 to either side
    assert low == pytest.approx(-0.088, abs=0.006) and high == pytest.approx(0.088, abs=0.006)
    assert found["non_inferior"] and not compare([first], [second], margin=0.05)["non_inferior"]
    worse = compare([second], [[1.0] * 100], margin=0.1)
    assert worse["accuracy"]["difference"] == pytest.approx(-0.3) and not worse["non_inferior"]
    assert worse["log_loss"]["difference"] == pytest.approx(0.3)  # −log σ(−1) + log σ(1) = 1, on 30 of 100 pairs


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    model = tiny_model(size=64)
    model.resize_token_embeddings(len(tokenizer))
    model.config.pad_token_id, model.config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    model.save_pretrained(folder)
    return Job(str(folder), EXAMPLE, EXAMPLE, 0, 8, 4, 1e-3, 300, 300)


def test_held_out_pairs_have_other_prompts(job):
    pairs = reward_arms.split_pairs(job, byte_tokenizer())
    assert len(pairs.train) == 8
    assert len(pairs.held_out) == 2 * 24 - 2 * 8  # the same file twice: what is trained on is in neither part
    trained = {tuple(ids) for ids in pairs.train["chosen_ids"]}
    assert not trained & {tuple(ids) for ids in pairs.held_out["chosen_ids"]}


def test_all_arms_start_as_one_function_and_are_trained(job, monkeypatch):
    monkeypatch.setattr(reward_arms, "nf4", lambda: None)  # four bits would be another function
    still = {name: reward_arms.run_arm(name, Job(**{**vars(job), "learning_rate": 0.0})) for name in ARMS}
    start = torch.tensor(still["trl-bf16"]["margins"])
    assert start.std() > 0.05
    for name in ARMS:
        torch.testing.assert_close(torch.tensor(still[name]["margins"]), start, rtol=0, atol=0.1 * float(start.std()))
    for name in ARMS:
        found = reward_arms.run_arm(name, job)
        assert len(found["margins"]) == 32 and found["seconds"] > 0 and found["seed"] == 0
        assert found["margins"] != still[name]["margins"]


def answer(arm, job):
    shift = {"trl-bf16": 0.0, "ours-nf4": 0.1, "ours-nf4-token-level": -0.1}[arm]
    return {"arm": arm, "seed": job.seed, "margins": [shift + 1, shift - 1, shift + job.seed], "seconds": 1.0}


def test_a_run_goes_on_where_it_was(job, tmp_path):
    output, console = tmp_path / "results" / "x.json", Console(file=io.StringIO())
    asked = []

    def step(arm, one):
        asked.append((arm, one.seed))
        if len(asked) == 3:
            raise BenchmarkError("stopped")
        return answer(arm, one)

    arms = ("trl-bf16", "ours-nf4")
    with pytest.raises(BenchmarkError, match="stopped"):
        reward_parity.run(job, seeds=[0, 1], arms=arms, output=output, console=console, step=step)
    result = reward_parity.run(job, seeds=[0, 1], arms=arms, output=output, console=console, step=step)
    assert asked == [("trl-bf16", 0), ("ours-nf4", 0), ("trl-bf16", 1), ("trl-bf16", 1), ("ours-nf4", 1)]
    assert json.loads(output.read_text()) == result
    (found,) = result["comparisons"]
    assert found["seeds"] == [0, 1] and found["margin"] == reward_parity.MARGIN
    # The third pair of seed 0 is a tie for the one and right for the other.
    assert found["accuracy"]["difference"] == pytest.approx(0.5 / 6)
    assert "accuracy 0.667 against 0.583, difference +0.083" in reward_parity.verdict(found)
    with pytest.raises(
        BenchmarkError, match=r"x\.json differs from this run in settings\. Name another file with --output"
    ):
        reward_parity.run(
            Job(**{**vars(job), "pairs": 9}), seeds=[0], arms=arms, output=output, console=console, step=step
        )


def test_an_arm_in_a_process_of_its_own_that_fails_says_which(job, monkeypatch):
    monkeypatch.setattr(reward_parity.sys, "executable", "false")
    with pytest.raises(BenchmarkError, match="the arm ours-nf4 of seed 0 failed: nothing was said"):
        reward_parity.arm_in_process("ours-nf4", job)


def test_the_table_is_made_from_the_result(job, tmp_path):
    console = Console(file=io.StringIO())
    output = tmp_path / "2026-01-01_reward.json"
    reward_parity.run(
        job, seeds=[0], arms=("trl-bf16", "ours-nf4"), output=output, console=console,
        step=lambda arm, one: {**answer(arm, one), "memory_gb": {"resident": 1.5}},
    )  # fmt: skip
    page = "a\n<!-- reward results -->\nold\n<!-- end of reward results -->\nb"
    found = reward_table.filled(page, tmp_path)
    assert "| trl-bf16 | 0 | 0.500 | 0.000 | 1 | 1.50 |" in found and "old" not in found  # right, wrong and a tie
    assert "| ours-nf4 | 0 | 0.667 | 0.100 | 1 | 1.50 |" in found and "McNemar p 1.00" in found
    assert reward_table.filled(page, tmp_path / "none").splitlines()[2] == "No result yet."
    with pytest.raises(ValueError, match="lacks the markers"):
        reward_table.filled("", tmp_path)
