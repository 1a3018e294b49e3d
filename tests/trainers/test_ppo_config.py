from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
from transformers import HfArgumentParser

from tests.tiny_models import needs_trl_loop
from tests.trainers.helpers import config
from toolkit.errors import ConfigError
from toolkit.functional import KL_ESTIMATORS
from toolkit.models import Precision
from toolkit.spec.sections import STAGE_CLASSES
from toolkit.trainers.ppo_config import PPOConfig
from toolkit.trainers.unread import INSTEAD

TOGETHER = (
    "min_response_length — above 1 it needs short_response_penalty or drop_short_responses, and each of these needs it "
    "above 1."
)


def test_the_words_are_those_of_the_maths():
    types = get_type_hints(PPOConfig)
    assert get_args(types["kl_estimator"]) == (*KL_ESTIMATORS, "full")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature — must be at least 0.0001, got 0.0."),
        ({"response_length": 0}, "response_length — must be at least 1, got 0."),
        ({"max_length": 0}, "max_length — must be at least 1 or null, got 0."),
        ({"gamma": 1.5}, "gamma — must be between 0 and 1, got 1.5."),
        (
            {"num_mini_batches": 3},
            "num_mini_batches — a batch of 4 (per_device_train_batch_size × gradient_accumulation_steps) cannot be "
            "divided into 3.",
        ),
        ({"kl_estimator": "k4"}, "kl_estimator — 'k1' or 'k2' or 'k3' or 'abs' or 'full' is needed, got 'k4'."),
        ({"missing_eos_penalty": -1.0}, "missing_eos_penalty — must be positive or null, got -1.0."),
        (
            {"max_steps": 3, "total_episodes": 12},
            "total_episodes — sets the number of updates, and so does max_steps. Give one.",
        ),
        ({"kl_target": 0.0}, "kl_target — must be positive or null, got 0.0."),
        ({"num_mini_batches": 0}, "num_mini_batches — must be at least 1, got 0."),
        ({"kl_horizon": 0}, "kl_horizon — must be at least 1, got 0."),
        ({"kl_horizon": 2000}, "kl_horizon — would have no effect without kl_target."),
        (
            {"vf_coef": 0.0, "value_learning_rate": 0.1},
            "value_learning_rate — would have no effect with vf_coef 0.",
        ),
        (
            {
                "value_learning_rate": 0.1,
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr": 1e-6},
            },
            "lr_scheduler_kwargs — min_lr is the policy's final learning rate, and value_learning_rate would end at "
            "another. Take min_lr_rate, a share of each, with cosine_with_min_lr, or leave value_learning_rate out.",
        ),
        (
            {"update_kl_limit": 0.1, "num_ppo_epochs": 1, "num_mini_batches": 1},
            "update_kl_limit — would have no effect: an update has one optimizer step, which is always taken.",
        ),
        ({"loop": "mine"}, "loop — 'toolkit' or 'trl' is needed, got 'mine'."),
        ({"value": "none"}, "value — 'separate' or 'shared' is needed, got 'none'."),
        ({"kl_coef": "high"}, "kl_coef — a number is needed, got 'high'."),
        (
            {"kl_penalty_in": "loss"},
            "kl_penalty_in — loss needs another kl_estimator than k1, whose gradient is 0 on average (Tang and Munos "
            "2025, arXiv 2506.09477). Take k2 or full for KL(policy, reference), or k3 for KL(reference, policy).",
        ),
        (
            {"kl_penalty_in": "loss", "kl_estimator": "k2", "kl_coef": 0.0},
            "kl_penalty_in — would have no effect with kl_coef 0.",
        ),
        ({"kl_penalty_in": "both"}, "kl_penalty_in — 'reward' or 'loss' is needed, got 'both'."),
        ({"use_score_norm": True}, "use_score_norm — would have no effect without use_score_scaling: true."),
        ({"entropy_coef": -0.1}, "entropy_coef — must be 0 or more, got -0.1."),
        ({"old_policy_kl_coef": -1.0}, "old_policy_kl_coef — must be 0 or more, got -1.0."),
        ({"update_kl_limit": 0.0}, "update_kl_limit — must be positive or null, got 0.0."),
        ({"short_response_penalty": 1.0}, TOGETHER),
        ({"min_response_length": 3}, TOGETHER),
        ({"drop_short_responses": True}, TOGETHER),
        (
            {"drop_short_responses": True, "min_response_length": 2, "short_response_penalty": 1.0},
            "short_response_penalty — would have no effect with drop_short_responses. Give one.",
        ),
        (
            {"response_length": 4, "min_response_length": 5, "drop_short_responses": True},
            "min_response_length — 5 is more than the 4 tokens of response_length: each response would be punished or "
            "dropped. Lower it.",
        ),
        (
            {"optim": "schedule_free_adamw"},
            "optim — schedule_free_adamw has to be told when it trains, and no loop of PPO does so. Take adamw_torch.",
        ),
        ({"value_learning_rate": -1.0}, "value_learning_rate — must be 0 or more or null, got -1.0."),
        ({"score_clip": 0.0}, "score_clip — must be positive or null, got 0.0."),
        ({"cliprange": 0.0}, "cliprange — must be positive or null, got 0.0."),
        ({"cliprange_high": 0.0}, "cliprange_high — must be positive or null, got 0.0."),
        (
            {"cliprange": None, "cliprange_high": 0.28},
            "cliprange_high — would have no effect with cliprange null, by which no ratio is clipped.",
        ),
        ({"rollouts_shown": -1}, "rollouts_shown — must be 0 or more, got -1."),
        (
            {"kl_target": 6.0, "kl_horizon": 10, "per_device_train_batch_size": 50},
            "kl_horizon — with 10 the 50 responses of one update can take kl_coef to 0 and below. It counts responses: "
            "take thousands.",
        ),
        (
            {"push_to_hub": True},
            "push_to_hub — would have no effect: transformers cannot upload a folder of weights per role; upload what "
            "toolkit export writes.",
        ),
        *(
            ({name: value}, f"{name} — would have no effect: the toolkit's PPO loop does not read it.")
            for name, value in {
                "remove_unused_columns": False,
                "torch_compile": True,
                "label_names": ["labels"],
                "debug": "underflow_overflow",
                "accelerator_config": {"split_batches": True},
            }.items()
        ),
        *(
            pytest.param({name: value}, f"{name} — would have no effect: {why}.", marks=needs_trl_loop)
            for name, value, why in (
                ("stop_token", "eos", INSTEAD["stop_token"]),
                ("num_sample_generations", 0, INSTEAD["num_sample_generations"]),
                ("batch_size", 8, "a batch is per_device_train_batch_size × gradient_accumulation_steps"),
            )
        ),
    ],
)
def test_bad_values(changes, message, tmp_path):
    with pytest.raises(ValueError) as error:
        config(tmp_path, **changes)
    assert str(error.value) == f"PPOConfig has 1 problem\n  {message}"


@needs_trl_loop
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 256}, "max_length — would have no effect with loop: trl, which has none."),
        ({"kl_estimator": "k2"}, "kl_estimator — 'k1' or 'k3' is needed with loop: trl, got 'k2'."),
        ({"kl_target": 6.0}, "kl_target — would have no effect with loop: trl, which has none."),
        ({"rollouts_per_update": 2}, "rollouts_per_update — would have no effect with loop: trl, which has none."),
        (
            {"sample_with_replacement": True},
            "sample_with_replacement — would have no effect with loop: trl, which has none.",
        ),
        ({"entropy_coef": 0.1}, "entropy_coef — would have no effect with loop: trl, which has none."),
        ({"cliprange_value": None}, "cliprange_value — a number is needed with loop: trl, got None."),
        ({"cliprange_high": 0.28}, "cliprange_high — would have no effect with loop: trl, which has none."),
        ({"rollouts_shown": 0}, "rollouts_shown — would have no effect with loop: trl, which has none."),
        ({"stop_token_id": 5}, "stop_token_id — would have no effect: TRL's loop does not read it."),
        (
            {"num_sample_generations": 3},
            "num_sample_generations — would have no effect: TRL's loop does not read it.",
        ),
        ({"eval_on_start": True}, "eval_on_start — would have no effect: TRL's loop does not read it."),
        ({"max_grad_norm": 0.5}, "max_grad_norm — would have no effect with loop: trl, which clips no gradients."),
        ({"eval_strategy": "epoch"}, "eval_strategy — would have no effect: TRL's loop does not read it."),
        (
            {"metric_for_best_model": "score"},
            "metric_for_best_model — would have no effect: TRL's loop does not read it.",
        ),
        *(
            ({name: value}, f"{name} — would have no effect: TRL's loop does not read it.")
            for name, value in {
                **dict.fromkeys(("world_size", "local_batch_size", "micro_batch_size", "local_mini_batch_size"), 4),
                **dict.fromkeys(("model_adapter_name", "ref_adapter_name"), "x"),
                "neftune_noise_alpha": 5.0,
                "label_smoothing_factor": 0.1,
                "dataloader_num_workers": 1,
                "auto_find_batch_size": True,
                "torch_compile": True,
                "include_num_input_tokens_seen": "all",
                "logging_nan_inf_filter": False,
                "bf16_full_eval": True,
                "include_for_metrics": ["loss"],
                "eval_delay": 2,
                "hub_model_id": "me/x",
                "save_only_model": True,
            }.items()
        ),
        (
            {"whiten_rewards": True, "per_device_train_batch_size": 14, "num_mini_batches": 2},
            "whiten_rewards — needs mini-batches of 8 with loop: trl, and they have 7.",
        ),
    ],
)
def test_values_that_trls_loop_lacks(changes, message, tmp_path):
    test_bad_values({"loop": "trl", **changes}, message, tmp_path)


def test_what_nobody_gave_is_not_refused_in_a_copy(tmp_path):
    args = config(tmp_path, eval_strategy="steps", eval_steps=2)
    assert replace(args, kl_coef=0.1).kl_coef == 0.1


@pytest.mark.parametrize(
    ("fast", "given", "expected"),
    [("bfloat16", None, True), ("float32", None, False), ("float16", None, False), ("float32", True, True)],
)
def test_passes_are_in_bfloat16_where_it_is_fast_or_asked_for(fast, given, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("toolkit.trainers.ppo_config.fast_precision", lambda: Precision(fast))
    assert config(tmp_path, bf16=given).bf16 is expected


def test_what_transformers_sets_on_a_mac_is_not_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.training_args.is_torch_mps_available", lambda: True)
    assert config(tmp_path, dataloader_num_workers=2).dataloader_multiprocessing_context == "fork"


@pytest.mark.parametrize("owner", STAGE_CLASSES.values())
def test_a_script_can_take_its_arguments_from_the_command_line(owner, tmp_path):
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--learning_rate", "0.5"]
    assert HfArgumentParser(owner).parse_args_into_dataclasses(words)[0].learning_rate == 0.5


def test_arguments_of_every_type_that_ours_has(tmp_path):
    words = f"--output_dir {tmp_path} --use_cpu --bf16 false --kl_target 6 --value shared --max_length 9 "
    words += "--kl_estimator full --no_whiten_advantages --use_score_scaling --cliprange 0.5"
    args = HfArgumentParser(PPOConfig).parse_args_into_dataclasses(words.split())[0]
    assert (args.kl_target, args.value, args.max_length, args.kl_estimator) == (6.0, "shared", 9, "full")
    assert (args.whiten_advantages, args.use_score_scaling, args.cliprange) == (False, True, 0.5)


def test_all_bad_values_are_in_one_error(tmp_path):
    with pytest.raises(ConfigError) as error:
        config(tmp_path, kl_coef=-1, loop="mine", value_adam_beta1=1.0)
    assert {p.field: p.wrong for p in error.value.problems} == {
        "kl_coef": "must be 0 or more, got -1.",
        "loop": "'toolkit' or 'trl' is needed, got 'mine'.",
        "value_adam_beta1": "must be from 0 to below 1 or null, got 1.0.",
    }


@needs_trl_loop
def test_all_that_trls_loop_lacks_is_in_one_error(tmp_path):
    with pytest.raises(ConfigError) as error:
        config(tmp_path, loop="trl", drop_short_responses=True, min_response_length=2)
    assert {p.field for p in error.value.problems} == {"drop_short_responses", "min_response_length"}
    assert {p.wrong for p in error.value.problems} == {"would have no effect with loop: trl, which has none."}


@needs_trl_loop
def test_trls_own_loop_takes_what_its_class_has(tmp_path):
    args = config(tmp_path, loop="trl", kl_estimator="k3", cliprange=0.1, eval_do_sample=True, logprob_chunk_size=4)
    assert args.loop == "trl"


def test_number_of_updates(tmp_path):
    assert config(tmp_path, max_steps=7).number_of_updates(100) == 7
    assert config(tmp_path, max_steps=-1, total_episodes=40).number_of_updates(100) == 10
    assert config(tmp_path, max_steps=-1, num_train_epochs=2).number_of_updates(100) == 50
    assert config(tmp_path, max_steps=-1, num_train_epochs=0.01).number_of_updates(100) == 1
    hundredths = [
        config(tmp_path, max_steps=-1, num_train_epochs=n / 100).number_of_updates(400) for n in range(1, 500)
    ]
    assert hundredths == list(range(1, 500))  # 0.29 · 100 and others are just below, in binary
    several = config(tmp_path, max_steps=-1, num_train_epochs=2, rollouts_per_update=3)
    assert several.number_of_updates(100) == 16  # 50 batches of 4
