"""Other systems' settings, and Q-learning and cloning, on instructions that a program checks:

    python -m benchmarks.systems base.model=/path/to/SmolLM2-135M-Instruct

All begin where the sft stage of `smollm2_135m_instructions` ends. PPO is run with the recipe's settings and with those
of other recipes; Q-learning, and cloning of what kept all rules, learn from as many responses of that beginning,
sampled once. `--arm cloning_on` runs that one alone; the page has the newest result of each. Stages that are finished
are not repeated. Writes `benchmarks/results/DATE_systems.json`, `docs/figures/systems.svg` and the table in
`docs/comparisons.md`.
"""

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from matplotlib.figure import Figure
from peft import PeftModel
from transformers import AutoModelForCausalLM

from benchmarks.demonstrations import COMPARISONS, GAIN, gain, measured, run_stage, run_values, untrained, with_range
from benchmarks.records import (
    RESULTS,
    add_result,
    chip_and_day,
    fill_file,
    markdown,
    new_result,
    newest,
    save_figure,
)
from toolkit import recipes
from toolkit.recipes import Recipe
from toolkit.reports import read_jsonl, write_jsonl

RECIPE = "smollm2_135m_instructions"
UPDATES = {RECIPE: (50, 32), "actor_critic_lora": (25, 64), "llama3_8b_lora": (150, 2), "llama3_8b_lora_fast": (50, 32)}
"""By recipe: updates, and the responses of each; half as many as the recipe's own PPO has. Those of `llama3_8b_lora`
are so small that fewer take as long."""
SAMPLES = 1600
"""Responses that Q-learning and cloning learn from."""
OF_THE_TASK = (
    *("response_length", "temperature", "missing_eos_penalty", "per_device_eval_batch_size", "eval_do_sample"),
    *("logging_steps", "save_strategy", "save_steps", "save_total_limit", "gradient_checkpointing"),
)
"""What of section `ppo` is the task's or the machine's: the recipe's own in every run."""
LOGGED = {"max_prompts": 400, "samples_per_prompt": 4, "batch_size": 32}
Q = {"max_steps": 200, "lowest_return": 0.0, "highest_return": 1.0, "gamma": 1.0, "decoding_temperature": 0.1}
"""What the task asks of Q-learning: one reward from 0 to 1 at the end. All else is `smollm2_135m_q`'s."""
LABELS = {
    RECIPE: "PPO, the recipe's settings, half its updates",
    "actor_critic_lora": "PPO, `actor_critic_lora`",
    "llama3_8b_lora": "PPO, `llama3_8b_lora`",
    "llama3_8b_lora_fast": "PPO, `llama3_8b_lora_fast`",
    "q": "Q-learning",
    "cloning": "cloning of what kept all rules",
    "cloning_on": "cloning of it on top of what sampled it",
}


def without_stages(begun: Recipe, **sections: Any) -> dict[str, Any]:
    """The recipe with other sections in place of its stages."""
    return {key: value for key, value in begun.values.items() if key not in ("sft", "ppo", "value_head")} | sections


def _after_sft(begun: Recipe) -> dict[str, str]:
    return {"policy": str(begun.stage_folder("sft") / "policy")}


def with_ppo_of(name: str, begun: Recipe) -> dict[str, Any]:
    """PPO with another recipe's settings, and its value role."""
    theirs, adapters = recipes.load(name).values, dict(begun.values["adapters"])
    if "value" in theirs["adapters"]:
        adapters["value"] = theirs["adapters"]["value"]
    ppo = theirs["ppo"] | {key: begun.values["ppo"][key] for key in OF_THE_TASK} | {"max_steps": UPDATES[name][0]}
    head = {"value_head": theirs["value_head"]} if "value_head" in theirs else {}
    return without_stages(begun, start=_after_sft(begun), adapters=adapters, ppo=ppo, **head)


def with_q(begun: Recipe) -> dict[str, Any]:
    """Q-learning from responses that are sampled where PPO starts."""
    theirs, ppo = recipes.load("smollm2_135m_q").values, begun.values["ppo"]
    of_task = {"response_length": ppo["response_length"]}
    collect = LOGGED | of_task | {"temperature": ppo["temperature"]}
    evaluated = {"per_device_eval_batch_size": ppo["per_device_eval_batch_size"]}
    adapters = {**begun.values["adapters"], "q": theirs["adapters"]["q"]}
    q = theirs["q"] | Q | of_task | evaluated
    return without_stages(begun, start=_after_sft(begun), adapters=adapters, collect=collect, q=q)


def with_cloning(begun: Recipe, collected: Path, kept: Path, model: str) -> dict[str, Any]:
    """The sft stage of a model with those of the collected responses that kept all their rules, which go to `kept`, in
    place of its demonstrations."""
    rows = [
        {"prompt": row["prompt"], "completion": row["response"]}
        for row in read_jsonl(collected)
        if row["ended"] and row["rewards"][-1] == 1.0
    ]
    write_jsonl(kept, rows)
    data = {"task": "demonstrations", "train": str(kept), "validation_size": 32, "chat": False}
    return without_stages(begun, base={**begun.values["base"], "model": model}, sft_data=data, sft=begun.values["sft"])


def _merged(begun: Recipe, folder: Path) -> str:
    """The checkpoint of base and sft's adapter as one."""
    if not folder.is_dir():
        begun_in = folder.with_name(f"{folder.name}-begun")  # a kill leaves it, and no half checkpoint
        base = AutoModelForCausalLM.from_pretrained(begun.base_path, dtype=torch.bfloat16)
        PeftModel.from_pretrained(base, _after_sft(begun)["policy"]).merge_and_unload().save_pretrained(begun_in)
        begun.tokenizer.save_pretrained(begun_in)
        begun_in.rename(folder)
    return str(folder)


def _cloned(name: str, begun: Recipe, collected: Path, runs: Path, seed: int) -> dict[str, Any]:
    """What cloning reaches: trained on the base, or on the merged checkpoint of what was cloned, and where that begins.
    Merged, it is rounded to 4 bits once more."""
    kept = runs / f"kept-{seed}.jsonl"
    model = _merged(begun, runs / f"merged-{seed}") if name == "cloning_on" else begun.base_path
    values = with_cloning(begun, collected, kept, model)
    cloned = _run("sft", name, values, runs, seed) / "policy"
    measured_on = recipes.load({**begun.values, "base": values["base"]}, run=name)
    starts = {"before": _after_sft(begun) if name == "cloning" else {}, "after": {"policy": str(cloned)}}
    ends = {}
    for when, start in starts.items():
        with tempfile.TemporaryDirectory() as folder:
            metrics = untrained(measured_on, folder, **start).evaluate_rollout(begun.task.prompts("test")).metrics
        ends[when] = {key: value for key, value in metrics.items() if key != "kl"}  # to itself
    return {**ends, "kept": len(read_jsonl(kept))}


def run(runs: Path, overrides: Sequence[str], seeds: Sequence[int], arms: Sequence[str] = tuple(LABELS)) -> Path:
    """All stages of these arms, and the result's path."""
    runs = runs.resolve()
    runs.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {name: {} for name in arms}
    for seed in seeds:
        name, settings = f"systems-{RECIPE}-{seed}", (f"seed={seed}", f"ppo.max_steps={UPDATES[RECIPE][0]}", *overrides)
        run_stage("sft", RECIPE, name, runs, *settings)
        begun = recipes.load(RECIPE, *settings, run=name, runs_dir=runs)
        for arm in arms:
            if arm == RECIPE:
                run_stage("ppo", RECIPE, name, runs, *settings)
                one = measured(begun.stage_folder("ppo"))
            elif arm in UPDATES:
                one = measured(_run("ppo", arm, with_ppo_of(arm, begun), runs, seed))
            elif arm == "q":
                one = measured(_run("q", "q", with_q(begun), runs, seed))
            else:
                collected = _run("collect", "q", with_q(begun), runs, seed) / "responses.jsonl"
                one = _cloned(arm, begun, collected, runs, seed)
            updates, each = UPDATES.get(arm, (1, SAMPLES))
            found[arm][str(seed)] = one | {"responses": updates * each}
    return add_result(new_result("systems", prompts=len(begun.task.prompts("test")), arms=found), RESULTS)


def _run(stage: str, name: str, values: Mapping[str, Any], runs: Path, seed: int) -> Path:
    return run_values(values, runs / f"systems-{name}-{seed}.yaml", runs, stage) / stage


# ---------------------------------------------------------------------- figure and table


_WINDOW = 160  # responses that a point of the curve is the mean of


def _curve(responses: int, points: Sequence[Sequence[float]]) -> Iterator[tuple[float, float]]:
    """Responses so far, and the mean score of the last `_WINDOW` of them; every update had as many."""
    scores = [score for _, score in points]
    each = responses / len(scores)
    window = max(1, round(_WINDOW / each))
    for end in range(window, len(scores) + 1, window):
        yield end * each, sum(scores[end - window : end]) / window


def _figure(arms: Mapping[str, Any]) -> Figure:
    """The score of the rollouts by responses, and where each ends against KL beside the best of N."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    rollouts, ends = figure.subplots(1, 2)
    for colour, (name, label) in enumerate((name, label) for name, label in LABELS.items() if name in arms):
        for i, one in enumerate(arms[name].values()):
            style = {"color": f"C{colour}", "label": None if i else label.replace("`", "")}
            if name in UPDATES:
                rollouts.plot(*zip(*_curve(one["responses"], one["score"]), strict=True), lw=1.2, marker=".", **style)
            if "kl" in one["after"]:
                gain = one["after"]["score"] - one["before"]["score"]
                ends.plot(one["after"]["kl"], gain, linestyle="", marker="o", **style)
    instructions = newest("demonstration_instructions")
    if instructions is not None:
        seeds = [one["best_of"] for one in instructions["arms"]["recipe"].values()]
        gains = [statistics.mean(best[n][2] - best[0][2] for best in seeds) for n in range(len(seeds[0]))]
        label = f"the best of 1 to {len(gains)} (the demonstration's, {len(seeds)} seed(s))"
        ends.plot([kl for _, kl, _ in seeds[0]], gains, "k:", label=label)
    rollouts.set_xlabel("responses", fontsize=9)
    rollouts.set_title("score of the rollouts", fontsize=10)
    ends.set_xlabel("KL a response", fontsize=9)
    ends.set_title("held out: gain in score", fontsize=10)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.legend(*ends.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    return figure


_COLUMNS = {"satisfied": "all rules kept", "satisfied_unseen": "pairs never trained", "score": "score"}
_COLUMNS |= {"kl": "KL a response", "length": "tokens"}


def _table(arms: Mapping[str, Any], prompts: int) -> str:
    def cell(ends: Sequence[Mapping[str, float]], key: str) -> str:
        if key not in ends[0]:
            return ""
        values = [end[key] for end in ends]
        return with_range(values) if key.startswith("satisfied") else f"{sum(values) / len(values):.3f}"

    def gained(name: str) -> tuple[str, str]:
        """From where its seeds began, which may be measured on another day; that of Q is at another temperature."""
        own = name != "q" and all("before" in one for one in arms[name].values())
        begun = {seed: one["before"]["satisfied"] for seed, one in arms[name if own else RECIPE].items()}
        ends = {seed: one["after"]["satisfied"] for seed, one in arms[name].items() if seed in begun}
        gains = [end - begun[seed] for seed, end in ends.items()]
        return ", ".join(f"{of:+.3f}" for of in gains), gain(gains)

    begun = [one["before"] for one in arms[RECIPE].values()]
    rows = [["where all begin", "", *(cell(begun, key) for key in _COLUMNS), "", ""]]
    for name, label in ((name, label) for name, label in LABELS.items() if name in arms):
        ends = [one["after"] for one in arms[name].values()]
        responses = f"{next(iter(arms[name].values()))['responses']:,}"
        rows.append([label, responses, *(cell(ends, key) for key in _COLUMNS), *gained(name)])
    columns = ["", "responses", *_COLUMNS.values(), "all rules kept, gained by seed", GAIN]
    return markdown(columns, rows) + f"\n\n{len(arms[RECIPE])} seed(s) of {prompts} prompts"


def show(folder: Path = RESULTS) -> None:
    """Draw the figure of the newest result of each arm and put their table into the page."""
    arms: dict[str, Any] = {}
    made: dict[str, str] = {}
    for path in sorted(folder.glob("*_systems.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        arms |= result["arms"]
        made |= dict.fromkeys(result["arms"], chip_and_day(result))
    save_figure(_figure(arms), "systems")
    days = {day: [LABELS[arm] for arm in arms if made[arm] == day] for day in made.values()}
    *others, most = sorted(days, key=lambda day: len(days[day]))
    told = "".join(f" {', '.join(days[day])}: {day}" for day in others)
    text = f"{_table(arms, result['prompts'])}; {most}{told}"
    fill_file(COMPARISONS, "systems: made by benchmarks.systems", "end of systems", text)


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, for the recipe")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/demonstrations"),
    seed: Annotated[
        list[int] | None, typer.Option(help="0, 1 and 2 if none is given; may be given several times.")
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(help=f"Of {', '.join(LABELS)}; all if none is given. May be given several times."),
    ] = None,
) -> None:
    """Run what is not finished yet, draw the figure and fill the table."""
    if unknown := set(arm or ()) - set(LABELS):
        raise typer.BadParameter(f"{min(unknown)!r} is not one of {', '.join(LABELS)}")
    run(runs_dir, overrides or (), seed or (0, 1, 2), arm or tuple(LABELS))
    show()


if __name__ == "__main__":
    typer.run(main)
