"""Files and overrides that are no recipe, and names that no file can have: one message each, and soon."""

import time

import pytest

from tests.spec.test_load import MINIMAL, written
from toolkit import recipes
from toolkit.errors import RecipeError


def refused(tmp_path, *overrides, **sections):
    with pytest.raises(RecipeError) as error:
        recipes.load(written(tmp_path, {**MINIMAL, **sections}), *overrides)
    return str(error.value)


ALIASES = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10 if i else ['1'] * 10)}]" for i in range(9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1: x", "a key has to be text, in quotes if need be: '1' in line 1 is not."),
        ("ppo:\n  no: 1", "'no' in line 2 is not"),
        ("1e3: 5", "1000.0 — no such section."),
        ("adapters:\n  1e3: {}", "1000.0"),
        ("[a]: 1", "a sequence in line 1 is not"),
        ("seed: !!float x", "cannot be read as YAML"),
        ("seed: !!python/name:os.system", "cannot be read as YAML"),
        ("seed: 2026-13-45", "mine.yaml has"),
        ("about: " + "[" * 60 + "]" * 60, "nested more than 50 deep"),
        ("about: " + "[" * 1000 + "]" * 1000, "nested too deeply"),
        (ALIASES, "has more than 100,000 values"),
        ("a: &a [*a]", "nested more than 50 deep"),
        ("seed: ???", "mine.yaml has"),
        ("\x00", "cannot be read as YAML"),
        ("seed: 010", "010 would be a number to base 8 or 60. Write it in tens, or in quotes if it is text."),
        ("seed: 1:30", "1:30 would be a number to base 8 or 60"),
        ("ppo: {kl_coef: 1:30.5}", "1:30.5 would be a number to base 8 or 60"),
        ("", "section is missing"),
    ],
)
def test_yaml_that_is_no_recipe(text, message, tmp_path):
    started = time.monotonic()
    with pytest.raises(RecipeError) as error:
        recipes.load(written(tmp_path, text))
    assert message in str(error.value) and time.monotonic() - started < 30


@pytest.mark.parametrize(
    "override", ["=", "=1", "[]=1", ".x=1", "ppo.=1", "ppo..x=1", f"{'a.' * 60}b=1", f"{'a.' * 5000}b=1"]
)
def test_overrides_without_a_key(override, tmp_path):
    assert "is not of the form section.key=value." in refused(tmp_path, override)


@pytest.mark.parametrize("value", ["{1: 2}", "[" * 1000, "!!float x", "[" * 60 + "]" * 60, "\x00"])
def test_overrides_that_are_no_values(value, tmp_path):
    assert "cannot be read: " in refused(tmp_path, f"ppo.run_name={value}")


@pytest.mark.parametrize("name", ["x" * 5000 + ".yaml", "a\0.yaml", "~no-such-user/x.yaml", "x" * 5000, "a\0"])
def test_names_that_no_file_can_have(name):
    with pytest.raises(RecipeError, match="names no recipe|there is no such file|no recipe"):
        recipes.load(name)


def test_numbers_of_an_override_are_in_tens_as_well(tmp_path):
    assert "0100 would be a number to base 8 or 60" in refused(tmp_path, "ppo.response_length=0100")
    recipe = recipes.load(written(tmp_path, {**MINIMAL, "about": "010"}), "seed=0", "ppo.kl_coef=0.5")
    assert (recipe.values["about"], recipe.seed, recipe.values["ppo"]["kl_coef"]) == ("010", 0, 0.5)


@pytest.mark.parametrize("function", [f"{'x' * 5000}.py:f", "~no-such-user/x.py:f"])
def test_a_reward_s_file_that_cannot_be(function, tmp_path):
    assert refused(tmp_path, "scorer.kind=function", f"scorer.function={function}")


@pytest.mark.parametrize("override", ["ppo.report_to={}", "ppo.{}=1", "{}=1", "ppo.loop={}", "data.task={}", "seed={}"])
def test_a_message_shows_no_more_of_a_value_than_fits(override, tmp_path):
    text = refused(tmp_path, override.format("x" * 20_000))
    assert len(text) < 3000 and "characters …" in text


def test_a_message_moves_no_cursor(tmp_path):
    text = refused(tmp_path, ppo={"\x1b[2Jloop": 1, "run_name": ["\x1b[2J"]})
    assert "\x1b" not in text and "\\x1b[2Jloop" in text
