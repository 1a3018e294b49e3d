"""Questions that are answered with curves, two on the number-doubling demo and the others on a chat model:

    python -m benchmarks.demonstrations value   # a value head on the policy's adapter, or an adapter of its own?
    python -m benchmarks.demonstrations kl      # how much reward does each way of holding the policy back buy?
    python -m benchmarks.demonstrations critic base.model=/path/to/SmolLM2-135M-Instruct data.train=… data.validation=…
                                                # a fresh critic, or one that starts as a copy of the reward?
    python -m benchmarks.demonstrations instructions base.model=/path/to/SmolLM2-135M-Instruct
                                                # does PPO teach instructions that a program checks?
    python -m benchmarks.demonstrations ideas base.model=/path/to/SmolLM2-135M-Instruct
                                                # which of the ideas of actor_critic_lora pay there?
    python -m benchmarks.demonstrations script base.model=/path/to/SmolLM2-135M-Instruct
                                                # what of llama3_8b_lora's settings loses what sft taught, step by step?
    python -m benchmarks.demonstrations sentiment base.model=/path/to/SmolLM2-135M-Instruct

For each seed what comes before PPO is run once; every arm then runs PPO from there, with the same prompts. Arms that
are finished are not repeated. Writes `benchmarks/results/DATE_demonstration_NAME.json`, the figure
`docs/figures/NAME.svg`, but for `script`, and the table in `docs/comparisons.md`, or in
`docs/demonstrations.md` where a recipe is run as it is.
"""

import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from benchmarks.records import (
    DOCS,
    RESULTS,
    add_result,
    chip_and_day,
    fill_file,
    folded,
    markdown,
    new_result,
    save_figure,
)
from toolkit import recipes
from toolkit.data.instructions import COMPOSITIONS
from toolkit.functional import best_of_kl_bound, expected_best, wilson_interval
from toolkit.recipes import Recipe
from toolkit.reports import read_jsonl

PAGE = DOCS / "demonstrations.md"
COMPARISONS = DOCS / "comparisons.md"
APOLOGY = re.compile(r"\b(sorry|apologi[sz]e|apolog(y|ies))\b", re.IGNORECASE)


@dataclass(frozen=True)
class Arm:
    """One setting of PPO: a label for the figure and what it changes in the recipe's section `ppo`."""

    label: str
    ppo: Mapping[str, Any]
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What it changes in other sections; None takes a key away."""


@dataclass(frozen=True)
class Demonstration:
    """Arms that are compared, and what they have in common: a recipe, the stages before PPO, settings of PPO.

    Without arms it is the recipe itself, by seed: all its stages.
    """

    arms: Mapping[str, Arm]
    seeds: tuple[int, ...]
    updates: int
    recipe: str = "doubling"
    stages: tuple[str, ...] = ("sft", "reward")
    settings: tuple[str, ...] = ()
    """Of the recipe, for all its stages."""
    said: bool = False
    """Whether apologies and empty responses are counted."""
    common: Mapping[str, Any] = field(default_factory=lambda: {"eval_steps": 5, "logging_steps": 5})


_EVALUATED = 5  # updates between two evaluations of the critics' comparison
_SCRIPT = {
    **{"learning_rate": 1.41e-5, "lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 0.0},
    **{"kl_estimator": "full", "kl_coef": 0.2, "kl_target": 6.0, "kl_horizon": 10000, "num_ppo_epochs": 3},
    **{"lam": 0.95, "cliprange_value": 0.2},
}
"""How `llama3_8b_lora` trains, but for its batch of 2."""
_ITS_HEAD = {"value_head": {"init": None}}  # a role's own
_BATCH_OF_2 = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "num_mini_batches": 2}
_FIXED_KL = {"kl_estimator": "k1", "kl_coef": 0.05, "kl_target": None}
_FAST = {"num_ppo_epochs": 2, "max_grad_norm": 1.0, "learning_rate": 5e-5, "lr_scheduler_type": "linear"}
_ATTENTION_LORA = {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
DEMONSTRATIONS = {
    "value": Demonstration(
        arms={
            "separate": Arm("separate: an adapter of its own", {"value": "separate"}),
            "shared": Arm("shared: a head on the policy's adapter", {"value": "shared"}, {"adapters": {"value": None}}),
        },
        seeds=(0, 1, 2),
        updates=50,
    ),
    "kl": Demonstration(
        arms={
            "none": Arm("nothing", {"kl_coef": 0.0}),
            "k1-0.05": Arm("k1 in the reward, 0.05", {"kl_coef": 0.05}),
            "k1-0.2": Arm("k1 in the reward, 0.2", {"kl_coef": 0.2}),
            "k1-0.8": Arm("k1 in the reward, 0.8", {"kl_coef": 0.8}),
            "k2-0.2": Arm("k2 in the reward, 0.2", {"kl_coef": 0.2, "kl_estimator": "k2"}),
            "k3-0.2": Arm("k3 in the reward, 0.2", {"kl_coef": 0.2, "kl_estimator": "k3"}),
            "abs-0.2": Arm("absolute log-ratio in the reward, 0.2", {"kl_coef": 0.2, "kl_estimator": "abs"}),
            "full-0.2": Arm("full KL in the reward, 0.2", {"kl_coef": 0.2, "kl_estimator": "full"}),
            "adaptive": Arm("adaptive, towards 0.5 a response", {"kl_coef": 0.2, "kl_target": 0.5, "kl_horizon": 1000}),
            "loss-k2": Arm("k2 in the loss, 0.2", {"kl_coef": 0.2, "kl_estimator": "k2", "kl_penalty_in": "loss"}),
            "loss-k3": Arm("k3 in the loss, 0.2", {"kl_coef": 0.2, "kl_estimator": "k3", "kl_penalty_in": "loss"}),
            "loss-full": Arm(
                "full KL in the loss, 0.2", {"kl_coef": 0.2, "kl_estimator": "full", "kl_penalty_in": "loss"}
            ),
            "old": Arm("KL to the old policy, 0.5", {"kl_coef": 0.0, "old_policy_kl_coef": 0.5}),
            "limit": Arm("an update ends at 0.02 a token", {"kl_coef": 0.0, "update_kl_limit": 0.02}),
        },
        seeds=(0, 1, 2),
        updates=50,
    ),
    "critic": Demonstration(
        arms={
            "fresh": Arm("fresh adapter and head", {}),
            "reward": Arm("a copy of the reward role", {}, {"start": {"value": "reward"}}),
        },
        seeds=(0, 1, 2),
        updates=50,
        recipe="smollm2_135m_lora",
        settings=("data.made_pairs=null", "data.max_validation_rows=100"),
        said=True,
        common={
            "lr_scheduler_type": "constant",
            "learning_rate": 1e-4,
            "response_length": 24,
            "gradient_accumulation_steps": 4,
            "kl_coef": 0.05,
            **{"eval_strategy": "steps", "eval_steps": _EVALUATED, "eval_on_start": True},
            "per_device_eval_batch_size": 80,
        },
    ),
    "instructions": Demonstration(
        arms={},
        seeds=(0, 1, 2, 3),
        updates=100,
        recipe="smollm2_135m_instructions",
        stages=("sft", "ppo"),
        settings=("data.test_size=720",),  # of 240 a share of those never put together is as uncertain as seeds differ
    ),
    "ideas": Demonstration(
        arms={
            "none": Arm("the recipe's settings", {}),
            "old": Arm(
                "KL to the policy that sampled, 0.1, none to the reference", {"kl_coef": 0.0, "old_policy_kl_coef": 0.1}
            ),
            "entropy": Arm("entropy bonus, 0.01", {"entropy_coef": 0.01}),
            "pooled": Arm("one value a response, its mean", {"value_pooling": "response_mean"}),
            "orthogonal": Arm(
                "value head that begins orthogonal", {}, {"value_head": {"init": "orthogonal", "bias": True}}
            ),
            "separate": Arm(
                "value adapter of its own",
                {"value": "separate", "value_learning_rate": 1e-4, "vf_coef": 1.0},
                {"adapters": {"value": _ATTENTION_LORA}},
            ),
            "lion": Arm("Lion, a third of the learning rate", {"optim": "lion_8bit", "learning_rate": 3e-5}),
        },
        seeds=(0, 1, 2),
        updates=25,
        recipe="smollm2_135m_instructions",
        stages=("sft",),
        common={"eval_strategy": "no", "eval_on_start": False},
    ),
    "script": Demonstration(
        arms={
            "script": Arm(
                "`llama3_8b_lora`, 100 updates of 2", {**_SCRIPT, **_BATCH_OF_2, "max_steps": 100}, _ITS_HEAD
            ),
            "batch": Arm("with 32 responses an update", _SCRIPT, _ITS_HEAD),
            "kl": Arm("and a fixed penalty on the KL, k1, 0.05", {**_SCRIPT, **_FIXED_KL}, _ITS_HEAD),
            "fast": Arm(
                "and two passes, gradients clipped, 5e-5 that falls: `llama3_8b_lora_fast`",
                {**_SCRIPT, **_FIXED_KL, **_FAST},
                _ITS_HEAD,
            ),
        },
        seeds=(0, 1, 2),
        updates=25,
        recipe="smollm2_135m_instructions",
        stages=("sft",),
        common={"eval_strategy": "no", "eval_on_start": False},
    ),
    "sentiment": Demonstration(arms={}, seeds=(0, 1, 2), updates=60, recipe="smollm2_135m_sentiment", stages=("ppo",)),
}


def run_stage(stage: str, recipe: Path | str, run: str, runs: Path, *overrides: str) -> None:
    """One stage by the command line, in a process of its own; one that was stopped goes on from its checkpoints."""
    command = [sys.executable, "-m", "toolkit", stage, str(recipe), *overrides, "--run", run, "--runs-dir", str(runs)]
    command += ["--resume"] if (runs / run).is_dir() else []
    print(" ".join(["toolkit", *command[3:]]), flush=True)
    ended = subprocess.run(command, check=False).returncode
    if ended:
        raise SystemExit(ended)  # the stage has said why


def run_values(values: Mapping[str, Any], path: Path, runs: Path, *stages: str) -> Path:
    """These stages of a recipe, which is written to a file first, in a run of the file's name. Returns its folder."""
    path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")
    for stage in stages:
        run_stage(stage, path, path.stem, runs)
    return runs / path.stem


def _start(demonstration: Demonstration, seed: int, runs: Path, overrides: Sequence[str]) -> Recipe:
    """What every arm of a seed begins with: a base and a trained reward."""
    run, settings = f"{demonstration.recipe}-{seed}", (f"seed={seed}", *demonstration.settings, *overrides)
    for stage in demonstration.stages:
        run_stage(stage, demonstration.recipe, run, runs, *settings)
    return recipes.load(demonstration.recipe, *settings, run=run, runs_dir=runs)


def recipe_of_arm(start: Recipe, arm: Arm, demonstration: Demonstration) -> dict[str, Any]:
    """The recipe's ppo stage alone, from what is there already."""
    before = {*demonstration.stages, "reward_head"}
    values = {key: value for key, value in start.values.items() if key not in before}
    values["start"] = {}
    if "reward" in demonstration.stages:
        values["start"]["reward"] = str(start.stage_folder("reward") / "reward")
    if start.base.model is None:
        values["base"] = {"model": start.base_path, "dtype": start.base.dtype}
    elif "sft" in demonstration.stages:
        values["start"]["policy"] = str(start.stage_folder("sft") / "policy")
    for section, changed in arm.sections.items():
        merged = {**values[section], **changed}
        values[section] = {key: value for key, value in merged.items() if value is not None}
    kept = {
        key: value
        for key, value in values["ppo"].items()
        if key not in ("eval_steps", "save_steps", "save_total_limit")
    }
    changes = {"save_strategy": "no", "max_steps": demonstration.updates, **demonstration.common, **arm.ppo}
    values["ppo"] = {**kept, **changes}
    return values


def _run_arm(name: str, arm_name: str, seed: int, start: Recipe, runs: Path) -> dict[str, Any]:
    demonstration = DEMONSTRATIONS[name]
    values = recipe_of_arm(start, demonstration.arms[arm_name], demonstration)
    folder = run_values(values, runs / f"{name}-{arm_name}-{seed}.yaml", runs, "ppo") / "ppo"
    return measured(folder) | (said_by(folder) if demonstration.said else {})


def measured(folder: Path) -> dict[str, Any]:
    """What a finished ppo stage reached, before and after, its curves, and what the run took and warned of."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    metrics = read_jsonl(folder / "metrics.jsonl")
    curve = [
        {"update": row["step"]} | {key.removeprefix("eval_"): v for key, v in row.items() if key.startswith("eval_")}
        for row in metrics
        if "eval_score" in row
    ]
    keys = ("score", "value_loss", "explained_variance")
    logged = {key: [[row["step"], row[key]] for row in metrics if key in row] for key in keys}
    of_run = {key: result[key] for key in ("date", "seconds", "peak_memory_gb")}
    of_run["warnings"] = result.get("warnings", [])
    return {"before": result["before"], "after": result["after"], "curve": curve, **logged, **of_run}


def said_by(folder: Path) -> dict[str, list[list[float]]]:
    """By update the share of the responses that a ppo stage has kept which apologise, and of those that say nothing."""
    said: dict[int, list[str]] = {}
    for row in read_jsonl(folder / "rollouts.jsonl"):
        said.setdefault(row["step"], []).append(row["response"])
    kinds = {"apologies": lambda text: bool(APOLOGY.search(text)), "empty": lambda text: not text.strip()}
    return {key: [[step, statistics.mean(map(of, texts))] for step, texts in said.items()] for key, of in kinds.items()}


def _asked(recipe: Recipe) -> dict[str, int]:
    """How many of the test prompts ask for each rule."""
    rows = recipe.task.prompts("test")
    if "rules" not in rows.column_names:
        return {}
    return dict(Counter(rule["rule"] for rules in rows["rules"] for rule in rules if not rule["required"]))


def untrained(recipe: Recipe, folder: str, **start: str) -> Any:
    """The recipe's PPO trainer before its first update, from the base or from what `start` names."""
    values = {key: value for key, value in recipe.values.items() if key != "sft"} | ({"start": start} if start else {})
    return recipes.load(values, run="untrained", runs_dir=folder).ppo_trainer()


def _before_ppo(recipe: Recipe) -> dict[str, Any]:
    """What the base alone reaches on the test prompts, and says, where something is trained before PPO; and by N the
    score of the best of N responses from where PPO starts, with the bound of its KL, and PPO's for these prompts."""
    found: dict[str, Any] = {}
    prompts = recipe.task.prompts("test")
    trained = {"policy": str(recipe.stage_folder("sft") / "policy")} if "sft" in recipe.values else {}
    with tempfile.TemporaryDirectory() as folder:
        if trained:
            evaluation = untrained(recipe, f"{folder}/base").evaluate_rollout(prompts)
            found |= {"base": evaluation.metrics, "said": evaluation.rollout.responses}
        few = prompts.select(range(min(_BEST_OF_PROMPTS, len(prompts))))
        scores = untrained(recipe, f"{folder}/start", **trained).best_of(few, _BEST_OF).scores
    best = expected_best(scores).tolist()
    found["best_of"] = [[n, best_of_kl_bound(n), score] for n, score in enumerate(best, 1)]
    rows = read_jsonl(recipe.stage_folder("ppo") / "samples.jsonl")[: len(few)]
    return found | {"of_these": statistics.mean(row["after_score"] for row in rows)}


def _language(recipe: Recipe, of_base: Sequence[str]) -> dict[str, Any]:
    """What is said by the base, before PPO if something else is trained first, and after: how likely the base finds it,
    how much of it differs, and some of it."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(recipe.base_path), recipe.tokenizer
    rows = [
        {"prompt": row["prompt"], "before": row["before"], "after": row["after"]}
        | ({"base": of_base[i]} if of_base else {})
        for i, row in enumerate(read_jsonl(recipe.stage_folder("ppo") / "samples.jsonl"))
    ]
    found: dict[str, Any] = {"prompts": len(rows), "samples": rows[:_SHOWN]}
    for when in [when for when in _WHEN if when in rows[0]]:
        of_all = perplexity(model, tokenizer, [(row["prompt"], row[when]) for row in rows])
        found[when] = {"perplexity": of_all, "different": len({row[when] for row in rows}) / len(rows)}
    return found


def perplexity(model: Any, tokenizer: Any, said: Iterable[tuple[str, str]]) -> float:
    """Of the responses to their prompts, over all their tokens; 1 where they have none."""
    loss, tokens = 0.0, 0
    for prompt, response in said:
        before = tokenizer.encode(prompt, add_special_tokens=False)
        ids = torch.tensor([before + tokenizer.encode(response, add_special_tokens=False)])
        if (number := ids.shape[1] - len(before)) > 0:
            with torch.no_grad():
                logits = model(ids).logits[0, len(before) - 1 : -1].float()
            loss += float(cross_entropy(logits, ids[0, len(before) :], reduction="sum"))
            tokens += number
    return math.exp(loss / max(tokens, 1))


def run(name: str, runs: Path, overrides: Sequence[str] = (), seeds: Sequence[int] = ()) -> Path:
    """Run all arms of a demonstration, for its own seeds if none are given, and write its result. Returns its path."""
    demonstration = DEMONSTRATIONS[name]
    runs.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {arm: {} for arm in demonstration.arms}
    seeds = seeds or demonstration.seeds
    for seed in seeds:
        start = _start(demonstration, seed, runs, overrides)
        for arm in demonstration.arms:
            found[arm][str(seed)] = _run_arm(name, arm, seed, start, runs)
        if not demonstration.arms:
            one = measured(start.stage_folder("ppo")) | _before_ppo(start)
            one |= {"asked": _asked(start), "language": _language(start, one.pop("said", ()))}
            found.setdefault("recipe", {})[str(seed)] = one
    result = new_result(f"demonstration_{name}", demonstration=name, updates=demonstration.updates, arms=found)
    return add_result(result, RESULTS)


# ---------------------------------------------------------------------- figure and table


Curves = Iterable[tuple[Sequence[Sequence[float]], dict[str, Any]]]


def _figure(size: tuple[float, float], panels: Mapping[str, Curves], xlabel: str, legend: Mapping[str, Any]) -> Figure:
    """Panels side by side under one legend: by title the points of each curve, and how it is drawn."""
    figure = Figure(figsize=size, layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for points, style in curves:
            axes.plot(*zip(*points, strict=True), **{"linewidth": 1.2, **style})
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(xlabel, fontsize=9)
        axes.grid(alpha=0.3)
    drawn = (axes.get_legend_handles_labels() for axes in figure.axes)
    figure.legend(*next(handles for handles in drawn if handles[0]), **legend)
    return figure


_SHOWN = 8  # samples in a page
_BEST_OF, _BEST_OF_PROMPTS = 64, 80
_BEST_OF_SHOWN = (1, 4, 16, 64)
_MEAN_OF = 10  # updates
_WHEN = {"base": "base", "before": "before PPO", "after": "after PPO"}
_TITLES = {
    "satisfied": "all rules kept",
    "satisfied_one": "of prompts with one rule",
    "satisfied_seen": "with two that training puts together",
    "satisfied_unseen": "with two that it never does",
    "score": "score",
    "kl": "KL a response",
    "length": "tokens",
    "eos_share": "share that ends by itself",
    "perplexity": "perplexity under the base, not quantised",
    "different": "share of different responses",
}
_BELOW = {"loc": "outside lower center", "ncols": 3, "fontsize": 9}


def _arms_figure(demonstration: Demonstration, found: Mapping[str, Any]) -> Figure:
    """All seeds of two arms: held-out responses, and the value loss."""
    point = next(iter(next(iter(found.values())).values()))["curve"][0]
    titles = {"right answers": "exact_match"} if "exact_match" in point else {}
    titles |= {"score": "score", "value loss": "value_loss"}

    def curves(key: str) -> Curves:
        for colour, (arm, described) in zip(("C0", "C1"), demonstration.arms.items(), strict=True):
            for seed, one in enumerate(found[arm].values()):
                points = one[key] if key == "value_loss" else [[p["update"], p[key]] for p in one["curve"]]
                yield points, {"color": colour, "label": described.label if not seed else None}

    panels = {title: curves(key) for title, key in titles.items()}
    figure = _figure((10, 3.2), panels, "updates", _BELOW)
    figure.axes[-1].set_yscale("log")
    return figure


def _kl_figure(demonstration: Demonstration, found: Mapping[str, Any]) -> Figure:
    def curves(key: str) -> Curves:
        for i, (arm, described) in enumerate(demonstration.arms.items()):
            style = {"color": f"C{i % 10}", "marker": "os^"[i // 5]}
            for seed, one in enumerate(found[arm].values()):
                points = [(p["kl"], p[key]) for p in one["curve"]]
                yield points, {**style, "markersize": 2, "linewidth": 0.6, "alpha": 0.35}
                label = described.label if not seed else None
                yield points[-1:], {**style, "markersize": 7, "linestyle": "", "label": label}

    panels = {"score": curves("score"), "right answers": curves("exact_match")}
    beside = {"loc": "outside right center", "fontsize": 8}
    figure = _figure((11, 4.6), panels, "KL(policy, reference) a response", beside)
    for axes in figure.axes:
        axes.set_xscale("log")
    return figure


def _ideas_figure(demonstration: Demonstration, found: Mapping[str, Any]) -> Figure:
    """The score of the rollouts, means of the seeds, and what each seed has gained in the end."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    rollouts, gains = figure.subplots(1, 2)
    for place, (arm, described) in enumerate(demonstration.arms.items()):
        runs, style = list(found[arm].values()), {"color": f"C{place}"}
        curves = [_running_mean(one["score"]) for one in runs]
        means = [(points[0][0], statistics.mean(score for _, score in points)) for points in zip(*curves, strict=True)]
        rollouts.plot(*zip(*means, strict=True), linewidth=1.4, label=described.label, **style)
        gained = [_gained(one) for one in runs]
        gains.plot(gained, [place] * len(gained), "o", markersize=4, **style)
        gains.plot([statistics.mean(gained)], [place], "|", markersize=16, **style)
    gains.axvline(0, color="0.6", linewidth=0.8)
    gains.set_yticks(range(len(demonstration.arms)), [""] * len(demonstration.arms))
    gains.invert_yaxis()
    rollouts.set_title(f"score of the rollouts, means of {_MEAN_OF} updates and of the seeds", fontsize=10)
    rollouts.set_xlabel("updates", fontsize=9)
    gains.set_title("held out: all rules kept, gained by seed", fontsize=10)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.legend(*rollouts.get_legend_handles_labels(), **_BELOW)
    return figure


def _gained(one: Mapping[str, Any]) -> float:
    return float(one["after"]["satisfied"] - one["before"]["satisfied"])


def _recipe_figure(demonstration: Demonstration, found: Mapping[str, Any]) -> Figure:
    runs = found["recipe"].items()
    shares = "satisfied" in next(iter(runs))[1]["after"]
    # Of rules the prompts on the way are others than those before and after.
    begins = {seed: [] if shares else [{"update": 0, **one["before"]}] for seed, one in runs}
    at_start = {seed: [*begins[seed], *one["curve"]] for seed, one in runs}

    def held_out() -> Curves:
        for seed, points in at_start.items():
            yield [[p["update"], p["score"]] for p in points], {"label": f"seed {seed}"}

    def of_rollouts(key: str) -> Curves:
        for number, (seed, one) in enumerate(runs):
            yield one[key], {"color": f"C{number}", "alpha": 0.2}
            yield _running_mean(one[key]), {"color": f"C{number}", "linewidth": 2, "label": f"seed {seed}"}

    def by_kl() -> Curves:
        for number, points in enumerate(at_start.values()):
            yield [[p["kl"], p["score"]] for p in points], {"color": f"C{number}", "marker": "."}
        for number, (_, one) in enumerate(runs):
            if shares:
                ends = [[one[when]["kl"], one[when]["score"]] for when in ("before", "after")]
                yield ends, {"color": f"C{number}", "marker": "s", "linestyle": "--", "linewidth": 0.6}
            yield [[kl, score] for _, kl, score in one["best_of"]], {"color": f"C{number}", "linestyle": ":"}

    most = max(len(one["best_of"]) for _, one in runs)
    panels = {
        "held out: all rules kept" if shares else "held out: score": () if shares else held_out(),
        f"score of the rollouts, means of {_MEAN_OF}": of_rollouts("score"),
        f"held out: PPO, and (dotted) best of 1–{most}": by_kl(),
    }
    figure = _figure((11, 3.4), panels, "updates", _BELOW)
    if shares:
        _draw_shares(figure.axes[0], [one for _, one in runs])
    figure.axes[2].set_xlabel("KL a response", fontsize=9)
    figure.axes[2].set_ylabel("score", fontsize=9)
    return figure


def _running_mean(points: Sequence[Sequence[float]]) -> list[list[float]]:
    """Of each point and those before it, `_MEAN_OF` of them."""
    windows = (points[max(0, end - _MEAN_OF) : end] for end in range(min(_MEAN_OF, len(points)), len(points) + 1))
    return [[window[-1][0], statistics.mean(value for _, value in window)] for window in windows]


def _draw_shares(axes: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    """What is kept in each state by what training puts together: the mean of the seeds, and each as a point."""
    columns = {"satisfied": "all", **{f"satisfied_{kind}": kind for kind in COMPOSITIONS}}
    columns = {key: name for key, name in columns.items() if key in runs[0]["after"]}
    for place, (when, label) in enumerate(_WHEN.items()):
        for column, key in enumerate(columns):
            of_seeds, at = [one[when][key] for one in runs], column + 0.27 * (place - 1)
            style = {"color": ("0.85", "0.65", "0.4")[place], "label": None if column else label}
            axes.bar(at, statistics.mean(of_seeds), width=0.25, **style)
            axes.plot([at] * len(of_seeds), of_seeds, "k.", markersize=4)
    names = {"one": "one rule", "seen": "two, trained\ntogether", "unseen": "two, never\ntogether"}
    axes.set_xticks(range(len(columns)), [names.get(name, name) for name in columns.values()], fontsize=8)
    axes.set_xlabel("")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8, loc="upper right", ncols=1)


def _recipe_table(demonstration: Demonstration, found: Mapping[str, Any]) -> str:
    """All stages: means of the seeds with their range; by rule the share of all prompts, with Wilson's interval."""
    runs = list(found["recipe"].values())
    each, whens = runs[0]["language"]["prompts"], [when for when in _WHEN if when in runs[0]]

    def of(key: str, when: str) -> list[float]:
        return [one[when].get(key, one["language"][when].get(key)) for one in runs]

    def line(key: str) -> Iterator[str]:
        yield from (with_range(of(key, when)) for when in whens)
        yield gain([end - start for start, end in zip(of(key, "before"), of(key, "after"), strict=True)])

    def by_rule(rule: str, when: str) -> str:
        asked = [one for one in runs if rule in one["asked"]]
        return share([one[when][f"kept_{rule}"] for one in asked], [one["asked"][rule] for one in asked])

    names = {
        key: title for key, title in _TITLES.items() if key in runs[0]["after"] or key in runs[0]["language"]["after"]
    }
    columns = [_WHEN[when] for when in whens]
    tables = [markdown(["", *columns, GAIN], [[title, *line(key)] for key, title in names.items()])]
    if rules := sorted({rule for one in runs for rule in one["asked"]}):
        lines = [[f"`{rule}`", *(by_rule(rule, when) for when in whens)] for rule in rules]
        tables.append(markdown(["prompts that ask for it: kept", *columns], lines))
    tables.append(_best_of_table(found["recipe"]))
    shown = [[cell_of(row[key]) for key in ("prompt", *whens)] for row in runs[0]["language"]["samples"]]
    tables.append(markdown(["prompt", *columns], shown, texts=True))
    return "\n\n".join([*tables, f"{len(runs)} seed(s) of {each} prompts"])


def _best_of_table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """By seed the score of the best of N, beside PPO's for the same prompts; its KL is that of all."""
    runs = list(found.values())
    shown = [
        [n, kl, [one["best_of"][n - 1][2] for one in runs]] for n, kl, _ in runs[0]["best_of"] if n in _BEST_OF_SHOWN
    ]
    lines = [[f"best of {n} before PPO", f"at most {kl:.2f}", *(f"{s:.3f}" for s in of)] for n, kl, of in shown]
    after = [one["after"]["kl"] for one in runs]
    lines.append(["after PPO", with_range(after, 2), *(f"{one['of_these']:.3f}" for one in runs)])
    seeds, few = [f"score, seed {seed}" for seed in found], min(_BEST_OF_PROMPTS, runs[0]["language"]["prompts"])
    return markdown([f"{few} prompts", "KL a response", *seeds], lines)


GAIN = "gain (95 %)"


def with_range(values: Sequence[float], digits: int = 3) -> str:
    """The mean of seeds, with the lowest and the highest where there are several."""
    mean, least, most = (f"{value:.{digits}f}" for value in (statistics.mean(values), min(values), max(values)))
    return f"{mean} ({least}–{most})" if len(values) > 1 else mean


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 0.975 quantiles of Student's distribution with 1 to 9 degrees of freedom."""


def gain(gains: Sequence[float], digits: int = 3) -> str:
    """The mean of what seeds gained, with the 95 % interval of the mean over such seeds by Student's distribution.
    Nothing of none."""
    if not gains:
        return ""
    mean, freedom = statistics.mean(gains), len(gains) - 1
    if not freedom:
        return f"{mean:+.{digits}f}"
    half = _STUDENT[min(freedom, len(_STUDENT)) - 1] * statistics.stdev(gains) / math.sqrt(len(gains))
    return f"{mean:+.{digits}f} ({mean - half:+.{digits}f} to {mean + half:+.{digits}f})"


def share(values: Sequence[float], numbers: Sequence[int]) -> str:
    """Shares of so many prompts each as one, with its interval."""
    kept = round(sum(value * number for value, number in zip(values, numbers, strict=True)))
    low, high = wilson_interval(kept, sum(numbers))
    return f"{kept / sum(numbers):.3f} ({low:.3f}–{high:.3f})"


def cell_of(text: str) -> str:
    """A text as a cell of a table: what the user said of a chat, on one line."""
    said = re.sub(r"<\|im_start\|>\w+\n?|<\|im_end\|>", " ", text)
    return " ".join(said.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").split()) or "(nothing)"


def _mean(found: Mapping[str, Any], key: str) -> str:
    return with_range([one["after"][key] for one in found.values()])


def _table(demonstration: Demonstration, found: Mapping[str, Any]) -> str:
    columns = {"exact_match": "right answers", "score": "score", "kl": "KL a response"}
    measured = next(iter(next(iter(found.values())).values()))["after"]
    columns = {key: title for key, title in columns.items() if key in measured}
    arms = demonstration.arms.items()
    rows = [[described.label, *(_mean(found[arm], key) for key in columns)] for arm, described in arms]
    return markdown(["", *columns.values()], rows)


def _critic_table(demonstration: Demonstration, found: Mapping[str, Any]) -> str:
    """What each seed ends at; its value loss, apologies and empty responses by updates; and what it was warned of, and
    when."""
    columns = ("score", "kl", "length", "distinct_share")
    ends, losses, said, told = [], [], [], []
    for arm, described in demonstration.arms.items():
        for seed, one in found[arm].items():
            name = f"{described.label}, seed {seed}"
            ends.append([name, *(f"{one['after'][key]:.3f}" for key in columns)])
            losses.append([name, *(f"{ten:.3f}" for ten in _means(one["value_loss"], _MEAN_OF))])
            pairs = zip(*(_means(one[kind], _EVALUATED) for kind in ("apologies", "empty")), strict=True)
            said.append([name, *(f"{apologies:.2f} / {empty:.2f}" for apologies, empty in pairs)])
            told += [f"- {name}, update {of['step']}, `{of['name']}`: {of['text']}" for of in one["warnings"]]
    tens, fives = (
        [f"{end - each + 1}–{end}" for end in range(each, demonstration.updates + 1, each)]
        for each in (_MEAN_OF, _EVALUATED)
    )
    heads = [_TITLES.get(key, "share of different responses") for key in columns]
    tables = {"held out": (heads, ends), "value loss in updates": (tens, losses)}
    tables |= {"of four responses an update: apologise / are empty": (fives, said)}
    drawn = [markdown([name, *columns], rows) for name, (columns, rows) in tables.items()]
    return "\n\n".join([*drawn, folded("The warnings", "\n".join(told))])


def _means(points: Sequence[Sequence[float]], each: int) -> list[float]:
    """Of so many updates each."""
    values = [value for _, value in points]
    return [statistics.mean(values[start : start + each]) for start in range(0, len(values), each)]


def _ideas_table(demonstration: Demonstration, found: Mapping[str, Any]) -> str:
    """Of the last `_MEAN_OF` updates what the rollouts score and the critic explains; of held-out prompts the ends."""
    lines = []
    for arm, described in demonstration.arms.items():
        runs = list(found[arm].values())
        score, explained = (
            with_range([statistics.mean(value for _, value in one[key][-_MEAN_OF:]) for one in runs])
            for key in ("score", "explained_variance")
        )
        ends = [_mean(found[arm], key) for key in ("satisfied", "kl", "length")]
        gains = [_gained(one) for one in runs]
        lines.append([described.label, score, explained, *ends, ", ".join(f"{of:+.3f}" for of in gains), gain(gains)])
    of_last = [f"{name}, last {_MEAN_OF} updates" for name in ("score of the rollouts", "critic explains")]
    return markdown(["", *of_last, "all rules kept", "KL a response", "tokens", "gained by seed", GAIN], lines)


_FIGURES = {
    "value": _arms_figure,
    "kl": _kl_figure,
    "critic": _arms_figure,
    "instructions": _recipe_figure,
    "ideas": _ideas_figure,
    "sentiment": _recipe_figure,
}


def show(path: Path) -> None:
    """Draw the figure of a result, if it has one, and put its table into the page."""
    result = json.loads(path.read_text(encoding="utf-8"))
    name = result["demonstration"]
    demonstration = DEMONSTRATIONS[name]
    if name in _FIGURES:
        save_figure(_FIGURES[name](demonstration, result["arms"]), name)
    of_arms = {"critic": _critic_table, "ideas": _ideas_table, "script": _ideas_table}.get(name, _table)
    table = (of_arms if demonstration.arms else _recipe_table)(demonstration, result["arms"])
    text = f"{table}\n\n{chip_and_day(result)}"
    page = COMPARISONS if demonstration.arms else PAGE
    fill_file(page, f"{name}: made by benchmarks.demonstrations", f"end of {name}", text)


def main(
    name: Annotated[str, typer.Argument(help=", ".join(DEMONSTRATIONS))],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, for its recipe")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/demonstrations"),
    seed: Annotated[list[int] | None, typer.Option(help="Only this one; may be given several times.")] = None,
) -> None:
    """Run a demonstration, draw its figure and fill its table."""
    if name not in DEMONSTRATIONS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(DEMONSTRATIONS)}")
    show(run(name, runs_dir, overrides or (), seed or ()))


if __name__ == "__main__":
    typer.run(main)
