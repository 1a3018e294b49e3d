from dataclasses import fields

import pytest
import torch

from toolkit.settings import declared
from toolkit.spec.refused import OF_NO_RECIPE
from toolkit.spec.sections import STAGE_CLASSES
from toolkit.spec.stage import check_stage
from toolkit.trainers.ppo_config import PPOConfig
from toolkit.trainers.q_config import QConfig
from toolkit.trainers.trl_compat import HAS_PPO, PPOFields, TRLPPOConfig
from toolkit.trainers.unread import INSTEAD, NO_CAST, NO_UPLOADS, OF_THE_RUN, READ_BY_PPO, UNREAD_BY_Q


def test_the_lists_name_real_fields():
    names = {f.name for f in fields(TRLPPOConfig)}
    assert names >= READ_BY_PPO and names >= OF_THE_RUN == OF_NO_RECIPE.keys()
    assert names & INSTEAD.keys() == (INSTEAD if HAS_PPO else {**NO_UPLOADS, **NO_CAST}).keys()
    assert not READ_BY_PPO & (INSTEAD.keys() | OF_THE_RUN | declared(PPOConfig).keys())
    assert UNREAD_BY_Q.keys() <= {f.name for f in fields(QConfig)}


def test_every_field_of_ppo_is_read_or_refused():
    every = {f.name for f in fields(PPOConfig) if f.init}
    problems = check_stage("ppo", dict.fromkeys(every))
    unread = {p.field.removeprefix("ppo.") for p in problems if p.wrong.startswith("would have no effect")}
    kept = READ_BY_PPO | PPOFields.__annotations__.keys() | declared(PPOConfig).keys() | OF_THE_RUN
    assert unread | kept == every and not unread & kept


def test_fields_that_trls_class_no_longer_has_are_refused_with_the_same_reasons():
    assert {p.field for p in check_stage("ppo", dict.fromkeys(INSTEAD, 1))} == {f"ppo.{name}" for name in INSTEAD}


def test_trls_dead_fields_are_refused_each_with_a_reason():
    values = {"sft_model_path": "x", "batch_size": 4, "push_to_hub": True, "include_for_metrics": ["x"], "kl_coef": 0.1}
    assert {p.field: p.wrong for p in check_stage("ppo", values)} == {
        "ppo.sft_model_path": "would have no effect: the base is base.model.",
        "ppo.batch_size": "would have no effect: a batch is per_device_train_batch_size × gradient_accumulation_steps.",
        "ppo.push_to_hub": "would have no effect: transformers cannot upload a folder of weights per role; upload "
        "what toolkit export writes.",
        "ppo.include_for_metrics": "would have no effect: the toolkit's PPO loop does not read it.",
    }
    if HAS_PPO:
        of_trl = {p.field for p in check_stage("ppo", {**values, "loop": "trl", "data_seed": 3})}
        assert of_trl == {f"ppo.{name}" for name in (values.keys() - {"kl_coef"}) | {"data_seed"}}


@pytest.mark.parametrize("stage", STAGE_CLASSES)
@pytest.mark.parametrize("wanted", [None, ["none", "all"]])
def test_what_transformers_would_report_to_nobody_with(stage, wanted):
    (problem,) = check_stage(stage, {"report_to": wanted})
    assert problem.field == f"{stage}.report_to" and "Write none, or list what" in problem.remedy


@pytest.mark.parametrize("stage", STAGE_CLASSES)
def test_a_trackio_space_can_be_private(stage):
    assert check_stage(stage, {"trackio_space_id": "me/x", "hub_private_repo": True}) == []


@pytest.mark.parametrize("stage", STAGE_CLASSES)
@pytest.mark.parametrize(
    "name", ["save_only_model", "ignore_data_skip", "enable_jit_checkpoint", "auto_find_batch_size"]
)
def test_what_would_break_stopping_or_going_on_is_refused(stage, name):
    (problem,) = check_stage(stage, {name: True})
    assert problem.field == f"{stage}.{name}"


def test_to_read_a_recipe_leaves_the_precision_of_products(monkeypatch):
    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: True)
    before = torch.backends.fp32_precision
    assert check_stage("ppo", {"tf32": True}) == [] and torch.backends.fp32_precision == before


@pytest.mark.parametrize("stage", STAGE_CLASSES)
def test_what_a_run_sets_is_no_part_of_a_recipe(stage):
    problems = check_stage(stage, {"seed": 1, "output_dir": "x", "resume_from_checkpoint": "y"})
    assert [p.field for p in problems] == [f"{stage}.seed", f"{stage}.output_dir", f"{stage}.resume_from_checkpoint"]
    assert [p.remedy for p in problems] == ["", "Name the run with $run.", "Give $resume."]


@pytest.mark.parametrize("stage", STAGE_CLASSES)
@pytest.mark.parametrize("loop", [{}, {"loop": "trl"}])
def test_what_transformers_alone_reads_is_refused_in_every_stage(stage, loop):
    values = {"local_rank": 1, "restore_callback_states_from_checkpoint": True}
    problems = check_stage(stage, {**values, **(loop if stage == "ppo" and HAS_PPO else {})})
    assert [(p.field, p.wrong[:16]) for p in problems] == [(f"{stage}.{name}", "it has no effect") for name in values]


def test_rows_of_sft_are_prepared_as_its_own_settings_say():
    """TRL would skip max_length and packing, of which the stage says what they do, and no other key is read."""
    for value in ({"skip_prepare_dataset": True}, {"bogus": 1}):
        (problem,) = check_stage("sft", {"dataset_kwargs": value})
        assert problem.field == "sft.dataset_kwargs" and problem.wrong.startswith("would have no effect: rows come tok")


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_the_tokenizer_is_the_same_in_every_stage(stage):
    """TRL would look a token up as late as in its trainer, and change the tokenizer that the other stages read with."""
    for name in ("pad_token", "eos_token", "chat_template_path"):
        (problem,) = check_stage(stage, {name: "bogus"})
        assert (
            problem.text()
            == f"{stage}.{name} — would have no effect: the tokenizer is that of the base in every stage."
        )
        assert name in {f.name for f in fields(STAGE_CLASSES[stage])}


@pytest.mark.parametrize("stage", ["sft", "reward", "q"])
def test_rows_are_drawn_in_an_order_that_a_run_has_again_when_it_goes_on(stage):
    for order in ("group_by_length", "batch_rebalance"):
        (problem,) = check_stage(stage, {"train_sampling_strategy": order})
        assert problem.field == f"{stage}.train_sampling_strategy" and problem.wrong.startswith(order)
    for order in ("random", "sequential"):
        assert not check_stage(stage, {"train_sampling_strategy": order})


def test_a_stages_own_class_says_what_it_refuses():
    (problem,) = check_stage("ppo", {"use_score_norm": True})
    assert (problem.field, problem.wrong) == (
        "ppo.use_score_norm",
        "would have no effect without use_score_scaling: true.",
    )
    (problem,) = check_stage("ppo", {"optim": "schedule_free_sgd"})
    assert problem.field == "ppo.optim" and problem.wrong.startswith("schedule_free_sgd has to be told")
    (problem,) = check_stage("reward", {"bf16": True, "fp16": True})
    assert problem.field == "reward" and problem.wrong.startswith("At most one of fp16 and bf16")


@pytest.mark.parametrize("stage", STAGE_CLASSES)
def test_the_best_checkpoint_alone_needs_to_be_known(stage):
    best, metric = {"save_strategy": "best"}, {"metric_for_best_model": "eval_loss"}
    (problem,) = check_stage(stage, best)
    assert problem.field == f"{stage}.save_strategy" and "eval_strategy and metric_for_best_model" in problem.wrong
    (problem,) = check_stage(stage, best | metric)
    assert "needs eval_strategy." in problem.wrong
    assert check_stage(stage, best | metric | {"eval_strategy": "epoch"}) == []
