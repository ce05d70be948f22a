"""What automatic cuts even out: the argument `balance`, checked."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate
from typing import Any, Literal, get_args

from torch import nn

from penstock._base.errors import ArgumentError
from penstock._base.formatting import named
from penstock.costs import Profile, read_profile
from penstock.partition.cut.candidates import Measure

BalanceName = Literal["time", "flops", "memory", "parameters", "layers"]

Weight = Callable[[str, nn.Module], float]
"""What a module costs, by its name and itself."""

Balance = BalanceName | str | os.PathLike[str] | Profile | Weight

BALANCES: tuple[BalanceName, ...] = get_args(BalanceName)

_TYPE = "type:"


@dataclass(frozen=True, slots=True)
class BalanceChoice:
    """What cuts even out.

    Attributes:
        by: what the recording alone says, where nothing else is known, and to decide which modules to open.
        measures: whether units are to be run, to see how long they take.
        memory: whether bytes are to be even, not time.
        profile: what each unit costs.
        weight: the user's function for that.
        kind: where stages may begin: before modules whose class has such a name; each counts the same.
    """

    by: Measure = "flops"
    measures: bool = False
    memory: bool = False
    profile: Profile | None = None
    weight: Weight | None = None
    kind: re.Pattern[str] | None = None

    @classmethod
    def of(cls, value: Any) -> BalanceChoice:
        """Parse the value of `balance=`. Raise ArgumentError if it is not one."""
        match value:
            case BalanceChoice():
                return value
            case "flops" | "parameters" | "layers":
                return cls(value)
            case "time":
                return cls(measures=True)
            case "memory":
                return cls(memory=True)
            case str() if value.startswith(_TYPE):
                return cls(kind=_pattern(value))
            case str() if value.endswith(".json"):
                return cls(profile=read_profile(value))
            case os.PathLike():
                return cls(profile=read_profile(value))
            case Profile():
                return cls(profile=value)
            case _ if callable(value) and not isinstance(value, type):
                return cls(weight=_checked_weight(value))
        if isinstance(value, (list, tuple)) and all(isinstance(layers, int) for layers in value):  # torchgpipe
            cuts = [str(layers) for layers in accumulate(value)][:-1]
            raise ArgumentError(f"balance={value!r}: pass cuts={cuts}, the layers at which stages begin")
        names = ", ".join(map(repr, BALANCES))
        peer_hints = {"'uniform'": "pass 'layers'; ", "'size'": "pass 'memory'; "}
        raise ArgumentError(
            f"balance={value!r}: {peer_hints.get(repr(value), '')}expected one of {names}, 'type:' and a pattern of "
            "class names, a Profile, the path of one (.json), or a function of a module's name and the module"
        )

    def weight_of(self, name: str, module: nn.Module) -> float:
        """Return the weight that the user's function gives a module. Raise ArgumentError if it is not a number of 0 or
        more."""
        assert self.weight is not None
        weight = self.weight(name, module)
        if not isinstance(weight, (int, float)) or not 0 <= weight < float("inf"):
            raise ArgumentError(
                f"balance: {named(self.weight).__qualname__} returned {weight!r} for {name!r}; expected a number of "
                "0 or more"
            )
        return float(weight)


def _checked_weight(function: Weight) -> Weight:
    try:
        signature(function).bind("name", None)
    except TypeError as error:
        name = named(function).__qualname__
        message = f"balance={name}: expected a function of a module's name and the module, but {error}"
        raise ArgumentError(message) from None
    except ValueError:  # functions written in C have no signature
        pass
    return function


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text.removeprefix(_TYPE))
    except re.error as error:
        raise ArgumentError(f"balance={text!r}: {error}; expected 'type:' and a regular expression") from error
