"""What would end a run later, or would have no effect in it, is said when the recipe is read."""

from dataclasses import make_dataclass

import pytest
import torch
from transformers import TrainingArguments

from tests.spec.test_load import MINIMAL, load_changed
from tests.spec.test_yaml import refused
from toolkit.errors import RecipeError, ToolkitError
from toolkit.recipes import load
from toolkit.spec.keys import check_keys
from toolkit.spec.sources import lora_config
from toolkit.spec.stage import check_stage

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
BEST = {**EVALUATED, "load_best_model_at_end": True}


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo", "q"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adam_beta1": 2}, "adam_beta1 — must be from 0 to below 1, got 2."),
        ({"adam_epsilon": -1}, "adam_epsilon — must be 0 or more, got -1."),
        ({"eval_delay": -5}, "eval_delay — must be 0 or more, got -5."),
        ({"num_train_epochs": float("inf")}, "num_train_epochs — a finite number below 2^63 is needed, got inf."),
        ({"max_steps": 10**30}, "max_steps — a finite number below 2^63 is needed"),
        ({"max_steps": 1e30}, "max_steps — a whole number is needed"),
        ({"data_seed": 10**30}, "data_seed — a finite number below 2^63 is needed"),
        ({"data_seed": -1}, "data_seed — must be from 0 to 4294967295"),
        ({"lr_scheduler_kwargs": {"bogus": 1}}, "the schedule linear (with lr_scheduler_kwargs {'bogus': 1}) cannot"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_type — the schedule cosine_with_min_lr"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "warmup_stable_decay (with lr_scheduler_kwargs {}) cannot be"),
        (
            {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"min_lr": 1}},
            "lr_scheduler_kwargs — would have no effect: constant has none.",
        ),
        (
            {"lr_scheduler_type": "constant", "warmup_steps": 3},
            "warmup_steps — would have no effect: constant has none. Set it to 0, or take constant_with_warmup.",
        ),
        ({"optim": "apollo_adamw"}, "optim — the optimizer apollo_adamw cannot be made of these settings"),
        ({"optim": "lomo"}, "optim — the optimizer lomo cannot be made of these settings"),
        ({"optim_args": "bogus"}, "optim_args — 'bogus' is not of the form name=value,name=value."),
        ({"optim_args": "a=b"}, "optim_args — 'a=b' would have no effect on adamw_torch"),
        ({"optim": "sgd", "adam_beta1": 0.8}, "adam_beta1 — 0.8 would have no effect on sgd. Remove it."),
        ({"optim": "adafactor", "adam_epsilon": 1e-6}, "adam_epsilon — 1e-06 would have no effect on adafactor."),
        ({"gradient_checkpointing_kwargs": "best"}, "_kwargs — a section with keys is needed, got 'best'."),
        ({"gradient_checkpointing_kwargs": {"bogus": 1}}, "torch.utils.checkpoint has no argument 'bogus'."),
        (
            {**BEST, "metric_for_best_model": "nothing"},
            "metric_for_best_model — 'nothing' is nothing that is measured.",
        ),
        ({**BEST, "metric_for_best_model": "eval_kl"}, "greater_is_better — is needed with eval_kl: more of it may be"),
        ({**BEST, "metric_for_best_model": "score_se"}, "greater_is_better — is needed with score_se"),
    ],
)
def test_what_training_would_refuse(stage, settings, message):
    problems = check_stage(stage, settings, measured=("loss", "score", "score_se", "kl"))
    assert any(message in problem.text() for problem in problems), problems


@pytest.mark.parametrize(
    "settings",
    [{"metric_for_best_model": "kl", "greater_is_better": False}, {"metric_for_best_model": "score"}],
)
def test_what_is_better_need_not_be_said_twice(settings):
    assert check_stage("ppo", {**BEST, **settings}, measured=("score", "kl")) == []


def test_what_a_library_says_without_a_key_is_said_of_the_one_that_it_is_about():
    def build(left=0, right=0, name=""):
        if right > 1:
            raise AttributeError("it cannot be done")
        if left and name:
            raise ValueError("left fits no name")

    owner = make_dataclass("Owner", [("left", int, 0), ("right", int, 0), ("name", str, "")])
    (problem,) = check_keys("here", {"left": 1, "right": 7}, owner, build=build)
    assert problem.text() == "here.right — it cannot be done (got 7)"
    (problem,) = check_keys("here", {"left": 1, "name": "x"}, owner, build=build)
    assert problem.text() == "here — left fits no name"  # of two keys
    assert check_keys("here", {"left": 1, "right": 1}, owner, build=build) == []


def test_what_the_card_refuses_is_no_fault_of_a_recipe():
    def build(**_):
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nfurther lines")

    with pytest.raises(ToolkitError, match=r"^the GPU failed: CUDA error: .* unavailable\. See whether another"):
        check_keys("here", {}, lambda: None, build=build)


def test_what_training_takes():
    for settings in (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": {"num_decay_steps": 10},
            "warmup_steps": 500,
        },
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1},
        {"optim": "rmsprop", "optim_args": "momentum=0.5"},
        {"optim": "adafactor"},
        {"optim": "paged_adamw_8bit"},
        {"gradient_checkpointing_kwargs": {"use_reentrant": False}, "gradient_checkpointing": True},
        {"gradient_checkpointing_kwargs": {"preserve_rng_state": False}, "gradient_checkpointing": True},
        {**BEST, "metric_for_best_model": "eval_loss", "greater_is_better": False},
    ):
        for stage in ("sft", "reward", "ppo", "q"):
            assert check_stage(stage, settings, measured=("loss", "score")) == [], (stage, settings)


@pytest.mark.parametrize(("stage", "refused"), [("sft", False), ("reward", False), ("ppo", True), ("q", True)])
def test_passes_of_a_role_are_not_computed_again_by_re_entry(stage, refused):
    problems = check_stage(stage, {"gradient_checkpointing_kwargs": {"use_reentrant": True}})
    assert ["use_reentrant: true would have no effect" in problem.text() for problem in problems] == [True] * refused


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_that_goes_by_a_metric_knows_which_way_is_better(schedule):
    """transformers tells it for the best checkpoint, and not for these."""
    by_score = {**EVALUATED, "lr_scheduler_type": schedule, "metric_for_best_model": "score"}
    (problem,) = check_stage("q", by_score, measured=("loss", "score"))
    assert problem.text() == (
        f"q.lr_scheduler_kwargs — {schedule} would take a worse score for a better one. Set mode: max, "
        "or greater_is_better: false."
    )
    assert check_stage("q", by_score | {"lr_scheduler_kwargs": {"mode": "max"}}, measured=("loss", "score")) == []
    by_loss = {**EVALUATED, "lr_scheduler_type": schedule}
    assert check_stage("sft", by_loss, measured=("loss",)) == []
    (problem,) = check_stage("sft", by_loss | {"lr_scheduler_kwargs": {"mode": "max"}}, measured=("loss",))
    assert problem.remedy == "Set mode: min, or greater_is_better: true."


@pytest.mark.parametrize("stage", ["sft", "reward", "q"])
def test_what_transformers_would_do_to_what_trains_is_refused(stage):
    for name, reason in {
        "push_to_hub": "transformers cannot upload a folder of weights per role",
        "bf16_full_eval": "evaluation has the precision of training",
    }.items():
        (problem,) = check_stage(stage, {name: True})
        assert problem.text().startswith(f"{stage}.{name} — would have no effect: {reason}")
    (problem,) = check_stage(stage, {"accelerator_config": {"use_seedable_sampler": False}})
    assert problem.field == f"{stage}.accelerator_config" and "an order that a run which goes on" in problem.wrong
    if not hasattr(TrainingArguments, "activation_checkpointing"):
        return  # an older transformers
    assert check_stage(stage, {"activation_checkpointing_kwargs": {"every_n_layers": 2}}) == []
    (problem,) = check_stage(stage, {"activation_checkpointing": False, "gradient_checkpointing": True})
    assert problem.text() == f"{stage}.activation_checkpointing — has another name here. Write gradient_checkpointing."


@pytest.mark.filterwarnings("ignore:The `'keep_end'` truncation mode is deprecated")
def test_packing_that_would_read_or_keep_other_tokens_is_refused():
    (problem,) = check_stage("sft", {"eval_packing": True})
    assert problem.text().startswith("sft.eval_packing — true needs packing")
    (problem,) = check_stage("sft", {"packing": True, "truncation_mode": "keep_end"})
    assert problem.text().startswith("sft.truncation_mode — keep_end would have no effect with packing")
    assert check_stage("sft", {"packing": True, "eval_packing": False}) == []
    (problem,) = check_stage("sft", {"padding_free": True})
    assert problem.text().startswith("sft.padding_free — true without packing holds no row to max_length. Add packing")
    assert check_stage("sft", {"padding_free": True, "max_length": None}) == []


@pytest.mark.parametrize(
    ("section", "without"), [("value_head", "ppo"), ("reward_head", "reward"), ("adapters.q", "q")]
)
def test_a_key_that_no_stage_of_the_recipe_reads_is_refused(section, without):
    recipe = "smollm2_135m_sentiment" if without == "reward" else "doubling_q" if without == "ppo" else "doubling"
    key = {"value_head": "init", "reward_head": "num_labels", "adapters.q": "r"}[section]
    with pytest.raises(RecipeError, match=f"{section} — would have no effect: there is no section {without}"):
        load(recipe, f"{section}.{key}={'zeros' if key == 'init' else 3}")


def test_an_optimizer_without_what_the_value_role_names():
    (problem,) = check_stage("ppo", {"optim": "sgd", "value_adam_beta1": 0.8})
    assert problem.text().startswith("ppo.optim — sgd has no betas")
    # Its eps are two numbers, and the betas of the other three.
    (problem,) = check_stage("ppo", {"optim": "adafactor", "value_adam_epsilon": 1e-7})
    assert problem.text().startswith("ppo.optim — adafactor has eps (1e-30, 0.001), and value_… would give it 1e-07")
    (problem,) = check_stage("ppo", {"optim": "ademamix", "value_adam_beta1": 0.5})
    assert problem.text().startswith("ppo.optim — ademamix has betas (")
    (problem,) = check_stage("ppo", {"value_adam_beta1": 2})
    assert problem.text() == "ppo.value_adam_beta1 — must be from 0 to below 1 or null, got 2."


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"ppo": {**BEST, "metric_for_best_model": "eval_loss"}},
            "'eval_loss' is nothing that is measured. Known: cut_gap, distinct_2",
        ),
        ({"ppo": BEST}, "ppo.metric_for_best_model — 'loss' is nothing that is measured"),  # transformers' default
        ({"ppo": {**BEST, "metric_for_best_model": "exact_mach"}}, "Did you mean exact_match?"),
        ({"ppo": {**BEST, "metric_for_best_model": "judge"}}, "Add a section judge; a judge given in Python then"),
        (
            {"reward": {**BEST, "metric_for_best_model": "accuracy"}, "reward_head": {"num_labels": 3}},
            "reward.metric_for_best_model — 'accuracy' is nothing that is measured",
        ),
        ({"reward": {**BEST, "metric_for_best_model": "acuracy"}}, "Did you mean accuracy?"),
        ({"ppo": {"local_rollout_forward_batch_size": 0}}, "ppo.local_rollout_forward_batch_size — must be at least 1"),
        ({"ppo": {"kl_coef": float("inf")}}, "ppo.kl_coef — a finite number below 2^63 is needed, got inf."),
        ({"seed": -1}, "seed — must be from 0 to 4294967295, got -1."),
        ({"seed": 2**32}, "seed — must be from 0 to 4294967295, got 4294967296."),
        ({"seed": True}, "seed — a whole number is needed, got True."),
        ({"about": 3}, "about — text is needed, got 3."),
        ({"data": {"task": ["doubling"]}}, "data.task — one of doubling, instructions, preferences"),
        ({"scorer": {"kind": ["function"]}}, "scorer.kind — 'adapter' or"),
        ({"reward": {"max_length": 64}}, "reward.max_length — is refused: TRL leaves out pairs that are longer"),
        (
            {"reward": {"trust_remote_code": True}},
            "reward.trust_remote_code — would have no effect: the model is",
        ),
        ({"reward": {"model_init_kwargs": {}}}, "reward.model_init_kwargs — would have no effect: the model is"),
        (
            {"sft": {"model_init_kwargs": {}}},
            "sft.model_init_kwargs — would have no effect: the base is loaded",
        ),
        (
            {"reward": {"pad_to_multiple_of": 8}, "reward_head": {"num_labels": 3}},
            "reward.pad_to_multiple_of — would have no effect: it is of pairs, and reward_head.num_labels says",
        ),
        ({"reward_head": {"num_labels": 0}}, "reward_head.num_labels — must be at least 1, got 0."),
        ({"reward": {"loss": "hinge"}}, "reward.loss — 'bradley_terry' or 'token_level' is needed, got 'hinge'."),
        (
            {"reward": {"loss": "token_level"}, "reward_head": {"num_labels": 3}},
            "reward.loss — token_level is of pairs, and reward_head.num_labels says classes. Remove one.",
        ),
        (
            {"reward": {"center_rewards_coefficient": 0.01}, "reward_head": {"num_labels": 3}},
            "reward.center_rewards_coefficient — would have no effect: it is of pairs, and reward_head.num_labels says",
        ),
        (
            {"reward": {"label_smoothing_factor": 0.1}},
            "reward.label_smoothing_factor — would have no effect: it is of classes, and reward_head.num_labels says",
        ),
        ({"sft": {"label_smoothing_factor": 0.1}}, "sft.label_smoothing_factor — would have no effect: the losses of"),
        ({"sft": {"completion_only_loss": False}}, "sft.completion_only_loss — would have no effect: the form of the"),
        ({"sft": {"dataset_text_field": "x"}}, "sft.dataset_text_field — would have no effect: the form of the data"),
        ({"sft": {"trust_remote_code": True}}, "sft.trust_remote_code — would have no effect: the base is loaded by"),
        ({"reward": {"eval_accumulation_steps": 0}}, "eval_accumulation_steps — must be at least 1 or null, got 0."),
        ({"sft": {"pad_to_multiple_of": -5}}, "sft.pad_to_multiple_of — must be at least 1 or null, got -5."),
        ({"sft": {"neftune_noise_alpha": -5}}, "sft.neftune_noise_alpha — must be 0 or more or null, got -5."),
        (
            {"reward": {"label_smoothing_factor": 7}, "reward_head": {"num_labels": 3}},
            "reward.label_smoothing_factor — must be from 0 to below 1, got 7.",
        ),
        ({"reward": {"dataset_num_proc": -5}}, "reward.dataset_num_proc — must be at least 1 or null, got -5."),
        (
            {"reward": {"disable_dropout": False}},
            "reward.disable_dropout — false would have no effect: a base under an",
        ),
        (
            {"reward": {"disable_dropout": True}, "reward_head": {"num_labels": 3}},
            "reward.disable_dropout — would have no effect: it is of pairs, and reward_head.num_labels says classes.",
        ),
        ({"q": {"torch_compile": True}}, "q.torch_compile — would have no effect: a step runs several roles"),
        ({"q": {"use_liger_kernel": True}}, "q.use_liger_kernel — would have no effect: a step runs several roles"),
        (
            {"reward": {"use_liger_kernel": True}},
            "reward.use_liger_kernel — would have no effect: its kernels patch a whole",
        ),
        (
            {"reward": {"gradient_checkpointing_kwargs": {"use_reentrant": True}}},
            "reward.gradient_checkpointing_kwargs — use_reentrant: true would have no effect",
        ),
        ({"base": {"config": {"model_type": "gpt2", "n_layer": 10**9}}}, "base.config.n_layer — a whole number from 1"),
        ({"base": {"config": {"model_type": "llama", "num_hidden_layers": "2"}}}, "config.num_hidden_layers — a whole"),
        ({"base": {"config": {"model_type": ["gpt2"]}}}, "base.config.model_type — text is needed, got ['gpt2']."),
        ({"base": {"config": {}}}, "base.config.model_type — text is needed, got None."),
        (
            {"base": {"config": {"model_type": "gpt2", "initializer_range": float("nan")}}},
            "base.config.initializer_range — a finite number is needed, got nan.",
        ),
    ],
)
def test_what_a_run_would_find_out(sections, message, tmp_path):
    assert message in refused(tmp_path, **sections)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({}, "neither load_in_4bit nor load_in_8bit is true"),
        ({"load_in_4bit": False}, "neither load_in_4bit nor load_in_8bit is true"),
        ({**NF4, "load_in_4bit": False}, "neither load_in_4bit nor load_in_8bit is true"),
        ({"bnb_4bit_quant_type": "nf4"}, "neither load_in_4bit nor load_in_8bit is true"),
        ({**NF4, "load_in_8bit": True}, "load_in_4bit and load_in_8bit are both True"),
        ({**NF4, "bnb_4bit_quant_type": "bogus"}, "bnb_4bit_quant_type — nf4 or fp4 is needed, got 'bogus'."),
        ({**NF4, "bnb_4bit_compute_dtype": "bogus"}, "bogus"),
        ({**NF4, "llm_int8_threshold": 3.0}, "quantization.llm_int8_threshold — would have no effect on 4 bits."),
        (
            {"load_in_8bit": True, "bnb_4bit_quant_type": "nf4"},
            "quantization.bnb_4bit_quant_type — would have no effect on 8 bits.",
        ),
    ],
)
def test_what_is_asked_for_is_what_is_loaded(quantization, message, tmp_path):
    assert message in refused(tmp_path, base={"model": "m", "quantization": quantization})
    model = {"kind": "model", "model": "m", "quantization": quantization}
    assert message in refused(tmp_path, scorer=model, start={"value": "x"})


def test_the_head_stays_as_it_is(tmp_path):
    base = {"model": "m", "quantization": {**NF4, "llm_int8_skip_modules": ["q_proj"]}}
    assert "llm_int8_skip_modules — is ['q_proj'], so that transformers would quantise lm_head" in refused(
        tmp_path, base=base
    )
    base["quantization"]["llm_int8_skip_modules"].append("lm_head")
    heads = ["score", "classifier"]  # of a model that may be loaded with the same settings
    assert load_changed(tmp_path, base=base).quantization().llm_int8_skip_modules == ["q_proj", "lm_head", *heads]


def test_eight_bits_are_eight(tmp_path):
    recipe = load_changed(tmp_path, base={"model": "m", "quantization": {"load_in_8bit": True}})
    assert recipe.quantization().load_in_8bit and not recipe.quantization().load_in_4bit


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"rank_pattern": {"q_proj": "x"}}, ".rank_pattern.q_proj — a positive whole number is needed, got 'x'."),
        ({"alpha_pattern": {"q_proj": 0}}, ".alpha_pattern.q_proj — a positive number is needed, got 0."),
        ({"peft_type": "bogus"}, ".peft_type — would have no effect: it is LORA, got 'bogus'."),
        ({"task_type": "SEQ_CLS"}, ".task_type — would have no effect: it is CAUSAL_LM, got 'SEQ_CLS'."),
        ({"inference_mode": True}, ".inference_mode — would have no effect: it is False, got True."),
        ({"use_qalora": True}, ".use_qalora — would have no effect: it is False, got True."),
        ({"layer_replication": [[0, 1], [0, 1]]}, ".layer_replication — would change the layers of the base"),
        ({"arrow_config": {}}, ".arrow_config — routes between adapters of other tasks, and a role has one."),
        ({"lora_ga_config": {}}, ".lora_ga_config — would change the base, which all roles share."),
        ({"runtime_config": {}}, ".runtime_config — is for adapters that are loaded onto a GPU one by one."),
        ({"loftq_config": {"loftq_bits": 4}}, ".loftq_config — `loftq_config` specified but will be ignored"),
        ({"lora_alpha": float("inf")}, ".lora_alpha — "),
    ],
)
def test_adapters_without_what_they_say(adapter, message, tmp_path):
    assert f"adapters.policy{message}" in refused(tmp_path, adapters={**MINIMAL["adapters"], "policy": adapter})


def test_what_an_adapter_always_is_may_stand_there(tmp_path):
    policy = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": False, "r": 2}
    loaded = load_changed(tmp_path, adapters={**MINIMAL["adapters"], "policy": policy})
    assert lora_config(loaded.values["adapters"]["policy"]).r == 2


def test_to_read_a_recipe_draws_no_number(tmp_path):
    before = torch.random.get_rng_state()
    load_changed(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [None, 3, ["float32"]])
def test_a_precision_that_is_none_is_one_problem(dtype, tmp_path):
    with pytest.raises(RecipeError) as error:
        load_changed(tmp_path, base={"model": "m", "dtype": dtype})
    assert [problem.field for problem in error.value.problems] == ["base.dtype"]
