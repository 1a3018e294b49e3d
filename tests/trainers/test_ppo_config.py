from dataclasses import fields

import pytest

from tests.trainers.helpers import config
from toolkit.trainers.ppo_config import HONOURED, INSTEAD, PPOConfig, ignored_by_our_loop


def test_the_lists_name_real_fields():
    names = {f.name for f in fields(PPOConfig)}
    assert names >= HONOURED
    assert names >= set(INSTEAD)
    assert not HONOURED & set(INSTEAD)


def test_trls_dead_fields_are_refused_each_with_a_reason():
    dead = ignored_by_our_loop({"sft_model_path": "x", "batch_size": 4, "push_to_hub": True, "kl_coef": 0.1, "typo": 1})
    assert dead == {
        "sft_model_path": "the base is base.model",
        "batch_size": "a batch is per_device_train_batch_size × gradient_accumulation_steps",
        "push_to_hub": "the toolkit's PPO loop does not read it",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"response_length": 0}, "response_length must be at least 1"),
        ({"max_length": 0}, "max_length must be at least 1 or null, got 0"),
        ({"loop": "trl", "max_length": 256}, "loop: trl has no max_length"),
        ({"gamma": 1.5}, "gamma must be between 0 and 1, got 1.5"),
        ({"num_mini_batches": 3}, "a batch of 4 .* cannot be divided into num_mini_batches = 3"),
        ({"kl_estimator": "k4"}, "kl_estimator must be one of k1, k2, k3, abs, full, got 'k4'"),
        ({"missing_eos_penalty": -1.0}, "missing_eos_penalty must be positive or null, got -1.0"),
        ({"max_steps": 3, "total_episodes": 12}, "max_steps and total_episodes both set the number of updates"),
        ({"loop": "trl", "kl_estimator": "k2"}, "loop: trl knows the kl_estimator k1 and k3 only"),
        ({"loop": "trl", "kl_target": 6.0}, "kl_target would have no effect"),
        ({"loop": "trl", "sample_with_replacement": True}, "sample_with_replacement would have no effect"),
        ({"kl_target": 0.0}, "kl_target must be positive or null, got 0.0"),
        ({"num_mini_batches": 0}, "num_mini_batches must be at least 1, got 0"),
        ({"kl_horizon": 0}, "kl_horizon must be at least 1, got 0"),
        ({"loop": "mine"}, "loop must be one of toolkit, trl, got 'mine'"),
        ({"value": "none"}, "value must be one of separate, shared"),
    ],
)
def test_bad_values(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **changes)


def test_number_of_updates(tmp_path):
    assert config(tmp_path, max_steps=7).number_of_updates(100) == 7
    assert config(tmp_path, max_steps=-1, total_episodes=40).number_of_updates(100) == 10
    assert config(tmp_path, max_steps=-1, num_train_epochs=2).number_of_updates(100) == 50
    assert config(tmp_path, max_steps=-1, num_train_epochs=0.01).number_of_updates(100) == 1
