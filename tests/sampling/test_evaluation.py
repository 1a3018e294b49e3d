"""What is measured of responses, and that measuring leaves no trace."""

import pytest
import torch

from tests.tiny_models import shared_base
from tests.trainers.helpers import PROMPTS, Counting, count_reward, dataset
from toolkit.data import doubling
from toolkit.errors import DataError, RewardError
from toolkit.rewards import DenseScores, WeightedSum, state_of
from toolkit.sampling import Evaluator, Sampler, best_of


def evaluator(reward, *, temperature=1.0, batch_size=3, **settings):
    sampler = Sampler(shared_base(), doubling.tokenizer(), response_length=5, temperature=temperature)
    ratios = {"log_ratios": lambda rollout: torch.tensor([float(n) for n in rollout.columns["number"]])}
    return Evaluator(sampler, reward, batch_size=batch_size, seed=3, **{**ratios, **settings})


def total(ids):
    return float(sum(ids))


def test_metrics_by_hand_over_batches_that_do_not_divide():
    ended = []
    measure = evaluator(lambda r: list(map(total, r.response_ids)), metrics=lambda r: {"rows": float(len(r))})
    metrics, rollout, scores, *_ = measure(dataset(2).select(range(7)), after_batch=lambda: ended.append(1))
    assert len(ended) == 3 and len(rollout) == len(scores) == metrics["rows"] == 7
    assert rollout.columns["number"] == list(range(7)) and metrics["kl"] == 3.0
    expected = list(map(total, rollout.response_ids))
    assert len(set(expected)) > 1
    assert scores.tolist() == pytest.approx(expected) and metrics["score"] == pytest.approx(sum(expected) / 7)
    assert metrics["length"] == sum(map(len, rollout.response_ids)) / 7
    assert metrics["eos_share"] == sum(rollout.ended) / 7
    off = [score - sum(expected) / 7 for score in expected]  # of the four prompts three stand twice
    by_prompt = [one + other for one, other in zip(off[:3], off[4:], strict=True)] + [off[3]]
    assert metrics["score_se"] == pytest.approx((4 / 3 * sum(one**2 for one in by_prompt)) ** 0.5 / 7)


def test_rows_of_one_prompt_do_not_make_the_error_smaller():
    """Four prompts, and three rows of each that score the same."""

    def second(rollout):
        return [float(ids[1]) for ids in rollout.prompt_ids]  # 4, 30, 5 and 20

    once, thrice = (evaluator(second, judge=second)(dataset(copies)).metrics for copies in (1, 3))
    for name in ("score", "judge"):
        assert once[name] == thrice[name] == 14.75
        assert once[f"{name}_se"] == pytest.approx((470.75 / 3) ** 0.5 / 2) == pytest.approx(thrice[f"{name}_se"])


def test_score_and_error_are_of_the_same_mean_where_prompts_repeat_unevenly():
    """Nine rows of one prompt score 0, and one of another 1: `tests/functional/test_statistics.py` has their error."""
    second = PROMPTS[1]
    rows = [{"input_ids": second if number == 5 else PROMPTS[0], "number": 0} for number in range(10)]

    def is_second(rollout):
        return [float(list(ids) == second) for ids in rollout.prompt_ids]

    metrics = evaluator(is_second, judge=is_second)(rows).metrics
    for name in ("score", "judge"):
        assert metrics[name] == pytest.approx(0.1) and metrics[f"{name}_se"] == pytest.approx(0.18)


def test_the_seed_is_its_own_and_the_caller_s_random_state_stays():
    measure = evaluator(count_reward(7), metrics=lambda rollout: {"drawn": float(torch.rand(1) < 1)})
    torch.manual_seed(11)
    state = torch.get_rng_state()
    first = measure(dataset(1))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(12)
    again = measure(dataset(1))
    assert again.rollout.response_ids == first.rollout.response_ids and again.metrics == first.metrics


def test_a_reward_that_changes_is_left_as_it_was():
    reward = Counting()
    assert evaluator(reward)(dataset(1)).scores.tolist() == [1.0] * 4
    assert reward.calls == 0 and state_of(reward).state_dict() == {"calls": 0}

    class Stopped(Counting):
        def __call__(self, rollout):
            super().__call__(rollout)
            raise KeyboardInterrupt

    stopped = Stopped()
    with pytest.raises(KeyboardInterrupt):
        evaluator(stopped)(dataset(1))
    assert stopped.calls == 0
    assert state_of(torch.nn.Linear(1, 1)) is None and state_of(count_reward(7)) is None


class Centred:
    """The sum of a response's ids, less the mean of those that were scored before."""

    seen, mean = 0, 0.0

    def __call__(self, rollout):
        totals = [total(ids) for ids in rollout.response_ids]
        scores = [one - self.mean for one in totals]
        self.mean = (self.mean * self.seen + sum(totals)) / (self.seen + len(totals))
        self.seen += len(totals)
        return scores

    def state_dict(self):
        return {"seen": self.seen, "mean": self.mean}

    def load_state_dict(self, state):
        self.seen, self.mean = state["seen"], state["mean"]


@pytest.mark.parametrize("size", [1, 3, 8])
def test_each_batch_is_scored_from_the_same_state(size):
    measured = evaluator(Centred(), judge=Centred(), batch_size=size)(dataset(2))
    expected = [total(ids) for ids in measured.rollout.response_ids]
    assert measured.scores.tolist() == measured.judged.tolist() == expected and len(set(expected)) > 1


def test_parts_of_a_sum_and_dense_scores():
    def dense(rollout):
        return DenseScores(tokens=[[1.0] * n for n in rollout.lengths])

    measured = evaluator(WeightedSum({"tokens": dense, "one": lambda r: [1.0] * len(r)}, {"one": 0.5}))(dataset(1))
    assert measured.metrics["score/tokens"] == measured.metrics["length"] and measured.metrics["score/one"] == 1.0
    assert measured.scores.tolist() == [n + 0.5 for n in measured.rollout.lengths]


def test_a_judge_scores_the_same_responses():
    judge = WeightedSum({"length": lambda r: [float(n) for n in r.lengths], "one": lambda r: [1.0] * len(r)})
    alone = evaluator(count_reward(7))(dataset(2))
    metrics, rollout, scores = measured = evaluator(count_reward(7), judge=judge)(dataset(2))
    judged = measured.judged
    assert rollout.response_ids == alone.rollout.response_ids and torch.equal(scores, alone.scores)
    assert judged.tolist() == [n + 1.0 for n in rollout.lengths] and alone.judged is None
    assert metrics["judge"] == metrics["length"] + 1.0 and metrics["judge/length"] == metrics["length"]
    by_prompt = judged.view(2, 4).mean(dim=0)  # each prompt stands twice
    assert metrics["judge_se"] == pytest.approx(float(by_prompt.std()) / 4**0.5)
    assert {name for name in metrics if not name.startswith("judge")} == alone.metrics.keys()


def test_what_a_judge_raises_is_the_judge_s():
    judge = Counting()
    assert evaluator(count_reward(7), judge=judge)(dataset(1)).judged.tolist() == [1.0] * 4
    assert judge.calls == 0
    with pytest.raises(RewardError, match=r"^judge: the reward returned None"):
        evaluator(count_reward(7), judge=lambda rollout: None)(dataset(1))


def test_nothing_to_measure_is_said():
    with pytest.raises(DataError, match="no held-out prompts to measure. Hold some rows of the data out"):
        evaluator(count_reward(7))(dataset(1).select([]))


ROWS = [{"input_ids": ids, "number": i} for i, ids in enumerate(PROMPTS)]


def best(n, rows=ROWS, reward=None, batch_size=5):
    sampler = Sampler(shared_base(), doubling.tokenizer(), response_length=5, temperature=2.0)
    torch.manual_seed(0)
    return best_of(rows, n, sampler=sampler, reward=reward or count_reward(7), batch_size=batch_size)


def test_the_highest_score_is_kept_and_of_equals_the_first():
    sampled = best(6)
    assert sampled.scores.shape == (4, 6) and len(sampled.candidates) == 24 and len(sampled.best) == 4
    assert sampled.candidates.columns["number"] == [number for number in range(4) for _ in range(6)]
    for i, scores in enumerate(sampled.scores.tolist()):
        assert sampled.best.response_ids[i] == sampled.candidates.response_ids[6 * i + scores.index(max(scores))]
    assert float(sampled.scores.max()) > 0.0
    reward = Counting()
    assert best(2, reward=reward).scores.flatten().tolist() == [1.0] * 8 and reward.calls == 0
    same = best(3, reward=lambda rollout: [1.0] * len(rollout))
    assert same.best.response_ids == [same.candidates.response_ids[3 * i] for i in range(4)]


def test_the_best_is_the_best_response_and_not_of_the_best_state():
    """Of the four to a prompt, two batches have some."""
    sampled = best(4, reward=Centred(), batch_size=3)
    totals = [total(ids) for ids in sampled.candidates.response_ids]
    assert sampled.scores.flatten().tolist() == totals
    for i, response in enumerate(sampled.best.response_ids):
        assert total(response) == max(totals[4 * i : 4 * i + 4])


def test_one_is_the_sample_itself():
    sampled = best(1)
    assert sampled.best.response_ids == sampled.candidates.response_ids


@pytest.mark.parametrize(("n", "rows"), [(0, ROWS), (2, [])])
def test_nothing_to_choose_from(n, rows):
    with pytest.raises(ValueError, match="at least one prompt and one sample; got"):
        best(n, rows)
