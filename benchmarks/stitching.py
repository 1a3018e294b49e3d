"""Stitching: the best answer is in no single response of the data, but in parts of several.

    python -m benchmarks.stitching

Each of eight questions has logged answers, and answers that were logged from the middle on. From the start the logs
say `m x` (0.2) or `n k` (0.5). From `m` on they say `p x` (0.1) or `x y` (0.3). From `m p` on they say mostly `x` (0),
and once `g` (1). Nobody ever answered `m p g`, which is worth 1. Behaviour cloning imitates what is frequent, filtered
cloning the best response to each prompt, which is `n k`. Q-learning has to find `m p g` by itself: the value of `g`
goes back over `p` to `m`.

All three learn on one tiny random model with the same adapter, from the same rows, in as many steps.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase, set_seed

from benchmarks.records import RESULTS
from toolkit.data import doubling
from toolkit.functional import masked_mean
from toolkit.models import QBound, Sequences, SharedBase, add_q_roles, response_logprobs
from toolkit.reports import write_json
from toolkit.sampling import Sampler
from toolkit.trainers.q_config import QConfig
from toolkit.trainers.q_learning import QTrainer

QUESTIONS, BATCH, LEARNING_RATE = 8, 48, 5e-3
EOS = 2
RESULT = RESULTS / "stitching.json"


class Task:
    """The questions, the logs and what each whole answer is worth."""

    def __init__(self, seed: int, questions: int = QUESTIONS):
        generator = torch.Generator().manual_seed(seed)
        self.rows: list[dict[str, Any]] = []
        self.prompts: list[list[int]] = []
        self.worth: list[dict[tuple[int, ...], float]] = []
        starts = torch.randperm(100, generator=generator).tolist()
        for question in range(questions):
            prompt = [1, 4 + starts[question] // 10, 4 + starts[question] % 10]
            m, n, p, g, x, y, k = (torch.randperm(20, generator=generator)[:7] + 16).tolist()
            self.prompts.append(prompt)
            self.worth.append({(m, x): 0.2, (n, k): 0.5, (m, p, x): 0.1, (m, x, y): 0.3, (m, p, g): 1.0})
            self._log(prompt, [m, x], 0.2, times=4)
            self._log(prompt, [n, k], 0.5, times=3)
            self._log([*prompt, m], [p, x], 0.1, times=3)
            self._log([*prompt, m], [x, y], 0.3, times=3)
            self._log([*prompt, m, p], [x], 0.0, times=4)
            self._log([*prompt, m, p], [g], 1.0, times=1)

    def _log(self, prompt: list[int], answer: list[int], reward: float, *, times: int) -> None:
        rewards = [None] * len(answer) + [reward]
        row = {"prompt_ids": prompt, "response_ids": [*answer, EOS], "rewards": rewards, "ended": True}
        self.rows += [row] * times

    def measure(self, answers: Sequence[Sequence[int]]) -> dict[str, float]:
        """Mean worth, and the share of best answers; an answer that is no answer is worth 0."""
        found = [
            worth.get(tuple(answer[: answer.index(EOS)]) if EOS in answer else (), 0.0)
            for worth, answer in zip(self.worth, map(list, answers), strict=True)
        ]
        return {"worth": sum(found) / len(found), "best_share": sum(value == 1.0 for value in found) / len(found)}

    def filtered(self) -> list[dict[str, Any]]:
        """The best logged responses to each prompt."""
        best: dict[tuple[int, ...], float] = {}
        for row in self.rows:
            key = tuple(row["prompt_ids"])
            best[key] = max(best.get(key, 0.0), row["rewards"][-1])
        return [row for row in self.rows if row["rewards"][-1] == best[tuple(row["prompt_ids"])]]


def _base(tokenizer: PreTrainedTokenizerBase) -> SharedBase:
    set_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=64, n_layer=2, n_head=4, n_positions=16, initializer_range=0.2,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=EOS, pad_token_id=0,
    )  # fmt: skip
    return SharedBase(GPT2LMHeadModel(config).eval())


def _adapter() -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")


def clone(task: Task, rows: list[dict[str, Any]], steps: int) -> dict[str, float]:
    """Maximum likelihood of the responses, then greedy answers."""
    base = _base(doubling.tokenizer())
    base.add_role("policy", _adapter())
    base.train_roles("policy")
    optimizer = torch.optim.AdamW(base.parameters_of("policy"), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    for _ in range(steps):
        picked = [rows[i] for i in torch.randperm(len(rows))[:BATCH].tolist()]
        prompts, responses = ([row[name] for row in picked] for name in ("prompt_ids", "response_ids"))
        sequences = Sequences.from_ids(prompts, responses, pad_token_id=0)
        with base.role("policy"):
            loss = -masked_mean(response_logprobs(base, sequences), sequences.response_mask)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return _answered(task, base, "policy")


def learn_q(task: Task, steps: int) -> dict[str, float]:
    """The q stage on the same rows, then greedy answers."""
    tokenizer = doubling.tokenizer()
    base = _base(tokenizer)
    add_q_roles(base, _adapter(), bound=QBound(lowest=0.0, highest=1.0))
    with tempfile.TemporaryDirectory() as folder:
        args = QConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=LEARNING_RATE,
            bound="sigmoid", target_decay=0.9, conservative_coef=0.5, save_strategy="no", report_to="none",
            logging_strategy="no", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        QTrainer(args, tokenizer, base, Dataset.from_list(task.rows), callbacks=[]).train()
    return _answered(task, base, "q")


def _answered(task: Task, base: SharedBase, role: str) -> dict[str, float]:
    """What the greedy answers of a role are worth."""
    sampler = Sampler(base, doubling.tokenizer(), role=role, response_length=5, temperature=None)
    return task.measure(sampler(sampler.collator([{"input_ids": prompt} for prompt in task.prompts])).response_ids)


def run(seed: int, steps: int, questions: int = QUESTIONS) -> dict[str, dict[str, float]]:
    """What the three reach, and the best that any single response to a question is worth."""
    task = Task(seed, questions)
    single = [row["rewards"][-1] for row in task.rows if row["prompt_ids"] in task.prompts]
    return {
        "best_single_response": {"worth": max(single), "best_share": 0.0},
        "behaviour_cloning": clone(task, task.rows, steps),
        "filtered_cloning": clone(task, task.filtered(), steps),
        "q_learning": learn_q(task, steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Q-learning against cloning where the best answer is in parts.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    seeds = {str(seed): run(seed, arguments.steps) for seed in arguments.seeds}
    result = {"questions": QUESTIONS, "steps": arguments.steps, "seeds": seeds}
    write_json(arguments.output, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
