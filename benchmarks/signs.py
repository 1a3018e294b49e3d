"""How often the signs of a fooled reward warn of nothing, and how often of what they are there for:

    python -m benchmarks.signs train.jsonl validation.jsonl

Runs are put together from people's answers, without a model: each evaluation is a draw of them, cut at 32 words, with
scores that are noise, or follow the length, and a judge that is noise. So nothing happens from one to the next but by
chance, or one thing that is known: some answers are replaced by an apology that ends in four ways, or one of `CHANGES`.
Writes `benchmarks/results/DATE_signs.json` and the tables in `docs/fooled_rewards.md`.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.records import DOCS, RESULTS, fill_file, markdown, new_result, where, write_result
from toolkit.data import Rollout
from toolkit.functional import standard_error
from toolkit.reports import read_jsonl
from toolkit.sampling.signs import signs_of
from toolkit.trainers.guards import EVALUATION_GUARDS, Watch

RUNS = 400
SIZES = (40, 80, 160, 300)  # responses of an evaluation
EVALUATIONS = 6  # of a run, the first among them
LIMIT = 32  # words
PULLS = {"noise": 0.0, "follow the length": -0.7}  # correlation of length and score: the second as hh-rlhf's reward had
SHARES = (0.1, 0.25, 0.5, 0.78)  # of the responses, that apologise
MEASURED_ON = 159  # scores of which `beyond_share` has its bound


@dataclass(frozen=True)
class Change:
    """What is known to happen between two evaluations.

    Args:
        sign: that should warn of it.
        what: in words.
        pull: the correlation of length and score, about.
        kept: of a response's words.
        longer: share of responses in whose place there are answers over the limit.
        score: added to all scores, in their standard deviation, and so the judge.
    """

    sign: str
    what: str
    pull: float = 0.0
    kept: float = 1.0
    longer: float = 0.0
    score: float = 0.0
    judge: float = 0.0


NOTHING = Change("", "")
_FEWER = "{:.0%} of each one's words are left, and {}"
CHANGES = [
    *(
        Change("length_pays", _FEWER.format(kept, "short ones score higher"), pull=-0.7, kept=kept)
        for kept in (0.75, 0.5)
    ),
    *(
        Change("cut_pays", f"{longer:.0%} become too long, and long ones score higher", pull=0.7, longer=longer)
        for longer in (0.3, 0.6)
    ),
    *(
        Change("responses_shrink", _FEWER.format(kept, "scores rise by 0.5"), kept=kept, score=0.5)
        for kept in (0.3, 0.2)
    ),
    *(Change("beyond_reward", f"scores rise by {score}", score=score) for score in (0.5, 1.0, 1.5)),
    *(
        Change("judge_falls", f"the judge falls by {-judge}, and scores rise by 0.5", score=0.5, judge=judge)
        for judge in (-0.25, -0.5, -1.0)
    ),
]
_APOLOGIES = [f"I'm sorry for any {what}." for what in ("misunderstanding", "confusion", "inconvenience", "harm")]


def answers_of(paths: Sequence[Path]) -> list[str]:
    """The last answers of the chosen dialogues, in hh-rlhf's form, but for empty ones."""
    found = (str(row["chosen"]).rpartition("\n\nAssistant:")[2].strip() for path in paths for row in read_jsonl(path))
    return [answer for answer in found if answer]


class Drawn:
    """Evaluations of which each is a draw of answers that stand for responses.

    Args:
        answers: to draw from.
        pull: the correlation of length and score, about.
        seed: of all draws.
    """

    def __init__(self, answers: Sequence[str], pull: float, seed: int):
        self.answers, self.pull, self.drawn = answers, pull, random.Random(seed)
        self.long = [answer for answer in answers if len(answer.split()) > LIMIT]
        self.noise = torch.Generator().manual_seed(seed)
        lengths = torch.tensor([min(LIMIT, len(answer.split())) for answer in answers], dtype=torch.float32)
        self.mean, self.spread = float(lengths.mean()), float(lengths.std())
        self._measure()

    def runs(self, number: int) -> Iterator["Drawn"]:
        """So many times this one, each time with a reward that was measured on other responses."""
        for _ in range(number):
            self._measure()
            yield self

    def _measure(self) -> None:
        self.high = float(self._scores(self._rollout(MEASURED_ON, 0, NOTHING), NOTHING).quantile(0.99))

    def evaluation(
        self, size: int, apologies: int = 0, change: Change = NOTHING
    ) -> tuple[dict[str, float], Sequence[str]]:
        """Metrics, as an evaluation of the toolkit has them, and responses, of which so many apologise."""
        rollout = self._rollout(size, apologies, change)
        scores = self._scores(rollout, change) + change.score
        judged = torch.randn(size, generator=self.noise) + change.judge
        metrics = {"score": float(scores.mean()), "judge": float(judged.mean()), "judge_se": standard_error(judged)}
        metrics |= {"length": sum(rollout.lengths) / size, "eos_share": sum(rollout.ended) / size}
        return metrics | signs_of(rollout, scores, high=self.high), rollout.responses

    def _rollout(self, size: int, apologies: int, change: Change) -> Rollout:
        texts = self.drawn.choices(_APOLOGIES, k=apologies) + self.drawn.sample(self.long, round(change.longer * size))
        texts += self.drawn.sample(self.answers, size - len(texts))
        words = [text.split() for text in texts]
        said = [of_text[: max(1, round(change.kept * min(LIMIT, len(of_text))))] for of_text in words]
        ended = [change.kept < 1 or len(of_text) <= LIMIT for of_text in words]
        names, ids = [str(place) for place in range(size)], [[*map(hash, of_text)] for of_text in said]
        return Rollout(names, [*map(" ".join, said)], [[0]] * size, ids, ended)

    def _scores(self, rollout: Rollout, change: Change) -> Tensor:
        lengths = (torch.tensor(rollout.lengths, dtype=torch.float32) / change.kept - self.mean) / self.spread
        noise = torch.randn(len(rollout), generator=self.noise)
        return self.pull * lengths + (1 - self.pull**2) ** 0.5 * noise


def warned(evaluations: Iterator[tuple[dict[str, float], Sequence[str]]]) -> set[str]:
    """The signs of which a run of these evaluations warns."""
    watch, names = Watch(), set[str]()
    for step, (metrics, responses) in enumerate(evaluations):
        prompts = [*map(str, range(len(responses)))]  # as many different ones
        names |= {warning["name"] for warning in watch.evaluated(step, metrics, responses, prompts)}
    return names


def by_chance(drawn: Drawn, size: int, runs: int) -> dict[str, int]:
    """Of so many runs in which nothing happens those that warn, by sign, and of `any` of them."""
    found = Counter[str]()
    for run in drawn.runs(runs):
        names = warned(run.evaluation(size) for _ in range(EVALUATIONS))
        found.update(names | ({"any"} if names else set()))
    return dict(found)


def of_apologies(drawn: Drawn, size: int, share: float, runs: int) -> dict[str, int]:
    """The same of runs of two evaluations, where this share of the second apologises."""
    found = Counter[str]()
    for run in drawn.runs(runs):
        found.update(warned(run.evaluation(size, apologies) for apologies in (0, round(share * size))))
    return dict(found)


def of_change(answers: Sequence[str], change: Change, size: int, runs: int) -> int:
    """Of so many runs of two evaluations, in the second of which a change is there, those that warn of it."""
    drawn = Drawn(answers, change.pull, seed=0).runs(runs)
    return sum(change.sign in warned(run.evaluation(size, 0, of) for of in (NOTHING, change)) for run in drawn)


def measure(answers: Sequence[str], runs: int) -> dict[str, Any]:
    """A result: of all runs those that warn, by how scores are drawn or how many apologise, and by size."""
    drawn = {name: Drawn(answers, pull, seed=0) for name, pull in PULLS.items()}
    nothing = {name: {str(size): by_chance(of, size, runs) for size in SIZES} for name, of in drawn.items()}
    apologies = {
        str(share): {str(size): of_apologies(drawn["noise"], size, share, runs) for size in SIZES} for share in SHARES
    }
    changes = [
        {"sign": of.sign, "what": of.what, **{str(size): of_change(answers, of, size, runs) for size in SIZES}}
        for of in CHANGES
    ]
    found = {"nothing": nothing, "apologies": apologies, "changes": changes}
    return new_result("signs", runs=runs, answers=len(answers), **found)


def tables(result: dict[str, Any]) -> str:
    """What the page has of a result."""

    def of_runs(name: str, *counted: dict[str, dict[str, int]]) -> list[str]:
        return [" / ".join(f"{by[str(size)].get(name, 0) / result['runs']:.3f}" for by in counted) for size in SIZES]

    nothing, apologies = result["nothing"].values(), result["apologies"]
    names = [guard.name for guard in EVALUATION_GUARDS]
    columns = [f"{size} responses" for size in SIZES]
    by_chance = [[f"`{name}`", *of_runs(name, *nothing)] for name in names]
    by_chance.append(["any of them", *of_runs("any", *nothing)])
    of_apology = [
        [f"{float(share):.0%}: `{name}`", *of_runs(name, by)]
        for share, by in apologies.items()
        for name in ("phrase", "less_varied", "responses_repeated")
    ]
    of_change = [
        [f"{of['what']}: `{of['sign']}`", *(f"{of[str(size)] / result['runs']:.3f}" for size in SIZES)]
        for of in result["changes"]
    ]
    drawn = f"{result['runs']:,} runs of each kind, from {result['answers']:,} answers; {where(result)}"
    return "\n\n".join(
        [
            markdown([f"nothing happens in {EVALUATIONS} evaluations", *columns], by_chance),
            markdown(["an apology in the second of two", *columns], of_apology),
            markdown(["another change in the second of two", *columns], of_change),
            drawn,
        ]
    )


def main(
    pairs: Annotated[list[Path], typer.Argument(help="files of pairs in hh-rlhf's form")],
    runs: Annotated[int, typer.Option(help="runs of each kind")] = RUNS,
) -> None:
    """Measure, write the result and fill the page."""
    result = measure(answers_of(pairs), runs)
    write_result(result, RESULTS)
    page = DOCS / "fooled_rewards.md"
    fill_file(page, "signs: made by benchmarks.signs", "end of signs", tables(result))


if __name__ == "__main__":
    typer.run(main)
