"""A rank that torchrun started, of a run in which one is killed: see cases/falls.py."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]


def main() -> None:
    from cases import falls, nccl
    from cases.case import Setting

    setting = Setting(sys.argv[1], Path(sys.argv[2]))  # type: ignore[arg-type]
    setting.prepare()
    with nccl.rules(setting):
        falls.train(setting, "kill", "distributed")


if __name__ == "__main__":
    main()
