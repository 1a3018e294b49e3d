"""The warnings of a run: each is given once, with its number and what to try."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.sampling import since_first
from toolkit.trainers.evaluation_guards import EVALUATION_GUARDS
from toolkit.trainers.guards import GUARDS, Guard, Metrics

WARNINGS_FILE = "warnings.jsonl"


@dataclass
class Watch:
    """Guards at work over a run."""

    in_a_row: dict[str, int] = field(default_factory=dict)
    given: list[dict[str, Any]] = field(default_factory=list)
    """Warnings so far, one of each guard at most: `step`, `name`, `value`, `text`, `remedy`."""
    first: dict[str, Any] | None = None
    """The `metrics` and `responses` of the first evaluation."""
    best: dict[str, float] | None = None
    """The metrics of the evaluation that the judge liked best, with its `step`."""

    def seen(self, step: int, metrics: Metrics) -> list[dict[str, Any]]:
        """The warnings that the metrics of an update are reason for, and that were not given before."""
        return self._new(GUARDS, step, metrics)

    def evaluated(self, step: int, metrics: Metrics, responses: Sequence[str]) -> list[dict[str, Any]]:
        """The warnings that an evaluation is reason for, held against the first one, and that were not given before."""
        if self.first is None:
            self.first = {"metrics": dict(metrics), "responses": list(responses)}
        if "judge" in metrics and (self.best is None or metrics["judge"] > self.best["judge"]):
            self.best = {**metrics, "step": float(step)}
        numbers: dict[str, Any] = {**metrics, **since_first(responses, self.first["responses"])._asdict()}
        for moment, held in (("first", self.first["metrics"]), ("best", self.best or {})):
            numbers |= {f"{name}_{moment}": value for name, value in held.items()}
        return self._new(EVALUATION_GUARDS, step, numbers)

    def _new(self, guards: Iterable[Guard], step: int, numbers: Mapping[str, Any]) -> list[dict[str, Any]]:
        told = {warning["name"] for warning in self.given}
        new = []
        for guard in guards:
            value = guard.number(numbers)
            there = value is not None and guard.out_of_bounds(value)
            self.in_a_row[guard.name] = self.in_a_row.get(guard.name, 0) + 1 if there else 0
            if guard.name not in told and self.in_a_row[guard.name] >= guard.updates:
                text = guard.text.format(**{**numbers, "value": value, "updates": guard.updates})
                about = {"step": step, "name": guard.name, "value": value, "text": text, "remedy": guard.remedy}
                new.append(about)
        self.given += new
        return new

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on has to know."""
        return {"in_a_row": dict(self.in_a_row), "given": self.given, "first": self.first, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        self.in_a_row, self.given = dict(state["in_a_row"]), list(state["given"])
        self.first, self.best = state.get("first", self.first), state.get("best", self.best)
