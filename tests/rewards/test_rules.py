import torch

from toolkit.data import Rollout
from toolkit.rewards import score_with
from toolkit.rewards.rules import plain_words, right_answer


def rollout(*responses: str, ended: bool = True, **columns: list) -> Rollout:
    number = len(responses)
    return Rollout(["?"] * number, list(responses), [[1]] * number, [[5, 6]] * number, [ended] * number, columns)


def test_a_right_answer_is_the_whole_text_and_ended():
    assert right_answer(rollout("12", "12 ", "1", answer=["12", "12", "12"])) == [1.0, 0.0, 0.0]
    assert right_answer(rollout("12", ended=False, answer=["12"])) == [0.0]


def test_plain_words_cost_nothing_and_the_others_where_they_end():
    responses = ("The kitten sat.", "Neverthless, I’m concerned; x1234567 pumpkin_", "größere Größen", "")
    #             kitten has 6       11 letters      9                    7         7        6
    scores = score_with(plain_words, rollout(*responses))
    assert scores.spans == [[], [(0, 11, -1.0), (17, 26, -1.0), (37, 44, -1.0)], [(0, 7, -1.0)], []]
    assert torch.equal(scores.total, torch.tensor([0.0, -3.0, -1.0, 0.0]))
