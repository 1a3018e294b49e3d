"""The command `toolkit`, also as `python -m toolkit`.

Before a command has begun, and once it has ended, Ctrl-C ends the process at once and in silence: imports and what
libraries do at exit take seconds, in which there is nothing to save.
"""

import signal
import sys


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else somebody has decided otherwise
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from toolkit.cli import app

    try:
        app(prog_name="toolkit")
    except SystemExit as end:
        if (joined := sys.modules.get("toolkit.processes")) is not None:
            joined.leave(failed=bool(end.code))
        raise


if __name__ == "__main__":
    main()
