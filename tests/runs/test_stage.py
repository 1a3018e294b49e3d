from types import SimpleNamespace

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from tests.reports.examples import RESULT
from tests.tiny_models import shared_base
from tests.tiny_runs import byte_tokenizer, chat_recipe, save_llama
from toolkit import recipes
from toolkit.errors import SelfCheckError
from toolkit.models import fast_precision
from toolkit.runs import stages
from toolkit.runs.build import about_stage
from toolkit.runs.report_on_the_way import ReportAtEvaluations
from toolkit.runs.result import figures, how_it_ended, of_training
from toolkit.runs.said import banner, show_result
from toolkit.trainers.guards import Watch
from toolkit.trainers.not_finite import Skipped
from toolkit.trainers.resume import ResumableTrainer


def test_where_it_runs_what_it_trains_and_where_it_goes(tmp_path, checkpoint):
    recipe, roles = chat_recipe(tmp_path, checkpoint), shared_base()
    args = SimpleNamespace(bf16=True, fp16=False, device=torch.device("cpu"))
    first, second = banner(recipe, "ppo", SimpleNamespace(args=args, roles=roles))
    assert first.startswith("chat ppo: CPU (") and first.endswith("; bfloat16, base in 4 bits")
    policy = sum(p.numel() for p in roles.parameters_of("policy"))
    assert second.startswith(f"trains policy ({policy:,} weights) and value (")
    assert second.endswith(f"writes to {recipe.stage_folder('ppo')}")
    roles.train_roles("policy")
    _, second = banner(recipe, "ppo", SimpleNamespace(args=args, roles=roles))
    assert "value" not in second


def test_of_two_lengths_it_is_said_which_one_counts():
    both = recipes.load("doubling", "ppo.num_train_epochs=2", "ppo.max_steps=7")
    assert [*about_stage(both, "ppo")] == ["ppo.max_steps (7) says how long it trains: num_train_epochs has no effect."]
    assert [*about_stage(recipes.load("doubling"), "ppo")] == []


def test_the_precision_and_why_it_is_this_one_are_said_and_kept(tmp_path, checkpoint, monkeypatch):
    left_open, fast = chat_recipe(tmp_path, checkpoint, "base.dtype=auto"), fast_precision()
    assert [*about_stage(left_open, "ppo")] == [f"base.dtype is {fast.dtype}, since {fast.why}."]
    assert figures(left_open, "ppo", 0.0, {}, {})["dtype"] == fast.dtype
    asked = chat_recipe(tmp_path, checkpoint, "base.dtype=float32")
    monkeypatch.setattr("toolkit.runs.build.finds_no_gpu", lambda: True)
    (said,) = about_stage(asked, "ppo")
    assert "finds no GPU that it can use: ppo runs on the CPU. If there is one, see nvidia-smi" in said
    monkeypatch.undo()
    assert [*about_stage(asked, "ppo")] == [] and figures(asked, "ppo", 0.0, {}, {})["dtype"] == "float32"
    monkeypatch.setattr("toolkit.runs.build.slow_here", lambda dtype: "nine times slower." * (dtype == "bfloat16"))
    in_16_bits = chat_recipe(tmp_path, checkpoint, "base.dtype=float32", "ppo.bf16=true")
    assert [*about_stage(in_16_bits, "ppo")] == [
        "ppo.bf16 is true: nine times slower. Without it passes are in float32."
    ]


@pytest.mark.parametrize(
    ("step", "best", "waited", "said"),
    [
        (9, None, 0, None),
        (9, 9, 0, None),
        (9, 3, 1, "The weights are those of step 3 of 9, the best by exact_match."),
        (
            9,
            6,
            1,
            "The weights are those of step 6 of 9, the best by exact_match of those that were saved; step 3 had 0.75.",
        ),
        (
            6,
            2,
            2,
            "It stopped early, at step 6 of 9: no better exact_match in 2 evaluations. The weights are those of step 2 "
            "of 6, the best by exact_match.",
        ),
        (6, None, 1, "It stopped early, at step 6 of 9."),  # by a callback of the user's
    ],
)
def test_how_training_ended_is_said(step, best, waited, said, capsys):
    args = SimpleNamespace(load_best_model_at_end=best is not None, metric_for_best_model="eval_exact_match")
    checkpoint = best and f"runs/x/ppo/checkpoint-{best}"
    state = SimpleNamespace(global_step=step, max_steps=9, best_model_checkpoint=checkpoint, best_metric=0.75)
    state.best_global_step = best and min(best, 3)
    stopper = EarlyStoppingCallback(early_stopping_patience=2)
    stopper.early_stopping_patience_counter = waited
    handler = SimpleNamespace(callbacks=[TrainerCallback(), stopper])
    ours = SimpleNamespace(args=args, state=state, callback_handler=handler, step_of_weights=best or step)
    found = how_it_ended(ours)
    assert found == ({} if said is None else {"ended": said})
    assert capsys.readouterr().out.split() == (said or "").split()


@pytest.mark.parametrize(
    ("evaluated", "smoothing", "held"),
    [
        ({"eval_accuracy": 0.75, "eval_loss": 0.1, "eval_margin": 2.0}, 0.0, {"accuracy": 0.75, "margin": 2.0}),
        ({"eval_loss": 0.1}, 0.0, {"loss": 0.1}),  # of classes
        ({"eval_loss": 0.1}, 0.2, {}),
    ],
)
def test_a_loss_that_is_trained_is_not_held_against_a_plain_one(evaluated, smoothing, held):
    """As of `loss: token_level`, or with margins."""
    before = {"accuracy": 0.5, "loss": 0.7, "margin": 0.0, "rows": 4}
    trainer = SimpleNamespace(args=SimpleNamespace(label_smoothing_factor=smoothing))
    so_far = ReportAtEvaluations(None, "reward", 0.0, before, trainer, None)
    assert so_far._of_evaluation({"step": 2, **evaluated}) == held


def test_figures_stand_before_and_after(capsys):
    show_result(RESULT, [])
    assert "score 1.0000 → 2.0000" in " ".join(capsys.readouterr().out.split())


def test_a_result_says_what_a_run_warned_of_and_passed_over():
    warning = {"step": 7, "name": "judge_falls", "value": 3.2, "text": "It has fallen.", "remedy": "Go back."}
    trainer = SimpleNamespace(
        train_dataset=[1, 2],
        eval_dataset=None,
        resumed_at=(4,),
        watch=Watch(given=[warning]),
        skipped=Skipped(total=3),
    )
    found = {"rows": {"train": 2}, "resumed_at": [4], "warnings": [warning], "skipped_steps": 3, "spent": {}}
    assert of_training(trainer, SimpleNamespace(spent={})) == found


@pytest.mark.parametrize("moved", [False, True])
def test_a_base_that_has_changed_between_two_stages_is_told_of(moved, tmp_path, stages_here, recwarn):
    """As a branch of the hub does: an adapter fits on every base of its shape."""
    folder = save_llama(tmp_path / "base", byte_tokenizer())
    recipe = chat_recipe(tmp_path, folder, "ppo.max_steps=1", "reward.max_steps=1")
    stages.run(recipe, "reward")
    if moved:
        save_llama(folder, byte_tokenizer(), initializer_range=0.03)
    stages.run(recipe, "ppo")
    told = [str(one.message) for one in recwarn if "has other weights than the base that" in str(one.message)]
    assert len(told) == moved and all(f"{recipe.stage_folder('reward')} was trained on" in one for one in told)


def test_processes_that_are_not_alike_are_told_before_anything_is_measured(
    tmp_path, checkpoint, stages_here, monkeypatch
):
    def unlike(trainer):
        raise SelfCheckError("the processes do not begin with the same base.")

    monkeypatch.setattr(ResumableTrainer, "check_alike", unlike)
    monkeypatch.setattr("toolkit.runs.stage._measure", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(SelfCheckError, match="same base"):
        stages.run(chat_recipe(tmp_path, checkpoint), "reward")
