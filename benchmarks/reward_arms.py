"""One arm of `benchmarks.reward_parity` in a process of its own: a reward is trained, then it judges held-out pairs.

    python -m benchmarks.reward_arms --arm ours-nf4 --job '{…}' --output answer.json

All arms of a seed start as the same function: each adapter's B is zero, its A and the head come from the seed and the
name of their place. They get the same token ids in the same order, and but for the loss the same settings of
`trl.RewardTrainer`.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase
from trl import RewardConfig as TRLRewardConfig
from trl import RewardTrainer as TRLRewardTrainer

from benchmarks.start import lora, nf4, seed_adapter, seed_head
from toolkit.data import Preferences, pad_rows
from toolkit.models import SharedBase, load_base, load_tokenizer
from toolkit.reports import peak_memory_gb
from toolkit.rewards import read_sequences
from toolkit.trainers.reward import RewardConfig, reward_trainer


@dataclass(frozen=True)
class Job:
    """What an arm is to do.

    Args:
        model: folder of the checkpoint.
        train: file of pairs. The first that fit are trained on, the others are held out.
        validation: file of pairs, all held out.
        seed: of the order of the pairs and of the start.
        pairs: number of training pairs.
        batch_size: pairs of a step.
        learning_rate: at its highest.
        max_prompt_length: tokens.
        max_response_length: tokens.
    """

    model: str
    train: str
    validation: str
    seed: int
    pairs: int = 192
    batch_size: int = 8
    learning_rate: float = 4e-4
    max_prompt_length: int = 80
    max_response_length: int = 64


@dataclass(frozen=True)
class Pairs:
    """Tokenised pairs to train on and others to judge: none of the latter has the prompt of one of the former."""

    train: Dataset
    held_out: Dataset


def split_pairs(job: Job, tokenizer: PreTrainedTokenizerBase) -> Pairs:
    """The pairs of a job; the same for all seeds and arms."""
    task = Preferences(
        tokenizer,
        job.train,
        job.validation,
        max_prompt_length=job.max_prompt_length,
        max_response_length=job.max_response_length,
        system="",
    )
    rows: list[dict[str, list[int]]] = []
    prompts: list[tuple[int, ...]] = []
    for split in ("train", "validation"):
        rows += task.pairs(split).select_columns(["chosen_ids", "rejected_ids"]).to_list()
        for shown in task.demonstrations(split):
            prompts.append(tuple(shown["input_ids"][: shown["labels"].count(-100)]))
    seen = set(prompts[: job.pairs])
    held_out = [row for row, prompt in zip(rows[job.pairs :], prompts[job.pairs :], strict=True) if prompt not in seen]
    return Pairs(Dataset.from_list(rows[: job.pairs]), Dataset.from_list(held_out))


def settings(job: Job, folder: str) -> dict[str, Any]:
    """Arguments of `RewardConfig`, the same for all arms."""
    return {
        "output_dir": folder,
        "seed": job.seed,
        "num_train_epochs": 1,
        "per_device_train_batch_size": job.batch_size,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 4,
        "max_length": None,
        "pad_to_multiple_of": 8,
        "gradient_checkpointing": False,
        "bf16": True,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 4,
        "disable_tqdm": True,
    }


def _judged(trainer: Any, held_out: Dataset, scores: Callable[[Sequence[Sequence[int]]], Tensor]) -> dict[str, Any]:
    """Trains, and then judges pairs by the scores (N, 1) of token ids."""
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    with trainer.compute_loss_context_manager():
        margins = (scores(held_out["chosen_ids"]) - scores(held_out["rejected_ids"])).squeeze(1)
    return {"margins": [round(margin, 6) for margin in margins.tolist()], "seconds": seconds, "losses": losses}


def ours(
    job: Job,
    pairs: Pairs,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    *,
    loss: Literal["bradley_terry", "token_level"] = "bradley_terry",
) -> dict[str, Any]:
    """Our reward role on the NF4 base."""
    roles = SharedBase(load_base(job.model, quantization=nf4(), dtype="bfloat16"))
    roles.add_role("reward", lora())
    own = [(name.replace(".reward.", "."), p) for name, p in roles.model.named_parameters() if ".reward." in name]
    seed_adapter(own, f"reward {job.seed}")
    seed_head(roles.head("reward").weight, f"reward {job.seed}")
    args = RewardConfig(**settings(job, folder), loss=loss)
    trainer = reward_trainer(args, tokenizer, roles, pairs.train, callbacks=[])
    scores = partial(read_sequences, roles, pad_token_id=tokenizer.pad_token_id, batch_size=job.batch_size)
    return _judged(trainer, pairs.held_out, scores)


@torch.no_grad()
def _scores(model: Any, rows: Sequence[Sequence[int]], *, pad_token_id: int, batch_size: int) -> Tensor:
    model.eval()
    scores = torch.zeros(len(rows), 1)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for start in range(0, len(rows), batch_size):
        part = order[start : start + batch_size]
        ids, mask = pad_rows([rows[i] for i in part], pad_token_id=pad_token_id, side="right", multiple=8)
        scores[part] = model(input_ids=ids, attention_mask=mask).logits.float()
    return scores


def plain_trl(job: Job, pairs: Pairs, tokenizer: PreTrainedTokenizerBase, folder: str) -> dict[str, Any]:
    """`trl.RewardTrainer` with a PEFT classifier on the bf16 base, as its users have it."""
    model = AutoModelForSequenceClassification.from_pretrained(job.model, num_labels=1, dtype=torch.bfloat16)
    model = get_peft_model(model, lora("SEQ_CLS"))
    seed_adapter(model.named_parameters(), f"reward {job.seed}")
    for name, parameter in model.named_parameters():
        if ".score." in name:  # the original of the head, and PEFT's trained copy of it
            seed_head(parameter, f"reward {job.seed}")
    trainer = TRLRewardTrainer(
        model=model,
        args=TRLRewardConfig(**settings(job, folder)),
        train_dataset=pairs.train,
        processing_class=tokenizer,
    )
    scores = partial(_scores, model, pad_token_id=tokenizer.pad_token_id, batch_size=job.batch_size)
    return _judged(trainer, pairs.held_out, scores)


ARMS: dict[str, Callable[[Job, Pairs, PreTrainedTokenizerBase, str], dict[str, Any]]] = {
    "trl-bf16": plain_trl,
    "ours-nf4": ours,
    "ours-nf4-token-level": partial(ours, loss="token_level"),
}


def run_arm(arm: str, job: Job) -> dict[str, Any]:
    """Train one arm and judge the held-out pairs.

    Returns:
        `margins` (score of chosen less that of rejected, one a held-out pair), `losses` and `seconds` of training,
        `memory_gb`.
    """
    tokenizer = load_tokenizer(job.model)
    with tempfile.TemporaryDirectory() as folder:
        found = ARMS[arm](job, split_pairs(job, tokenizer), tokenizer, folder)
    return {"arm": arm, "seed": job.seed, **found, "memory_gb": peak_memory_gb()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--job", type=lambda text: Job(**json.loads(text)), required=True, help="as JSON")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    args.output.write_text(json.dumps(run_arm(args.arm, args.job)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
