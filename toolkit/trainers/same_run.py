"""Whether a checkpoint is of this run: its state would mean nothing on other data or another base."""

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import PeftModel
from torch import Tensor, nn
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from toolkit import processes
from toolkit.data import data_digest
from toolkit.errors import CheckpointError, SelfCheckError
from toolkit.models import SharedBase, base_digest, frozen_digest, tensors_digest
from toolkit.reports import versions
from toolkit.rewards import code_digests

# Other versions of these may round differently, or store their state differently.
_EXACT_WITH = ("torch", "transformers", "trl", "peft", "bitsandbytes")
_OF_A_GROUP = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
_OF_OPTIMIZER = ("optim", "optim_args", *_OF_A_GROUP)
# What cannot change within a run: a checkpoint brings the optimizer as it was made, and the coefficient as it was
# adapted, which would take the place of other settings without a word.
_FIXED = (*_OF_OPTIMIZER, *(f"value_{name}" for name in _OF_A_GROUP), "kl_coef")
# Of a config's own settings those of length, memory and speed, by which nothing else is learnt than before; and
# those of transformers by which it is.
_NOT_LEARNT_BY = {
    "total_episodes", "generation", "logprob_chunk_size", "q_chunk_size", "local_rollout_forward_batch_size",
    "activation_offloading", "dataset_num_proc", "rollouts_shown",
}  # fmt: skip
_LEARNT_BY = (
    *_OF_OPTIMIZER, "seed", "data_seed", "max_grad_norm", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
    "label_smoothing_factor", "neftune_noise_alpha", "dataloader_drop_last", "train_sampling_strategy",
)  # fmt: skip


def settings_of(args: TrainingArguments) -> dict[str, Any]:
    """The settings by which a run learns what it does, as JSON has them."""
    own = {one.name for one in fields(args)} - {one.name for one in fields(TrainingArguments)} - _NOT_LEARNT_BY
    values = {name: getattr(args, name) for name in sorted({*own, *_LEARNT_BY})}
    values["rows of a step"] = args.per_device_train_batch_size * args.gradient_accumulation_steps
    found: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return found


def identity(
    dataset: Dataset, model: nn.Module, roles: SharedBase | None, reward: Any = None, judge: Any = None
) -> dict[str, Any]:
    """What a checkpoint keeps to know its run by; the base where a role of one is trained."""
    data = {"rows": len(dataset), "sha256": data_digest(dataset)}
    dtype = str(getattr(model if roles is None else roles.causal_lm, "dtype", None)).removeprefix("torch.")
    base = None  # of one that trains whole
    if roles is not None:
        base = base_digest(roles)
    elif isinstance(model, PeftModel):
        base = frozen_digest(model.base_model)
    texts = _texts_of(reward, judge)
    return {"data": data, "base": base, "dtype": dtype, "versions": versions(), "reward": texts}


def _texts_of(reward: Any, judge: Any) -> dict[str, str]:
    """Digests of a user's files that reward and judge are written in, and of models that they score by, by name."""
    return code_digests(reward) | {f"{name} (judge)": text for name, text in code_digests(judge).items()}


def made_with(roles: SharedBase, reward: Any, judge: Any = None) -> dict[str, Any]:
    """What responses are made and scored with, beside what is trained: digests of the base, of the adapters that are
    not trained, by role, and of what reward and judge are made of, by name."""
    return {**of_base(roles.causal_lm), "adapters": frozen_digests(roles), "reward": _texts_of(reward, judge)}


def of_base(model: nn.Module) -> dict[str, str]:
    """The digest of a base but for what is quantised, and the precision in which alone it can be compared."""
    quantised = any(hasattr(parameter, "quant_state") for parameter in model.parameters())
    dtype = str(model.dtype).removeprefix("torch.")
    return {"dtype": f"{dtype} beside 4 bits" if quantised else dtype, "base": frozen_digest(model)}


def is_another_base(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the bases of two `of_base`, or `made_with`, can be told apart."""
    return bool(then["dtype"] == now["dtype"] and then["base"] != now["base"])


def other_than(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What of two `made_with` is there both times, and differs."""
    found = ["base"] if is_another_base(then, now) else []
    for kind, named in (("adapters", "{} adapter"), ("reward", "{}")):
        both = then[kind].keys() & now[kind].keys()
        found += [named.format(name) for name in sorted(both) if then[kind][name] != now[kind][name]]
    return found


def frozen_digests(base: SharedBase) -> dict[str, str]:
    """By role a digest of the adapter that it has and that is not trained."""
    own = {role: base.parameters_of(role) for role in base.roles if role not in base.trained_roles}
    return {role: tensors_digest(parameters) for role, parameters in own.items() if parameters}


def check_frozen(then: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Nothing, if the frozen adapters are those that a run began with, else a CheckpointError."""
    if changed := [role for role, digest in now.items() if then.get(role) != digest]:
        wrong = f"the {' and '.join(changed)} adapter is not the one that this run began with: "
        wrong += "responses, scores or KL may mean something else from here on."
        raise CheckpointError(wrong, remedy="Restore that adapter, or begin the run anew.")


def check_alike(
    identity: Mapping[str, Any], roles: SharedBase | None = None, *, trained: Iterable[Tensor] = ()
) -> None:
    """Nothing, if all of several processes, which may be on several machines, begin with the same base and data, and
    the same adapters, those that are trained and those that are not, else a SelfCheckError."""
    if processes.count() == 1:
        return
    identity = {**identity, "weights to train": tensors_digest(trained)}
    if roles is not None:
        identity = {**identity, "adapters": frozen_digests(roles)}
    of_all = processes.gather(identity)
    differ = sorted(key for key in identity if any(one[key] != of_all[0][key] for one in of_all))
    for key in {"settings", "versions"}.intersection(differ):
        first = of_all[0][key]
        names = sorted(name for name in first if any(one[key].get(name) != first[name] for one in of_all))
        differ[differ.index(key)] = f"{key} ({', '.join(names)})"
    if differ:
        wrong = f"the processes do not begin with the same {' and '.join(differ)}."
        remedy = "Give all machines the same settings, checkpoint, data and packages."
        if "weights to train" in differ:
            remedy += " Random ones can differ between GPUs of two models: name adapters to begin with (start)."
        raise SelfCheckError(wrong, remedy=remedy)


@contextmanager
def of_this_version(checkpoint: Path) -> Iterator[None]:
    """Inside, what the state of a checkpoint lacks, or has beside, is another version's."""
    try:
        yield
    except (KeyError, TypeError) as error:
        wrong = f"{checkpoint} was written by another version of the toolkit or of transformers: "
        remedy = "Go on with that version, or begin a new run, whose start.policy can be its policy."
        raise CheckpointError(f"{wrong}{type(error).__name__} {error}.", remedy=remedy) from error


def trainer_state(kind: type[TrainerState], checkpoint: Path) -> Any:
    """How far a checkpoint is, as transformers' trainers note it. Raises: CheckpointError: it cannot be read."""
    with of_this_version(checkpoint):
        try:
            return kind.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{checkpoint}: {TRAINER_STATE_NAME} cannot be read ({error}).") from error


def check_same_run(checkpoint: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    """Warn where going on from a checkpoint is not exact.

    Args:
        then: the state that it holds, with its `identity`.
        now: the identity of this run.

    Raises:
        CheckpointError: the state means nothing in this run.
    """
    wrong = ""
    if then["data"] != now["data"]:
        rows = f"{then['data']['rows']} rows; now {now['data']['rows']}"
        wrong = f"was written on other training data ({rows}), or the toolkit reads them otherwise: its place in them "
        wrong += "means nothing."
        remedy = "Restore the data, or the toolkit's version, or start anew."
    elif is_another_base(then, now):
        wrong = "was written on a base with other weights: its adapters mean nothing on this one."
        remedy = "Restore the base, or start anew."
    if wrong:
        raise CheckpointError(f"{checkpoint} {wrong}", remedy=remedy)
    if then["dtype"] != now["dtype"]:
        warnings.warn(
            f"{checkpoint} was written with its model in {then['dtype']}, and goes on in {now['dtype']}: not exact, "
            "and whether it is the same base cannot be checked beyond its shapes.",
            stacklevel=3,
        )
    if edited := [name for name, text in now["reward"].items() if then["reward"].get(name, text) != text]:
        wrong = f"{checkpoint} was written with another version of {', '.join(edited)}, which scores responses: if its "
        warnings.warn(f"{wrong}scores differ, the figures before and after are of two rewards.", stacklevel=3)
    pairs = ((name, then["versions"].get(name), now["versions"].get(name)) for name in _EXACT_WITH)
    changed = [f"{name} {before} → {after}" for name, before, after in pairs if before != after]
    if changed:
        others = f"other versions ({', '.join(changed)}): the resumed run is not bit-identical."
        warnings.warn(f"{checkpoint} was written with {others}", stacklevel=3)
    if (before := then["processes"]) != (after := processes.count()):
        wrong = f"{checkpoint} was written by {before} process{'es' * (before > 1)}, and {after} "
        wrong += f"resume{'s' * (after == 1)} it: rows and responses are drawn alike, but sums are rounded in another "
        wrong += "order, and dropout draws other numbers."
        warnings.warn(wrong, stacklevel=3)


def _given(settings: Mapping[str, Any], name: str) -> Any:
    """A setting; of the value role's optimizer what null stands for."""
    of_value = name.startswith("value_") and settings[name] is None
    return settings[name.removeprefix("value_") if of_value else name]


def check_same_settings(checkpoint: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn where a run goes on with others than `then`, of those of `settings_of`; a CheckpointError if it cannot."""
    others = {name: (then[name], new) for name, new in now.items() if then.get(name, new) != new}
    for name in (name for name in _FIXED if name in now):
        before, new = _given(then, name), _given(now, name)
        if before == new:
            others.pop(name, None)
            continue
        wrong = f"{checkpoint} is of a run with {name} {before}, and here it is {new}: it cannot change within a run."
        raise CheckpointError(wrong, remedy="Set the old value again, or begin a new run.")
    if others:
        told = ", ".join(f"{name} {before} → {new}" for name, (before, new) in others.items())
        wrong = f"{checkpoint} was written with other settings ({told}): the figures before and after are of two "
        warnings.warn(f"{wrong}recipes.", stacklevel=3)
