"""What a case is, and where it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

DeviceType = Literal["cuda", "cpu", "standin"]

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here
sys.path.append(str(Path(__file__).parents[3] / "tests"))  # `scaffolding`: a stand-in for a device, and steps by hand

CPU_TIMEOUT_FACTOR = 4.0

Found = dict[str, Any]
"""What a case found: `ok`, whether it is as it should be, unless it only measures; `says`, that in one line; figures by
other names, of which `reached` says whether an aim is."""


class UnsupportedError(Exception):
    """This machine cannot show it; says why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a case runs.

    Attributes:
        device: "cuda", or what stands in for it: the CPU, or the tests' `scaffolding.stand_in`.
        folder: an empty one, for its files, which go when it ends.
    """

    device: DeviceType
    folder: Path

    @property
    def is_real(self) -> bool:
        return self.device == "cuda"

    @property
    def patience(self) -> float:
        """By what to multiply seconds of a device: where the CPU stands in, it may be a crowded one."""
        return 1.0 if self.is_real else CPU_TIMEOUT_FACTOR

    def prepare(self) -> None:
        """Makes the device usable in this process. Raises UnsupportedError if there is none."""
        import torch

        torch.set_num_threads(1)
        if self.device == "standin":
            from scaffolding import stand_in

            stand_in.install()
        elif self.device == "cuda" and not torch.cuda.is_available():
            raise UnsupportedError(f"torch {torch.__version__} sees no CUDA device")

    def need_cuda(self, what: str) -> None:
        """Raises UnsupportedError anywhere else: `what` has no stand-in."""
        if not self.is_real:
            raise UnsupportedError(f"{what} has no stand-in on {self.device}")

    def synchronize(self) -> None:
        """Waits for all that the device was given."""
        import torch

        if self.device != "cpu":
            torch.get_device_module(self.device).synchronize()


@dataclass(frozen=True, slots=True)
class World:
    """Ranks that are started once for many cases, each of which runs on all of them.

    Attributes:
        ranks: how many there are.
        groups: what `torch.distributed` is initialised with before: "gloo", and then ranks are forks; where torchrun
            starts them, "both" gloo and NCCL, "nccl" only that, "device_id" both and a device; "own" is nothing, so
            that Penstock does it.
        name: tells it from others of that kind.
    """

    ranks: int
    groups: Literal["gloo", "own", "both", "nccl", "device_id"] = "gloo"
    name: str = ""

    @property
    def is_over_nccl(self) -> bool:
        return self.groups != "gloo"


@dataclass(frozen=True, slots=True)
class Case:
    """Something that one GPU can show.

    Attributes:
        part: of the run, from 1.
        run: shows it, in a process of its own or in each rank of a world, and says what it found. It may raise
            UnsupportedError.
        seconds: after which it is ended.
        alone: it measures, so that nothing else may run meanwhile.
        world: the ranks that run it, one case after another.
        requires: the case that has to be ok before; the variables that it found, `environment`, are set for this one.
    """

    name: str
    part: int
    run: Callable[[Setting], Found]
    seconds: float = 60.0  # about four times what the longest took on an H100
    alone: bool = False
    world: World | None = None
    requires: str = ""

    @property
    def uses_nccl(self) -> bool:
        """Whether its ranks wait for each other on the device."""
        return bool(self.requires)
