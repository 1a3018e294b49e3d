"""What we use of upstream's private parts is still there, and the newest that is admitted was read."""

import ast
import inspect
from importlib.metadata import version

import pytest
import torch
import transformers
import trl
from accelerate import Accelerator
from accelerate.state import GradientState
from packaging.version import Version
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from tests.test_floors import ROOT
from tests.test_versions import pins
from tests.trainers.helpers import RESPONSES, SCORES, rollout, trainer
from tests.trainers.resumable import reward_model_lora, sft_model, sft_policy
from toolkit.models import Precision, SharedBase
from toolkit.spec.stage import stage_config
from toolkit.trainers.q_config import QConfig
from toolkit.trainers.reward import RewardConfig
from toolkit.trainers.trainer_internals import READ_FROM, TrainerHooks, take_rates_of_schedule

PUBLIC = ("autocast_smart_context_manager", "create_accelerator_and_postprocess")
OVERRIDDEN = [
    name
    for name, member in vars(TrainerHooks).items()
    if inspect.isfunction(member) and (name.startswith("_") or name in PUBLIC)
]
READ_IN_THIS_ORDER = (
    "self._load_from_checkpoint(resume_from_checkpoint)",
    "self._load_callback_state()",
    "self._load_optimizer_and_scheduler(resume_from_checkpoint)",
    "self._load_scaler(resume_from_checkpoint)",
    "self._load_rng_state(resume_from_checkpoint)",
)
LINES = {
    Accelerator: (
        'if getattr(model, "_is_accelerate_prepared", False):',
        "model._original_forward = model.forward",
        "model.forward = MethodType(",
    ),
    transformers.Trainer: (
        "self.neftune_hook_handle = activate_neftune(",
        "self._tr_loss = torch.tensor(0.0, device=args.device)",
        "self._total_loss_scalar = 0.0",
        "self._globalstep_last_logged = self.state.global_step",
        "train_loss = self._total_loss_scalar / ",  # up to 5.18 by all steps of the run, then of this call
    ),
    transformers.TrainingArguments: ("return self._n_gpu",),
    GradientState: ("def _set_sync_gradients(self, sync_gradients):",),
    trl.SFTTrainer: ('self._metrics = {"train": defaultdict(list)', "self._total_train_tokens = 0"),
    trl.RewardTrainer: ('self._metrics = {"train": defaultdict(list)', "self._total_train_tokens = 0"),
}


def moved(part, where):
    installed = ", ".join(f"{name} {version(name)} (read from {READ_FROM[name]})" for name in READ_FROM)
    return f"{where} no longer has {part}: read it again for `toolkit/trainers/trainer_internals.py`. {installed}"


def test_the_hooks_override_what_they_are_known_for():
    assert set(OVERRIDDEN) == {
        "_save_checkpoint", "_load_from_checkpoint", "_load_callback_state", "_load_optimizer_and_scheduler",
        "_load_scaler", "_load_rng_state", "_load_best_model", "_determine_best_metric", "_send_telemetry",
        "_finalize_training",
        *PUBLIC,
    }  # fmt: skip


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_upstream_has_each_method_with_the_arguments_that_it_is_given(name):
    owners = [owner for owner in (transformers.Trainer, trl.SFTTrainer, trl.RewardTrainer) if hasattr(owner, name)]
    assert owners, moved(f"a method {name}", "transformers' and TRL's Trainer")
    ours = inspect.signature(getattr(TrainerHooks, name)).parameters
    for owner in owners:
        assert list(inspect.signature(getattr(owner, name)).parameters) == list(ours), moved(
            f"a method {name}({', '.join(ours)})", owner.__name__
        )


def test_upstream_reads_a_checkpoint_in_the_order_that_is_relied_on():
    source, place = inspect.getsource(transformers.Trainer), 0
    for call in READ_IN_THIS_ORDER:
        later = source.find(call, place)
        assert later >= 0, moved(f"the call `{call}` after the one before it", "transformers.Trainer")
        place = later


@pytest.mark.parametrize("owner", LINES, ids=lambda owner: owner.__name__)
def test_upstream_has_each_line_that_is_relied_on(owner):
    source = inspect.getsource(owner)
    for line in LINES[owner]:
        assert line in source, moved(f"the line `{line}`", owner.__name__)


def test_no_other_module_of_trainers_names_what_is_private_to_others():
    """Names that nothing here has, which are all but a named tuple's methods."""
    ours, named = {"_asdict", "_replace"}, set()
    for path in (path for package in ("trainers", "spec", "runs") for path in (ROOT / package).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                if isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self":
                    ours.add(node.attr)
                elif path.name != "trainer_internals.py":
                    named.add((path.name, node.attr))
    assert len(named) > 50 and {(name, attribute) for name, attribute in named if attribute not in ours} == set()


def test_the_versions_that_were_read_are_the_newest_that_are_admitted():
    for name, read in READ_FROM.items():
        assert pins("newest")[name] == Version(read), f"{name} {pins('newest')[name]} was never read"


def test_the_rates_are_those_of_the_schedule_that_now_is():
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / 4)
    scheduler.last_epoch = 2
    optimizer.param_groups[0]["lr"] = 0.0
    take_rates_of_schedule(scheduler, optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05) and scheduler.get_last_lr() == pytest.approx([0.05])
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_trainer_goes_on_after_settings_and_a_trainer_of_another_precision(bf16, tmp_path):
    """As in a notebook that reads a second recipe."""
    first, expected = trainer(tmp_path / "first", bf16=bf16), torch.bfloat16 if bf16 else torch.float32

    def computed_in():
        with first.compute_loss_context_manager():
            return (torch.ones(1, 2) @ torch.ones(2, 1)).dtype

    stage_config("reward", {}, output_dir=str(tmp_path), seed=0, precision=Precision("float32"))
    assert computed_in() is expected
    first.train()
    trainer(tmp_path / "second", bf16=not bf16)
    assert computed_in() is expected and first.evaluate_rollout(first.train_dataset).metrics


@pytest.mark.parametrize("bf16", [False, True])
def test_settings_and_trainers_that_are_made_since_change_nothing_of_what_accelerate_does(bf16, tmp_path):
    ppo = trainer(tmp_path / "ppo", bf16=bf16, max_steps=3)
    sft = sft_policy(tmp_path, bf16=bf16, max_steps=1, save_strategy="no")
    for kind in (trl.SFTConfig, RewardConfig, QConfig):
        kind(output_dir=str(tmp_path), bf16=not bf16, use_cpu=True, report_to="none")
        assert ppo.step({}, rollout(RESPONSES), SCORES)["optimizer_steps"] == 1
    assert sft.evaluate()["eval_loss"] > 0
    trainer(tmp_path / "second", bf16=not bf16)
    GradientState().plugin_kwargs = {"num_steps": 4}  # as an Accelerator leaves it that accumulates by itself
    seen = []

    class Looks(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            seen.append((sft.accelerator.mixed_precision, sft.accelerator.gradient_accumulation_steps))

    sft.add_callback(Looks())
    sft.train()
    assert seen == [("bf16" if bf16 else "no", 1)]
    assert GradientState().plugin_kwargs == {"num_steps": 4}  # which is that one's


@pytest.mark.parametrize("made_of", [sft_model, reward_model_lora], ids=lambda stage: stage.__name__)
def test_a_model_that_was_trained_in_another_precision_computes_in_its_own(made_of, tmp_path):
    """accelerate leaves what it puts around the forward pass. The learning rate is 0."""
    made = made_of(tmp_path, bf16=True, learning_rate=0.0, max_steps=1, save_strategy="no")
    model, ids = made.model, torch.tensor([[1, 5, 6, 7]])

    def logits():
        with torch.no_grad():
            return model.eval()(input_ids=ids).logits

    expected, loss = logits(), made.evaluate()["eval_loss"]
    with made.wrapped():
        assert not torch.equal(logits(), expected)  # in bfloat16, as the evaluation was
    made.train()
    assert torch.equal(logits(), expected) and made.evaluate()["eval_loss"] == loss
    assert made_of is reward_model_lora or SharedBase(model)  # refused where its logits are not those of its states
