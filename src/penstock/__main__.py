"""Runs the command `penstock`: the console script, `python -m penstock`, or `torchrun ... -m penstock`."""

import signal
import sys


def main() -> None:
    """Loads the command line, which takes a moment in which Ctrl-C may come, and runs it."""
    try:
        from penstock.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("penstock: stopped by Ctrl-C; no process is left running\n")
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
