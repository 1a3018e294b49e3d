"""A step of sft or of the reward stage, by the trainer that takes it: what is counted is what runs."""

from contextlib import nullcontext
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

from accelerate.utils.operations import convert_outputs_to_fp32
from datasets import Dataset
from transformers import TrainingArguments

from toolkit.checkpoints import kept_random_states
from toolkit.costs.counted import Counted, as_on_a_card
from toolkit.costs.passes import TOKEN, Phase, learning, of_all_layers, unpacked
from toolkit.data import Kind, doubling
from toolkit.errors import within
from toolkit.models import SharedBase, planned_for_cpu
from toolkit.trainers.common import made_by_trl, precision
from toolkit.trainers.reward import reward_trainer
from toolkit.trainers.sft import sft_trainer
from toolkit.trainers.trainer_internals import trainers_kept

SUPERVISED = ("sft", "reward")


def counted_step(
    kind: Kind, roles: SharedBase, args: TrainingArguments, length: int, held_out: int, *, on_cpu: bool = False
) -> tuple[Phase, Phase]:
    """The micro-batches of an optimizer step, and a batch of the evaluation, on roles without numbers.

    Args:
        kind: of the stage's data: "demonstrations" for sft, "pairs" or "labelled" for a reward.
        roles: as `take_shape` leaves them, with the role that the stage trains.
        args: of the stage.
        length: tokens of all rows, which are as long as they can be; `held_out` of those of the evaluation.
        on_cpu: as for `CountedUpdate`.
    """
    sft = kind == "demonstrations"
    stage = "sft" if sft else "reward"

    # Packed rows of several are full, and stand in one line with rows beside them.
    in_line = sft and args.packing and (args.padding_free or args.packing_strategy != "wrapped")

    def rows_of(number: int, tokens: int) -> list[dict[str, Any]]:
        ids = [TOKEN] * tokens
        if kind == "pairs":
            return [{"chosen_ids": ids, "rejected_ids": ids}] * number
        return [{"input_ids": ids, "labels": ids if sft else 0}] * number

    parts = 2 if in_line else 1
    rows = rows_of(parts * args.per_device_train_batch_size, max(1, length // parts))
    evaluated = rows_of(parts * args.per_device_eval_batch_size, max(1, held_out // parts))
    steps = args.gradient_accumulation_steps
    counted = Counted(roles.config.get_text_config().vocab_size)
    with trainers_kept(), kept_random_states(), TemporaryDirectory() as folder:
        # Nothing is written, rows need no cutting, and autocast is given: accelerate has none in float16 on a CPU.
        changes: dict[str, Any] = {"output_dir": folder, "report_to": "none", "use_cpu": True, "bf16": False}
        # And activations are counted, wherever they are kept between the passes, which a build without CUDA cannot do.
        # Liger's kernels read what has no numbers.
        changes |= {"push_to_hub": False, "activation_offloading": False, "use_liger_kernel": False}
        changes |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "packing": False} if sft else {}
        changes |= {"padding_free": True, "max_length": None} if in_line else {}
        make: Any = sft_trainer if sft else reward_trainer
        # Nobody reads the ids, and so a plan needs no file of a tokenizer.
        given = replace(args, fp16=False, **changes), doubling.tokenizer(), roles
        with within(stage), made_by_trl():
            trainer = make(*given, Dataset.from_list(rows), Dataset.from_list(evaluated))
        trainer.compute_loss_context_manager = precision(args, roles)
        trainer.current_gradient_accumulation_steps = steps
        if args.bf16 or args.fp16:  # as `Accelerator.prepare_model` does
            trainer.model.forward = convert_outputs_to_fp32(trainer.model.forward)

        def count() -> list[Phase]:
            with unpacked(counted, roles, on_cpu=on_cpu):
                with learning(counted, roles, args, further=steps > 1, copied=not on_cpu) as costs:
                    trainer.training_step(trainer.model, trainer.data_collator(rows))
                trainer.model.eval()
                with counted.phase() as evaluation:
                    trainer.prediction_step(trainer.model, trainer.data_collator(evaluated), True)
            return [Phase(stage, costs, steps), Phase(f"{stage} evaluation", evaluation, 0)]

        with roles.role("policy") if sft else nullcontext(), planned_for_cpu() if on_cpu else as_on_a_card():
            step, evaluation = of_all_layers(roles, count, args)
        vars(trainer.model).pop("forward", None)
    return step, evaluation
