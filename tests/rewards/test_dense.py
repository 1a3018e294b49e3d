"""Scores at tokens and spans, by hand."""

import pytest
import torch

from tests.tiny_runs import byte_tokenizer
from tests.tolerances import EXACT
from tests.trainers.helpers import dataset, rollout, trainer
from toolkit.data import Rollout
from toolkit.errors import RewardError
from toolkit.rewards import DenseScores, WeightedSum, concatenate_scores, score_with, select_scores, total_scores

RESPONSES = [[12, 13, 2], [9, 9, 8, 8, 7, 7], [20, 2], [2]]
TOKENS = [[0.5, 0.0, 1.0], [], [-1.0, 2.0], [0.25]]


def text_rollout(texts, tokenizer):
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    responses = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return Rollout(["p"] * len(texts), responses, [[1]] * len(texts), ids, [True] * len(texts))


def test_a_score_is_the_sum_of_its_parts():
    dense = DenseScores(scores=[1, 2, 3, 4], tokens=TOKENS, spans=[[], [(0, 1, 0.5), (1, 3, 0.25)], [], []])
    found = score_with(lambda r: dense, rollout(RESPONSES))
    torch.testing.assert_close(total_scores(found), torch.tensor([2.5, 2.75, 4.0, 4.25]), **EXACT)
    some = select_scores(found, [2, 0])
    assert total_scores(some).tolist() == [4.0, 2.5]
    both = concatenate_scores([some, torch.tensor([7.0])])
    assert total_scores(both).tolist() == [4.0, 2.5, 7.0]
    assert concatenate_scores([torch.tensor([7.0]), torch.tensor([8.0])]).tolist() == [7.0, 8.0]
    none = DenseScores(tokens=TOKENS).checked(rollout(RESPONSES))
    assert both.at_end and concatenate_scores([none, found]).at_end
    assert not concatenate_scores([none, select_scores(none, [0])]).at_end


@pytest.mark.parametrize("text", ["naïve – 長い語 yes", "plain words"])
def test_a_span_pays_at_the_token_that_completes_it(text):
    """Against one span at a time: the shortest beginning of the tokens that decodes to all of it."""
    tokenizer = byte_tokenizer()
    batch = text_rollout([text], tokenizer)
    ids = batch.response_ids[0]
    assert len(ids) > len(text.encode()) - 3 and batch.responses == [text]  # a token a byte or so
    for end in range(1, len(text) + 1):
        complete = next(
            n for n in range(1, len(ids) + 1)
            if tokenizer.decode(ids[:n], skip_special_tokens=True)[:end] == text[:end]
        )  # fmt: skip
        scores = DenseScores(spans=[[(0, end, 3.0)]]).checked(batch).at_tokens(batch, tokenizer)
        assert scores.nonzero().tolist() == [[0, complete - 1]] and scores.sum() == 3.0, end


def test_scores_stand_at_their_tokens_in_the_rewards_of_an_update(tmp_path):
    ours = trainer(tmp_path, kl_coef=0.0, missing_eos_penalty=3.0)
    batch = rollout(RESPONSES)
    # One sign a token: the span ends with the third token of the second response, which was cut.
    spans = [[], [(1, 3, 0.5)], [], []]
    scores = score_with(lambda r: DenseScores([1.0, 2.0, 3.0, 4.0], TOKENS, spans), batch)
    experience = ours._make_experience(batch, scores)
    assert [row[: len(r)].tolist() for row, r in zip(experience.rewards, RESPONSES, strict=True)] == [
        [0.5, 0.0, 2.0],
        [0.0, 0.0, 0.5, 0.0, 0.0, -1.0],
        [-1.0, 5.0],
        [4.25],
    ]
    assert experience.scores.tolist() == [2.5, 2.5, 4.0, 4.25]
    assert experience.shaped_scores.tolist() == [2.5, -0.5, 4.0, 4.25]
    with_kl = trainer(tmp_path, kl_coef=0.1, missing_eos_penalty=3.0)._make_experience(batch, scores)
    expected = (experience.rewards - 0.1 * with_kl.kl) * with_kl.response_mask
    torch.testing.assert_close(with_kl.rewards, expected, **EXACT)
    stats = ours.step({}, batch, scores)
    assert stats["score"] == pytest.approx(13.25 / 4) and stats["shaped_score"] == pytest.approx(10.25 / 4)


def test_dense_and_plain_parts_make_one_sum():
    batch = rollout(RESPONSES)
    spans = [[], [(0, 2, 1.0)], [], []]
    parts = {
        "tokens": lambda r: DenseScores(tokens=TOKENS),
        "spans": lambda r: DenseScores(scores=[1.0] * 4, spans=spans),
        "plain": lambda r: [1.0, 2.0, 3.0, 4.0],
        "more": lambda r: DenseScores(tokens=[[1.0] * n for n in r.lengths]),
    }
    both = WeightedSum(parts, {"tokens": 2.0, "spans": 10.0, "plain": -1.0})
    found = score_with(both, batch)
    assert isinstance(found, DenseScores) and list(found.scores) == [9.0, 8.0, 7.0, 6.0]
    assert [row.tolist() for row in found.tokens] == [[2.0, 1.0, 3.0], [1.0] * 6, [-1.0, 5.0], [1.5]]
    assert [list(row) for row in found.spans] == [[], [(0, 2, 10.0)], [], []]
    assert both.last_parts["tokens"].tolist() == [1.5, 0.0, 1.0, 0.25]
    assert both.last_parts["spans"].tolist() == [1.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_part_without_weight_gives_nothing_at_the_end(weight):
    parts = {"tokens": lambda r: DenseScores(tokens=TOKENS), "plain": lambda r: [1.0, 2.0, 3.0, 4.0]}
    found = score_with(WeightedSum(parts, {"plain": weight}), rollout(RESPONSES))
    assert found.at_end is bool(weight) and list(found.scores) == [weight * n for n in (1, 2, 3, 4)]


def test_best_of_n_and_evaluation_go_by_the_sum(tmp_path):
    def sevens(r):
        return DenseScores(tokens=[[float(token == 7) for token in ids] for ids in r.response_ids])

    ours = trainer(tmp_path, reward=sevens)
    found = ours.best_of(dataset(1), 3)
    counts = [list(map(int, ids)).count(7) for ids in found.candidates.response_ids]
    assert found.scores.flatten().tolist() == counts
    metrics, answers, scores, *_ = ours.evaluate_rollout(dataset(1))
    assert scores.tolist() == [list(ids).count(7) for ids in answers.response_ids]
    assert metrics["score"] == pytest.approx(float(scores.mean()))
    assert ours.train()["optimizer_steps"] == 1


@pytest.mark.parametrize(
    ("dense", "said"),
    [
        (DenseScores(tokens=[[1.0]] * 3), "returned 3 tokens for 4 responses"),
        (DenseScores(spans=[[]] * 5), "returned 5 spans for 4 responses"),
        (DenseScores(spans=[]), "returned 0 spans for 4 responses"),
        (DenseScores(scores=[1.0]), r"returned shape \(1,\) for 4 responses; \(4,\) is needed"),
        (DenseScores(scores=torch.zeros(4, 1)), r"returned shape \(4, 1\) for 4 responses"),
        (DenseScores(tokens=[[1.0]] * 4), r"token scores of shape \(1,\) to the response .* which has 3 tokens"),
        (DenseScores(spans=[[(0, 99, 1.0)], [], [], []]), "the characters 0 to 99 of the response"),
        (DenseScores(spans=[[(1, 1, 1.0)], [], [], []]), "the characters 1 to 1 of the response"),
        (DenseScores(spans=[[(0, 1)], [], [], []]), "not made of numbers"),
        (
            DenseScores(spans=[[(0.7, 1, 1.0)], [], [], []]),
            "not made of numbers: 'float' object cannot be interpreted as",
        ),
        (DenseScores(spans=[[(0, torch.tensor(1.0), 1.0)], [], [], []]), "not made of numbers: .*integer"),
        (
            DenseScores(spans=[[(0, 1, "1")], [], [], []]),
            "not made of numbers: the score of a span is a number, got '1'",
        ),
        (DenseScores(spans=[[(0, 1, 1j)], [], [], []]), "not made of numbers: .*complex"),
        (DenseScores(tokens=[torch.ones(3) * 1j, [], [], []]), "not made of numbers: real numbers .* not complex"),
        (
            DenseScores([3e38] * 4, tokens=[[3e38, -3e38, 0.0], [], [], []]),
            "gave scores that overflow float32 to the resp",
        ),
        (DenseScores(spans=[[(0, 1, 3e38)] * 2, [], [], []]), "gave scores that overflow float32 to the response"),
        (DenseScores(tokens=[["a", "b", "c"], [], [], []]), "not made of numbers"),
        (DenseScores([0.0] * 4, tokens=[["a"]] * 4), r"returned \[\['a'\], .*, which is not made of numbers"),
        (DenseScores(tokens=[[0.0, float("nan"), 0.0], [], [], []]), "gave nan to the response .*; scores are finite"),
        (DenseScores(spans=[[(0, 1, float("inf"))], [], [], []]), "gave inf to the response .*; scores are finite"),
    ],
)
def test_what_is_no_score(dense, said):
    with pytest.raises(RewardError, match=said):
        score_with(lambda r: dense, rollout(RESPONSES))


def test_scaling_and_clipping_are_for_one_number_a_response(tmp_path):
    for settings in ({"score_clip": 1.0}, {"use_score_scaling": True}):
        ours = trainer(tmp_path, reward=lambda r: DenseScores(tokens=TOKENS), **settings)
        with pytest.raises(RewardError, match="use_score_scaling and score_clip are for one number a response"):
            ours.step({}, rollout(RESPONSES), DenseScores(tokens=TOKENS))


def test_a_part_that_cannot_be_called_is_found_at_once():
    class Kind:
        def __call__(self, rollout):
            return rollout.lengths

    for part, said in ((Kind, "parts.b: Kind is a class"), (3, "parts.b: a function of a rollout is needed, got 3")):
        with pytest.raises(RewardError, match=said):
            WeightedSum({"a": Kind(), "b": part})
