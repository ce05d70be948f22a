"""torchrun's agent on this machine. Without it nothing would end this rank, and its store may be gone with it."""

from __future__ import annotations

import os


class Launcher:
    """The process that started this one, if torchrun did.

    Ranks live on when their agent is killed, for lack of memory for example: nobody would restart them, learn how they
    end, or end them with the job.
    """

    def __init__(self) -> None:
        self._pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def gone(self) -> str | None:
        """What to say if it has ended, as this process's parent shows; None while it is there, or if there is none."""
        if self._pid is None or os.getppid() == self._pid:
            return None
        return f"its torchrun agent (process {self._pid}) is gone"
