"""Every error that a user can cause.

`ToolkitError` is the root; the command line prints one without a traceback. Each category is also the
built-in type that it replaces, so that `except ValueError` in a notebook still works. To add one,
inherit `ToolkitError` and that built-in type, and say when it is raised.

A message says what is wrong, where (file and key, or role), the value seen, and the next step.
"""


class ToolkitError(Exception):
    """Root of the errors that a user can cause and mend."""


class RecipeError(ToolkitError, ValueError):
    """A recipe, an override or the order of stages is wrong. Carries all problems of the file at once."""


class ModelError(ToolkitError, ValueError):
    """A base model cannot be loaded, or cannot be used for this."""


class AdapterError(ToolkitError, ValueError):
    """An adapter or head is missing, damaged, or belongs to another base."""


class DataError(ToolkitError, ValueError):
    """A file, row or column of a data set is wrong."""


class RewardError(ToolkitError, ValueError):
    """A reward callback cannot be found, or did not return one finite score a response."""


class SelfCheckError(ToolkitError, RuntimeError):
    """A check at the start of training failed: going on would train the wrong thing."""


class CheckpointError(ToolkitError, ValueError):
    """A checkpoint cannot be written, or there is none from which training could go on."""


class RunInterrupted(ToolkitError, RuntimeError):
    """Ctrl-C or SIGTERM ended a run, after its step was finished and all was saved.

    Args:
        message: what was saved, and where.
        signal_number: of the signal that asked.
    """

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number
