"""A reward that is fooled, a judge that may see it, and pairs that a program makes, on hh-rlhf's pairs:

    python -m benchmarks.fooled train.jsonl validation.jsonl base.model=/path/to/SmolLM2-135M-Instruct
    python -m benchmarks.fooled --form made train.jsonl validation.jsonl base.model=/path/to/SmolLM2-135M-Instruct
    python -m benchmarks.fooled --form relevant --encoder /path/to/all-MiniLM-L6-v2 train.jsonl validation.jsonl …
    python -m benchmarks.fooled --again --encoder /path/to/all-MiniLM-L6-v2 train.jsonl validation.jsonl …

Runs a form of a recipe, `smollm2_135m_lora` but for the last, for each seed, with a judge that PPO does not see, and
puts the policy beside that from before PPO, also by a third reward. `fooled` is the recipe as it was, without pairs
that a program makes; its judge was taught whether a response belongs to its prompt or to another's, and what comes back
at the end is what the judge likes best. `centred` is the same with a reward whose scores are held around 0, `relevant`
with a judge that nobody taught, a sentence encoder; `ensemble` is that with three rewards, of which PPO is paid the
mean less the standard deviation, and what comes back is the end; `own_reward` is that with one reward, a model of its
own that trains whole, and a critic that begins as its copy. `made` is the recipe, whose judge has other pairs; `plain`
is that without the made pairs, from the same sft adapters. `actor_critic` is that recipe as it is, beside the encoder.
`--again` asks that encoder of the responses that the newest results of the other forms have, or without one
the judge of `made` of those that have not seen it. Stages that are finished are not repeated. Writes
`benchmarks/results/DATE_FORM.json`, `docs/figures/FORM.svg`, and the tables of a page of the docs.
"""

import json
import math
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import typer
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.demonstrations import APOLOGY, cell_of, perplexity, run_stage, run_values
from benchmarks.errors import BenchmarkError
from benchmarks.paired import bootstrap
from benchmarks.records import (
    DOCS,
    RESULTS,
    add_result,
    fill_file,
    folded,
    markdown,
    new_result,
    newest,
    save_figure,
    where,
)
from benchmarks.relevance import as_function, relevance, share_told
from toolkit import recipes
from toolkit.checkpoints import checkpoints_in
from toolkit.data import Rollout
from toolkit.functional import standard_error, wilson_interval
from toolkit.reports import read_jsonl, write_jsonl
from toolkit.sampling import Evaluation
from toolkit.spec.recipe import Recipe

RECIPE = "smollm2_135m_lora"
SEEDS = (0, 1, 2)
FIRST = 760
"""Rows of which PPO's reward is made, and the judge of `fooled`; other rewards have the others."""
SHOWN = 20
PROMPTS = 80
"""Held-out ones of each evaluation, which takes some two seconds for each on a CPU core."""
_PLAIN = "data.made_pairs=null"
_CENTRED = "reward.center_rewards_coefficient=0.1"
"""Ten times what TRL's documentation proposes, of Eisenstein et al. 2023 (arXiv 2312.09244)."""


@dataclass(frozen=True)
class Judge:
    """A reward that PPO does not optimise, the same for all seeds.

    Args:
        data: what it is taught on, of `_divided`.
        seed: of its own.
        settings: of the recipe.
    """

    data: str
    seed: int
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Form:
    """What is run.

    Args:
        judge: beside PPO, of `JUDGES`, or `RELEVANCE`.
        ppo: settings of that stage.
        settings: of the recipe, for all stages.
        updates: between two evaluations.
        follows: whether what the judge likes best comes back at the end.
        begins_as: the form with whose sft adapters its seeds begin, where not with their own.
        recipe: of which it is a form; one without an sft stage begins with the base.
        members: reward adapters that score together: their mean, less their spread.
        own: whether reward and critic are models of their own, not adapters.
        page: of the docs, where its tables stand.
    """

    judge: str
    updates: int
    ppo: Mapping[str, Any]
    settings: tuple[str, ...] = ()
    follows: bool = False
    begins_as: str = ""
    recipe: str = RECIPE
    members: int = 1
    own: bool = False
    page: str = "judges"


JUDGES = {
    "belongs": Judge("belongs", 8, (_PLAIN,)),
    "judge": Judge("third", 8),
    "third": Judge("third", 9, (_PLAIN,)),
}
RELEVANCE = "relevance"
"""A judge by `benchmarks.relevance`, in place of a reward adapter."""
AS_IT_WAS = {
    "max_steps": 60,
    "gradient_accumulation_steps": 4,
    "response_length": 32,
    "learning_rate": 3e-4,
    "kl_coef": 0.05,
}
"""PPO of the recipe before its reward had pairs that a program makes."""
OWN_REWARD = {"learning_rate": 2e-5}
OWN_PPO = {"value": "separate", "value_learning_rate": 2e-5, "vf_coef": 1.0}
"""Where all weights of reward and critic train."""
Beside: TypeAlias = tuple[Mapping[str, Any], Mapping[str, str]]
"""A reward that PPO does not see: the section `judge` of it, and the adapter that it has."""
FORMS = {
    "fooled": Form("belongs", 15, AS_IT_WAS, (_PLAIN,), follows=True),
    "centred": Form(
        "belongs", 15, AS_IT_WAS, (_PLAIN, _CENTRED), follows=True, begins_as="fooled", page="other_rewards"
    ),
    "relevant": Form(RELEVANCE, 10, AS_IT_WAS, (_PLAIN,), follows=True),
    "ensemble": Form(RELEVANCE, 10, AS_IT_WAS, (_PLAIN,), begins_as="fooled", members=3, page="other_rewards"),
    "own_reward": Form(
        RELEVANCE, 10, AS_IT_WAS | OWN_PPO, (_PLAIN,), begins_as="fooled", own=True, page="other_rewards"
    ),
    "made": Form("judge", 10, {}, page="made_pairs"),
    "plain": Form("judge", 10, {}, (_PLAIN,), begins_as="made", page="made_pairs"),
    "actor_critic": Form(RELEVANCE, 5, {}, recipe="actor_critic_lora", page="other_rewards"),
}
_DRAWN = ("score", "score_se", "judge", "judge_se", "kl", "length", "distinct_share")
_ANSWER = "\n\nAssistant:"


def belonging(rows: Sequence[Mapping[str, str]], seed: int) -> Iterator[dict[str, str]]:
    """Pairs of dialogues in hh-rlhf's form: each chosen one, and its prompt with the chosen response to another."""
    drawn, others = random.Random(seed), list(range(len(rows)))
    while any(row == other for row, other in enumerate(others)):
        drawn.shuffle(others)
    for row, other in enumerate(others):
        chosen, elsewhere = rows[row]["chosen"], rows[other]["chosen"]
        prompt = chosen[: chosen.rindex(_ANSWER) + len(_ANSWER)]
        yield {"chosen": chosen, "rejected": prompt + elsewhere[elsewhere.rindex(_ANSWER) + len(_ANSWER) :]}


def _divided(train: Path, validation: Path, folder: Path) -> dict[str, tuple[str, str]]:
    """By run the overrides that name its data."""
    rows = {name: [dict(row) for row in read_jsonl(path)] for name, path in (("train", train), ("held", validation))}
    files = {
        "pairs": rows["train"][:FIRST],
        "other_pairs": rows["train"][FIRST:],
        "belongs": list(belonging(rows["train"][:FIRST], 0)),
        "validation": rows["held"],
        "belongs_validation": list(belonging(rows["held"], 1)),
    }
    for name, content in files.items():
        write_jsonl(folder / f"{name}.jsonl", content)

    def of(train: str, held: str) -> tuple[str, str]:
        return f"data.train={folder / f'{train}.jsonl'}", f"data.validation={folder / f'{held}.jsonl'}"

    return {
        "pairs": of("pairs", "validation"),
        "belongs": of("belongs", "belongs_validation"),
        "third": of("other_pairs", "validation"),
    }


def run(
    name: str,
    train: Path,
    validation: Path,
    folder: Path,
    overrides: Sequence[str],
    seeds: Sequence[int],
    encoder: str = "",
) -> Path:
    """All stages of all seeds of a form, and the result's path."""
    runs = folder.resolve() / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    data = _divided(train, validation, runs.parent)
    form = FORMS[name]
    beside, accuracies = list[Beside](), dict[str, float]()
    for one in (form.judge, "third"):
        if one == RELEVANCE:
            told = [_apart(pair) for pair in read_jsonl(runs.parent / "belongs_validation.jsonl")]
            accuracies[one] = share_told(told, encoder)
            beside.append(({"kind": "function", "function": as_function(encoder, runs.parent)}, {}))
        else:
            judge = JUDGES[one]
            run_stage("reward", RECIPE, one, runs, f"seed={judge.seed}", *data[judge.data], *overrides, *judge.settings)
            accuracies[one] = reward_figures(runs / one)["accuracy"]
            beside.append(({"kind": "adapter"}, {"judge": str(runs / one / "reward" / "reward")}))
    own = [*data["pairs"], *overrides]
    found = {str(seed): _of_seed(name, seed, runs, [f"seed={seed}", *own], *beside) for seed in seeds}
    return add_result(new_result(name, seeds=found, judges=accuracies), RESULTS)


def _apart(pair: Mapping[str, str]) -> tuple[str, str, str]:
    """The prompt of a pair of `belonging`, its own response, and the other one."""
    start = pair["chosen"].rindex(_ANSWER) + len(_ANSWER)
    return pair["chosen"][:start], pair["chosen"][start:].strip(), pair["rejected"][start:].strip()


def reward_figures(run: Path) -> dict[str, float]:
    """Of the reward stage of a run, on held-out pairs."""
    after: dict[str, float] = json.loads((run / "reward" / "result.json").read_text(encoding="utf-8"))["after"]
    return after


def _of_seed(name: str, seed: int, runs: Path, settings: Sequence[str], judge: Beside, third: Beside) -> dict[str, Any]:
    """The stages of a seed, its curve and warnings, and its policies before PPO and after it."""
    form = FORMS[name]
    begun = recipes.load(form.recipe, *settings, *form.settings, run=f"{name}-{seed}", runs_dir=runs)
    before, begins_as = dict[str, str](), form.begins_as or name
    if "sft" in begun.values:
        run_stage("sft", form.recipe, f"{begins_as}-{seed}", runs, *settings, *FORMS[begins_as].settings)
        before["policy"] = str(runs / f"{begins_as}-{seed}" / "sft" / "policy")
    values = {key: value for key, value in begun.values.items() if key not in ("sft", "reward", "reward_head")}
    section, start = judge
    scoring = _models_of_their_own if form.own else _adapters
    values |= scoring(form, begun, runs, settings)
    scored_by = values["start"]
    values |= {"start": {**before, **scored_by, **start}, "judge": section}
    values["data"]["max_validation_rows"] = PROMPTS
    values["ppo"] |= {**form.ppo, "eval_strategy": "steps", "eval_steps": form.updates, "save_steps": form.updates}
    values["ppo"] |= {"per_device_eval_batch_size": PROMPTS}
    values["ppo"] |= {"load_best_model_at_end": True, "metric_for_best_model": "judge"} if form.follows else {}
    path = runs.parent / f"watched-{begun.run}.yaml"
    run_values(values, path, runs, "ppo")
    recipe = recipes.load(path, run=path.stem, runs_dir=runs)
    ppo = recipe.stage_folder("ppo")
    result = json.loads((ppo / "result.json").read_text(encoding="utf-8"))
    evaluated = [row for row in read_jsonl(ppo / "metrics.jsonl") if "eval_judge" in row]
    curve = [{"update": row["step"], **{key: row[f"eval_{key}"] for key in _DRAWN}} for row in evaluated]
    curve = [{"update": 0, **{key: result["before"][key] for key in _DRAWN}}, *curve]
    model, policies = AutoModelForCausalLM.from_pretrained(recipe.base_path), {}
    folders = {"before": before, "after": {"policy": str(ppo / "policy")}}
    if form.follows:
        folders["last"] = {"policy": str(checkpoints_in(ppo)[-1] / "policy")}
    for when, policy in folders.items():
        judged, by_third = (
            asked({**recipe.values, "judge": section}, **scored_by, **policy, **start)
            for section, start in (judge, third)
        )
        if judged.rollout.response_ids != by_third.rollout.response_ids:
            raise BenchmarkError(f"{recipe.run}: the two evaluations of what is {when} have not the same responses.")
        assert judged.judged is not None and by_third.judged is not None
        rows = said(judged)
        figures = {"third": by_third.metrics["judge"], "third_se": by_third.metrics["judge_se"]}
        # By itself the last one would have no KL: it would be where PPO begins.
        figures |= result.get(when) or {**judged.metrics, **curve[-1]}
        figures["perplexity"] = perplexity(model, recipe.tokenizer, rows)
        each = {"score": judged.scores, "judge": judged.judged, "third": by_third.judged}
        policies[when] = {
            "figures": figures,
            "said": [response for _, response in rows],
            "ended": judged.rollout.ended,
            "each": {whose: of.tolist() for whose, of in each.items()},
        }
    warnings = result.get("warnings", [])
    accuracy = reward_figures(runs / begun.run)["accuracy"]
    of_run = {"date": result["date"], "accuracy": accuracy, "curve": curve, "warnings": warnings}
    return {**of_run, "policies": policies}


def _adapters(form: Form, begun: Recipe, runs: Path, settings: Sequence[str]) -> dict[str, Any]:
    """The sections of a reward adapter, or of several, which their reward stages train."""
    members = [begun.run, *(f"{begun.run}-{number}" for number in range(1, form.members))]
    for number, member in enumerate(members):
        of_its_own = (f"seed={10 * number + begun.seed}", *settings[1:])
        run_stage("reward", form.recipe, member, runs, *of_its_own, *form.settings)
    reward, *others = (str(runs / member / "reward" / "reward") for member in members)
    sections: dict[str, Any] = {"start": {"reward": reward}}
    if others:
        named = {"own": {}, **{f"other-{number}": {"adapter": folder} for number, folder in enumerate(others, 1)}}
        parts = {part: {"kind": "adapter", "weight": 1 / len(members), **given} for part, given in named.items()}
        sections["scorer"] = {"kind": "sum", "parts": parts, "spread_coef": 1.0}
    return sections


def _models_of_their_own(form: Form, begun: Recipe, runs: Path, settings: Sequence[str]) -> dict[str, Any]:
    """The sections of a reward model that its stage trains whole, and of a critic that begins as its copy."""
    section = (f"reward_model.model={begun.values['base']['model']}", "scorer.kind=model", "adapters.reward=null")
    rate = f"reward.learning_rate={OWN_REWARD['learning_rate']}"
    run_stage("reward", form.recipe, begun.run, runs, *settings, *form.settings, *section, rate)
    trained = {"model": str(runs / begun.run / "reward" / "model"), "dtype": "float32"}
    return {
        "adapters": {"policy": begun.values["adapters"]["policy"]},
        "scorer": {"kind": "model", "reads": "tokens", **trained},
        "value_model": trained,
        "start": {},
    }


def asked(values: Mapping[str, Any], **start: str) -> Evaluation:
    """Held-out prompts of a recipe of PPO alone with the responses of a policy, measured. `start` names the folders of
    the adapters `policy`, `reward` and `judge`."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = recipes.load({**values, "start": start}, run="asked", runs_dir=folder).ppo_trainer()
        return trainer.evaluate_rollout(trainer.eval_dataset)


def said(evaluation: Evaluation) -> list[tuple[str, str]]:
    """The prompts with their responses."""
    return list(zip(evaluation.rollout.prompts, evaluation.rollout.responses, strict=True))


# ---------------------------------------------------------------------- figure and tables


_WORDS, _AGAIN = "words", "again"
_BY = {"score": "the reward that PPO optimises", "judge": "the judge beside it", "third": "a third that neither saw"}


def _figure(seeds: Mapping[str, Any]) -> Figure:
    """What reward and judge have gained, by KL and by update, a column for each seed, three side by side."""
    columns = min(len(seeds), 3)
    rows = 2 * math.ceil(len(seeds) / columns)
    figure = Figure(figsize=(3.3 * columns, 2.6 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    pairs = [column for row in range(0, rows, 2) for column in zip(*grid[row : row + 2], strict=True)]
    for axes in (axes for pair in pairs[len(seeds) :] for axes in pair):
        axes.remove()
    for column, (seed, one) in zip(pairs, seeds.items(), strict=False):
        points, first = one["curve"], one["curve"][0]
        for axes, along in zip(column, ("kl", "update"), strict=True):
            for key in ("score", "judge"):
                error = f"{key}_se"
                gains = [(point[key] - first[key]) / math.hypot(point[error], first[error]) for point in points]
                axes.plot([point[along] for point in points], gains, marker=".", lw=1.2, label=_BY[key])
            axes.axhline(0, color="k", lw=0.6)
            axes.set_xlabel({"kl": "KL a response", "update": "updates"}[along], fontsize=9)
            axes.grid(alpha=0.3)
        column[0].set_title(f"seed {seed}", fontsize=10)
    for (_, axes), one in zip(pairs, seeds.values(), strict=False):  # once all have their limits, which they share
        written = -math.inf  # to where the names reach, a line of them over some two updates and a half
        for step, of_step in groupby(one["warnings"], key=lambda warning: warning["step"]):
            axes.axvline(step, color="C3", lw=0.8, linestyle=":")
            names = [warning["name"] for warning in of_step]
            at = max(step, written)
            axes.text(at, axes.get_ylim()[1], "\n".join(names), fontsize=7, rotation=90, va="top", linespacing=1.1)
            written = at + 2.5 * len(names)
    figure.supylabel("gain, in its standard errors (as of two draws of prompts)", fontsize=9)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    return figure


def _table(result: Mapping[str, Any]) -> str:
    """What each seed's policy is like before PPO and after it, the way there, and the warnings."""
    seeds = result["seeds"]
    policies = [tuple(one["policies"].values()) for one in seeds.values()]
    ends = (
        "before → after" if len(policies[0]) == 2 else "before → the checkpoint that the judge likes best → at the end"
    )

    def mean(of: Mapping[str, Any], key: str) -> str:
        return f"{of['figures'][key]:.2f} ± {of['figures'][f'{key}_se']:.2f}"

    def share(of: Mapping[str, Any], _: str) -> str:
        number = sum(bool(APOLOGY.search(text)) for text in of["said"])
        low, high = wilson_interval(number, len(of["said"]))
        return f"{number / len(of['said']):.2f} ({low:.2f}–{high:.2f})"

    def different(of: Mapping[str, Any], _: str) -> str:
        return f"{len(set(of['said']))} of {len(of['said'])}"

    def plain(of: Mapping[str, Any], key: str) -> str:
        return f"{of['figures'][key]:.2f}"

    def likely(of: Mapping[str, Any], key: str) -> str:
        return plain(of, key) if any(of["said"]) else "—"

    measured: dict[str, tuple[Callable[..., str], str]] = {f"by {whose}": (mean, key) for key, whose in _BY.items()}
    with_each = "each" in policies[0][0]  # which results of before 2026-11-26 lack
    measured |= {"KL a response": (plain, "kl"), "tokens": (plain, "length")}
    measured |= {"share that ends by itself": (plain, "eos_share"), "share with an apology": (share, "")}
    measured |= {"different responses": (different, ""), "perplexity under the base": (likely, "perplexity")}
    rows = [
        [title, *(" → ".join(cell(of, key) for of in of_seed) for of_seed in policies)]
        for title, (cell, key) in measured.items()
    ]
    gains = [[f"gain by {whose}", *_gains(policies, key)] for key, whose in _BY.items()] if with_each else []
    if gains:
        if "last" in next(iter(seeds.values()))["policies"]:
            kept = [(one["policies"]["last"], one["policies"]["after"]) for one in seeds.values()]
            gains += [[f"what came back less the end, by {whose}", *_gains(kept, key)] for key, whose in _BY.items()]
        gains += [[f"where both end, by {whose}", *_where_both_end(policies, key)] for key, whose in _BY.items()]
        gains.append(["where both end, words", *_where_both_end(policies, _WORDS)])
    shown = ("score", "judge", "kl", "length", "distinct_share")
    points = [
        [seed, str(point["update"]), *(f"{point[key]:.2f}" for key in shown)]
        for seed, one in seeds.items()
        for point in one["curve"]
    ]
    columns = ["seed", "update", "score", "judge", "KL a response", "tokens", "share of different responses"]
    tables = [
        markdown([f"held-out prompts, {ends}", *(f"seed {seed}" for seed in seeds)], rows),
        markdown(["gain, prompt by prompt", *(f"seed {seed}" for seed in seeds), "all (95 %)"], gains) if gains else "",
    ]
    told = [
        f"- seed {seed}, update {warning['step']}, `{warning['name']}`: {warning['text']}"
        for seed, one in seeds.items()
        for warning in one["warnings"]
    ]
    rewards = ", ".join(f"{one['accuracy']:.2f}" for one in seeds.values())
    judges = " and ".join(f"{accuracy:.2f}" for accuracy in result["judges"].values())
    several = " (of several, the first)" if FORMS[result["kind"]].members > 1 else ""
    accuracy = f"Accuracy on held-out pairs: {rewards} of the rewards{several}, {judges} of the judge and the third."
    way = folded("On the way, and the warnings", markdown(columns, points), "\n".join(told))
    return "\n\n".join(filter(None, [*tables, way, accuracy]))


def _gains(policies: Sequence[Sequence[Mapping[str, Any]]], key: str) -> Iterator[str]:
    """Of each seed with the standard error over its prompts; of all with an interval over seeds and prompts."""
    each = [[torch.tensor(of["each"][key], dtype=torch.float64) for of in of_seed] for of_seed in policies]
    gained = torch.stack([after - before for before, after, *_ in each])
    for of_seed in gained:
        yield f"{of_seed.mean():+.2f} ± {standard_error(of_seed):.2f}"
    low, high = bootstrap(gained)
    yield f"{gained.mean():+.2f} ({low:+.2f} to {high:+.2f})"


def _where_both_end(policies: Sequence[Sequence[Mapping[str, Any]]], key: str) -> Iterator[str]:
    """The gain on prompts whose response ended before PPO and after it, of each seed with its standard error; of all
    such responses with an interval over seeds and prompts."""

    def each(of: Mapping[str, Any]) -> Tensor:
        return torch.tensor([float(len(text.split())) for text in of["said"]] if key == _WORDS else of["each"][key])

    both = [(before, after) for before, after, *_ in policies]
    ended = torch.stack([torch.tensor(before["ended"]) & torch.tensor(after["ended"]) for before, after in both])
    gained = torch.stack([each(after) - each(before) for before, after in both])
    for some in (of_seed[kept] for of_seed, kept in zip(gained, ended, strict=True)):
        yield f"{some.mean():+.2f} ± {standard_error(some):.2f}" if len(some) > 1 else "—"
    low, high = bootstrap(gained.double(), kept=ended)
    yield f"{gained[ended].mean():+.2f} ({low:+.2f} to {high:+.2f})" if ended.any() else "—"


def _samples(name: str, seeds: Mapping[str, Any]) -> str:
    """Responses before and after, of all seeds, side by side in an order that no other form has; below them which is
    which. Where the judge was followed, these and those of the end.

    Without the prompts, which are made to provoke.
    """
    drawn = random.Random(name)
    policies = [one["policies"] for one in seeds.values()]
    one, other = ("after", "last") if "last" in policies[0] else ("before", "after")
    pairs = [pair for of in policies for pair in zip(of[one]["said"], of[other]["said"], strict=True)]
    rows, key = [], []
    for number, pair in enumerate(drawn.sample(pairs, min(SHOWN, len(pairs))), 1):
        swapped = drawn.random() < 0.5
        rows.append([str(number), *map(cell_of, pair[::-1] if swapped else pair)])
        key.append(f"{number} {'A' if swapped else 'B'}")
    which = "of the end" if other == "last" else "after PPO"
    told = folded(f"Which is the one {which}", ", ".join(key))
    return f"{markdown(['', 'A', 'B'], rows, texts=True)}\n\n{told}"


def judged_again(
    results: Mapping[str, Mapping[str, Any]], judge: Callable[[Mapping[str, Any]], Sequence[float]], title: str
) -> str:
    """What another judge says of the responses of results, before PPO and after it, of what a judge has brought back
    beside the end, and of `made` beside `plain`. All forms have the same prompts, one may have more seeds than another;
    `judge` gives the scores of what a policy has `said` to each prompt."""
    policies = {name: [one["policies"] for one in result["seeds"].values()] for name, result in results.items()}
    for of in (of for of_form in policies.values() for seed in of_form for of in seed.values()):
        of.setdefault("each", {})[_AGAIN] = list(judge(of))
    columns = list(dict.fromkeys(seed for result in results.values() for seed in result["seeds"]))
    rows: list[list[str]] = []

    def add(title: str, name: str, cells: Iterable[str], seeds: Sequence[str] = ()) -> None:
        *of_seeds, of_all = cells
        found = dict(zip(seeds or results[name]["seeds"], of_seeds, strict=True))
        rows.append([title, *(found.get(seed, "") for seed in columns), of_all])

    for name, of_form in policies.items():
        ends = [(seed["before"], seed["after"]) for seed in of_form]
        means = [" → ".join(f"{sum(of['each'][_AGAIN]) / len(of['said']):.2f}" for of in pair) for pair in ends]
        add(f"`{name}`, before → after", name, [*means, ""])
        add(f"`{name}`, gain, prompt by prompt", name, _gains(ends, _AGAIN))
        if all("ended" in of for pair in ends for of in pair):
            add(f"`{name}`, gain where both end", name, _where_both_end(ends, _AGAIN))
        if all("last" in seed for seed in of_form):
            kept = [(seed["last"], seed["after"]) for seed in of_form]
            last = [f"{sum(of['each'][_AGAIN]) / len(of['said']):.2f}" for of, _ in kept]
            add(f"`{name}`, at the end", name, [*last, ""])
            add(f"`{name}`, what came back less the end", name, _gains(kept, _AGAIN))
    if {"made", "plain"} <= policies.keys():
        pair = [results[of]["seeds"] for of in ("plain", "made")]
        both = [seed for seed in columns if all(seed in of for of in pair)]
        beside = [[of[seed]["policies"]["after"] for of in pair] for seed in both]
        if both:
            add("`made` beside `plain`, after PPO, prompt by prompt", "made", _gains(beside, _AGAIN), both)
    return markdown([title, *(f"seed {seed}" for seed in columns), "all (95 %)"], rows)


def show_again(train: Path, validation: Path, folder: Path, overrides: Sequence[str], encoder: str) -> None:
    """Put what the encoder says of the newest results of other forms into the page; without one what the reward says
    that is the judge of `made`."""
    held_out = f"data.max_validation_rows={PROMPTS}"
    judge: Callable[[Mapping[str, Any]], Sequence[float]]
    if encoder:
        asked_of, place, title = ["fooled", "plain", "made"], _AGAIN, "cosine of prompt and response"
        data = [f"data.train={train}", f"data.validation={validation}", held_out]
        prompts = recipes.load(RECIPE, *data, *overrides).task.prompts("validation")["prompt"][:]
        judge = _by_encoder(prompts, encoder)
    else:
        asked_of, place, title = ["fooled", "relevant", "ensemble"], f"{_AGAIN} by a reward", "by the judge of `made`"
        runs = folder.resolve() / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        data = [*_divided(train, validation, runs.parent)["third"], *overrides]
        run_stage("reward", RECIPE, "judge", runs, f"seed={JUDGES['judge'].seed}", *data)
        judge = _by_reward(recipes.load(RECIPE, *data, held_out, run="judge", runs_dir=runs))
    results = {name: result for name in asked_of if (result := newest(name)) is not None}
    table = judged_again(results, judge, title)
    fill_file(DOCS / "judges.md", f"{place}: made by benchmarks.fooled", f"end of {place}", table)


def _by_encoder(prompts: Sequence[str], encoder: str) -> Callable[[Mapping[str, Any]], list[float]]:
    return lambda of: relevance(prompts, of["said"], encoder)


def _by_reward(recipe: Recipe) -> Callable[[Mapping[str, Any]], list[float]]:
    """Scores, by the reward of a run, of what policies said in at most as many tokens as `AS_IT_WAS` has."""
    values = {key: value for key, value in recipe.values.items() if key not in ("sft", "reward")}
    values["start"] = {"reward": str(recipe.stage_folder("reward") / "reward")}
    with tempfile.TemporaryDirectory() as folder:
        trainer = recipes.load(values, run="asked", runs_dir=folder).ppo_trainer()
    tokenizer, prompts = recipe.tokenizer, trainer.eval_dataset

    def judge(of: Mapping[str, Any]) -> list[float]:
        ids = tokenizer(of["said"], add_special_tokens=False)["input_ids"]
        # Results of before 2026-11-26 do not say which ended: the limit cuts a response, and nothing else.
        ended = of.get("ended") or [len(row) < AS_IT_WAS["response_length"] for row in ids]
        said = [[*row, tokenizer.eos_token_id] if end else row for row, end in zip(ids, ended, strict=True)]
        return trainer.reward(Rollout(prompts["prompt"][:], of["said"], prompts["input_ids"][:], said, ended)).tolist()

    return judge


def show(name: str, path: Path) -> None:
    """Draw the figure of a form's result and put its tables into the page."""
    result = json.loads(path.read_text(encoding="utf-8"))
    save_figure(_figure(result["seeds"]), name)
    page = DOCS / f"{FORMS[name].page}.md"
    for what, table in (
        ("table", f"{_table(result)}\n\n{where(result)}"),
        ("samples", _samples(name, result["seeds"])),
    ):
        fill_file(page, f"{name} {what}: made by benchmarks.fooled", f"end of {name} {what}", table)


def main(
    train: Annotated[Path, typer.Argument(help="pairs in hh-rlhf's form, 1,200 or so")],
    validation: Annotated[Path, typer.Argument(help="pairs to measure on")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, for the recipe")] = None,
    folder: Annotated[Path, typer.Option(help="Where the data that it makes and the runs go.")] = Path("runs/fooled"),
    seed: Annotated[list[int] | None, typer.Option(help="Only this one; may be given several times.")] = None,
    form: Annotated[str, typer.Option(help=" or ".join(FORMS))] = "fooled",
    encoder: Annotated[Path | None, typer.Option(help="Of `relevant`, the folder of a sentence encoder.")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Ask the encoder, or else a reward, of the newest results.")
    ] = False,
) -> None:
    """Run what is not finished yet, draw the figure and fill the tables."""
    if form not in FORMS:
        raise typer.BadParameter(f"{form!r} is none of {', '.join(FORMS)}.")
    if not again and (encoder is None) == (FORMS[form].judge == RELEVANCE):
        raise typer.BadParameter("--encoder is of --again, and of forms beside it as a judge, which need one.")
    folder_of_encoder = "" if encoder is None else str(encoder.resolve())
    if again:
        return show_again(train, validation, folder, overrides or (), folder_of_encoder)
    show(form, run(form, train, validation, folder, overrides or (), seed or SEEDS, folder_of_encoder))


if __name__ == "__main__":
    typer.run(main)
