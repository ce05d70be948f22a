"""One rank of a job that `penstock blame` starts: `python -m penstock.blame.rank SCRIPT [ARGUMENTS]`."""

from __future__ import annotations

from penstock.blame.pipelining import Schedules
from penstock.blame.watch import watching
from penstock.launch import rank

if __name__ == "__main__":
    watch = watching()
    if watch is not None:
        Schedules(watch).find()
    rank.main()
