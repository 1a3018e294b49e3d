"""A trained run that the tests of this folder share."""

import pytest

from tests.tiny_runs import chat_recipe
from toolkit.runs import stages


@pytest.fixture(scope="package")
def trained(tmp_path_factory, checkpoint):
    """A finished run on an NF4 base, with a policy that is far from its base."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "shorter_for_test.py").write_text("def rule(rollout):\n    return [-float(n) for n in rollout.lengths]\n")
    recipe = chat_recipe(
        folder, checkpoint, "ppo.learning_rate=3e-2", "ppo.max_steps=3", "ppo.eval_do_sample=false", reward=None,
        scorer={"kind": "function", "function": "shorter_for_test:rule"},
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        stages.run(recipe, "ppo")
    return folder, recipe
