"""TARGET, the options for how its model is split and run, and access to what it returns."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock._base.errors import ArgumentError
from penstock.cli._options import CUT, REQUIRED, USUAL_OR_BATCH_SIZE, argument, option

if TYPE_CHECKING:
    import torch

    from penstock.costs import Profile
    from penstock.distributed.launch.target import Target
    from penstock.simulate import LinkCost

TARGET = argument(
    "module:function or file.py:function (the function defaults to make), or hf:path/to/config.json.",
    metavar="TARGET",
    default=REQUIRED,
)
OF_BATCH = option(f"{CUT}; {USUAL_OR_BATCH_SIZE}.")
SPLIT_INSIDE = option("Modules that cuts may split, besides those found automatically: a,b,c.")
LEAF_MODULES = option("Modules to run as a whole: a,b,c, for code that cannot be recorded.")


def _balance(text: str) -> str:
    if text == "time":
        return text
    from penstock.partition import BALANCES

    if text not in BALANCES and not text.startswith("type:") and not text.endswith(".json"):
        names = ", ".join(BALANCES)
        raise ArgumentError(
            f"--balance {text}: expected one of {names}, type:CLASSES, or the path of a profile (.json)"
        )
    return text


GradDtypeName = Literal["float32", "float64"]
GRAD_DTYPE = "Dtype in which gradients of low-precision parameters accumulate; default: the parameter's."


def dtype_named(name: str | None) -> torch.dtype | None:
    """Return torch's dtype of that name."""
    import torch

    return None if name is None else getattr(torch, name)


def parse_link_cost(text: str | None) -> LinkCost | None:
    """Return the costs of a link, given as for `--link`. Raise ArgumentError unless it is a rate and a delay only."""
    if text is None:
        return None
    from penstock.network.link import Impairment, Link
    from penstock.network.parse import parse_link
    from penstock.simulate import LinkCost

    link = parse_link(text)
    delay, rate = link.impairment.delay_seconds, link.bytes_per_second
    if link != Link(rate, impairment=Impairment(delay_seconds=delay), text=link.text):
        raise ArgumentError(f"link {text!r}: expected a rate and a delay only, as in 100gbit delay 5us")
    return LinkCost(delay, rate)


def parse_names(text: str | None) -> list[str] | None:
    """Split `a,b,c` into names. Return None if the option was omitted."""
    return [name.strip() for name in text.split(",")] if text is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOptions:
    """Options for splitting a model and running its stages."""

    schedule: str = option("Name of the schedule; `penstock schedules` lists them.", default="1f1b")
    stages_per_rank: int | None = option("Stages per rank; default: the schedule's usual number.")
    cuts: str | None = option("Modules that begin a new stage: a,b,c; default: balanced.")
    leaf_modules: str | None = LEAF_MODULES
    split_inside: str | None = SPLIT_INSIDE
    balance: str = option(
        "What to balance across stages: time (measured), flops, memory, parameters, layers, the costs of a profile "
        "(its path), or modules of some classes (type:PATTERN).",
        default="time",
        callback=_balance,
    )
    memory_limit: str | None = option("Memory per rank: 80GiB. Cuts that exceed it are rejected.")
    link: str | None = option(
        'Link between two ranks, for cuts by time: "900gbit delay 3us", rate and latency as for tc. Default: shared '
        "memory on CPUs, PCIe between other devices."
    )
    recompute: str = option(
        "What to recompute in the backward: never, except_last, always, or n for every n-th layer.", default="never"
    )
    grad_dtype: GradDtypeName | None = option(GRAD_DTYPE)

    def arguments(self) -> dict[str, Any]:
        """Return these options as arguments of `penstock.pipeline`."""
        from penstock.network.quantities import parse_size

        return {
            "schedule": self.schedule,
            "stages_per_rank": self.stages_per_rank,
            "balance": self.balance,
            "cuts": parse_names(self.cuts),
            "leaf_modules": parse_names(self.leaf_modules),
            "split_inside": parse_names(self.split_inside),
            "memory_limit": None if self.memory_limit is None else parse_size(self.memory_limit),
            "link_cost": parse_link_cost(self.link),
            "recompute": int(self.recompute) if self.recompute.isdecimal() else self.recompute,
            "grad_dtype": dtype_named(self.grad_dtype),
        }


def compute_as_ranks(ranks: int) -> None:
    """Set the number of threads to that of a rank when `penstock run` starts `ranks` on this machine."""
    import torch

    from penstock.distributed.launch.processes import thread_environment

    for number in thread_environment(ranks, None).values():
        torch.set_num_threads(int(number))


@contextlib.contextmanager
def load_target(name: str, subject: str, *, weights: bool = True) -> Iterator[Target]:
    """Call TARGET with seed 0 and yield its result. Inside the block, output goes to stderr, and errors of `subject`
    ("the model", say) become an ArgumentError.

    `weights`: False if only shapes are needed: a model from a configuration is then built on the meta device.
    """
    from penstock.distributed.launch.target import load, user_code

    with contextlib.redirect_stdout(sys.stderr):
        loaded_target = load(name, weights=weights)
        with user_code(f"{subject} of {name}"):
            yield loaded_target


def profile_target(target: Target, /, **options: Any) -> Profile:
    """Profile the model of a TARGET; `options` are those of `penstock.profile`."""
    from penstock.pipe.profiling import profile

    return profile(target.model, target.args, target.kwargs, **target.dividing, **options)


def load_profiles(
    target: str | None, files: Sequence[Path], measure: Callable[[Target], list[Profile]], *, weights: bool = True
) -> list[Profile]:
    """Return the profiles in the files, checked against TARGET if there is one; without files, measure TARGET."""
    from penstock.costs import read_profile

    profiles = [read_profile(file) for file in files]
    if target is None:
        return profiles
    with load_target(target, "the model", weights=weights and not files) as loaded_target:
        if not files:
            return measure(loaded_target)
        from penstock.pipe.profiling import fingerprint_for

        fingerprint = fingerprint_for(loaded_target.model, loaded_target.args, loaded_target.kwargs)
        for profile, file in zip(profiles, files, strict=True):
            profile.check_for(fingerprint, f"--profile {file}", ", or omit TARGET to use it as it is")
    return profiles
