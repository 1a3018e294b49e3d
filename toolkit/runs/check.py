"""Check a recipe without loading weights: files, columns and adapters, and what its batches come to.

report = check(recipes.load("smollm2_135m_lora"))
print(report)
report.raise_problems()
"""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace

from toolkit.errors import Problem, ToolkitError
from toolkit.rewards import ScorerContext
from toolkit.runs.build import HELD_OUT, OF_TRAINING, about_slow, scored_prompts
from toolkit.runs.check_data import DataCheck
from toolkit.runs.check_report import Findings, Report
from toolkit.runs.check_roles import RolesCheck
from toolkit.runs.folder import conflict, data_changed
from toolkit.spec.plan import STAGES, adapter_roles, at
from toolkit.spec.recipe import Recipe
from toolkit.spec.sections import STAGE_CLASSES
from toolkit.trainers.ppo_config import GREEDY_ROLLOUTS


def check(recipe: Recipe) -> Report:
    """Check all that can be checked without weights. Problems are collected, not raised.

    Data is read and tokenised, the function of the scorer is imported, and the model takes no memory.
    """
    report = check_stages(recipe, STAGES)
    for stage in recipe.plan.stages:
        with suppress(ToolkitError):  # of a damaged result, which the stage itself tells of
            report = replace(report, notes=(*report.notes, *data_changed(recipe, [stage])))
    if recipe.plan.stages:
        return report
    remedy = f"Add a section: ppo: {{}} for its defaults, or another of {', '.join(STAGES)}."
    nothing = Problem("it has no stage: nothing would be run.", remedy=remedy)
    return replace(report, problems=(*report.problems, nothing))


def check_stages(recipe: Recipe, wanted: Collection[str], *, handed_over: Collection[str] = ()) -> Report:
    """As `check`, of what some stages need.

    A scorer or judge that Python has handed over may have no name by which it could be found: it is not looked for.
    """
    findings = Findings()
    plans = [recipe.plan.stages[name] for name in STAGES if name in recipe.plan.stages and name in wanted]
    for plan in plans:
        with findings.at(plan.stage):
            recipe.plan.needs(plan.stage)
    roles = RolesCheck(recipe, plans, findings)
    # Without a tokenizer each data section would ask the hub for it again.
    # What is collected for a q stage is checked with that, unless it alone is wanted.
    for_q = any(plan.stage == "q" for plan in plans)
    read = {*STAGE_CLASSES, *([] if for_q else ["collect"])}
    names = [plan.stage for plan in plans if plan.stage in read and roles.tokenizer]
    data = DataCheck(recipe, names, findings, roles)
    facts = data.facts()
    _check_scorers(recipe, roles, data, findings, handed_over)
    notes = [GREEDY_ROLLOUTS.within("ppo")] if at(recipe.values, "ppo.rollout_do_sample") is False else []
    if roles.roles is not None and (slow := about_slow(recipe.base_precision.dtype, "base.dtype")):
        notes.append(Problem(slow))
    notes += [problem] if (problem := conflict(recipe)) is not None else []
    about = (recipe.name, roles.base, tuple(roles.facts()), tuple(data.lines()), facts)
    return Report(*about, (*findings.notes, *notes), tuple(findings.problems))


def _check_scorers(
    recipe: Recipe,
    roles: RolesCheck,
    data: DataCheck,
    findings: Findings,
    handed_over: Collection[str],
) -> None:
    """What scorer and judge name, but those that were handed over. No server is asked and no file run."""
    if not {"ppo", "collect", "q", "scorer"} & recipe.values.keys():
        return
    trained = recipe.plan.stages.get("reward")
    context = ScorerContext(
        roles=roles.roles,
        tokenizer=roles.tokenizer,
        prompts=lambda: scored_prompts(recipe, OF_TRAINING) if data.prompts_read else (),
        reads_rows=True,
        chats=data.prompts_read and recipe.task.chats,
        adapters=adapter_roles(recipe.values),
        untrained=roles.untrained,
        reward_outputs=None if trained is None or trained.own is None else trained.own.num_labels,
    )
    held_out = (lambda: scored_prompts(recipe, HELD_OUT)) if data.prompts_read else context.prompts
    judge = replace(context, role="judge", prompts=held_out, adapters=adapter_roles(recipe.values, "judge"))
    named = {"scorer": (recipe.scorer, context), "judge": (recipe.judge, judge)}
    for section, (one, reads) in named.items():
        for problem in () if one is None or section in handed_over else one.check(reads):
            findings.note(problem.within(section))
