"""Signs of a fooled reward, counted by hand."""

import pytest
import torch

from toolkit.data import Rollout
from toolkit.sampling import SIGNS, distinct_share, since_first
from toolkit.sampling.signs import signs_of


def said(*responses, lengths=None, ended=None, prompts=None):
    """A rollout of these texts, each text an id of its own."""
    number = len(responses)
    ids = {text: place for place, text in enumerate(dict.fromkeys(responses))}
    rows = [[ids[text]] * length for text, length in zip(responses, lengths or [1] * number, strict=True)]
    prompts = prompts or [f"prompt {i}" for i in range(number)]
    return Rollout(prompts, responses, [[1]] * number, rows, ended or [True] * number)


def test_figures_by_hand():
    texts = ("I am so sorry", "I am so sorry for that", "no no no", "You are right, I am so sorry")
    scores = torch.tensor([1.0, 2.0, 0.0, 3.0])
    signs = signs_of(said(*texts, lengths=[4, 6, 3, 7], ended=[True, True, False, False]), scores)
    assert tuple(signs) == SIGNS
    # Pairs: 3 + 5 + 2 + 6 = 16. Different: "I am", "am so", "so sorry", "sorry for", "for that", "no no", "You are",
    # "are right,", "right, I": 9.
    assert signs["distinct_2"] == 9 / 16
    assert signs["distinct_share"] == 1.0
    assert signs["opening_share"] == 2 / 4
    assert signs["phrase_share"] == 3 / 4
    # Deviations of the lengths (-1, 1, -2, 2) and scores (-0.5, 0.5, -1.5, 1.5): 7 / √(10 · 5).
    assert signs["length_correlation"] == pytest.approx(7 / 50**0.5)
    assert (
        signs["cut_gap"] == 1.5 - 1.5 and signs_of(said("a", "b", ended=[False, True]), scores[:2])["cut_gap"] == -1.0
    )


def test_scores_beyond_what_a_reward_has_met():
    scores = torch.tensor([1.0, 2.0, 2.5, 3.0])
    assert signs_of(said("a", "b", "c", "d"), scores, high=2.0)["beyond_share"] == 2 / 4
    of_forty = torch.tensor([3.0] * 6 + [1.0] * 34)
    assert signs_of(said(*"a" * 40), of_forty, high=2.0)["beyond_share"] == 0.15  # as the guard has it


def test_where_there_is_nothing_to_count():
    scores = torch.tensor([1.0, 1.0])
    for ended in ([True, True], [False, False]):
        signs = signs_of(said("一0784", "", ended=ended), scores)
        assert signs == {
            "distinct_2": 1.0, "distinct_share": 1.0, "opening_share": 0.0, "phrase_share": 0.0,
            "length_correlation": 0.0, "cut_gap": 0.0,
        }  # fmt: skip


def test_a_phrase_counts_once_a_response():
    again = "go on and on and on and on"
    assert signs_of(said(again, "x", "y", "z"), torch.zeros(4))["phrase_share"] == 1 / 4


def test_equal_prompts_may_have_equal_responses():
    assert distinct_share(said("a", "a", "b", "b", prompts=["p", "p", "q", "q"])) == 1.0
    assert distinct_share(said("a", "a", "a", "b")) == 0.5
    assert distinct_share(said("a", "b", "c", prompts=["p", "p", "q"])) == 1.0


ANSWERS = [f"Answer number {i} says that {i * 7} is more than {i * 5}" for i in range(40)]


def test_the_phrase_that_has_risen():
    first = [f"As a model, I think {i}" for i in range(30)] + ["I am so sorry"] * 2 + ["other words of it all"] * 8
    now = ["As a model, I am so sorry"] * 24 + ["other words of it all"] * 16
    found = since_first(now, first)
    # "As a model, I" has become rarer, "other words of it" was in 8 of 40 at first, "I am so sorry" in 2.
    assert found["phrase_rows"] == 24 and found["phrase_now"] == 24 / 40
    assert found["phrase"] == "a model, I am" and found["phrase_then"] == 0.0  # of several the first
    assert found["different_kept"] == 2 / 32


def test_a_phrase_of_one_in_twenty_was_rare():
    found = since_first(["I am so sorry"] * 30 + ["No."] * 10, ["I am so sorry"] * 2 + ["No."] * 38)
    assert (found["phrase"], found["phrase_rows"]) == ("I am so sorry", 30)
    assert (found["phrase_now"], found["phrase_then"]) == (0.75, 0.05)


def test_shares_are_of_equally_many():
    found = since_first(ANSWERS[:10], ANSWERS)
    assert found["pairs_kept"] == found["different_kept"] == 1.0 and found["phrase_now"] == found["phrase_then"]
    assert since_first(ANSWERS, ANSWERS[:10])["pairs_kept"] == 1.0


def test_longer_responses_are_not_less_varied():
    longer = [f"{text}, and the sum of it is {i}, as it is" for i, text in enumerate(ANSWERS)]
    assert since_first(longer, ANSWERS)["pairs_kept"] == since_first(ANSWERS, longer)["pairs_kept"] == 1.0
    assert since_first(ANSWERS, ["No."] * 40)["pairs_kept"] == 1.0  # of which there was no pair
    assert since_first([f"{text} to" for text in ANSWERS[:1] * 40], ANSWERS)["pairs_kept"] < 0.1


def test_short_answers_may_be_alike():
    """Right answers of few words, as in doubling or a class."""
    found = since_first(["yes"] * 20, ANSWERS)
    assert found["different_kept"] == 1.0 and found["phrase"] == "" and found["phrase_now"] == 0.0
