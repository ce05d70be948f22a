"""Second names for arguments: another library's name, or an old one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from penstock.errors import ArgumentError

P = ParamSpec("P")
T = TypeVar("T")

OF_PIPELINE = {
    "loss": "loss_fn",
    "n_microbatches": "microbatches",
    "stages_per_rank": "chunks",
    "example_args": "args",
    "example_kwargs": "kwargs",
}
"""The second names of arguments of `pipeline`, `inspect` and `verify`."""

OF_PEERS = {
    "activation_checkpoint_interval": "pass recompute=",
    "args_chunk_spec": "pass batch_dims={'args': ...}",
    "checkpoint": "pass recompute='always', 'except_last' or 'never'",
    "gradient_accumulation_steps": "pass microbatches=",
    "kwargs_chunk_spec": "pass batch_dims={'kwargs': ...}",
    "losses": "read result.losses, the microbatches' own",
    "mb_args": "pass args=, a whole batch",
    "mb_kwargs": "pass kwargs=, a whole batch",
    "num_model_chunks": "pass chunks=",
    "num_stages": "pass ranks=, and chunks= for several stages per rank",
    "output_merge_spec": "pass batch_dims={'output': ...}, or merge=",
    "partition_method": "pass balance='parameters', 'layers' or 'type:Block'",
    "scale_grads": "omit it: gradients are those of the whole batch's loss",
    "split_spec": "pass cuts=['blocks.5'], the modules at which stages begin",
    "stages": "pass ranks=, and chunks= for several stages per rank",
}
"""Options of other libraries, and what to do here, for messages."""

SCHEDULES_OF_PEERS = {
    "1f1b": "'1f1b'",
    "dualpipev": "'dualpipe-v'",
    "gpipe": "'gpipe'",
    "interleaved": "'interleaved-1f1b'",
    "interleaved1f1b": "'interleaved-1f1b'",
    "interleavedzerobubble": "penstock.schedule.read_csv('order.csv')",
    "loopedbfs": "'looped-bfs'",
    "oneforwardonebackward": "'1f1b'",
    "train": "'1f1b'",
    "zbvzerobubble": "'zb-v'",
    "zerobubblevpipescheduler": "'zb-v'",
}
"""Schedules of other libraries, in lower case and without "schedule" around, and what to pass here."""


def schedule_of_peer(name: str) -> str | None:
    """What to pass for a schedule of another library, as code; None if it is unknown."""
    return SCHEDULES_OF_PEERS.get(name.lower().removeprefix("schedule").removesuffix("schedule"))


def nearest(name: str, known: Iterable[str], names: Mapping[str, str] = {}) -> str:
    """The end of a message about an unknown argument: what to do instead, or the known one that it resembles."""
    if name in OF_PEERS:
        return f"; {OF_PEERS[name]}"
    near = difflib.get_close_matches(name, [*known], n=1)
    return f"; did you mean {names.get(near[0], near[0])}=?" if near else ""


def also(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Lets a function accept arguments under a second name: `also(loss="loss_fn")` makes `loss=` mean `loss_fn=`.

    The function raises ArgumentError if both are given, and TypeError for a name that it does not know, with the
    nearest one that it does.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        parameters = inspect.signature(function).parameters
        known = [*parameters, *names]
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            given: dict[str, Any] = kwargs
            for name in () if takes_any else given.keys() - set(known):
                raise TypeError(f"{function.__name__}() has no argument {name}={nearest(name, known, names)}")
            for second in names.keys() & given.keys():
                name = names[second]
                if name in given:
                    raise ArgumentError(f"{second}= and {name}= are one argument by two names: give one of them")
                given[name] = given.pop(second)
            return function(*args, **kwargs)

        return call

    return decorate
