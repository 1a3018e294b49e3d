"""Drives a contender's updates, and times their phases without changing what they do.

rollout   generation
score     from there to the first forward pass of the update: log-probabilities of policy and reference, values,
          scores, advantages
update    the rest: every pass of every epoch, and the optimizer
"""

from typing import Any
from unittest import mock

from transformers import TrainerCallback

from benchmarks.clock import PhaseClock
from benchmarks.start import Built
from benchmarks.work import Work, given_responses


def run_ours(built: Built, work: Work, clock: PhaseClock, updates: int) -> dict[str, float]:
    """Run updates of our trainer, as its users' own loops do. Returns the metrics of the last."""
    trainer = built.trainer
    batch = trainer.data_collator([{"input_ids": ids} for ids in work.prompt_ids])
    update = trainer._update

    def timed(*args: Any, **kwargs: Any) -> Any:
        clock.start("update")
        return update(*args, **kwargs)

    stats: dict[str, float] = {}
    with given_responses(built.generator, work), mock.patch.object(trainer, "_update", timed):
        for _ in range(updates):
            clock.start("rollout")
            responses = trainer.generate(batch)
            clock.start("score")
            scores = trainer.score(batch, responses)
            stats = trainer.step(batch, responses, scores)
            clock.stop()
            work.check(responses.response_ids)
    return {name: stats[name] for name in ("score", "kl", "entropy", "policy_loss", "value_loss")}


_TRL_NAMES = {
    "score": "objective/scores",
    "kl": "objective/kl",
    "entropy": "objective/entropy",
    "policy_loss": "loss/policy_avg",
    "value_loss": "loss/value_avg",
}


class _Listener(TrainerCallback):
    """Takes the metrics that TRL logs, and the end of each update."""

    def __init__(self, clock: PhaseClock):
        self.clock = clock
        self.logs: dict[str, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "objective/kl" in logs:
            self.logs = logs

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.stop()


def run_trl(built: Built, work: Work, clock: PhaseClock, updates: int) -> dict[str, float]:
    """Run `train()` of TRL's trainer, which was built for so many updates. Returns the metrics of the last.

    Every batch holds the prompts of `work` in order. TRL shuffles, and in the last batch of a data set it steps after
    each micro-batch; a list of batches does neither.
    """
    from trl.experimental.ppo import ppo_trainer as trl_module  # not above: `gpu` reads this module beside later TRL

    trainer = built.trainer
    listener = _Listener(clock)
    trainer.add_callback(listener)
    trainer.dataloader = [trainer.data_collator([{"input_ids": ids} for ids in work.prompt_ids])]
    generate, accumulate = trl_module.batch_generation, trainer.accelerator.accumulate

    def timed_generation(model: Any, queries: Any, *args: Any, **kwargs: Any) -> Any:
        clock.start("rollout")
        found = generate(model, queries, *args, **kwargs)
        clock.start("score")
        work.check(found[0][:, queries.shape[1] :].tolist())
        return found

    def timed_accumulation(*models: Any) -> Any:
        if clock.phase == "score":
            clock.start("update")
        return accumulate(*models)

    with (
        given_responses(built.generator, work),
        mock.patch.object(trl_module, "batch_generation", timed_generation),
        mock.patch.object(trainer.accelerator, "accumulate", timed_accumulation),
    ):
        trainer.train()
    assert len(clock.updates) >= updates
    return {name: float(listener.logs[theirs]) for name, theirs in _TRL_NAMES.items()}


def run(kind: str, built: Built, work: Work, clock: PhaseClock, updates: int) -> dict[str, float]:
    """Run updates of a contender of this kind. Returns score, kl, entropy and the losses of the last."""
    return (run_ours if kind == "ours" else run_trl)(built, work, clock, updates)
