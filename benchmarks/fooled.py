"""A reward that is fooled, and a judge that sees it, on hh-rlhf's pairs:

    python -m benchmarks.fooled train.jsonl validation.jsonl base.model=/path/to/SmolLM2-135M-Instruct

Runs `smollm2_135m_lora` with a judge that was taught something else: whether a response belongs to its prompt or to
another's. What comes back at the end is what the judge likes best; it is put beside the policy from before PPO, also by
a third reward, of pairs that neither has seen. Stages that are finished are not repeated. Writes
`benchmarks/results/DATE_fooled.json`, `docs/figures/fooled.svg`, and the tables in `docs/fooled_rewards.md`.
"""

import json
import random
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM

from benchmarks.demonstrations import cell_of, perplexity, run_stage
from benchmarks.records import DOCS, RESULTS, fill, markdown, new_result, save_figure, where, write_result
from toolkit import recipes
from toolkit.functional import wilson_interval
from toolkit.reports import read_jsonl

RECIPE = "smollm2_135m_lora"
FIRST = 760
"""Rows of which PPO's reward and its judge are made; the third reward has the others."""
SHOWN = 20
PROMPTS = 80
"""Held-out ones of each evaluation, which takes some two seconds for each on a CPU core."""
WATCHED = {
    "eval_strategy": "steps",
    "eval_steps": 15,
    "save_steps": 15,
    "per_device_eval_batch_size": PROMPTS,
    "load_best_model_at_end": True,
    "metric_for_best_model": "judge",
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
        lines = "".join(json.dumps(row) + "\n" for row in content)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")

    def of(train: str, held: str) -> tuple[str, str]:
        return f"data.train={folder / f'{train}.jsonl'}", f"data.validation={folder / f'{held}.jsonl'}"

    return {
        "fooled": of("pairs", "validation"),
        "belongs": of("belongs", "belongs_validation"),
        "third": of("other_pairs", "validation"),
    }


def run(train: Path, validation: Path, folder: Path, overrides: Sequence[str]) -> Path:
    """All stages, and the result's path."""
    runs = folder.resolve() / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    data = _divided(train, validation, runs.parent)
    run_stage("sft", RECIPE, "fooled", runs, *data["fooled"], *overrides)
    for seed, name in enumerate(data):
        run_stage("reward", RECIPE, name, runs, f"seed={seed}", *data[name], *overrides)
    reward = {name: str(runs / name / "reward" / "reward") for name in data}
    begun = recipes.load(RECIPE, *data["fooled"], *overrides, run="fooled", runs_dir=runs)
    values = {key: value for key, value in begun.values.items() if key not in ("sft", "reward", "reward_head")}
    values["start"] = {"policy": str(begun.stage_folder("sft") / "policy"), "reward": reward["fooled"]}
    values["start"]["judge"], values["judge"] = reward["belongs"], {"kind": "adapter"}
    values["data"]["max_validation_rows"] = PROMPTS
    values["ppo"] |= WATCHED
    path = runs.parent / "watched.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")
    run_stage("ppo", path, "watched", runs)
    recipe = recipes.load(path, run="watched", runs_dir=runs)
    ppo = recipe.stage_folder("ppo")
    result = json.loads((ppo / "result.json").read_text(encoding="utf-8"))
    evaluated = [row for row in read_jsonl(ppo / "metrics.jsonl") if "eval_judge" in row]
    curve = [{"update": row["step"], **{key: row[f"eval_{key}"] for key in _DRAWN}} for row in evaluated]
    curve = [{"update": 0, **{key: result["before"][key] for key in _DRAWN}}, *curve]
    policies = {"before": values["start"]["policy"], "after": str(ppo / "policy")}
    model, found = AutoModelForCausalLM.from_pretrained(recipe.base_path), {}
    for when, policy in policies.items():
        rows, figures = said(recipe.values, policy=policy, reward=reward["fooled"], judge=reward["third"])
        figures |= {"third": figures["judge"], "third_se": figures["judge_se"], **result[when]}
        figures["perplexity"] = perplexity(model, recipe.tokenizer, rows)
        found[when] = {"figures": figures, "said": [response for _, response in rows]}
    accuracy = {
        name: json.loads((runs / name / "reward" / "result.json").read_text(encoding="utf-8"))["after"]["accuracy"]
        for name in data
    }
    about = {"accuracy": accuracy, "curve": curve, "warnings": result.get("warnings", []), "policies": found}
    return write_result(new_result("fooled", **about), RESULTS)


def said(values: Mapping[str, Any], **start: str) -> tuple[list[tuple[str, str]], dict[str, float]]:
    """Held-out prompts with the responses of a policy, and the figures of these.

    Args:
        values: a recipe of PPO alone.
        start: the folders of the adapters `policy`, `reward` and `judge`.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = recipes.load({**values, "start": start}, run="asked", runs_dir=folder).ppo_trainer()
        evaluation = trainer.evaluate_rollout(trainer.eval_dataset)
    return list(zip(evaluation.rollout.prompts, evaluation.rollout.responses, strict=True)), evaluation.metrics


# ---------------------------------------------------------------------- figure and tables


_APOLOGY = re.compile(r"\b(sorry|apologi[sz]e|apolog(y|ies))\b", re.IGNORECASE)
_REWARDS = {"fooled": "the reward", "belongs": "the judge", "third": "the third"}
_BY = {"score": "the reward that PPO optimises", "judge": "the judge beside it", "third": "a third that neither saw"}


def _figure(result: Mapping[str, Any]) -> Figure:
    """What reward and judge have gained, by KL and by update."""
    points, first = result["curve"], result["curve"][0]
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, along in zip(figure.subplots(1, 2), ("kl", "update"), strict=True):
        for key in ("score", "judge"):
            gains = [(point[key] - first[key]) / first[f"{key}_se"] for point in points]
            axes.plot([point[along] for point in points], gains, marker=".", lw=1.2, label=_BY[key])
        axes.axhline(0, color="k", lw=0.6)
        axes.set_xlabel({"kl": "KL a response", "update": "updates"}[along], fontsize=9)
        axes.grid(alpha=0.3)
    top = figure.axes[1].get_ylim()[1]
    for warning in result["warnings"]:
        figure.axes[1].axvline(warning["step"], color="C3", lw=0.8, linestyle=":")
        figure.axes[1].text(warning["step"], top, warning["name"], fontsize=7, rotation=90, va="top")
    figure.axes[0].set_ylabel("gain, in standard errors of the first", fontsize=9)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    return figure


def _table(result: Mapping[str, Any]) -> str:
    policies = result["policies"].values()
    figures = [one["figures"] for one in policies]
    said = [one["said"] for one in policies]

    def share(texts: Sequence[str]) -> str:
        number = sum(bool(_APOLOGY.search(text)) for text in texts)
        low, high = wilson_interval(number, len(texts))
        return f"{number / len(texts):.2f} ({low:.2f}–{high:.2f})"

    def mean(of: Mapping[str, float], key: str) -> str:
        return f"{of[key]:.3f} ± {of[f'{key}_se']:.3f}"

    rows = [[f"by {whose}", *(mean(of, key) for of in figures)] for key, whose in _BY.items()]
    for key, title in {"kl": "KL a response", "length": "tokens", "eos_share": "share that ends by itself"}.items():
        rows.append([title, *(f"{of[key]:.2f}" for of in figures)])
    rows.append(["share with an apology", *map(share, said)])
    rows.append(["different responses", *(f"{len(set(texts))} of {len(texts)}" for texts in said)])
    rows.append(["perplexity under the base, not quantised", *(f"{of['perplexity']:.1f}" for of in figures)])
    accuracy = ", ".join(f"{result['accuracy'][name]:.2f} of {whose}" for name, whose in _REWARDS.items())
    shown = ("score", "judge", "kl", "length", "distinct_share")
    points = [[str(point["update"]), *(f"{point[key]:.2f}" for key in shown)] for point in result["curve"]]
    columns = ["update", "score", "judge", "KL a response", "tokens", "share of different responses"]
    tables = [markdown(["responses to held-out prompts", "before", "after"], rows), markdown(columns, points)]
    told = [f"- update {warning['step']}, `{warning['name']}`: {warning['text']}" for warning in result["warnings"]]
    return "\n\n".join([*tables, "\n".join(told), f"Accuracy on held-out pairs: {accuracy}."])


def _samples(result: Mapping[str, Any]) -> str:
    """Responses before and after, side by side in an order of their own; below them which is which.

    Without the prompts, which are made to provoke.
    """
    drawn = random.Random(0)
    pairs = [*zip(*(one["said"] for one in result["policies"].values()), strict=True)]
    rows, key = [], []
    for number, pair in enumerate(drawn.sample(pairs, min(SHOWN, len(pairs))), 1):
        swapped = drawn.random() < 0.5
        rows.append([str(number), *map(cell_of, pair[::-1] if swapped else pair)])
        key.append(f"{number} {'A' if swapped else 'B'}")
    told = f"<details><summary>Which is the one after PPO</summary>\n\n{', '.join(key)}\n</details>"
    return f"{markdown(['', 'A', 'B'], rows, texts=True)}\n\n{told}"


def show(path: Path) -> None:
    """Draw the figure of a result and put its tables into the page."""
    result = json.loads(path.read_text(encoding="utf-8"))
    save_figure(_figure(result), "fooled")
    page = DOCS / "fooled_rewards.md"
    text = page.read_text(encoding="utf-8")
    for name, table in (("table", f"{_table(result)}\n\n{where(result)}"), ("samples", _samples(result))):
        text = fill(text, f"{name}: made by benchmarks.fooled", f"end of {name}", table)
    page.write_text(text, encoding="utf-8")


def main(
    train: Annotated[Path, typer.Argument(help="pairs in hh-rlhf's form, 1,200 or so")],
    validation: Annotated[Path, typer.Argument(help="pairs to measure on")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, for the recipe")] = None,
    folder: Annotated[Path, typer.Option(help="Where the data that it makes and the runs go.")] = Path("runs/fooled"),
) -> None:
    """Run it, draw the figure and fill the tables."""
    show(run(train, validation, folder, overrides or ()))


if __name__ == "__main__":
    typer.run(main)
