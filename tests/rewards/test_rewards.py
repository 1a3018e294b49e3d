import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.tiny_models import lora, randomize, shared_base, tiny_model
from tests.tolerances import EXACT
from tests.trainers.helpers import rollout
from toolkit.data import doubling
from toolkit.errors import RewardError
from toolkit.models import SharedBase, sequence_logits
from toolkit.rewards import RewardAdapter, ScorerContext, check_scores, load_function, score_with, scorer_of

RESPONSES = [[12, 13, 2], [9, 9, 8, 8, 7, 7], [20, 2], [5, 6, 7]]


def test_adapter_scores_each_response_as_if_alone():
    base, batch = shared_base(), rollout(RESPONSES)
    expected = []
    for prompt, response in zip(batch.prompt_ids, batch.response_ids, strict=True):
        ids = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            expected.append(sequence_logits(base, ids, torch.ones_like(ids), pad_token_id=0).item())
    for size in (1, 3, 64):
        scores = RewardAdapter(base, pad_token_id=0, eos_token_id=2, batch_size=size)(batch)
        torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert base.active_role is None


@pytest.mark.parametrize(("size", "most"), [(1, 1), (2, 2), (64, 4)])
def test_no_more_rows_are_read_at_a_time_than_the_batch_size_says(size, most):
    base, even = shared_base(), rollout([[12, 13, 14]] * 4, [[1, 20, 21]] * 4)
    passes = []
    base.head("reward").register_forward_pre_hook(lambda _, given: passes.append(len(given[0])))
    RewardAdapter(base, pad_token_id=0, eos_token_id=2, batch_size=size)(even)
    assert passes == [most] * (4 // most)


def test_a_response_is_read_where_training_read_whichever_stop_ended_it():
    """With pad = eos that is the token before the end, which no other stop token may take the place of."""
    base = shared_base()
    batch = replace(rollout([[12, 13, 7], [12, 13, 2], [9, 9, 8, 7], [9, 9, 8, 8]]), ended=[True, True, True, False])
    for pad in (0, 2):
        scores = RewardAdapter(base, pad_token_id=pad, eos_token_id=2)(batch)
        for row, response in enumerate([[12, 13, 2], [12, 13, 2], [9, 9, 8, 2], [9, 9, 8, 8]]):
            ids = torch.tensor([[*batch.prompt_ids[row], *response]])
            with torch.no_grad():
                expected = sequence_logits(base, ids, torch.ones_like(ids), pad_token_id=pad)
            assert scores[row].item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)


def test_class_scores_are_log_probabilities_of_the_named_class():
    base, batch = shared_base(labels=3), rollout(RESPONSES)
    classes = [0, 2, 1, 0]
    batch = type(batch)(**{**vars(batch), "columns": {"style": classes}})
    scores = RewardAdapter(base, pad_token_id=0, eos_token_id=2, class_column="style")(batch)
    for row, wanted in enumerate(classes):
        ids = torch.tensor([[*batch.prompt_ids[row], *batch.response_ids[row]]])
        with torch.no_grad():
            logits = sequence_logits(base, ids, torch.ones_like(ids), pad_token_id=0)[0]
        assert scores[row].item() == pytest.approx(torch.log_softmax(logits, -1)[wanted].item(), rel=1e-4)
    assert (scores <= 0).all()
    always = RewardAdapter(base, pad_token_id=0, eos_token_id=2, wanted_class=0)(batch)
    assert torch.equal(always[[0, 3]], scores[[0, 3]]) and not torch.equal(always, scores)


def test_head_and_class_column_must_fit():
    with pytest.raises(RewardError, match=r"has 3 output\(s\) and class_column is None"):
        RewardAdapter(shared_base(labels=3), pad_token_id=0, eos_token_id=2)
    with pytest.raises(RewardError, match=r"has 1 output\(s\) and class_column is 'style'"):
        RewardAdapter(shared_base(), pad_token_id=0, eos_token_id=2, class_column="style")
    with pytest.raises(RewardError, match=r"^wanted_class: the reward head has 1 output\(s\) and wanted_class is 0"):
        RewardAdapter(shared_base(), pad_token_id=0, eos_token_id=2, wanted_class=0)
    reward = RewardAdapter(shared_base(labels=3), pad_token_id=0, eos_token_id=2, class_column="style")
    with pytest.raises(RewardError, match='no column "style"; present: number'):
        reward(rollout(RESPONSES))


def test_check_scores():
    batch = rollout(RESPONSES)
    torch.testing.assert_close(check_scores([1, 2.5, 3, 4], batch), torch.tensor([1, 2.5, 3, 4]), **EXACT)
    with pytest.raises(RewardError, match=r"shape \(3,\) for 4 responses"):
        check_scores([1, 2, 3], batch)
    with pytest.raises(RewardError, match="the reward gave nan to the response '"):
        check_scores([1, 2, float("nan"), 4], batch)
    with pytest.raises(RewardError, match="returned .* not made of numbers"):
        check_scores(["a", "b", "c", "d"], batch)
    with pytest.raises(RewardError, match="returned None, not one number a response"):
        check_scores(None, batch)


ODD = {
    "complex": lambda: torch.ones(4, dtype=torch.complex64),
    "complex, of numpy": lambda: np.ones(4) * 1j,
    "complex, in a list": lambda: [1j] * 4,
    "masked": lambda: torch.masked.masked_tensor(torch.ones(4), torch.tensor([True, False, True, True])),
    "masked, of numpy": lambda: np.ma.masked_array(np.ones(4), [0, 1, 0, 0]),
    "sparse": lambda: torch.ones(4).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2)] * 4, layout=torch.jagged),
    "without numbers": lambda: torch.ones(4, device="meta"),
    "text": lambda: ["1"] * 4,
    "texts, of numpy": lambda: np.array(["1"] * 4),
    "objects": lambda: [object()] * 4,
    "a dict": lambda: dict.fromkeys(range(4), 1.0),
    "a generator": lambda: (1.0 for _ in range(4)),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of")
@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_real_number_is_no_score(kind):
    with pytest.raises(RewardError, match="returned .* not made of numbers"):
        score_with(lambda batch: ODD[kind](), rollout(RESPONSES))


def test_numbers_of_every_type_are_scores():
    for values in (
        np.array([1, 2, 3, 4], dtype=np.uint8), np.arange(1.0, 5), torch.arange(1, 5), torch.arange(1, 5).bfloat16(),
        torch.arange(1.0, 5, dtype=torch.float64, requires_grad=True), (1, 2.0, 3, 4),
        [torch.tensor(n) for n in range(1, 5)], [np.float32(n) for n in range(1, 5)],
    ):  # fmt: skip
        assert score_with(lambda batch, values=values: values, rollout(RESPONSES)).tolist() == [1, 2, 3, 4]
    assert score_with(lambda batch: [True, False, True, 10**30], rollout(RESPONSES)).tolist()[:3] == [1, 0, 1]


def test_a_python_function_by_name(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_for_test.py").write_text(
        "def brevity(rollout):\n    return [-n for n in rollout.lengths]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    function = load_function("my_rewards_for_test:brevity")
    assert check_scores(function(rollout(RESPONSES)), rollout(RESPONSES)).tolist() == [-3, -6, -2, -3]
    with pytest.raises(RewardError, match='has no function "length"'):
        load_function("my_rewards_for_test:length")
    with pytest.raises(RewardError, match='has no function "mood". A notebook or script has given it: put it into'):
        load_function("__main__:mood")
    with pytest.raises(RewardError, match='no module "no_such_module"'):
        load_function("no_such_module:f")
    with pytest.raises(RewardError, match="not of the form module:function"):
        load_function("just_a_name")


def test_a_function_that_is_called_in_vain_is_named_by_its_own_place():
    def reward(rollout, more):
        return rollout.lengths

    here = rf"{re.escape(__file__)}, line {reward.__code__.co_firstlineno}\)\. Mend it there"
    with pytest.raises(RewardError, match=rf"TypeError: .*missing 1 required positional argument: 'more' \({here}"):
        score_with(reward, rollout([[5, 2]]))


def test_inference_mode_that_is_left_on_is_said():
    def reward(rollout):
        mode.__enter__()
        return rollout.lengths

    mode = torch.inference_mode()
    try:
        with pytest.raises(RewardError, match="has left torch's inference mode on, in which nothing is learnt"):
            score_with(reward, rollout([[5, 2]]))
    finally:
        mode.__exit__(None, None, None)
        torch.set_grad_enabled(True)  # the mode was entered without gradients, and goes back to that


def test_a_judge_is_an_adapter_of_its_own():
    """Loaded as judge beside another reward it scores as it does as the reward of a base of its own."""
    alone, base = shared_base(), shared_base()
    randomize(alone, "reward", seed=9)
    base.add_role("judge", lora())
    with torch.no_grad():
        for mine, theirs in zip(base.parameters_of("judge"), alone.parameters_of("reward"), strict=True):
            mine.copy_(theirs)
    batch, read = rollout([[7, 8, 2], [9], [7, 7], [5, 2]]), {"pad_token_id": 0, "eos_token_id": 2}
    expected = RewardAdapter(alone, **read)(batch)
    torch.testing.assert_close(RewardAdapter(base, role="judge", **read)(batch), expected)
    assert not torch.allclose(RewardAdapter(base, **read)(batch), expected)


def test_scores_have_no_dropout_while_the_base_trains():
    base = SharedBase(tiny_model())
    base.add_role("reward", lora(lora_dropout=0.5))
    randomize(base, "reward")
    batch, reward = rollout(RESPONSES), RewardAdapter(base, pad_token_id=0, eos_token_id=2)
    quiet = reward(batch)  # of a base in eval mode
    base.train()
    assert torch.equal(reward(batch), quiet) and base.training


def test_a_recipe_may_ask_for_the_logit_of_an_adapters_class():
    base, wanted = shared_base(labels=3), [0, 2, 1, 0]
    batch = replace(rollout(RESPONSES), columns={"style": wanted})
    context = ScorerContext(roles=base, tokenizer=doubling.tokenizer(), prompts=lambda: (), pad_tokens={"reward": 0})
    values = {"kind": "adapter", "class_column": "style", "class_score": "logit"}
    scores = scorer_of(values).build(context)(batch)
    for row, number in enumerate(wanted):
        ids = torch.tensor([[*batch.prompt_ids[row], *batch.response_ids[row]]])
        with torch.no_grad():
            logits = sequence_logits(base, ids, torch.ones_like(ids), pad_token_id=0)[0]
        assert scores[row].item() == pytest.approx(logits[number].item(), rel=1e-4, abs=1e-5)


def test_no_gradient_is_recorded_in_a_reward():
    weight, recorded = torch.ones(4, requires_grad=True), []

    def plain(batch):
        recorded.append((2 * weight).requires_grad)
        return batch.lengths

    async def later(batch):
        return plain(batch)

    for reward in (plain, later):
        score_with(reward, rollout(RESPONSES))
    assert recorded == [False, False]
