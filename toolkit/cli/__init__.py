"""Names and arguments of the command `toolkit`.

Exit codes: 0, done; 1, something that the user can mend, said in one message; 2, an argument that does not exist; 129,
130 and 143, stopped by SIGHUP, Ctrl-C or SIGTERM. Whatever loads a library is imported inside a command, so that --help
answers at once.
"""

from toolkit.cli import stages, recipes, runs, policies  # noqa: I001  (each adds its commands, in the order of --help)
from toolkit.cli.command import app
