"""What the rows of a stage come to: lengths, batches and steps."""

import math
from typing import Any

from trl import pack_dataset

from toolkit.recipes.facts import UpdateFacts


def counted_rows(dataset: Any, config: Any) -> Any:
    """The rows of the sft stage as TRL's trainer counts them: packed, or without those cut before their response."""
    if not config.packing:
        cut = slice(config.max_length)
        return dataset.filter(lambda labels: any(label != -100 for label in labels[cut]), input_columns="labels")
    dataset = dataset.select_columns(["input_ids"])
    if config.shuffle_dataset:
        dataset = dataset.shuffle(seed=config.seed)
    return pack_dataset(dataset, config.max_length, config.packing_strategy, {"num_proc": config.dataset_num_proc})


def longest_row(dataset: Any) -> int:
    """Tokens of the longest row in any column of ids."""
    columns = [name for name in ("input_ids", "chosen_ids", "rejected_ids") if name in dataset.column_names]
    return max((len(row) for name in columns for row in dataset[name]), default=0)


def batch_figures(stage: str, config: Any, rows: int) -> dict[str, Any]:
    """Fields of `StageFacts`: batch, batches, steps and update."""
    batch = config.per_device_train_batch_size * config.gradient_accumulation_steps
    if stage != "ppo":
        by_epochs = math.ceil(config.num_train_epochs * math.ceil(rows / batch))
        steps = config.max_steps if config.max_steps > 0 else by_epochs
        return {"batch": batch, "batches": steps, "steps": steps}
    rollout, batch = batch, config.update_batch_size
    updates, mini_batch = config.number_of_updates(rows), batch // config.num_mini_batches
    # TRL's own loop takes one step in each pass, whatever num_mini_batches (huggingface/trl#5645).
    steps = config.num_ppo_epochs * (config.num_mini_batches if config.loop == "toolkit" else 1)
    micro_batches = math.ceil(mini_batch / config.per_device_train_batch_size)
    update = UpdateFacts(config.num_ppo_epochs, config.num_mini_batches, mini_batch, micro_batches, steps, rollout)
    return {"batch": batch, "batches": updates, "steps": updates * steps, "update": update}
