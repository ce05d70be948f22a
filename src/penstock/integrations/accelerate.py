"""Accelerate beside a pipeline: it may count the processes of one pipeline as one device. Needs `penstock[accelerate]`.

Accelerate has no hook for a pipeline. In several processes `prepare` wraps the model in DDP and divides each batch, and
metrics are gathered from ranks that all have the same. None of that happens on one device, and to Accelerate that is
what the ranks of one pipeline are: together they train one model on one sequence of batches.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from penstock._base.errors import ArgumentError

try:
    from accelerate import Accelerator, PartialState
    from accelerate.state import is_initialized
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError(f"this needs the package accelerate ({error}): pip install penstock[accelerate]") from error

_REPLACEMENTS = {
    "backward": "Pipeline.step",
    "clip_grad_norm_": "Pipeline.clip_grad_norm_",
    "save_state": "penstock.checkpoint.save",
    "load_state": "penstock.checkpoint.load",
}
"""Methods of an accelerator that see one rank's stages alone, and what to call instead."""


def ranks_as_one_device(cpu: bool = False) -> PartialState:
    """Let Accelerate take all processes for one device, of which only the first prints and saves.

    Call it before `Accelerator()`, on every rank. Then `prepare` leaves batches whole, `gather_for_metrics` returns
    what it is given, and `is_main_process`, `print` and trackers are the first rank's as ever. The model stays with
    `penstock.pipeline`: pass only loaders, the optimizer and the scheduler to `prepare`. In several processes
    `backward`, `clip_grad_norm_`, `save_state` and `load_state` of all accelerators raise `ArgumentError` from then on,
    as they would see one rank's stages alone.

    Args:
        cpu: as for `Accelerator`: compute on the CPU even if there is an accelerator.

    Returns:
        The state that all of Accelerate shares, changed.

    Raises:
        ArgumentError: an `Accelerator` has already been made, and counts the processes.
    """
    if is_initialized() and PartialState().num_processes > 1:
        raise ArgumentError("an Accelerator has already been made for several processes; call this before it is")
    state = PartialState(cpu=cpu)
    processes = max(state.num_processes, int(os.environ.get("WORLD_SIZE", "1")))
    for name, replacement in _REPLACEMENTS.items() if processes > 1 else ():
        setattr(Accelerator, name, _raise_error(name, replacement))
    state.distributed_type, state.num_processes = DistributedType.NO, 1
    # Without an accelerator, and without cpu=True, Accelerate does not look at these itself.
    state.process_index = int(os.environ.get("RANK", state.process_index))
    state.local_process_index = int(os.environ.get("LOCAL_RANK", state.local_process_index))
    return state


def _raise_error(name: str, replacement: str) -> Any:
    def method(*_: Any, **__: Any) -> NoReturn:
        raise ArgumentError(f"Accelerator.{name} sees the stages of one rank alone; call {replacement} instead")

    return method
