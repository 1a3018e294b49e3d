"""The steps of transformers' own loop, passed over where they are not finite."""

from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from toolkit import phases, processes
from toolkit.errors import SelfCheckError
from toolkit.trainers.not_finite import MOST_IN_A_ROW, Skipped, save_broken
from toolkit.trainers.share import DividedSteps


class GuardedSteps(DividedSteps):
    """A `Trainer` whose steps leave no number in the weights that is not finite."""

    _in_hand: dict[str, Any]  # the micro-batch that is computed

    @cached_property
    def skipped(self) -> Skipped:
        """Optimizer steps that were passed over, since something in them was not finite."""
        return Skipped()

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        self._in_hand = inputs
        return super().training_step(model, inputs, num_items_in_batch)

    def skip(self, why: str) -> None:
        """Count an optimizer step that is not taken; a SelfCheckError if it is one too many in a row."""
        if self.skipped.total == 0:
            phases.tell(
                f"WARNING at step {self.state.global_step + 1}: {why}; such steps are passed over, and counted."
            )
        if self.skipped.add():
            self.stop_broken(why, tensors=self._in_hand)

    def stop_broken(self, why: str, **batch: Any) -> None:
        """End a run in which too many steps in a row are not finite; the last batch is written beside its checkpoints.

        Raises: SelfCheckError.
        """
        saved = processes.by_main(partial(save_broken, Path(self.args.output_dir), **batch))
        wrong = f"{why} at step {self.state.global_step + 1}, and {MOST_IN_A_ROW} optimizer steps in a row were not "
        wrong += "finite. None of them has reached the weights."
        remedy = "Go on from the last checkpoint with a lower learning_rate, or with a base in float32 if that does not"
        raise SelfCheckError(wrong, remedy=f"{remedy} help. The batch is in {saved}.")

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        """As in `Trainer`, with the number of steps that were passed over, if any were."""
        if self.skipped.total:
            logs["skipped_steps"] = float(self.skipped.total)  # the same object: TRL adds to it what it has measured
        super().log(logs, *arguments, **named)
