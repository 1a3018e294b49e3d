"""A trained run, opened again: its recipe, and what it has trained as something that responds."""

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils import (
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_flash_attn_4_available,
    is_kernels_available,
    is_liger_kernel_available,
    is_torch_tf32_available,
)

from toolkit import processes
from toolkit.checkpoints import checkpoint_folders
from toolkit.errors import RecipeError, ToolkitError, within
from toolkit.reports import read_json, read_result
from toolkit.runs import build
from toolkit.runs.differences import recorded
from toolkit.runs.folder import check_outputs, find_run, last_stage, recover, saved_by_hand
from toolkit.runs.owned import BEFORE_FILE, RECIPE_FILE
from toolkit.runs.said import has_other_weights
from toolkit.sampling import Sampler
from toolkit.spec.load import load
from toolkit.spec.plan import section
from toolkit.spec.recipe import Recipe
from toolkit.spec.sections import MODEL_SECTIONS, STAGE_CLASSES
from toolkit.trainers.same_run import is_another_base, of_base
from toolkit.trainers.trl_compat import HAS_PPO

_FLASH_ATTENTION: dict[str, Callable[[], bool]] = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
    "flash_attention_4": is_flash_attn_4_available,
}
# What training alone needs: the package of an optimizer, a card for graphs.
_NOT_TRAINED = {"optim": "adamw_torch", "optim_args": "null", "generation": "eager"}
# A best checkpoint, which may be by a judge that a run is used without.
_BY_THE_BEST = {"metric_for_best_model": "null", "early_stopping_patience": "null", "load_best_model_at_end": "false"}
_BY_THE_BEST |= {"greater_is_better": "null"}


def open_run(run: str, *overrides: str, runs_dir: str | Path = "runs", by_q: bool = False) -> Recipe:
    """The recipe of a run whose policy is trained.

    Args:
        run: its name, or its folder where no run in `runs_dir` has that name.
        overrides: "section.key=value", for example other held-out prompts.
        runs_dir: folder of all runs.
        by_q: whether a run whose q stage has finished will do, too.

    Raises:
        RecipeError: there is no such run, or its ppo stage has not finished.
    """
    with processes.agreed():
        runs = Path(os.path.expanduser(runs_dir))
        folder = processes.by_main(lambda: find_run(os.path.expanduser(run), runs))
        processes.by_main(lambda: recover(folder))
        beyond = [f"{key}={value}" for key, value in not_here(folder).items()]
        last = last_stage(folder)
        if last == "q" and not by_q:  # before the overrides, of a section that such a run may not have
            wrong = f'the run "{folder.name}" has Q-values and no policy of its own, which this needs.'
            raise RecipeError(wrong, remedy="Its responses are shown by generate and chat, and measured by eval.")
        recipe = load(folder / RECIPE_FILE, *beyond, *overrides, run=folder.name, runs_dir=folder.parent)
        if last not in recipe.plan.stages and read_result(recipe.stage_folder(last)) is not None:
            raise RecipeError("its settings are needed where the run is used.", field=last, remedy="Leave it as it is.")
        if read_result(recipe.stage_folder(last)) is None:
            if not {"ppo", "q"}.intersection(recipe.values):
                raise RecipeError(_without_policy(recipe))
            by_policy = "ppo" in recipe.values or "q" not in recipe.values
            last, what = ("ppo", "trained policy") if by_policy else ("q", "Q-values")
            wrong = f'the run "{folder.name}" has no {what}: its {last} stage has not finished.'
            stage = recipe.stage_folder(last)
            ways = ["$resume"] if checkpoint_folders(stage) else []
            ways += [f"$runs_dir (here {folder.parent})"] if folder.parent != Path("runs") else []
            remedy = f"Run that stage of {folder / RECIPE_FILE} again{' with ' * bool(ways)}{', and '.join(ways)}."
            if saved_by_hand(stage):
                remedy = (
                    f"Its weights are saved, by a loop of your own: another run can have start.policy={stage}/policy."
                )
            raise RecipeError(wrong, remedy=remedy)
        check_outputs(folder, [*recipe.plan.stages[last].needs, last])
    return recipe


def _without_policy(recipe: Recipe) -> str:
    """What a run of earlier stages alone has in the place of a policy."""
    wrong = (
        f'the run "{recipe.run}" has no policy that PPO or Q-learning trained: its recipe has no section "ppo" or "q".'
    )
    adapter = recipe.stage_folder("sft") / "policy"
    made = (
        f" What sft trained is {adapter}, a PEFT folder, and start.policy of another run." if adapter.is_dir() else ""
    )
    return f"{wrong}{made}"


def not_here(folder: Path) -> dict[str, str]:
    """What takes the place of what the stages of a run had, and this machine may not have, by its key: nothing is
    trained here."""
    values = recorded(folder)
    found: dict[str, str] = {}
    for model in MODEL_SECTIONS:
        if not _attention_here(str(section(values, model).get("attn_implementation"))):
            found[f"{model}.attn_implementation"] = "null"
        if section(values, model).get("dtype") == "float16" and not torch.cuda.is_available():
            found[f"{model}.dtype"] = "auto"
    for stage in STAGE_CLASSES:
        given = section(values, stage)
        if "report_to" in given:
            found[f"{stage}.report_to"] = "none"
        others = _NOT_TRAINED | (_BY_THE_BEST if given.get("metric_for_best_model") is not None else {})
        others |= {"save_strategy": "'no'"} if given.get("save_strategy") == "best" else {}
        found |= {f"{stage}.{name}": other for name, other in others.items() if name in given}
        if given.get("use_cpu") is not None and given["use_cpu"] == torch.cuda.is_available():
            found[f"{stage}.use_cpu"] = "null"
        if given.get("fp16") is False or (given.get("fp16") and not torch.cuda.is_available()):
            found[f"{stage}.fp16"] = "null"
        if given.get("use_liger_kernel") and not is_liger_kernel_available():
            found[f"{stage}.use_liger_kernel"] = "false"
        if given.get("tf32") and not is_torch_tf32_available():
            found[f"{stage}.tf32"] = "null"
        if given.get("loop") == "trl" and not HAS_PPO:
            found[f"{stage}.loop"] = "toolkit"
    return found


def _attention_here(implementation: str) -> bool:
    """False for flash attention where there is no GPU, or neither its package nor transformers' way to its kernels."""
    if "flash" not in implementation:
        return True
    packaged = _FLASH_ATTENTION.get(implementation, is_kernels_available)
    return torch.cuda.is_available() and (packaged() or is_kernels_available())


def policy_folder(recipe: Recipe) -> Path:
    """The trained policy of a run, a PEFT folder."""
    return recipe.stage_folder("ppo") / "policy"


def trained_sampler(
    recipe: Recipe,
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    of_policy: float = 1.0,
    compare: bool = True,
) -> Sampler:
    """The policy of a run, or what Q defines; `reference` of it is what it was held to.

    Args:
        recipe: of the run.
        max_new_tokens: of a response; the recipe's `response_length` if None.
        temperature: of sampling, for Q the τ of exp((Q − V) / τ); 0 decodes greedily. None decodes by Q as the recipe
            does.
        of_policy: the temperature where it is None, and a policy responds.
        compare: whether the reference is wanted. Without it what a policy was held to need not be here; Q reads it.
    """
    stage = last_stage(recipe.folder)
    role = "q" if stage == "q" else "policy"
    wanted = (role, "reference") if compare or role == "q" else (role,)
    roles, _ = build.placed_roles(recipe, stage, trained=recipe.stage_folder(stage) / role, wanted=wanted)
    warn_of_another_base(recipe, roles.causal_lm)
    config = recipe.stage_config(stage)
    length = max_new_tokens or int(config.response_length)
    if temperature is None:
        temperature = config.temperature if stage == "q" else of_policy
    return Sampler(roles, recipe.tokenizer, role=role, response_length=length, temperature=temperature or None)


def warn_of_another_base(recipe: Recipe, model: PreTrainedModel) -> None:
    """Warn where the weights of a base can be told from those of the run's beginning."""
    folder = recipe.stage_folder(last_stage(recipe.folder))
    with suppress(ToolkitError):  # damaged; what it says is for nothing but this
        then = (read_json(folder / BEFORE_FILE) or {}).get("made_with")
        if then is not None and is_another_base(then, of_base(model)):
            told = has_other_weights(recipe.base_path, str(recipe.folder))
            warnings.warn(f"{told} Name that base: base.model=/its/place.", stacklevel=3)


def place_reference(recipe: Recipe, sampler: Sampler) -> None:
    """Put what a policy was held to on the base of its `trained_sampler`, if it is not there yet.

    Raises:
        AdapterError: it is not here.
    """
    if "reference" in sampler.roles.roles:
        return
    for source in recipe.plan.stages["ppo"].roles:
        if source.role == "reference":
            with within(source.key):
                source.place(sampler.roles, build.site(recipe))
