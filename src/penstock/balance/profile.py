"""A profile: what each unit of a model costs on one device, as plain data that goes to JSON and back."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from penstock.errors import ArgumentError
from penstock.words import shortened

VERSION = 1
"""Of the JSON. A file of another version is refused."""

OPTIMIZER_VALUES = 2
"""What Adam keeps for each trained value."""

Source = Literal["measured", "estimate"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UnitCost:
    """A module before which the model can be cut, and all that runs from there to the next one, for one microbatch.

    Attributes:
        name: of the module, in the unsplit model.
        forward_seconds: F.
        input_gradient_seconds: I, the gradient of its inputs.
        weight_gradient_seconds: W, the gradient of its parameters: what the whole backward takes besides I.
        activation_bytes: what the forward keeps for the backward, besides parameters and buffers.
        parameter_bytes, gradient_bytes: of its parameters, and of those among them that are trained.
        optimizer_bytes: what an optimizer with two values for each trained one (Adam) keeps.
        boundary_bytes: what a forward sends from earlier units to this one and later ones.
        boundary_gradient_bytes: what a backward sends back.
        spread: the middle half of the measured times, as a fraction of their median.
        like: the unit that was measured in its place, since both run the same code on the same shapes; empty if this
            one was measured itself.
    """

    name: str
    forward_seconds: float
    input_gradient_seconds: float
    weight_gradient_seconds: float
    activation_bytes: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    boundary_bytes: int = 0
    boundary_gradient_bytes: int = 0
    spread: float = 0.0
    like: str = ""

    @property
    def seconds(self) -> float:
        """F + I + W."""
        return self.forward_seconds + self.input_gradient_seconds + self.weight_gradient_seconds

    @property
    def held_bytes(self) -> int:
        """What it takes all the time: parameters, gradients, and the optimizer's state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class Profile:
    """What each unit of a model costs for one microbatch on one device.

    Attributes:
        units: in the order in which they run.
        device: the type of device ("cpu", "cuda").
        device_name: what it calls itself.
        dtype: of the parameters ("float32").
        parameters: the shape of each parameter of the model, by name: what the profile is a profile of.
        inputs: the microbatch: each tensor's shape and dtype ("int64[4, 64]"), by name.
        torch: the version of torch.
        threads: how many computed, on a CPU.
        opened: the modules that were taken apart, so that units are inside them.
        source: "measured", or an "estimate" from the device's specifications.
        runs: how often each unit was measured, at least.
        notes: what else to know.

    Raises:
        ArgumentError: there are no units, or two of one name; a time is not a number of 0 or more.
    """

    units: tuple[UnitCost, ...]
    device: str
    dtype: str
    parameters: Mapping[str, Shape]
    device_name: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)
    torch: str = ""
    threads: int = 1
    opened: tuple[str, ...] = ()
    source: Source = "measured"
    runs: int = 0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [unit.name for unit in self.units]
        if not names or len({*names}) < len(names):
            raise ArgumentError(f"units: expected at least one, each of another name, not {shortened(names)}")
        for unit in self.units:
            for name in (f.name for f in fields(unit) if f.name.endswith(("seconds", "bytes"))):
                value = getattr(unit, name)
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                    raise ArgumentError(f"unit {unit.name!r}: {name}={value!r}; expected a number of 0 or more")

    @property
    def identity(self) -> str:
        """A hash of the names and shapes of the model's parameters."""
        text = json.dumps(sorted((name, list(shape)) for name, shape in self.parameters.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def check_for(self, parameters: Mapping[str, Shape], device: str, dtype: str) -> None:
        """Refuses a profile of something else.

        Raises:
            ArgumentError: names the first difference in parameters, device or dtype.
        """
        if difference := first_difference(self, parameters, device, dtype):
            raise ArgumentError(
                f"balance: the profile is not of this model on this device: {difference}. Make one with "
                "penstock.profile(...) or `penstock profile`, or use balance='time'"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        shapes = {name: list(shape) for name, shape in self.parameters.items()}
        return {"version": VERSION, "identity": self.identity, **asdict(self), "parameters": shapes}

    @classmethod
    def from_dict(cls, given: Any, what: str = "the profile") -> Profile:
        """The profile that `to_dict` wrote.

        Raises:
            ArgumentError: it is of another version, misses something, has something unknown, or was changed by hand.
        """
        if not isinstance(given, dict) or given.get("version") != VERSION:
            version = given.get("version") if isinstance(given, dict) else given
            raise ArgumentError(f"{what}: expected a profile of version {VERSION}, not of {version!r}; make a new one")
        known = {f.name for f in fields(cls)}
        values = {name: value for name, value in given.items() if name not in ("version", "identity")}
        _check_names(values, known, {f.name for f in fields(cls) if _is_needed(f)}, what)
        if not isinstance(values["units"], list) or not all(isinstance(unit, dict) for unit in values["units"]):
            raise ArgumentError(f"{what}: units: expected a list of objects")
        needed = {f.name for f in fields(UnitCost) if _is_needed(f)}
        for unit in values["units"]:
            _check_names(unit, {f.name for f in fields(UnitCost)}, needed, f"{what}, unit {unit.get('name')!r}")
        if values.get("source", "measured") not in get_args(Source):
            raise ArgumentError(f"{what}: source={values['source']!r}: expected one of {get_args(Source)}")
        found = cls(
            **{
                **values,
                "units": tuple(UnitCost(**unit) for unit in values["units"]),
                "parameters": {name: tuple(shape) for name, shape in values["parameters"].items()},
                "opened": tuple(values.get("opened", ())),
                "notes": tuple(values.get("notes", ())),
            }
        )
        if given.get("identity", found.identity) != found.identity:
            raise ArgumentError(f"{what}: its parameters are not those that it was made of; make a new one")
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it as JSON. Raises ArgumentError if the file cannot be written."""
        try:
            Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"{os.fspath(path)!r} cannot be written: {error.strerror}") from error


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """The profile in a file of JSON. Raises ArgumentError if there is none."""
    name = os.fspath(path)
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"profile {name!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ArgumentError(f"profile {name!r} is not JSON: {error}") from error
    return Profile.from_dict(given, f"profile {name!r}")


def _is_needed(each: Any) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _check_names(given: Mapping[str, Any], known: set[str], needed: set[str], what: str) -> None:
    if missing := sorted(needed - given.keys()):
        raise ArgumentError(f"{what}: misses {shortened(missing)}")
    if unknown := sorted(given.keys() - known):
        raise ArgumentError(f"{what}: has {shortened(unknown)}, which version {VERSION} does not know")


class MadeFor(Protocol):
    """What was made for a model: the shapes of its parameters by name, its device and dtype."""

    @property
    def parameters(self) -> Mapping[str, Shape]: ...

    @property
    def device(self) -> str: ...

    @property
    def dtype(self) -> str: ...


def first_difference(made: MadeFor, parameters: Mapping[str, Shape], device: str, dtype: str) -> str:
    """The first difference between what something was made for and a model on a device; empty if there is none."""
    if difference := _difference(made.parameters, parameters):
        return difference
    for what, mine, given in (("device", made.device, device), ("dtype", made.dtype, dtype)):
        if mine != given:
            return f"it was made for {what} {mine!r}, and this is {given!r}"
    return ""


def _difference(mine: Mapping[str, Shape], given: Mapping[str, Shape]) -> str:
    """The first difference between the parameters of a profile and those of a model; empty if there is none."""
    for name, shape in given.items():
        if name not in mine:
            return f"it has no parameter {name!r}"
        if tuple(mine[name]) != tuple(shape):
            return f"its {name!r} is {list(mine[name])}, and the model's {list(shape)}"
    missing = next((name for name in mine if name not in given), None)
    return "" if missing is None else f"the model has no parameter {missing!r}"
