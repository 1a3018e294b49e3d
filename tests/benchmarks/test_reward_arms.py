import torch

from benchmarks import reward_arms
from benchmarks.reward_arms import ARMS, Job
from tests.tiny_runs import byte_tokenizer


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
