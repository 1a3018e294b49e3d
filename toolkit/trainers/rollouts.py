"""From prompts to what an update is made from: answered, scored, gathered, filtered."""

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig

from toolkit.data import Rollout, concatenate, rollout_of
from toolkit.models import release_memory
from toolkit.rewards import Scores, concatenate_scores
from toolkit.trainers.ppo_config import PPOConfig
from toolkit.trainers.self_checks import check_room

if TYPE_CHECKING:
    from toolkit.trainers.ppo import PPOTrainer

NOTHING_LEFT = (
    "all responses of an update were shorter than ppo.min_response_length and dropped, so that it changed nothing: "
    "lower that, or see in samples what the policy says."
)


def answer(trainer: "PPOTrainer", batch: dict[str, Any], *, do_sample: bool) -> Rollout:
    """What the policy says to a batch of prompts.

    Args:
        trainer: its policy answers, by its temperature and limits.
        batch: as `PromptCollator` makes it.
        do_sample: False decodes greedily.

    Raises:
        DataError: `ppo.max_length` leaves a prompt no room for a response.
    """
    args, tokenizer, roles = trainer.args, trainer.processing_class, trainer.roles
    limits = response_limits(args, [len(ids) for ids in batch["prompt_ids"]])
    config = GenerationConfig(
        max_new_tokens=max(limits),
        do_sample=do_sample,
        # The whole distribution is sampled, which is what the log-probabilities of the update are of.
        **({"temperature": args.temperature, "top_k": 0, "top_p": 1.0} if do_sample else {}),
        eos_token_id=trainer.stop_token_ids,
        pad_token_id=tokenizer.pad_token_id,
    )
    ids, mask = (batch[name].to(roles.device) for name in ("input_ids", "attention_mask"))
    with roles.role("policy"), trainer.compute_loss_context_manager():
        output = roles.generate(ids, mask, config)
    release_memory()
    return rollout_of(batch, output.tolist(), tokenizer=tokenizer, stop_token_ids=trainer.stop_token_ids, limits=limits)


def response_limits(args: PPOConfig, prompt_lengths: list[int]) -> list[int]:
    """How many tokens each response may have: `response_length`, and with its prompt no more than `max_length`.

    Raises:
        DataError: a prompt leaves no room for one.
    """
    if args.max_length is None:
        return [args.response_length] * len(prompt_lengths)
    check_room(prompt_lengths, args.max_length)
    return [min(args.response_length, args.max_length - length) for length in prompt_lengths]


def kept_rows(args: PPOConfig, rollout: Rollout) -> list[int]:
    """Rows that are trained on: all, or with `drop_short_responses` those of at least `min_response_length` tokens."""
    lengths = enumerate(rollout.lengths)
    return [row for row, length in lengths if not args.drop_short_responses or length >= args.min_response_length]


class Gathered(NamedTuple):
    """What an update is made from: `rollouts_per_update` batches of prompts, answered and scored."""

    batch: dict[str, Any]
    """Of all prompts, as `PromptCollator` makes one."""
    rollout: Rollout
    scores: Scores
    parts: dict[str, Tensor]
    """What each part of a weighted sum gave, (B,) each."""
    rollout_seconds: float
    score_seconds: float


def gather(trainer: Any) -> Gathered:
    """Draw, answer and score what the next update of a PPO trainer needs."""
    batches, rollouts, scores, parts, seconds = [], [], [], [], [0.0, 0.0]
    for left in reversed(range(trainer.args.rollouts_per_update)):
        batches.append(trainer.next_batch())
        started = time.perf_counter()
        rollouts.append(trainer.generate(batches[-1]))
        answered = time.perf_counter()
        scores.append(trainer.score(batches[-1], rollouts[-1]))
        parts.append(trainer.score_parts())
        seconds[0] += answered - started
        seconds[1] += time.perf_counter() - answered
        if left:
            trainer.after_rollout()
    if len(batches) == 1:
        return Gathered(batches[0], rollouts[0], scores[0], parts[0], *seconds)
    whole = concatenate(rollouts)
    rows = [{"input_ids": ids} | {k: v[i] for k, v in whole.columns.items()} for i, ids in enumerate(whole.prompt_ids)]
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return Gathered(trainer.data_collator(rows), whole, concatenate_scores(scores), joined, *seconds)
