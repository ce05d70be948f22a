"""What each Python process of a job imports first that `penstock blame` starts: command.py puts it into PYTHONPATH."""

from __future__ import annotations

from penstock.verification.blame.pipelining import Schedules
from penstock.verification.blame.watch import watching

watch = watching()
if watch is not None:
    Schedules(watch)
