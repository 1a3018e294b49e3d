"""What stops a benchmark."""

from toolkit.errors import ToolkitError


class BenchmarkError(ToolkitError, RuntimeError):
    """A contender failed, did other work than the others, or computes something else."""


class KilledError(BenchmarkError):
    """The system killed a contender's process, as it does where memory runs out."""
