"""What stops a benchmark."""

from toolkit.errors import ToolkitError


class BenchmarkError(ToolkitError, RuntimeError):
    """A contender failed, did other work than the others, or computes something else."""
