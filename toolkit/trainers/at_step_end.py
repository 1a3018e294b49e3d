"""What transformers' events ask for at the end of a step, in every process the same, and a stop that loses nothing."""

import signal
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import SaveStrategy

from toolkit import checkpoints, processes
from toolkit.models import FreedMemory

_ASKED = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class AtStepEnd(TrainerCallback):
    """Gives memory back, and ends training where somebody asked for it, with a checkpoint. Comes after all others."""

    def __init__(self, request: checkpoints.StopRequest, freed: FreedMemory):
        self.request, self.freed = request, freed

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.freed.after_step()
        asked = self._join(control)
        if asked is not None:
            self.request.received = asked
            control.should_save = control.should_training_stop = self.request.met = True

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        asked = self._join(control)
        if asked is not None and (state.global_step >= state.max_steps or control.should_training_stop):
            self.request.received = asked  # no later step would meet it
            control.should_save = self.request.met = True
        early = control.should_training_stop and state.global_step < state.max_steps
        if early and args.save_strategy in (SaveStrategy.STEPS, SaveStrategy.EPOCH):
            control.should_save = True  # weights that may be better than any that are saved, and that it has stopped

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._join(control)
        if self.request.met and (state.global_step >= state.max_steps or float(state.epoch or 0.0).is_integer()):
            # The run, or the pass, really is over: no later step would do what is due here.
            control.should_save = control.should_save or control.should_evaluate or control.should_log
        elif self.request.met:
            control.should_log = control.should_evaluate = control.should_save = False

    def _join(self, control: TrainerControl) -> signal.Signals | None:
        """Whatever one process was asked for, by a signal or by a callback, as one with a clock, all of them do at the
        same step; the signal."""
        of_all = processes.gather((self.request.received, [getattr(control, name) for name in _ASKED]))
        for name, *asked in zip(_ASKED, *(flags for _, flags in of_all), strict=True):
            setattr(control, name, any(asked))
        return next((received for received, _ in of_all if received is not None), None)
