"""A trained run, opened again: its recipe, and what it has trained as something that responds."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
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
from toolkit.checkpoints import CHECKPOINT, checkpoint_folders, checkpoints_in, problem_of, step_of
from toolkit.errors import CheckpointError, RecipeError, ToolkitError, within
from toolkit.reports import read_result
from toolkit.runs import build
from toolkit.runs.differences import recorded
from toolkit.runs.folder import check_outputs, check_whole, find_run, last_stage, saved_by_hand
from toolkit.runs.owned import RECIPE_FILE
from toolkit.runs.said import warn_of_other_weights
from toolkit.sampling import Sampler
from toolkit.spec.load import load
from toolkit.spec.plan import STAGES, section
from toolkit.spec.recipe import Recipe
from toolkit.spec.sections import MODEL_SECTIONS, STAGE_CLASSES
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


def open_run(
    run: str, *overrides: str, runs_dir: str | Path = "runs", by_q: bool = False, checkpoint: int | None = None
) -> Recipe:
    """The recipe of a run whose policy is trained.

    Args:
        run: its name, or its folder where no run in `runs_dir` has that name.
        overrides: "section.key=value", for example other held-out prompts.
        runs_dir: folder of all runs.
        by_q: whether a run whose q stage has finished will do, too.
        checkpoint: step of the one whose policy is meant, of a run that need not have finished; None for its end.

    Raises:
        RecipeError: there is no such run, its ppo stage has not finished, or has no such checkpoint.
        ToolkitError: a kill has left a stage aside, or the checkpoint is damaged.
    """
    with processes.agreed():
        runs = Path(os.path.expanduser(runs_dir))
        folder = processes.by_main(lambda: find_run(os.path.expanduser(run), runs))
        processes.by_main(lambda: check_whole(folder, STAGES if checkpoint is None else ()))
        beyond = [f"{key}={value}" for key, value in not_here(folder).items()]
        last = last_stage(folder, checkpoint)
        if last == "q" and by_q and checkpoint is not None:
            wrong = f'the run "{folder.name}" responds by Q-values, and a checkpoint is one of PPO.'
            raise RecipeError(wrong, remedy="Leave checkpoint out.")
        if last == "q" and not by_q:  # before the overrides, of a section that such a run may not have
            wrong = f'the run "{folder.name}" has Q-values and no policy of its own, which this needs.'
            raise RecipeError(wrong, remedy="Its responses are shown by generate and chat, and measured by eval.")
        recipe = load(folder / RECIPE_FILE, *beyond, *overrides, run=folder.name, runs_dir=folder.parent)
        if last not in recipe.plan.stages and read_result(recipe.stage_folder(last)) is not None:
            raise RecipeError("its settings are needed where the run is used.", field=last, remedy="Leave it as it is.")
        if checkpoint is None or "ppo" not in recipe.plan.stages:
            _check_finished(recipe, last)
        else:
            recipe, last = replace(recipe, checkpoint=checkpoint), "ppo"
            processes.by_main(lambda: _check_checkpoint(recipe))
        recipe = replace(recipe, name=_recipe_of(recipe, last))
        check_outputs(folder, [*recipe.plan.stages[last].needs, *([last] if recipe.checkpoint is None else [])])
    return recipe


def _recipe_of(recipe: Recipe, last: str) -> str:
    """The name of the recipe that a run was made by; its own where its last stage has not finished."""
    with suppress(ToolkitError):  # a checkpoint is whole without it
        return str((read_result(recipe.stage_folder(last)) or {}).get("recipe", recipe.name))
    return recipe.name


def _check_finished(recipe: Recipe, last: str) -> None:
    """Raises: RecipeError: the stage by which the run responds has not finished."""
    if read_result(recipe.stage_folder(last)) is not None:
        return
    if not {"ppo", "q"}.intersection(recipe.values):
        raise RecipeError(_without_policy(recipe))
    by_policy = "ppo" in recipe.values or "q" not in recipe.values
    last, what = ("ppo", "trained policy") if by_policy else ("q", "Q-values")
    wrong = f'the run "{recipe.run}" has no {what}: its {last} stage has not finished.'
    stage, runs = recipe.stage_folder(last), recipe.runs_dir
    ways = ["$resume"] if checkpoint_folders(stage) else []
    ways += [f"$runs_dir (here {runs})"] if runs != Path("runs") else []
    remedy = f"Run that stage of {recipe.folder / RECIPE_FILE} again{' with ' * bool(ways)}{', and '.join(ways)}."
    if saved_by_hand(stage):
        remedy = f"Its weights are saved, by a loop of your own: another run can have start.policy={stage}/policy."
    elif by_policy and (saved := checkpoints_in(stage)):
        remedy += f" Or use a checkpoint of it: chat, generate, eval and export take --checkpoint {_steps(saved)}."
    raise RecipeError(wrong, remedy=remedy)


def _check_checkpoint(recipe: Recipe) -> None:
    """Raises: RecipeError: there is no checkpoint of this step. CheckpointError: it is damaged."""
    folder, saved = policy_folder(recipe).parent, checkpoints_in(recipe.stage_folder("ppo"))
    if folder not in saved:
        check_whole(recipe.folder, ["ppo"])
        wrong = f'the run "{recipe.run}" has no checkpoint of step {recipe.checkpoint}.'
        raise RecipeError(wrong, remedy=f"It has that of step {_steps(saved)}." if saved else "It has saved none.")
    if problem := problem_of(folder):
        raise CheckpointError(f"{folder}: {problem}.", remedy="Take another one.")


def _steps(checkpoints: list[Path]) -> str:
    *others, last = (str(step_of(folder)) for folder in checkpoints)
    return f"{', '.join(others)} or {last}" if others else last


def _without_policy(recipe: Recipe) -> str:
    """What a run of earlier stages alone has in the place of a policy."""
    wrong = f'the run "{recipe.run}" has no policy that PPO or Q-learning trained: '
    wrong += 'its recipe has no section "ppo" or "q".'
    adapter = recipe.stage_folder("sft") / "policy"
    if not adapter.is_dir():
        return wrong
    return f"{wrong} The adapter that sft trained is {adapter}, a PEFT folder; another run can name it in start.policy."


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
    """The trained policy of a run, or of the checkpoint of it that is meant: a PEFT folder."""
    stage = recipe.stage_folder("ppo")
    return (stage if recipe.checkpoint is None else stage / f"{CHECKPOINT}{recipe.checkpoint}") / "policy"


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
    stage = last_stage(recipe.folder, recipe.checkpoint)
    role = "q" if stage == "q" else "policy"
    wanted = (role, "reference") if compare or role == "q" else (role,)
    trained = recipe.stage_folder("q") / "q" if role == "q" else policy_folder(recipe)
    roles, _ = build.placed_roles(recipe, stage, trained=trained, wanted=wanted)
    warn_of_another_base(recipe, roles.causal_lm)
    config = recipe.stage_config(stage)
    length = max_new_tokens or int(config.response_length)
    if temperature is None:
        temperature = config.temperature if stage == "q" else of_policy
    return Sampler(roles, recipe.tokenizer, role=role, response_length=length, temperature=temperature or None)


def warn_of_another_base(recipe: Recipe, model: PreTrainedModel) -> None:
    """Warn where the weights of a base can be told from those of the run's beginning."""
    stage = last_stage(recipe.folder, recipe.checkpoint)
    warn_of_other_weights(recipe, stage, model, "Name that base: base.model=/its/place.")


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
