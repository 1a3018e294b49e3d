"""The contenders: ours in four forms, stock TRL 1.12 in the forms that its interface allows, and stock TRL on ours.

AgileRL's, which has no reward role, runs in `agile`, and beside it ours without that role.

All start as the same functions. Each adapter's A and B, like each head, come from a seed and the name of their place,
so that losses and gradients can be compared; the reference is the base.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset
from peft import get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedModel,
)

from benchmarks.errors import BenchmarkError
from benchmarks.start import MOVED, PRECISIONS, Built, Job, lora, nf4, seed_adapter, seed_head
from benchmarks.work import Work
from toolkit.data import Rollout
from toolkit.models import SharedBase, load_base
from toolkit.rewards import Reward, RewardAdapter
from toolkit.trainers.ppo import PPOTrainer
from toolkit.trainers.ppo_config import PPOConfig
from toolkit.trainers.stock_ppo import stock_ppo_trainer, trl_config


@dataclass(frozen=True)
class Contender:
    """One way to run the work.

    Args:
        name: what the tables call it, without the precision.
        kind: "ours"; "stock", a form that TRL's own interface allows; "views", stock TRL on our shared base; "agilerl",
            which `agile` builds and runs in another environment.
        value: "separate" or "shared".
        quantised: whether the base is in NF4.
        build: makes the trainer.
        rewarded: whether a reward role scores the responses; without one each has the score 0.
    """

    name: str
    kind: str
    value: str
    quantised: bool
    build: Callable[[Job], Built]
    rewarded: bool = True

    def label(self, dtype: str) -> str:
        """What the tables call it where a base that is not quantised is in `dtype`."""
        return f"{self.name}, {'NF4' if self.quantised else PRECISIONS[dtype]}"


# ---------------------------------------------------------------------- settings


def ppo_config(job: Job, **changes: Any) -> PPOConfig:
    """Ours, from which `trl_config` makes TRL's: for both one optimizer step an epoch.

    In TRL 1.12 `num_mini_batches` does not change the number of steps (huggingface/trl#5645), so that 1 is the setting
    where the two do the same work.
    """
    size = job.work.size
    settings: dict[str, Any] = {
        "output_dir": str(job.folder),
        "max_steps": job.updates,
        "per_device_train_batch_size": size.micro_batch,
        "gradient_accumulation_steps": size.rollouts // size.micro_batch,
        "num_mini_batches": 1,
        "num_ppo_epochs": size.epochs,
        # TRL also generates in groups of this; all at once is its default and its fastest.
        "local_rollout_forward_batch_size": size.rollouts,
        "response_length": size.response_length,
        "temperature": 1.0,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,  # TRL's loop does not clip
        "gradient_checkpointing": False,
        "bf16": job.dtype == "bfloat16",
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    return PPOConfig(**{**settings, **changes})


def prompts(work: Work) -> Dataset:
    return Dataset.from_dict({"input_ids": work.prompt_ids})


# ---------------------------------------------------------------------- ours


def add_roles(base: SharedBase, value: str, *, rewarded: bool = True) -> SharedBase:
    """All roles with an equal start, the value role "separate" or "shared", on a base that has none yet."""
    base.add_role("policy", lora())
    base.add_role("reference")
    base.add_role("value", lora() if value == "separate" else None)
    if rewarded:
        base.add_role("reward", lora())
    for role in ("policy", "value", "reward"):
        own = [(name, p) for name, p in base.model.named_parameters() if f".{role}." in name]
        seed_adapter([(name.replace(f".{role}.", "."), p) for name, p in own], role, moved=MOVED)
    for role in ("value", "reward") if rewarded else ("value",):
        seed_head(base.head(role).weight, role)
    return base


def _quantization(job: Job, *, quantised: bool) -> BitsAndBytesConfig | None:
    return nf4(job.dtype) if quantised else None


def _roles(job: Job, value: str, *, quantised: bool, rewarded: bool = True) -> SharedBase:
    quantization = _quantization(job, quantised=quantised)
    base = SharedBase(load_base(job.model, quantization=quantization, dtype=job.dtype))
    return add_roles(base, value, rewarded=rewarded)


def nothing(rollout: Rollout) -> list[float]:
    """A score of 0 for each response, by a reward that is a function."""
    return [0.0] * len(rollout)


def built_on(roles: SharedBase, trainer: Any) -> Built:
    """A trainer whose policy and value are roles of one base."""
    return Built(trainer, roles.causal_lm, roles.parameters_of("policy"), roles.head("value").weight)


def our_loop(job: Job, roles: SharedBase, args: PPOConfig, reward: Reward | None = None) -> Built:
    """Our trainer on a base that has its roles, with scores of the reward role unless another reward is given."""
    ids = {"pad_token_id": job.tokenizer.pad_token_id, "eos_token_id": job.tokenizer.eos_token_id}
    reward = reward or RewardAdapter(roles, **ids, batch_size=args.local_rollout_forward_batch_size)
    return built_on(roles, PPOTrainer(args, job.tokenizer, roles, reward, prompts(job.work), callbacks=[]))


def build_ours(job: Job, *, value: str, quantised: bool, rewarded: bool) -> Built:
    """Our loop on the shared base."""
    # Ours generates all at once whatever this is.
    args = ppo_config(job, value=value, local_rollout_forward_batch_size=2 * job.work.size.micro_batch)
    roles = _roles(job, value, quantised=quantised, rewarded=rewarded)
    return our_loop(job, roles, args, None if rewarded else nothing)


def build_views(job: Job) -> Built:
    """TRL's loop on the shared base, through the role views."""
    roles = _roles(job, "separate", quantised=False)
    return built_on(roles, stock_ppo_trainer(ppo_config(job, loop="trl"), job.tokenizer, roles, prompts(job.work)))


# ---------------------------------------------------------------------- stock TRL


def _classifier(job: Job, role: str, *, adapter: bool, quantised: bool) -> PreTrainedModel:
    model = AutoModelForSequenceClassification.from_pretrained(
        job.model, num_labels=1, dtype=job.dtype, quantization_config=_quantization(job, quantised=quantised)
    )
    wrapped = get_peft_model(model, lora("SEQ_CLS"))
    seed_adapter(wrapped.named_parameters(), role, moved=MOVED)
    # TRL reads `base_model_prefix` and `score`, which the model has and its PEFT wrapper has not.
    model = wrapped.get_base_model() if adapter else wrapped.merge_and_unload().requires_grad_()
    weights = [p for name, p in model.named_parameters() if name.startswith("score.")]
    for weight in weights:  # PEFT keeps the original of a head beside its copy
        seed_head(weight, role)
    return model


def build_stock(job: Job, *, adapters: bool, quantised: bool) -> Built:
    """TRL's PPOTrainer as its users have it, on a base for each model: with `adapters` value and reward are PEFT models
    like the policy, else whole ones, which in NF4 could not be trained."""
    from trl.experimental.ppo import PPOTrainer as TRLPPOTrainer  # not above: `gpu` reads this module beside later TRL

    dataset = prompts(job.work)
    # By `bf16` TRL makes a 4-bit model's norms float32, for an autocast that its loop never opens: no pass would run.
    settings = {"bf16": False} if quantised else {}
    value = _classifier(job, "value", adapter=adapters, quantised=quantised)
    trainer = TRLPPOTrainer(
        args=trl_config(ppo_config(job, **settings), len(dataset)),
        processing_class=job.tokenizer,
        model=AutoModelForCausalLM.from_pretrained(
            job.model, dtype=job.dtype, quantization_config=_quantization(job, quantised=quantised)
        ),
        ref_model=None,  # the policy with its adapter off
        reward_model=_classifier(job, "reward", adapter=adapters, quantised=quantised),
        value_model=value,
        train_dataset=dataset,
        eval_dataset=dataset,  # never read, but None has no length
        peft_config=lora(),
    )
    policy = trainer.policy_model
    seed_adapter(policy.named_parameters(), "policy", moved=MOVED)
    trained = [p for p in policy.parameters() if p.requires_grad]
    heads = [p for name, p in value.named_parameters() if name.startswith("score.") and p.requires_grad]
    return Built(trainer, policy.get_base_model(), trained, heads[0])


def _ours(value: str, *, quantised: bool, rewarded: bool = True) -> Contender:
    build = partial(build_ours, value=value, quantised=quantised, rewarded=rewarded)
    name = f"ours, {value} value{'' if rewarded else ', no reward role'}"
    return Contender(name, "ours", value, quantised, build, rewarded)


def _stock(about: str, *, adapters: bool, quantised: bool = False) -> Contender:
    build = partial(build_stock, adapters=adapters, quantised=quantised)
    return Contender(f"stock TRL, {about}", "stock", "separate", quantised, build)


def _elsewhere(job: Job) -> Built:
    raise BenchmarkError("AgileRL is built by benchmarks.agile, in an environment that has it.")


def _agile(*, quantised: bool) -> Contender:
    return Contender("AgileRL", "agilerl", "separate", quantised, _elsewhere, rewarded=False)


CONTENDERS = {
    "ours-separate": _ours("separate", quantised=False),
    "ours-shared": _ours("shared", quantised=False),
    "ours-separate-nf4": _ours("separate", quantised=True),
    "ours-shared-nf4": _ours("shared", quantised=True),
    "stock-full": _stock("whole value and reward models", adapters=False),
    "stock-peft": _stock("three PEFT models", adapters=True),
    "stock-peft-nf4": _stock("three PEFT models", adapters=True, quantised=True),
    "stock-views": Contender("stock TRL on our shared base", "views", "separate", False, build_views),
    "ours-separate-unscored": _ours("separate", quantised=False, rewarded=False),
    "ours-shared-unscored": _ours("shared", quantised=False, rewarded=False),
    "ours-separate-unscored-nf4": _ours("separate", quantised=True, rewarded=False),
    "ours-shared-unscored-nf4": _ours("shared", quantised=True, rewarded=False),
    "agilerl": _agile(quantised=False),
    "agilerl-nf4": _agile(quantised=True),
}
