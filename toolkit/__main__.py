"""`python -m toolkit` is the command `toolkit`."""

from toolkit.cli import app

app(prog_name="toolkit")
