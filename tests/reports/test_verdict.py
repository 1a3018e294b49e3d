import random

import pytest

from toolkit.reports import verdict


def result(before, before_se, after, after_se):
    return {"before": {"score": before, "score_se": before_se}, "after": {"score": after, "score_se": after_se}}


def rows(*pairs):
    return [{"prompt": str(i), "before_score": one, "after_score": other} for i, (one, other) in enumerate(pairs)]


def test_a_difference_is_held_against_its_noise():
    assert verdict(result(1.0, 0.3, 2.0, 0.4)) == (  # √(0.3² + 0.4²) = 0.5
        "The score rose: +1 ± 0.5, 2.0 standard errors of two means."
    )
    assert verdict(result(1.0, 0.3, 1.9, 0.4)).startswith("The score did not change by more than its noise: +0.9 ± 0.5")
    assert verdict(result(1.0, 0.3, -1.0, 0.4)).startswith("The score fell: -2 ± 0.5, 4.0 standard errors")


def test_pairs_of_the_same_prompts_have_less_noise():
    """Changes of 1, 1, 1 and 2: mean 1.25, standard deviation 0.5, and so a standard error of 0.25."""
    samples = rows((0.0, 1.0), (10.0, 11.0), (-5.0, -4.0), (3.0, 5.0))
    said = verdict(result(2.0, 3.2, 3.25, 3.1), samples)
    assert said == "The score rose: +1.25 ± 0.25, 5.0 standard errors over the same 4 prompts."


def test_rows_of_one_prompt_are_one():
    """A greedy policy says the same to each of them: by ten prompts 0.3 is no rise, by fifty it would be."""
    ten = rows(*((0.0, after) for after in [1.0] * 6 + [-1.0] * 3 + [0.0]))
    said = verdict({}, ten)
    assert said.startswith("The score did not change by more than its noise: +0.3 ± 0.3, 1.0 standard errors over")
    assert verdict({}, ten * 5) == said


def test_where_prompts_repeat_unevenly_the_difference_is_that_of_the_two_scores():
    """Nine rows of a rise by 0.2 and the one of b falls by 1: from 0.1 to 0.18, and √2 · √(2 · 1.08²) / 10 = 0.216."""
    uneven = [{"prompt": "a", "before_score": 0.0, "after_score": 0.2}] * 9
    uneven.append({"prompt": "b", "before_score": 1.0, "after_score": 0.0})
    said = verdict(result(0.1, 0.18, 0.18, 0.036), uneven)
    assert said == (
        "The score did not change by more than its noise: +0.08 ± 0.22, 0.4 standard errors over the same 2 prompts."
    )


def test_of_one_prompt_there_is_nothing_to_say():
    for times in (1, 3):
        assert verdict(result(1.0, 0.0, 2.0, 0.0), rows((1.0, 2.0)) * times) == ""
    assert verdict(result(1.0, 0.0, 2.0, 0.0) | {"rows": {"held out": 1}}) == ""


def test_what_has_no_noise_or_no_score():
    assert verdict(result(1.0, 0.0, 1.0, 0.0)) == "The score did not change, without noise (of two means)."
    assert verdict(result(1.0, 0.0, 2.0, 0.0)).startswith("The score changed by +1, without noise")
    assert verdict({"before": {"loss": 1.0}, "after": {"loss": 0.5}}) == "" == verdict({"before": None, "after": {}})
    same = rows((0.1, 0.4), (0.2, 0.5), (0.3, 0.6))  # but for the rounding of 0.5 - 0.2
    few = "The score changed by +0.3 over the same 3 prompts, which are too few for a standard error."
    assert verdict({}, same) == few == verdict({}, same * 3)
    five = rows(*((at, at - 1.0) for at in (0.0, 1.0, 2.0, 3.0, 4.0)))
    assert verdict({}, five) == "The score changed by -1, without noise (over the same 5 prompts)."
    assert verdict({}, rows((1.0, 1.0), (2.0, 2.0))).startswith("The score did not change, without noise (over")
    assert verdict(result(float("nan"), 0.1, 1.0, 0.1)) == ""


def test_the_judge_has_a_sentence_of_its_own():
    """Changes of the score of 1 and 3, of the judge of -1 and -1.5."""
    both = result(1.0, 0.3, 2.0, 0.4)
    both["before"] |= {"judge": 2.0, "judge_se": 0.3}
    both["after"] |= {"judge": 1.0, "judge_se": 0.4}
    assert verdict(both).endswith("The judge fell: -1 ± 0.5, 2.0 standard errors of two means.")
    judged = [
        {"prompt": "a", "before_score": 0.0, "after_score": 1.0, "before_judge": 2.0, "after_judge": 1.0},
        {"prompt": "b", "before_score": 0.0, "after_score": 3.0, "before_judge": 2.5, "after_judge": 1.0},
    ]
    assert verdict(both, judged) == (
        "The score did not change by more than its noise: +2 ± 1, 2.0 standard errors over the same 2 prompts. "
        "The judge did not change by more than its noise: -1.25 ± 0.25, 5.0 standard errors over the same 2 prompts."
    )


@pytest.mark.parametrize("number", [2, 3, 5, 12, 40])
def test_by_chance_alone_a_score_seldom_rises_or_falls(number):
    """Of 4,000 draws without a change 5 in 100 are told as one; of these 200 the standard error is 14."""
    drawn, told = random.Random(0), 0
    for _ in range(4000):
        said = verdict({}, rows(*((drawn.gauss(0, 1), drawn.gauss(0, 1)) for _ in range(number))))
        told += "rose" in said or "fell" in said
    assert 150 < told < 250
