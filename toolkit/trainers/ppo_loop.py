"""PPO's run without the algorithm, which `ppo.py` adds: passes and updates, events, and an update that fails."""

import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit import phases, processes
from toolkit.checkpoints import check_state, get_random_states, problem_of, set_random_states
from toolkit.data import concatenate
from toolkit.errors import CheckpointError, NotFiniteError, PeerError, RewardError, RewardStateError, ToolkitError
from toolkit.functional import Moments
from toolkit.reports import ROLLOUTS_FILE, WARNINGS_FILE, append_jsonl, keep_until, write_jsonl
from toolkit.rewards import Scores, check_scores, concatenate_scores, state_of, total_scores
from toolkit.trainers.guards import Watch
from toolkit.trainers.not_finite import MOST_IN_A_ROW, where_broken
from toolkit.trainers.ppo_base import SharedBaseTrainer
from toolkit.trainers.same_run import of_this_version

_OF_TRL = ("model", "ref_model", "value_model", "reward_model", "peft_config", "data_collator")


class PPOLoop(SharedBaseTrainer):
    """A trainer that runs `total_updates` updates, which a subclass makes by `generate`, `score` and `step`."""

    _counted = "updates"
    _trains_on = True

    def __init__(self, *arguments: Any, **named: Any):
        if theirs := [name for name in _OF_TRL if name in named]:
            wrong = f"{' and '.join(theirs)}: arguments of TRL's own trainer. The models are roles of one base here."
            raise ToolkitError(wrong, remedy="Give roles, a SharedBase, and reward, as docs/coming_from.md shows.")
        super().__init__(*arguments, **named)
        self.watch = Watch()
        self.measured_before: tuple[Mapping[str, float], Sequence[str], Sequence[str]] | None = None
        """Metrics, responses and prompts of before the first update, of which a checkpoint may not know."""
        self._at_fault: dict[str, Any] = {}
        """The batch that is written if it is not finite, as `where_broken` takes it."""
        self._broken_steps = 0
        """Optimizer steps of the update in hand whose gradient was not finite."""
        self._answered: Counter[tuple[int, ...]] = Counter()
        """How many responses to each prompt the update in hand has had."""
        self._ppo_epoch = 0
        """Passes over its rollout that it has begun, less one."""
        self._drawn = 0
        """Prompts that the update in hand has drawn."""
        self._passed_over = 0
        """Prompts of updates that were passed over, and of passes that a callback has ended."""
        self._left_out = 0
        """Of those the prompts of the pass whose end is due."""
        self._parts: dict[str, Tensor] = {}
        """Of the scores of what is learnt from, not of an evaluation's."""
        self._parts_of: Scores | None = None
        self._last_metrics: dict[str, float] = {}
        self._shown: list[dict[str, Any]] = []  # a few rows of the last rollout
        self._last_logged = 0
        self._state_checked = False  # the reward's, once it has one
        self._evaluation_due = False  # one that failed: a resumed run makes up for it
        self._end_due = False  # that of the pass; a run that was saved after its last update makes up for it

    def _run(self, checkpoint: Path | None, arguments: dict[str, Any]) -> dict[str, float]:
        """The metrics of the last of `total_updates` updates; empty if a checkpoint had all of them behind it."""
        if arguments:
            raise TypeError(f"train() got an unexpected argument {next(iter(arguments))!r}")
        self._prepare_training()
        over = False
        if checkpoint is not None:
            saved = self.load_checkpoint(checkpoint)
            with of_this_version(checkpoint):
                over = saved["stopped_early"]
            by_updates, by_episodes = self.args.max_steps > 0, self.args.total_episodes is not None
            field = "max_steps" if by_updates else "total_episodes" if by_episodes else "num_train_epochs"
            self._check_not_past(checkpoint, self.state.global_step, self.total_updates, field=field)
        args, state = self.args, self.state
        began = state.global_step
        if checkpoint is None and began:
            self._go_on()
        state.max_steps = self.total_updates
        state.num_train_epochs = self.total_updates * args.update_batch_size / self.prompts_of_a_pass
        state.compute_steps(args, self.total_updates)
        self.is_in_train = True
        processes.by_main(partial(keep_until, Path(args.output_dir) / ROLLOUTS_FILE, self._last_logged))
        processes.by_main(self._write_warnings)
        self.callback_handler.optimizer, self.callback_handler.lr_scheduler = self.optimizer, self.lr_scheduler
        self.callback_handler.train_dataloader = self.get_train_dataloader()
        self.control = self.callback_handler.on_train_begin(args, state, self.control)
        if args.eval_on_start and not began:
            self.evaluate()
        self._evaluation_due &= args.eval_strategy != "no"  # as where a judge is away, and shall not be waited for
        if self._evaluation_due:
            # What it was saved with does not know of the evaluation, which may be the best, or one too many.
            self.control.should_evaluate = self.control.should_save = True
            self._act(ends_pass=True)
        if self._end_due and (over or self.control.should_training_stop or state.global_step >= self.total_updates):
            self._end_pass()
        while state.global_step < self.total_updates and not (over or self.control.should_training_stop):
            self.control = self.callback_handler.on_epoch_begin(args, state, self.control)
            while not self.dataloader.pass_is_over:
                self.control = self.callback_handler.on_step_begin(args, state, self.control)
                self._last_metrics = self._guarded_step()
                self._end_due = True
                self.control = self.callback_handler.on_step_end(args, state, self.control)
                self._act(ends_pass=True)
                self._end_pass_if_asked()
                if state.global_step >= self.total_updates or self.control.should_training_stop:
                    break
            if self._request.met and state.global_step < self.total_updates:
                break  # in the middle of a pass, whose end a resumed run will see
            self._end_pass()
        self._put_best()
        self.is_in_train = False
        self.control = self.callback_handler.on_train_end(args, state, self.control)
        return self._last_metrics if state.global_step > began else {}

    def _go_on(self) -> None:
        """Told to train again: with its own weights where those of the best checkpoint are in their place.

        Raises: CheckpointError: they have not been saved.
        """
        step, way_on = self.state.global_step, "train(resume_from_checkpoint=True)"
        if step >= self.total_updates:
            over = f"the {step} updates of this run are done, and train() makes no more. "
            warnings.warn(f"{over}Raise max_steps in a new trainer, and go on with {way_on}.", stacklevel=4)
        elif step != self.step_of_weights:
            if problem_of(self._folder_of(step)):
                wrong = f"the weights of update {step} were not saved, and those of the best checkpoint replaced them."
                raise CheckpointError(f"train() cannot go on: {wrong}", remedy=f"Use {way_on}.")
            self.load_own()

    def _put_best(self) -> None:
        """The weights of the best checkpoint, but not where a signal has stopped: it may go on with its own."""
        state, paused = self.state, self._request.met and self.state.global_step < self.total_updates
        if self.args.load_best_model_at_end and state.best_model_checkpoint and not paused:
            self.load_best()

    def _end_pass_if_asked(self) -> None:
        """Leave the rest of the pass out where a callback ends it."""
        if self.control.should_epoch_stop and not self.dataloader.pass_is_over:
            self._left_out = self.dataloader.end_pass() * self.args.rollout_batch_size
            self.dataloader.pass_is_over = True

    def _end_pass(self) -> None:
        self._end_due = self.dataloader.pass_is_over = False
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._passed_over += self._left_out
        self._left_out = 0
        self._act()

    def _place(self) -> dict[str, Any]:
        """What moves on in an update before its first optimizer step, where weights and counts are still the last's."""
        changing = state_of(self.reward)  # where it changes as it goes
        return {
            "dataloader": self.dataloader.state_dict(),
            "pass_is_over": self.dataloader.pass_is_over,
            "reward": None if changing is None else changing.state_dict(),
        }

    def _go_to(self, place: dict[str, Any]) -> None:
        self.dataloader.load_state_dict(place["dataloader"])
        self.dataloader.pass_is_over = place["pass_is_over"]
        if (changing := state_of(self.reward)) is not None and place["reward"] is not None:
            changing.load_state_dict(place["reward"])

    def _save_before(self, error: ToolkitError) -> None:
        """Save the run up to the last update, and let an error of the reward say so."""
        if step := self.state.global_step:
            # One of this step was saved at its end, before the evaluation that is due now; beside one that it goes on
            # from there may be later ones, of another course.
            if self._evaluation_due or self._goes_on_from is not None or self._saved_at != step:
                self.save_checkpoint()
            error.add_remedy(f"All up to update {step} is saved in {self._folder_of(step)}: then go on with $resume.")

    @contextmanager
    def saved_if_the_reward_fails(self) -> Iterator[None]:
        """Inside, an error of what measures the weights that the last update has left does not cost that update."""
        try:
            yield
        except (RewardError, PeerError) as error:
            if self._kind(error):
                self._save_before(error)
            raise

    def _guarded_step(self) -> dict[str, float]:
        """An update, with what its metrics warn of; nothing is learnt from one whose scores are not finite."""
        random, place = get_random_states(), deepcopy(self._place())
        try:
            metrics = self._timed_step()
        except (RewardError, PeerError) as error:
            kind = self._kind(error)
            if kind is None:
                raise
            if kind is RewardError or self._too_many(error):
                if kind is NotFiniteError:  # this update will be taken again
                    self.skipped.total, self.skipped.in_a_row = self.skipped.total - 1, 0
                set_random_states(random)
                self._go_to(place)
                self._save_before(error)
                raise
            metrics = self._without_update()
        if not self._state_checked and (changing := state_of(self.reward)) is not None:  # not at the first checkpoint
            processes.by_main(lambda: check_state(changing.state_dict(), "the reward's state"))
        self._state_checked = True
        self._tell(self.watch.seen(self.state.global_step, metrics))
        return {**metrics, "warnings": float(len(self.watch.given))} if self.watch.given else metrics

    @staticmethod
    def _kind(error: ToolkitError) -> type[RewardError] | None:
        """What an error is, of several processes in that where it was raised: one that a reward raised, or one of
        numbers that are not finite; None for others, and those of a reward's state, which cannot be saved."""
        name = error.of if isinstance(error, PeerError) else type(error).__name__
        found = next((kind for kind in _kinds(RewardError) if kind.__name__ == name), None)
        if found is None or issubclass(found, RewardStateError):
            return None
        return NotFiniteError if issubclass(found, NotFiniteError) else RewardError

    def evaluated(self, metrics: Mapping[str, float], responses: Sequence[str], prompts: Sequence[str]) -> None:
        """Tell what an evaluation of held-out prompts is a warning of."""
        self._tell(self.watch.evaluated(self.step_of_weights, metrics, responses, prompts))

    def _write_warnings(self) -> None:
        """Those of this run, which may go on from before the last, or have begun anew after a kill."""
        path = Path(self.args.output_dir) / WARNINGS_FILE
        if self.watch.given or path.is_file():
            write_jsonl(path, self.watch.given)

    def _write_checkpoint(self) -> Path:
        folder = super()._write_checkpoint()
        self._write_warnings()  # those of another course go with its lines
        return folder

    def save_checkpoint(self) -> Path:
        """As of every trainer. What a loop samples after it is what one samples that goes on from it."""
        folder = super().save_checkpoint()
        self._answered.clear()
        return folder

    def _tell(self, new: list[dict[str, Any]]) -> None:
        for warning in new:
            phases.tell(f"WARNING at update {warning['step']}: {warning['text']} {warning['remedy']}")
        if new:
            processes.by_main(partial(append_jsonl, Path(self.args.output_dir) / WARNINGS_FILE, new))

    def _too_many(self, error: ToolkitError) -> bool:
        """Count an update that is not finite; whether they are too many in a row, the batch then saved."""
        if not self.skipped.add():
            return False
        folder = Path(self.args.output_dir)
        saved = where_broken(folder, **self._at_fault)
        before = f"So were those of the {MOST_IN_A_ROW - 1} updates before, which were passed over."
        error.add_remedy(f"{before} {saved}".strip())
        return True

    def _without_update(self) -> dict[str, float]:
        """Metrics of an update that is passed over: nothing is learnt, and the run goes on with other prompts."""
        learning_rate, self._shown = self._learning_rate, []
        self._count_update()
        self._passed_over += self._drawn
        self.state.epoch = self.epoch
        skipped = {"optimizer_steps": 0.0, "skipped_steps": float(self.skipped.total)}
        return {"kl_coef": self.kl_coef, **skipped, "learning_rate": learning_rate, "episode": self.state.episode}

    def _count_update(self) -> None:
        with warnings.catch_warnings():
            # torch's, of a first update in which the optimizer takes no step.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.lr_scheduler.step()
        self.state.global_step += 1
        self._answered.clear()

    def _timed_step(self) -> dict[str, float]:
        """Draw, respond to and score what an update needs, and update; its metrics, with seconds and speed."""
        rollouts, all_scores, parts = [], [], []
        self._drawn = 0
        self._answered.clear()  # of what was looked at before, or of a try that failed
        rollout_seconds = score_seconds = 0.0
        for left in reversed(range(self.args.rollouts_per_update)):
            batch = self.dataloader.next_batch()
            self._drawn += len(batch["prompt_ids"])
            started = time.perf_counter()
            self._at_fault = {}
            with phases.phase("rollout"):
                rollouts.append(self.generate(batch))
            sampled = time.perf_counter()
            self._at_fault = {"rollout": rollouts[-1]}
            with phases.phase("score"):
                all_scores.append(check_scores(self.score(batch, rollouts[-1]), rollouts[-1]))
            parts.append(self._parts)
            rollout_seconds += sampled - started
            score_seconds += time.perf_counter() - sampled
            if left:
                self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
        rollout, scores = concatenate(rollouts), concatenate_scores(all_scores)
        self._shown = [
            {"prompt": rollout.prompts[i], "response": rollout.responses[i], "score": score, "ended": rollout.ended[i]}
            for i, score in enumerate(total_scores(scores)[: self.args.rollouts_shown].tolist())
        ]
        self._parts = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        self._parts_of = scores
        started = time.perf_counter()
        with phases.phase("update", self.args.num_ppo_epochs * self.args.num_mini_batches):
            metrics = self.step({}, rollout, scores)
        seconds = {"rollout_seconds": rollout_seconds, "score_seconds": score_seconds}
        seconds["step_seconds"] = time.perf_counter() - started
        speed = len(rollout) / sum(seconds.values())
        return {**metrics, "episode": self.state.episode, "samples_per_second": speed, **seconds}

    def batches(self) -> Iterator[dict[str, Any]]:
        """Batches of prompts for a loop of your own, pass after pass, until the last of `total_updates` updates."""
        while self.state.global_step < self.total_updates:
            self.dataloader.pass_is_over = False
            yield self.dataloader.next_batch()
            self.freed_memory.after_step()

    def _act(self, *, ends_pass: bool = False) -> None:
        """Do what the callbacks asked for: log, evaluate, save; what is saved knows of a pass that they have ended."""
        if self.control.should_log and self.state.global_step > self._last_logged:
            self._last_logged = self.state.global_step
            self.log(dict(self._last_metrics))
            rows = [{"step": self.state.global_step, **row} for row in self._shown]
            if processes.is_main():
                append_jsonl(Path(self.args.output_dir) / ROLLOUTS_FILE, rows)
        best = False
        if ends_pass:
            self._end_pass_if_asked()
        if self.control.should_evaluate:
            self.control.should_evaluate, self._evaluation_due = False, True
            with self.saved_if_the_reward_fails():
                best = self.is_best(self.evaluate())
                self._evaluation_due = False
        if ends_pass:
            self._end_pass_if_asked()
        if self.control.should_save or (best and self.args.save_strategy == "best"):
            self.save_checkpoint()
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    @property
    def prompts_of_a_pass(self) -> int:
        """Prompts that are answered before the next pass over them begins; the last ones may not fill a batch."""
        return len(self.dataloader) * self.args.rollout_batch_size

    @property
    def epoch(self) -> float:
        """Passes over the prompts so far; of what was passed over, too."""
        return (self.state.episode + self._passed_over) / self.prompts_of_a_pass

    # ------------------------------------------------------------------ state

    def own_state(self) -> dict[str, Any]:
        return {
            **self._place(),
            "kl_coef": self.kl_coef,
            "evaluation_due": self._evaluation_due,
            "end_due": self._end_due,
            "passed_over": self._passed_over,
            "left_out": self._left_out,
            "scores": self.score_shaper.moments._asdict(),
            "metrics": self._last_metrics,
            "shown": self._shown,
            "last_logged": self._last_logged,
            "frozen": self.frozen,
            "watch": vars(self.watch),
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        self.kl_coef, self._evaluation_due = state["kl_coef"], state["evaluation_due"]
        self._passed_over, self._left_out = state["passed_over"], state["left_out"]
        self.score_shaper.moments = Moments(**state["scores"])
        self._answered.clear()
        self._go_to(state)
        self._last_metrics, self._last_logged = state["metrics"], state["last_logged"]
        self._shown, self._end_due = state["shown"], state["end_due"]
        self.watch = Watch(**state["watch"])
        if self.measured_before is not None:
            self.watch.measured(0, *self.measured_before)


def _kinds(kind: type[RewardError]) -> Iterator[type[RewardError]]:
    """A class of errors and all that inherit it, a user's among them."""
    yield kind
    for one in kind.__subclasses__():
        yield from _kinds(one)
