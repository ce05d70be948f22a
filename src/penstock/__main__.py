"""Runs the command `penstock`: the console script, `python -m penstock`, or `torchrun ... -m penstock`."""

import sys


def main() -> None:
    """Load the command line, which takes a moment in which Ctrl-C may come, and run it."""
    try:
        from penstock.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("penstock: stopped by Ctrl-C; no process is left running\n")
        sys.exit(130)
    finally:
        import signal

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is left to do needs no traceback


if __name__ == "__main__":
    main()
