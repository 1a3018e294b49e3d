"""PPO's trainer without its loop: set-up, optimizer, saving; and what remains of TRL's trainer."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import DataLoader, RandomSampler
from transformers import EarlyStoppingCallback, PreTrainedTokenizerBase, TrainerState

from toolkit import processes
from toolkit.checkpoints import read_state
from toolkit.data import PlacedDataLoader, PromptCollator, parts_of, values_of
from toolkit.errors import ConfigError, DataError, ToolkitError
from toolkit.models import SharedBase
from toolkit.rewards import Reward
from toolkit.sampling import check_room, measured_with
from toolkit.trainers import self_checks
from toolkit.trainers.common import SamplingTrainer
from toolkit.trainers.model_card import write_model_card
from toolkit.trainers.objective import ScoreShaper
from toolkit.trainers.ppo_config import GREEDY_ROLLOUTS, PPOConfig
from toolkit.trainers.rollouts import Rollouts
from toolkit.trainers.same_run import of_this_version, trainer_state
from toolkit.trainers.trainer_internals import by_own_accelerate
from toolkit.trainers.trl_compat import TRLPPOTrainer


@dataclass
class _State(TrainerState):
    episode: int = 0
    """Responses that were answered and scored, of updates that were not passed over."""


class SharedBaseTrainer(SamplingTrainer, TRLPPOTrainer):
    """PPO's trainer, whose models are roles of one `SharedBase`: TRL's own class, where TRL has one."""

    learnt_roles = "policy", "value"
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
        # What a data set of a notebook is set to give, such as tensors, is none of its rows.
        train_dataset = train_dataset.with_format(None)
        eval_dataset = None if eval_dataset is None else eval_dataset.with_format(None)
        self_checks.check_dataset(train_dataset, args.rollout_batch_size)
        self_checks.check_settings(args, roles, eval_dataset)
        super().__init__(args, processing_class, roles, train_dataset, eval_dataset, reward=reward, **named)
        for prompts in (train_dataset, eval_dataset):  # found when one is drawn, it would end a run for good
            if prompts is not None and len(prompts):
                self._check_room(prompts)
        self.saved_roles = roles.trained_roles
        if args.decoding["graphs"]:
            self_checks.check_device_records(roles.device)
            self_checks.check_graphs(roles, args, max(map(len, values_of(train_dataset, "input_ids"))))
        if args.decoding["merged"]:  # before anything is sampled, and before the first copies of weights
            with self.compute_loss_context_manager():
                self_checks.check_room_to_merge(roles)
        if args.early_stopping_patience is not None:
            self.add_callback(EarlyStoppingCallback(args.early_stopping_patience))
        self.score_shaper = ScoreShaper(args)
        self.kl_coef = args.kl_coef  # the adaptive controller changes it where kl_target asks for that, or a callback
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
        self._ready = self._ratio_checked = self._followed = self._told_of_whole_scores = False
        # Those whose gradient has not been looked at, in a step that was taken.
        self._unchecked_roles = {role for role in self.saved_roles if role != "value" or args.vf_coef > 0}

    # ------------------------------------------------------------------ set-up and self-checks

    def _check_room(self, prompts: Dataset) -> None:
        """The base knows all prompts, and there is room for responses to them."""
        sampler, fewest = self.rollouts.sampler(), self.args.min_response_length
        check_room(map(len, values_of(prompts, "input_ids")), self.args.max_length, fewest)
        room = min(min(sampler.limits(some)) for some in parts_of(prompts, "input_ids"))
        if room < fewest:
            wrong = f"{fewest} is more than the {room} tokens that the base's positions leave after the longest prompt."
            remedy = f"Shorten the prompts by {fewest - room} tokens, or lower it."
            raise DataError(wrong, field="min_response_length", remedy=remedy)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """An optimizer over the trained roles, whichever of them happens to be active.

        `spec.trial` calls it on a trainer that was not made, and has only what is read here.
        """
        if self.optimizer is None:
            kind, arguments = self.get_optimizer_cls_and_kwargs(self.args, self.roles)
            made = kind(list(self._parameter_groups()), **arguments)
            of_value, defaults = self.args.value_optimizer, made.defaults
            unknown = of_value.keys() - defaults.keys()
            if "lion" in self.args.optim.value:  # bitsandbytes' has an eps that it does not read
                unknown |= of_value.keys() & {"eps"}
            if unknown:
                wrong = f"{self.args.optim.value} has no {', '.join(sorted(unknown))}, which the settings of the value "
                raise ConfigError(
                    f"{wrong}role (value_…) name.", field="optim", remedy="Leave those out, or take adamw_torch."
                )
            for name, value in of_value.items():
                if np.shape(value) != np.shape(defaults[name]):  # of Adafactor's eps, and of ademamix's betas
                    wrong = f"{self.args.optim.value} has {name} {defaults[name]}, and value_… would give it {value}."
                    raise ConfigError(wrong, field="optim", remedy="Leave that out, or take adamw_torch.")
            self.optimizer = made
        return self.optimizer

    def _parameter_groups(self) -> Iterator[dict[str, Any]]:
        """The parameters of each trained role; where weights decay, biases and those of norms apart, which do not."""
        decays = set(self.get_decay_parameter_names(self.roles))
        exempt = {id(p) for name, p in self.roles.named_parameters() if name not in decays}
        for role in self.roles.trained_roles:
            group = {"weight_decay": self.args.weight_decay, "role": role}
            group |= self.args.value_optimizer if role == "value" else {}
            parameters = self.roles.parameters_of(role)
            apart = [p for p in parameters if id(p) in exempt] if group["weight_decay"] else []
            yield {"params": [p for p in parameters if not any(p is one for one in apart)], **group}
            if apart:
                yield {"params": apart, **group, "weight_decay": 0.0}

    @property
    def _learning_rate(self) -> float:
        """The policy's in the next update: of the optimizer's groups those of the value role may be the first."""
        one = self.roles.parameters_of("policy")[0]  # an optimizer that was given names no roles
        groups = self.optimizer.param_groups
        return next(float(group["lr"]) for group in groups if any(one is other for other in group["params"]))

    @by_own_accelerate
    def _prepare_training(self) -> None:
        self.take_over()
        if self._ready:
            return
        if not self.args.rollout_do_sample:
            warnings.warn(GREEDY_ROLLOUTS.text(), stacklevel=2)
        with processes.agreed():  # an error of all is told once
            if self.metrics is None and "/" not in (self._best_by or ""):  # those, and parts of a sum, nobody knows
                known = (*measured_with("score", *(["judge"] if self.judge else [])), "beyond_share")
                self.check_best_by([f"eval_{name}" for name in known])
            self.create_optimizer()
            self.create_scheduler(num_training_steps=self.total_updates, optimizer=self.optimizer)
            self_checks.check_in_optimizer(self.roles, self.optimizer)
            self.optimizer = self.accelerator.prepare(self.optimizer)
            self._check_rollouts()
        self._ready = True

    def _check_rollouts(self) -> None:
        prompt, pad = self.train_dataset[0]["input_ids"], self.processing_class.pad_token_id
        autocast, decoding = self.compute_loss_context_manager, self.args.decoding
        self_checks.check_rollout_uses_policy(self.roles, prompt, pad_token_id=pad, autocast=autocast, **decoding)

    # ------------------------------------------------------------------ saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir)
        if not _internal_call and processes.is_main():
            folder = Path(output_dir or self.args.output_dir)
            write_model_card(folder, self.roles, base_name=self.base_name)

    def save_checkpoint(self) -> Path:
        """As of every trainer, also before the first update."""
        self._prepare_training()
        return super().save_checkpoint()

    @by_own_accelerate
    def load_checkpoint(self, folder: str | Path) -> dict[str, Any]:
        """Put what `save_checkpoint` wrote into this trainer, for a loop of your own, and return the whole state.

        Raises:
            CheckpointError: it is damaged, holds weights alone, or is of another run.
        """
        checkpoint = self._whole_checkpoint(folder)
        self._prepare_training()
        state = read_state(checkpoint)
        with processes.agreed(), of_this_version(checkpoint):  # an error of all is told once
            self.check_checkpoint(checkpoint, state)  # before anything is changed
        noted = trainer_state(type(self.state), checkpoint)
        self.load_saved(checkpoint)
        self.state = noted
        self.load_callbacks()
        self.restore_optimizer(checkpoint, state)
        self.restore_progress(checkpoint, state)
        return state

    # ------------------------------------------------------------------ what remains of TRL's methods

    def null_ref_context(self) -> Any:
        """TRL's, of models that a shared base does not have: refused."""
        raise _of_models("null_ref_context", 'with trainer.roles.role("reference")')

    def generate_completions(self, sampling: bool = False) -> Any:
        """TRL's, of models that a shared base does not have: refused."""
        raise _of_models("generate_completions", "trainer.evaluate(), which samples, scores and logs")

    def create_model_card(self, *arguments: Any, **named: Any) -> None:
        write_model_card(Path(self.args.output_dir), self.roles, base_name=self.base_name)

    def get_train_dataloader(self) -> DataLoader:
        """A look at the prompts, pass after pass the same; for a loop of your own take `batches()`."""
        return self.dataloader.look()


def _of_models(name: str, instead: str) -> ToolkitError:
    wrong = f"{name} of TRL's PPOTrainer reads models of their own, and here all roles are on one base."
    return ToolkitError(wrong, remedy=f"Take {instead}.")
