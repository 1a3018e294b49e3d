from toolkit.reports import verdict


def result(before, before_se, after, after_se):
    return {"before": {"score": before, "score_se": before_se}, "after": {"score": after, "score_se": after_se}}


def rows(*pairs):
    return [{"before_score": before, "after_score": after} for before, after in pairs]


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


def test_what_has_no_noise_or_no_score():
    assert verdict(result(1.0, 0.0, 1.0, 0.0)) == "The score did not change, without noise (of two means)."
    assert verdict(result(1.0, 0.0, 2.0, 0.0)).startswith("The score changed by +1, without noise")
    assert verdict({"before": {"loss": 1.0}, "after": {"loss": 0.5}}) == "" == verdict({"before": None, "after": {}})
    assert verdict(result(float("nan"), 0.1, 1.0, 0.1)) == ""
