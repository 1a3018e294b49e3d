"""PPO's trainer without the algorithm, which `ppo.py` adds: set-up, optimizer, events, saving and resuming."""

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from transformers import EarlyStoppingCallback, PreTrainedTokenizerBase, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from toolkit import phases, processes
from toolkit.checkpoints import get_random_states, read_state, set_random_states
from toolkit.data import PlacedDataLoader, PromptCollator, Rollout, concatenate
from toolkit.errors import (
    CheckpointError,
    ConfigError,
    NotFiniteError,
    PeerError,
    RewardError,
    ToolkitError,
    printable,
)
from toolkit.functional import Moments
from toolkit.models import SharedBase, role_digest
from toolkit.reports import append_jsonl, keep_until
from toolkit.rewards import Reward, concatenate_scores, state_of, total_scores
from toolkit.sampling import check_room
from toolkit.trainers import self_checks
from toolkit.trainers.common import SamplingTrainer
from toolkit.trainers.guards import MOST_IN_A_ROW, WARNINGS_FILE, Watch, save_broken
from toolkit.trainers.model_card import write_model_card
from toolkit.trainers.objective import ScoreShaper
from toolkit.trainers.ppo_config import GREEDY_ROLLOUTS, PPOConfig
from toolkit.trainers.rollouts import Rollouts
from toolkit.trainers.trl_compat import TRLPPOTrainer

ROLLOUTS_FILE = "rollouts.jsonl"
_OF_REWARDS = (RewardError.__name__, NotFiniteError.__name__)
_ROWS_SHOWN = 4  # of a rollout, at every logged step


@dataclass
class _State(TrainerState):
    episode: int = 0
    """Responses that were learnt from."""


class SharedBaseTrainer(SamplingTrainer, TRLPPOTrainer):
    """PPO's trainer, whose models are roles of one `SharedBase`: TRL's own class, where TRL has one."""

    algorithm, learnt_roles = "PPO", ("policy", "value")
    collator_type, rollouts_type = PromptCollator, Rollouts
    # Set by transformers' Trainer.
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        args: PPOConfig,
        processing_class: PreTrainedTokenizerBase,
        roles: SharedBase,
        reward: Reward,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        **named: Any,
    ):
        self_checks.check_dataset(train_dataset, args.rollout_batch_size)
        for prompts in (train_dataset, eval_dataset):
            if args.max_length is not None and prompts is not None:
                check_room(map(len, prompts["input_ids"]), args.max_length)
        super().__init__(args, processing_class, roles, train_dataset, eval_dataset, reward=reward, **named)
        self.saved_roles = roles.trained_roles
        if args.early_stopping_patience is not None:
            self.add_callback(EarlyStoppingCallback(args.early_stopping_patience))
        self.score_shaper = ScoreShaper(args)
        self.kl_coef = args.kl_coef  # changed by the adaptive controller, where kl_target asks for it
        self.state = _State(**vars(self.state))
        if args.gradient_checkpointing:
            roles.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
        order = torch.Generator().manual_seed(args.seed if args.data_seed is None else args.data_seed)
        self.dataloader = PlacedDataLoader(
            train_dataset,
            batch_size=args.rollout_batch_size,
            sampler=RandomSampler(train_dataset, replacement=args.sample_with_replacement, generator=order),
            generator=order,
            collate_fn=self.data_collator,
            drop_last=True,
            num_workers=args.dataloader_num_workers,
        )
        self.total_updates = args.number_of_updates(len(train_dataset))
        self.watch = Watch()
        self._in_scoring: Rollout | None = None
        self._pass: Iterator[dict[str, Any]] = iter(())  # the one that batches come from
        self._pass_is_over = False  # its last batch was drawn, and what is due at its end is not done
        self._parts: dict[str, Tensor] | None = None  # of the scores of several rollouts
        self._last_metrics: dict[str, float] = {}
        self._shown: list[dict[str, Any]] = []  # a few rows of the last rollout
        self._last_logged = 0
        self._ready = self._ratio_checked = False
        # Those whose gradient has not been looked at.
        self._unchecked_roles = {role for role in self.saved_roles if role != "value" or args.vf_coef > 0}

    # ------------------------------------------------------------------ set-up and self-checks

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """An optimizer over the trained roles, whichever of them happens to be active."""
        if self.optimizer is None:
            kind, arguments = self.get_optimizer_cls_and_kwargs(self.args, self.roles)
            groups = [
                {"params": self.roles.parameters_of(role), "weight_decay": self.args.weight_decay, "role": role}
                | (self.args.value_optimizer if role == "value" else {})
                for role in self.roles.trained_roles
            ]
            self.optimizer = kind(groups, **arguments)
            unknown = self.args.value_optimizer.keys() - self.optimizer.defaults.keys()
            if unknown:
                wrong = f"{self.args.optim.value} has no {', '.join(sorted(unknown))}, which the settings of the value "
                raise ConfigError(
                    f"{wrong}role (value_…) name.", field="optim", remedy="Leave those out, or take adamw_torch."
                )
        return self.optimizer

    def _prepare_training(self) -> None:
        if self._ready:
            return
        if not self.args.rollout_do_sample:
            warnings.warn(GREEDY_ROLLOUTS.text(), stacklevel=2)
        self.create_optimizer()
        self.create_scheduler(num_training_steps=self.total_updates, optimizer=self.optimizer)
        self_checks.check_in_optimizer(self.roles, self.optimizer)
        self.optimizer = self.accelerator.prepare(self.optimizer)
        prompt, pad = self.train_dataset[0]["input_ids"], self.processing_class.pad_token_id
        autocast = self.compute_loss_context_manager
        self_checks.check_rollout_uses_policy(self.roles, prompt, pad_token_id=pad, autocast=autocast)
        self._ready = True

    # ------------------------------------------------------------------ the whole run

    def _run(self, checkpoint: Path | None, arguments: dict[str, Any]) -> dict[str, float]:
        """The metrics of the last of `total_updates` updates; empty if a checkpoint had all of them behind it."""
        if arguments:
            raise TypeError(f"train() got an unexpected argument {next(iter(arguments))!r}")
        self._prepare_training()
        over = checkpoint is not None and self.load_checkpoint(checkpoint)["stopped_early"]
        if checkpoint is not None:
            self._check_not_past(checkpoint, self.state.global_step, self.total_updates)
        args, state = self.args, self.state
        began = state.global_step
        state.max_steps = self.total_updates
        state.num_train_epochs = self.total_updates * args.update_batch_size / self.prompts_of_a_pass
        state.compute_steps(args, self.total_updates)
        self.is_in_train = True
        for name in (ROLLOUTS_FILE, WARNINGS_FILE):
            processes.by_main(partial(keep_until, Path(args.output_dir) / name, began))
        self.callback_handler.optimizer, self.callback_handler.lr_scheduler = self.optimizer, self.lr_scheduler
        self.callback_handler.train_dataloader = self.dataloader
        self.control = self.callback_handler.on_train_begin(args, state, self.control)
        if args.eval_on_start and checkpoint is None:
            self.evaluate()
        while state.global_step < self.total_updates and not (over or self.control.should_training_stop):
            self.control = self.callback_handler.on_epoch_begin(args, state, self.control)
            while not self._pass_is_over:
                self.control = self.callback_handler.on_step_begin(args, state, self.control)
                self._last_metrics = self._guarded_step()
                self.control = self.callback_handler.on_step_end(args, state, self.control)
                self._act()
                if state.global_step >= self.total_updates or self.control.should_training_stop:
                    break
                if self.control.should_epoch_stop:
                    self.dataloader.end_pass()
                    self._pass = iter(())
                    break
            if self._request.met and state.global_step < self.total_updates:
                break  # in the middle of a pass, whose end a resumed run will see
            self._pass_is_over = False
            self.control = self.callback_handler.on_epoch_end(args, state, self.control)
            self._act()
        if args.load_best_model_at_end and state.best_model_checkpoint:
            self.load_best()
        self.is_in_train = False
        self.control = self.callback_handler.on_train_end(args, state, self.control)
        return self._last_metrics if state.global_step > began else {}

    def _place(self) -> dict[str, Any]:
        """What moves on in an update before its first optimizer step, where weights and counts are still the last's."""
        changing = state_of(self.reward)
        return {
            "random": get_random_states(),
            "dataloader": self.dataloader.state_dict(),
            "pass_is_over": self._pass_is_over,
            "reward": None if changing is None else deepcopy(changing.state_dict()),
        }

    def _save_as_it_was(self, begun: dict[str, Any], error: ToolkitError) -> None:
        """Save the run as before an update whose reward failed, and let the error say so."""
        set_random_states(begun["random"])
        self.dataloader.load_state_dict(begun["dataloader"])
        self._pass, self._pass_is_over = iter(()), begun["pass_is_over"]
        if begun["reward"] is not None:
            state_of(self.reward).load_state_dict(begun["reward"])
        self._save_before(error)

    def _save_before(self, error: ToolkitError) -> None:
        """Save the run up to the last update, and let an error of the reward say so."""
        if step := self.state.global_step:
            saved = self._folder_of(step)
            if not processes.by_main(saved.is_dir):
                self.save_checkpoint()
            remedy = f"All up to update {step} is saved in {saved}: then go on with $resume."
            error.problems = tuple(replace(one, remedy=f"{one.remedy} {remedy}".lstrip()) for one in error.problems)

    def _guarded_step(self) -> dict[str, float]:
        """An update, with what its metrics warn of; nothing is learnt from one whose scores are not finite."""
        begun = self._place()
        try:
            metrics = self._timed_step()
        except (RewardError, PeerError) as error:
            kind = self._kind(error)
            if kind not in _OF_REWARDS:
                raise
            if kind == RewardError.__name__ or self._too_many(error):
                self._save_as_it_was(begun, error)
                raise
            metrics = self._without_update()
        return {**metrics, **self._warned(metrics)}

    @staticmethod
    def _kind(error: ToolkitError) -> str:
        """Name of an error's class, of several processes in that where it was raised."""
        return error.of if isinstance(error, PeerError) else type(error).__name__

    def _warned(self, metrics: dict[str, float]) -> dict[str, float]:
        """Tell what the metrics of an update are a warning of; how many warnings there have been, if any."""
        self._tell(self.watch.seen(self.state.global_step, metrics))
        return {"warnings": float(len(self.watch.given))} if self.watch.given else {}

    def evaluated(self, metrics: Mapping[str, float], responses: Sequence[str]) -> None:
        """Tell what an evaluation of the held-out prompts is a warning of."""
        self._tell(self.watch.evaluated(self.state.global_step, metrics, responses))

    def _tell(self, new: list[dict[str, Any]]) -> None:
        for warning in new:
            phases.tell(f"WARNING at update {warning['step']}: {warning['text']} {warning['remedy']}")
        if new:
            processes.by_main(partial(append_jsonl, Path(self.args.output_dir) / WARNINGS_FILE, new))

    def _too_many(self, error: ToolkitError) -> bool:
        """Count an update whose scores are not finite; whether they are too many in a row, the batch then saved."""
        if not self.skipped.add():
            return False
        folder = Path(self.args.output_dir)
        saved = processes.by_main(partial(save_broken, folder, rollout=self._in_scoring, tensors={}))
        before = f"So were those of the {MOST_IN_A_ROW - 1} updates before, which were passed over."
        more = f"{before} The last batch is in {saved}."
        error.problems = tuple(replace(one, remedy=f"{one.remedy} {more}".lstrip()) for one in error.problems)
        return True

    def _without_update(self) -> dict[str, float]:
        """Metrics of an update that is passed over: nothing is learnt, and the run goes on with other prompts."""
        learning_rate, self._shown = self.lr_scheduler.get_last_lr()[0], []
        self.lr_scheduler.step()
        self.state.global_step += 1
        skipped = {"optimizer_steps": 0.0, "skipped_steps": float(self.skipped.total)}
        return {"kl_coef": self.kl_coef, **skipped, "learning_rate": learning_rate, "episode": self.state.episode}

    def _timed_step(self) -> dict[str, float]:
        """Draw, respond to and score what an update needs, and update; its metrics, with seconds and speed."""
        rollouts, all_scores, parts = [], [], []
        rollout_seconds = score_seconds = 0.0
        for left in reversed(range(self.args.rollouts_per_update)):
            batch = self.next_batch()
            started = time.perf_counter()
            with phases.phase("rollout"):
                rollouts.append(self.generate(batch))
            sampled = time.perf_counter()
            self._in_scoring = rollouts[-1]
            with phases.phase("score"):
                all_scores.append(self.score(batch, rollouts[-1]))
            parts.append(self.score_parts())
            rollout_seconds += sampled - started
            score_seconds += time.perf_counter() - sampled
            if left:
                self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
        rollout, scores = concatenate(rollouts), concatenate_scores(all_scores)
        self._shown = [
            {"prompt": rollout.prompts[i], "response": rollout.responses[i], "score": score, "ended": rollout.ended[i]}
            for i, score in enumerate(total_scores(scores)[:_ROWS_SHOWN].tolist())
        ]
        columns = {"input_ids": rollout.prompt_ids, **rollout.columns}
        batch = self.data_collator(
            [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        )
        try:
            self._parts = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            started = time.perf_counter()
            with phases.phase("update", self.args.num_ppo_epochs * self.args.num_mini_batches):
                metrics = self.step(batch, rollout, scores)
        finally:
            self._parts = None
        seconds = {"rollout_seconds": rollout_seconds, "score_seconds": score_seconds}
        seconds["step_seconds"] = time.perf_counter() - started
        speed = len(rollout) / sum(seconds.values())
        return {**metrics, "episode": self.state.episode, "samples_per_second": speed, **seconds}

    def batches(self) -> Iterator[dict[str, Any]]:
        """Batches of prompts for a loop of your own, pass after pass, until the last of `total_updates` updates."""
        while self.state.global_step < self.total_updates:
            yield self.next_batch()

    def next_batch(self) -> dict[str, Any]:
        """The next batch of prompts, of the next pass where one ends."""
        while (batch := next(self._pass, None)) is None:
            self._pass = iter(self.dataloader)
        if self.dataloader.is_drawn:
            next(self._pass, None)  # lets the loader know
            self._pass_is_over = True
        return batch

    def _act(self) -> None:
        """Do what the callbacks asked for: log, evaluate, save."""
        if self.control.should_log and self.state.global_step > self._last_logged:
            self._last_logged = self.state.global_step
            self.log(dict(self._last_metrics))
            rows = [{"step": self.state.global_step, **row} for row in self._shown]
            if processes.is_main():
                append_jsonl(Path(self.args.output_dir) / ROLLOUTS_FILE, rows)
        best = False
        if self.control.should_evaluate:
            self.control.should_evaluate = False
            try:
                best = self.is_best(self.evaluate())
            except (RewardError, PeerError) as error:
                if self._kind(error) in _OF_REWARDS:
                    self._save_before(error)
                raise
        if self.control.should_save or (best and self.args.save_strategy == "best"):
            self.control.should_save = False
            self.save_checkpoint()
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    @property
    def prompts_of_a_pass(self) -> int:
        """Prompts that are answered before the next pass over them begins; the last ones may not fill a batch."""
        return len(self.dataloader) * self.args.rollout_batch_size

    # ------------------------------------------------------------------ saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir)
        if not _internal_call and processes.is_main():
            write_model_card(Path(output_dir or self.args.output_dir), base_name=self.base_name)

    def save_checkpoint(self) -> Path:
        self._prepare_training()  # in a loop of your own there may be no update yet
        return super().save_checkpoint()

    def load_checkpoint(self, folder: str | Path) -> dict[str, Any]:
        """Put what `save_checkpoint` wrote into this trainer, for a loop of your own, and return the whole state.

        Raises:
            CheckpointError: it is damaged, holds weights alone, or is of another run.
        """
        checkpoint = self._whole_checkpoint(folder)
        self._prepare_training()
        self._restoring = state = read_state(checkpoint)
        self.load_saved(checkpoint)
        self.state = type(self.state).load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        self.load_callbacks()
        self.load_optimizer(checkpoint)
        self.load_progress(checkpoint)
        return state

    def own_state(self) -> dict[str, Any]:
        changing = state_of(self.reward)  # where it changes as it goes
        return {
            "kl_coef": self.kl_coef,
            "scores": self.score_shaper.moments._asdict(),
            "dataloader": self.dataloader.state_dict(),
            "pass_is_over": self._pass_is_over,
            "metrics": self._last_metrics,
            "last_logged": self._last_logged,
            "reward": None if changing is None else changing.state_dict(),
            "frozen": self._frozen(),
            "watch": self.watch.state_dict(),
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        changed = [role for role, digest in self._frozen().items() if state["frozen"].get(role) != digest]
        if changed:
            wrong = f"the {' and '.join(changed)} adapter is not the one that this run began with: "
            wrong += "scores or KL would mean something else from here on."
            raise CheckpointError(wrong, remedy="Give it back, or begin the run anew.")
        self.kl_coef = state["kl_coef"]
        self.score_shaper.moments = Moments(**state["scores"])
        self.dataloader.load_state_dict(state["dataloader"])
        self._pass, self._pass_is_over = iter(()), state["pass_is_over"]
        self._last_metrics, self._last_logged = state["metrics"], state["last_logged"]
        if "watch" in state:
            self.watch.load_state_dict(state["watch"])
        if (changing := state_of(self.reward)) is not None and state["reward"] is not None:
            changing.load_state_dict(state["reward"])

    def _frozen(self) -> dict[str, str]:
        roles = (role for role in self.roles.roles if role not in self.roles.trained_roles)
        return {role: role_digest(self.roles, role) for role in roles if self.roles.parameters_of(role)}

    # What remains of TRL's methods reads models that a shared base does not have.

    def create_model_card(self, *arguments: Any, **named: Any) -> None:
        write_model_card(Path(self.args.output_dir), base_name=self.base_name)

    def null_ref_context(self) -> Any:
        """The reference role, as TRL names it."""
        return self.roles.role("reference")

    def get_train_dataloader(self) -> DataLoader:
        return self.dataloader

    def generate_completions(self, sampling: bool = False) -> None:
        """TRL's sample table: the responses to the held-out prompts with their scores; all, or the first batch."""
        if (prompts := self.eval_dataset) is None:
            return
        rows = min(len(prompts), self.args.per_device_eval_batch_size) if sampling else len(prompts)
        _, rollout, scores, *_ = self.evaluate_rollout(prompts.select(range(rows)))
        table = Table("query", "model response", "score", show_lines=True)
        for *texts, score in zip(rollout.prompts, rollout.responses, scores.tolist(), strict=True):
            table.add_row(*(Text(printable(text)) for text in texts), f"{score:.3f}")
        Console().print(table)
