"""One response to each prompt of a batch."""

from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from toolkit.data import Rollout
from toolkit.models import release_memory
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
    response_ids, ended = [], []
    # All rows go on to the longest limit of the batch: what a row says before its own does not depend on what follows.
    for row, limit in zip(output.tolist(), limits, strict=True):
        own = row[:limit]
        stop = next((i + 1 for i, token in enumerate(own) if token in trainer.stop_token_ids), 0)
        response_ids.append(own[:stop] if stop else own)
        ended.append(bool(stop))
    return Rollout(
        prompts=tokenizer.batch_decode(batch["prompt_ids"]),
        responses=tokenizer.batch_decode(response_ids, skip_special_tokens=True),
        prompt_ids=batch["prompt_ids"],
        response_ids=response_ids,
        ended=ended,
        columns=batch["columns"],
    )


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
