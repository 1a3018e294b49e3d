"""What the trainers of several stages share: progress, precision, saved roles, and evaluation by sampled responses."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback, default_logdir
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback

from toolkit import phases, processes
from toolkit.checkpoints import kept_random_states
from toolkit.data import PromptCollator, RatedCollator, values_of
from toolkit.errors import DataError, RecipeError, ToolkitError
from toolkit.models import (
    LENGTH_MULTIPLE,
    ROLE_FILE,
    SharedBase,
    load_classifier_weights,
    load_weights,
    save_model,
    save_role,
    scores_for,
    table_of_positions,
)
from toolkit.reports import Progress
from toolkit.rewards import Reward
from toolkit.sampling import BestOf, Evaluation, Metrics, Rows, best_of
from toolkit.trainers.resume import ResumableTrainer
from toolkit.trainers.rollouts import RoleRollouts
from toolkit.trainers.same_run import check_frozen, frozen_digests
from toolkit.trainers.self_checks import check_tokenizer
from toolkit.trainers.trainer_internals import autocast
from toolkit.trainers.transformers_loop import TransformersLoop


def in_place_of_progress(trainer: Trainer, callbacks: list[TrainerCallback] | None) -> None:
    """Take transformers' progress bar and printer from a trainer that has callbacks, or for which another speaks."""
    if callbacks or not processes.is_main():
        trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)
        trainer.remove_callback(PrinterCallback)


def precision(args: TrainingArguments, roles: SharedBase) -> Callable[[], AbstractContextManager]:
    """The region that `bf16` or `fp16` asks for, where there is no trainer to give it."""
    return partial(autocast, args, roles.device.type)


@contextmanager
def made_by_trl() -> Iterator[None]:
    """What TRL refuses of its own options while it makes a trainer, as a `RecipeError`."""
    try:
        yield
    except ToolkitError:
        raise
    except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
        wrong = f"TRL makes no trainer of these settings: {' '.join(str(error).split())}"
        raise RecipeError(wrong) from error


def no_upload(last_saved: Iterable[str]) -> ToolkitError:
    """That of `push_to_hub`, for a trainer whose `save_model` writes these files last."""
    wrong = "push_to_hub would upload all that the stage has written, and no weights at the root."
    folders = " or ".join(Path(name).parts[0] for name in last_saved)
    return ToolkitError(wrong, remedy=f"Take save_model(folder), and hf upload for what it makes there: {folders}.")


class RoleTrainer(ResumableTrainer):
    """A trainer of roles of a shared base, saved as PEFT folders named after them, or of a model without `roles`."""

    saved_roles: Iterable[str]
    base_name = ""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not processes.is_main():
            return
        folder = Path(output_dir or self.args.output_dir)
        if self.roles is None:
            return save_model(self.model, self.processing_class, folder / "model")
        for role in self.saved_roles:
            pad_token_id = self.processing_class.pad_token_id
            save_role(self.roles, role, folder / role, pad_token_id=pad_token_id, base_name=self.base_name)

    @property
    def last_saved(self) -> list[str]:
        """The last file that `save_model` writes of each of its weights."""
        if self.roles is None:
            return ["model/tokenizer_config.json"]
        return [f"{role}/{ROLE_FILE}" for role in self.saved_roles]

    def push_to_hub(self, *arguments: Any, **named: Any) -> Any:
        """transformers', which would upload the stage's folder, with its records of data and responses: refused."""
        raise no_upload(self.last_saved)

    def load_saved(self, folder: Path) -> None:
        if self.roles is None:
            return load_classifier_weights(self.model, folder / "model")
        for role in self.saved_roles:
            load_weights(self.roles, role, folder / role)


class SupervisedTrainer(TransformersLoop, RoleTrainer):
    """A trainer on given texts, whose evaluations are passes over such, too."""

    def _run(self, checkpoint: Path | None, arguments: dict[str, Any]) -> Any:
        with nullcontext() if self.roles is None else self.roles.unpacked_for_gradients():
            return super()._run(checkpoint, arguments)

    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        """As in `Trainer`; training draws the same random numbers whether it was called or not."""
        with kept_random_states(), phases.phase("evaluation"):
            measured = super().evaluate(*arguments, **named)
        if not arguments and named.get("eval_dataset") is None:
            self._note_metric(measured)
        return measured

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """As in `Trainer`, with all held-out rows: `dataloader_drop_last` is for batches to train on."""
        with self._all_rows(), self.state_of_accelerate.here():
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Likewise, of `predict`."""
        with self._all_rows(), self.state_of_accelerate.here():
            return super().get_test_dataloader(test_dataset)

    @contextmanager
    def _all_rows(self) -> Iterator[None]:
        drops, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        try:
            yield
        finally:
            self.args.dataloader_drop_last = drops

    def check_positions(self, model: Any, remedy: str) -> None:
        """What is trained and measured on fits into a model, which would break off at a longer row, perhaps hours in.

        Args:
            model: with positions of its own, or those of a shared base.
            remedy: what can be done about a longer row, with `{}` for the positions.

        Raises:
            DataError: a row has more tokens than the model has positions.
        """
        if (positions := table_of_positions(model)) is None:
            return
        for split, rows in (("training", self.train_dataset), ("held-out", self.eval_dataset)):
            for row, tokens in _lengths(rows):
                if tokens > positions:
                    wrong = f"row {row} of the {split} rows has {tokens} tokens, and the model has positions for "
                    raise DataError(f"{wrong}{positions}.", remedy=remedy.format(positions))


def _lengths(dataset: Any) -> Iterator[tuple[int, int]]:
    """Rows by number, as TRL has prepared them, with the tokens of their longest sequence."""
    if not isinstance(dataset, Dataset):  # a notebook may give others
        return
    if "seq_lengths" in dataset.column_names:  # of rows in which several are packed, each from position 0
        yield from ((row, max(lengths)) for row, lengths in enumerate(values_of(dataset, "seq_lengths")))
        return
    for name in (one for one in ("input_ids", "chosen_ids", "rejected_ids") if one in dataset.column_names):
        yield from ((row, len(ids)) for row, ids in enumerate(values_of(dataset, name)))


class SamplingTrainer(RoleTrainer):
    """A trainer that is evaluated by its responses to held-out prompts.

    Args:
        roles: the shared base. What is learnt is made trainable, alone.
        eval_dataset: held-out prompts with a column `input_ids`.
        reward: scores a rollout: `RewardAdapter`, or any callable of that form.
        metrics: further metrics of a rollout, for evaluation.
        judge: a second reward, for evaluation, which nothing is trained on.
        base_name: name of the base to write into saved adapters.
        callbacks: as in `Trainer`, in place of `Progress`, which is there where none are given; `disable_tqdm` has
            transformers' printer instead.
    """

    collator_type: type[PromptCollator | RatedCollator]
    rollouts_type: type[RoleRollouts]
    control: Any  # set by transformers' Trainer
    last_evaluation: tuple[int, Evaluation] | None = None
    """The last one of `eval_dataset`, and the step whose weights it is of."""

    def __init__(
        self,
        args: TrainingArguments,
        processing_class: PreTrainedTokenizerBase,
        roles: SharedBase,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        *,
        reward: Reward | None = None,
        metrics: Metrics | None = None,
        judge: Reward | None = None,
        base_name: str = "",
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
    ):
        check_tokenizer(processing_class, roles)
        roles.train_roles(*self.learnt_roles)
        if not args.gradient_checkpointing:  # which an earlier trainer may have switched on
            roles.gradient_checkpointing_disable()
        collator = self.collator_type(processing_class.pad_token_id, multiple=LENGTH_MULTIPLE)
        # Not TRL's __init__, which builds an Accelerator without precision, sets no seed, zeroes dropout and
        # changes the model: transformers' own.
        if callbacks is None and not args.disable_tqdm:
            callbacks = [Progress(args.run_name or Path(args.output_dir).name, quiet=not processes.is_main())]
        given = {"processing_class": processing_class, "callbacks": callbacks, "optimizers": optimizers}
        Trainer.__init__(self, roles, args, collator, train_dataset, eval_dataset, **given)
        in_place_of_progress(self, callbacks)
        for one in self.callback_handler.callbacks:
            # It finds its folder when training begins; told before, it would keep to the working directory.
            if isinstance(one, TensorBoardCallback) and one.logging_dir is None:
                one.logging_dir = str(Path(args.output_dir) / default_logdir())
        self.roles, self.reward, self.metrics, self.base_name = roles, reward, metrics, base_name
        self.judge = judge
        # Not the trainer's own region: a notebook's `del trainer` has to be all that holds it.
        self.rollouts: Any = self.rollouts_type(args, processing_class, roles, precision(args, roles))

    @property
    def _known_reward(self) -> Reward:
        if self.reward is None:
            raise ToolkitError("responses cannot be scored: the trainer was made without a reward.")
        return self.reward

    def best_of(self, prompts: Rows, n: int) -> BestOf:
        """n ≥ 1 sampled responses to each prompt, and the one that the reward scores highest; of equals the first."""
        size = self.args.per_device_eval_batch_size
        return best_of(prompts, n, sampler=self.rollouts.sampler(), reward=self._known_reward, batch_size=size)

    def evaluate_rollout(self, dataset: Dataset, **decoding: Any) -> Evaluation:
        """Respond to all prompts of a data set, score and measure. Training's random states are left as they were.

        Args:
            dataset: prompts with a column `input_ids`.
            decoding: `by_q` of Q-learning: False measures the reference, decoded in the same way.

        Raises:
            DataError: there are no prompts.
        """
        if isinstance(dataset, Dataset):  # a notebook's may be set to give tensors
            dataset = dataset.with_format(None)
        handler = self.callback_handler
        handler.eval_dataloader = self.get_eval_dataloader(dataset)

        def predicted() -> None:
            self.control = handler.on_prediction_step(self.args, self.state, self.control)

        measure = self.rollouts.evaluator(self._known_reward, self.metrics, self.judge, **decoding)
        return measure(dataset, after_batch=predicted)

    def evaluate(
        self, eval_dataset: Dataset | None = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Metrics of held-out prompts, without which there is an error, logged under `metric_key_prefix`."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ToolkitError("evaluate needs held-out prompts.", remedy="Give eval_dataset.")
        at_once = self.args.per_device_eval_batch_size * processes.count()
        with ExitStack() as shown:
            for one in self.callback_handler.callbacks:
                if isinstance(one, Progress):
                    shown.enter_context(one.by_hand())
            shown.enter_context(phases.phase("evaluation", math.ceil(len(dataset) / at_once)))
            evaluation = self.evaluate_rollout(dataset)
        named = {f"{metric_key_prefix}_{key}": value for key, value in evaluation.metrics.items()}
        if eval_dataset is None:
            self.last_evaluation = self.step_of_weights, evaluation
            self.evaluated(evaluation.metrics, evaluation.rollout.responses, evaluation.rollout.prompts)
            self._note_metric(named)
        self.log(dict(named))
        stoppers = [one for one in self.callback_handler.callbacks if isinstance(one, EarlyStoppingCallback)]
        counted, stops = [one.early_stopping_patience_counter for one in stoppers], self.control.should_training_stop
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        if not self.is_in_train:  # one by hand is none of those that early stopping waits for
            self.control.should_training_stop = stops
            for one, counter in zip(stoppers, counted, strict=True):
                one.early_stopping_patience_counter = counter
        return named

    @property
    def frozen(self) -> dict[str, str]:
        """By role a digest of the reference's adapter and of those for scores, which training leaves as they are."""
        found = frozen_digests(self.roles)
        return {role: digest for role, digest in found.items() if role == "reference" or scores_for(role)}

    def check_checkpoint(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """As of every trainer; and of the adapters that the run began with and does not train."""
        super().check_checkpoint(checkpoint, state)
        check_frozen(state["own"]["frozen"], self.frozen)

    def predict(self, *arguments: Any, **named: Any) -> Any:
        """transformers', of a model's outputs: refused."""
        wrong = "predict gives what a model says of rows, and this trainer is measured by its responses to prompts."
        raise ToolkitError(wrong, remedy="Take evaluate_rollout(prompts).")

    def evaluated(self, metrics: Mapping[str, float], responses: Sequence[str], prompts: Sequence[str]) -> None:
        """Told of each evaluation of held-out prompts, and of the responses to them."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Held-out prompts in batches, in order."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        collator, size = self.rollouts.sampler().collator, self.args.per_device_eval_batch_size
        return DataLoader(dataset, batch_size=size, collate_fn=collator)
