"""What the policy says to held-out prompts, and what it is worth."""

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch import Tensor

from toolkit.checkpoints import kept_random_states
from toolkit.data import Rollout, concatenate
from toolkit.errors import DataError, ToolkitError
from toolkit.functional import kl_k1, standard_error
from toolkit.rewards import total_scores

if TYPE_CHECKING:
    from toolkit.trainers.ppo import PPOTrainer


class EvaluatesRollouts:
    """transformers' `evaluate` for a trainer that answers prompts: comes first among its bases."""

    # Of the trainer.
    eval_dataset: Any
    args: Any
    state: Any
    control: Any
    callback_handler: Any
    log: Any
    evaluate_rollout: Any

    def evaluate(
        self, eval_dataset: Dataset | None = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Metrics of held-out prompts, logged under `metric_key_prefix`.

        Raises:
            ToolkitError: there are no held-out prompts.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ToolkitError("evaluate needs held-out prompts: give eval_dataset.")
        metrics, _, _ = self.evaluate_rollout(dataset)
        named = {f"{metric_key_prefix}_{key}": value for key, value in metrics.items()}
        self.log(dict(named))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named


@contextmanager
def _kept(reward: Any) -> Iterator[None]:
    """What is measured leaves no trace in what is trained on, as in a reward's running mean."""
    state = None if reward is None else copy.deepcopy(reward.state_dict())
    try:
        yield
    finally:
        if reward is not None:
            reward.load_state_dict(state)


def evaluate_rollout(trainer: "PPOTrainer", dataset: Dataset) -> tuple[dict[str, float], Rollout, Tensor]:
    """Answer, score and measure all prompts of a data set.

    Training's random states are left as they were, and so is a reward that changes as it goes.

    Args:
        trainer: answers by `eval_do_sample`, `per_device_eval_batch_size` prompts at a time, with its own seed.
        dataset: prompts with a column `input_ids`.

    Returns:
        metrics: `score`, `score_se`, `score/<part>` of a weighted sum, `kl` (mean over responses of the sum of
        log-ratios to the reference; an estimate of the KL divergence where responses are sampled), `length`,
        `eos_share`, and the metrics given to the constructor; then the rollout and its scores (N,).

    Raises:
        DataError: there are no prompts.
    """
    if len(dataset) == 0:
        raise DataError("there are no held-out prompts to measure: see data.validation_size and data.test_size.")
    rollouts, scores, kls = [], [], []
    parts: dict[str, list[Tensor]] = defaultdict(list)
    with kept_random_states(), _kept(trainer.changing_reward), torch.no_grad():
        loader = trainer.get_eval_dataloader(dataset)
        batches = iter(loader)  # which draws a number
        trainer.callback_handler.eval_dataloader = loader
        torch.manual_seed(trainer.args.seed)
        for batch in batches:
            rollout = trainer.generate(batch, do_sample=trainer.args.eval_do_sample)
            logprobs, ref_logprobs, *_ = trainer.read_roles(rollout, values=False)
            rollouts.append(rollout)
            scores.append(total_scores(trainer.score(batch, rollout)))
            kls.append(kl_k1(logprobs, ref_logprobs).sum(dim=1))  # both are 0 outside the mask
            for name, part in trainer.score_parts().items():
                parts[f"score/{name}"].append(part)
            handler = trainer.callback_handler
            trainer.control = handler.on_prediction_step(trainer.args, trainer.state, trainer.control)
    whole, all_scores = concatenate(rollouts), torch.cat(scores)
    metrics = {
        "score": float(all_scores.mean()),
        "score_se": standard_error(all_scores),
        **{name: float(torch.cat(found).mean()) for name, found in parts.items()},
        "kl": float(torch.cat(kls).mean()),
        "length": sum(whole.lengths) / len(whole),
        "eos_share": sum(whole.ended) / len(whole),
        **(trainer.metrics(whole) if trainer.metrics else {}),
    }
    return metrics, whole, all_scores
