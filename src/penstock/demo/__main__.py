"""One rank of `penstock demo`. Ctrl-C kills it without a traceback, even while torch is still loading."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)

from penstock.demo.train import main  # noqa: E402  loads torch, which takes a while

main()
