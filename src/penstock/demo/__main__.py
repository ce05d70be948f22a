"""One rank of `penstock demo`. Ctrl-C ends it as the system would, without a traceback, also while torch is loading."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)

from penstock.demo.train import main  # noqa: E402  loads torch, which takes a while

main()
