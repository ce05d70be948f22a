"""A profile: what each unit of a model costs on one device, as plain data that goes to JSON and back."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, Literal

from penstock._base.errors import ArgumentError
from penstock._base.files import STRICT, quoted, read_json, validate, write_json
from penstock._base.formatting import list_names
from penstock.costs.hardware import Operation

VERSION = 1
"""Of the JSON. A file of another version is refused."""

OPTIMIZER_VALUES = 2
"""What Adam keeps for each trained value."""

SPLIT_SECONDS = ("split_forward_seconds", "split_input_gradient_seconds", "split_weight_gradient_seconds")
"""The fields of a unit's F, I and W where a schedule splits the backward."""

Source = Literal["measured", "estimate"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpCounts:
    """What one microbatch makes a unit do, counted on tensors without memory.

    Attributes:
        forward: its forward.
        backward: its whole backward.
        input_gradient: the part of it that makes the gradient of its inputs; nothing if these take none.
    """

    __pydantic_config__ = STRICT
    forward: tuple[Operation, ...] = ()
    backward: tuple[Operation, ...] = ()
    input_gradient: tuple[Operation, ...] = ()


@dataclass(frozen=True, slots=True)
class Tied:
    """A parameter or buffer that several units hold.

    Attributes:
        name: in the unsplit model.
        parameter_bytes, gradient_bytes: as in `UnitCost`, where they are included.
    """

    __pydantic_config__ = STRICT
    name: str
    parameter_bytes: int
    gradient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class UnitCost:
    """A module before which the model can be cut, and all that runs from there to the next one, for one microbatch.

    Attributes:
        name: of the module, in the unsplit model.
        forward_seconds: F.
        input_gradient_seconds: I, the gradient of its inputs.
        weight_gradient_seconds: W, the gradient of its parameters: what the whole backward takes besides I.
        activation_bytes: what the forward keeps for the backward, besides parameters and buffers.
        parameter_bytes, gradient_bytes: of its parameters and buffers, and of those among them that are trained.
        optimizer_bytes: what an optimizer with two values for each trained one (Adam) keeps.
        boundary_bytes: what a forward sends from earlier units to this one and later ones.
        boundary_gradient_bytes: what a backward sends back.
        spread: the middle half of the measured times, as a fraction of their median.
        like: the unit that was measured in its place, since both run the same code on the same shapes; empty if this
            one was measured itself.
        recompute_seconds: the forward again, in a backward that needs what was not kept; without what a pipeline then
            restores (buffers, random streams). None: as long as F.
        operations: what it does, for estimates on other devices; None: not counted, or as the unit in `like`.
        split_forward_seconds, split_input_gradient_seconds, split_weight_gradient_seconds: F, I and W as the runtime
            runs them where a schedule splits the backward, which takes longer than a whole one. None: not measured.
        working_bytes: what its forward or backward takes while it runs, at most, besides `activation_bytes` and what is
            held all the time.
        input_bytes: of the model's inputs, which arrive here: they are there from the beginning of a step.
        loss_bytes: what a loss keeps for its backward, as much as cross entropy: of the last unit, unless the model
            computes its own.
        tied: those of its parameters and buffers that other units hold, too.
        shared_bytes: of `activation_bytes`, what the unit before keeps too, such as its result: there once on a device
            with both.
        target_bytes: of the target of the last unit's loss: it is there from the beginning of a step, too.
        weight_gradient_bytes: what the end of I leaves for W, if the backward is split: inputs of products and
            gradients of their results. None: not measured, and taken to be all that was kept.
    """

    __pydantic_config__ = STRICT
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
    recompute_seconds: float | None = None
    operations: OpCounts | None = None
    split_forward_seconds: float | None = None
    split_input_gradient_seconds: float | None = None
    split_weight_gradient_seconds: float | None = None
    working_bytes: float = 0
    input_bytes: float = 0
    loss_bytes: float = 0
    tied: tuple[Tied, ...] = ()
    shared_bytes: float = 0
    target_bytes: float = 0
    weight_gradient_bytes: float | None = None

    @property
    def split(self) -> UnitCost:
        """The unit in a schedule that splits the backward."""
        split_seconds = {name.removeprefix("split_"): getattr(self, name) for name in SPLIT_SECONDS}
        return replace(self, **{name: seconds for name, seconds in split_seconds.items() if seconds is not None})

    @property
    def in_flight_bytes(self) -> float:
        """What a microbatch takes from its forward to its backward, besides the model's inputs."""
        return max(self.activation_bytes - self.input_bytes, 0) + self.loss_bytes

    @property
    def waiting_bytes(self) -> float:
        """What a microbatch takes from the end of I to the end of W."""
        return self.in_flight_bytes if self.weight_gradient_bytes is None else self.weight_gradient_bytes

    @property
    def again_seconds(self) -> float:
        """What its forward takes if it runs again in the backward."""
        return self.forward_seconds if self.recompute_seconds is None else self.recompute_seconds

    @property
    def seconds(self) -> float:
        """F + I + W."""
        return self.forward_seconds + self.input_gradient_seconds + self.weight_gradient_seconds

    @property
    def held_bytes(self) -> int:
        """What it takes all the time: parameters, buffers, gradients, and the optimizer's state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def kept_bytes(units: Sequence[UnitCost]) -> list[float]:
    """Return the activation bytes per microbatch, besides the model's inputs, of the first of these consecutive units,
    of the first two, and so on."""
    later = [0.0, *(min(unit.shared_bytes, unit.in_flight_bytes) for unit in units[1:])]
    return [*accumulate(unit.in_flight_bytes - shared for unit, shared in zip(units, later, strict=True))]


def tied_bytes_overcount(units: Iterable[UnitCost]) -> tuple[float, float, float]:
    """Return the `parameter_bytes`, `gradient_bytes` and `optimizer_bytes` that these units count more than once if
    they are all on one device, which holds tied parameters once."""
    parameters, gradients, states = (
        sum(column) for column in zip((0.0,) * 3, *(p for *_, p in _find_ties(units)), strict=True)
    )
    return parameters, gradients, states


def ties_of(units: Iterable[UnitCost]) -> list[tuple[int, int, float]]:
    """Return, for each tied parameter, each two consecutive units that hold it, and the bytes that a device with both
    would count twice."""
    return [(first, second, sum(parts)) for first, second, parts in _find_ties(units)]


def _find_ties(units: Iterable[UnitCost]) -> Iterator[tuple[int, int, tuple[float, float, float]]]:
    last: dict[str, int] = {}
    for index, unit in enumerate(units):
        for tied in unit.tied:
            if tied.name in last:
                fraction = tied.gradient_bytes / unit.gradient_bytes if unit.gradient_bytes else 0.0
                parts = tied.parameter_bytes, tied.gradient_bytes, fraction * unit.optimizer_bytes
                yield last[tied.name], index, parts
            last[tied.name] = index


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """What a profile or a plan is made for.

    Attributes:
        parameters: the shape of each parameter of the model, by name.
        device: the type of device ("cpu", "cuda").
        dtype: of the parameters.
        threads: with how many the times were measured, on a CPU; 0: not known, or no matter.
    """

    __pydantic_config__ = STRICT
    parameters: Mapping[str, Shape]
    device: str
    dtype: str
    threads: int = 0


@dataclass(frozen=True, slots=True)
class OtherSize:
    """What the units cost for a microbatch of another size.

    Attributes:
        rows: of the microbatch.
        units: those of the profile, in the same order.
        inputs, runs: as in `Profile`.
    """

    __pydantic_config__ = STRICT
    rows: int
    units: tuple[UnitCost, ...]
    inputs: Mapping[str, str] = field(default_factory=dict)
    runs: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """What a message takes from one rank to another.

    Attributes:
        source, target: ranks.
        latency_seconds: of an empty message.
        bytes_per_second: of message bytes; None: beyond what the clock can tell.
        message_bytes: of the messages with which that was measured; 0: unknown.
    """

    __pydantic_config__ = STRICT
    source: int
    target: int
    latency_seconds: float
    bytes_per_second: float | None = None
    message_bytes: int = 0


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
        rows: of the microbatch, along whatever dimension the batch has them; 0: it does not say.
        others: the same units with microbatches of other sizes.
        links: between ranks, if they were measured too.
        action_seconds: what the runtime adds to each forward and each backward of a stage; None: not measured.
        optimizer_byte_seconds: what a step of AdamW takes per byte of `optimizer_bytes`; None: not measured.

    Raises:
        ArgumentError: there are no units, or two of one name; a time is not a number of 0 or more; two sizes are the
            same, or have other units.
    """

    __pydantic_config__ = STRICT
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
    rows: int = 0
    others: tuple[OtherSize, ...] = ()
    links: tuple[MeasuredLink, ...] = ()
    action_seconds: float | None = None
    optimizer_byte_seconds: float | None = None

    def __post_init__(self) -> None:
        names = [unit.name for unit in self.units]
        if not names or len({*names}) < len(names):
            raise ArgumentError(f"units: expected at least one, with unique names, not {list_names(names)}")
        check_numbers("the profile", self)
        for unit in (*self.units, *(unit for size in self.others for unit in size.units)):
            check_numbers(f"unit {unit.name!r}", unit)
        for link in self.links:
            check_numbers(f"link from rank {link.source} to rank {link.target}", link)
        for size in self.others:
            if [unit.name for unit in size.units] != names:
                raise ArgumentError(
                    f"microbatches of {size.rows} and {self.rows} rows have different units; make the profile with "
                    "split_inside= or leaf_modules= that are the same for both"
                )
        sizes = [self.rows, *(size.rows for size in self.others)]
        if len({*sizes}) < len(sizes) or (self.others and min(sizes) < 1):
            raise ArgumentError(f"rows: expected distinct sizes >= 1, not {sizes}")

    @property
    def each_size(self) -> tuple[Profile, ...]:
        """A profile for each size of a microbatch, in ascending order of rows."""
        profiles = [
            replace(self, units=size.units, rows=size.rows, inputs=size.inputs, runs=size.runs, others=())
            for size in self.others
        ]
        return tuple(sorted([*profiles, replace(self, others=())], key=lambda profile: profile.rows))

    def with_others(self, others: Iterable[Profile]) -> Profile:
        """Return this profile together with those of other microbatch sizes."""
        sizes = (OtherSize(profile.rows, profile.units, profile.inputs, profile.runs) for profile in others)
        return replace(self, others=(*self.others, *sizes))

    @property
    def identity(self) -> str:
        """A hash of the names and shapes of the model's parameters."""
        text = json.dumps(sorted((name, list(shape)) for name, shape in self.parameters.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def made_for(self) -> ModelFingerprint:
        """What it is a profile of."""
        threads = self.threads if (self.device, self.source) == ("cpu", "measured") else 0
        return ModelFingerprint(self.parameters, self.device, self.dtype, threads)

    def check_for(
        self, here: ModelFingerprint, what: str = "balance: the profile", remedy: str = ", or use balance='time'"
    ) -> None:
        """Refuse a profile of something else. `what`, `remedy`: the beginning and the end of the message.

        Raises:
            ArgumentError: names the first difference in parameters, device or dtype.
        """
        if difference := first_difference(self.made_for, here):
            raise ArgumentError(
                f"{what} is not of this model on this device: {difference}. Make one with penstock.profile(...) or "
                f"`penstock profile`{remedy}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        shapes = {name: list(shape) for name, shape in self.parameters.items()}
        return {"version": VERSION, "identity": self.identity, **asdict(self), "parameters": shapes}

    @classmethod
    def from_dict(cls, given: Any, what: str = "the profile") -> Profile:
        """Read the profile that `to_dict` wrote.

        Raises:
            ArgumentError: it is of another version, misses something, has something unknown, or was changed by hand.
        """
        if not isinstance(given, dict) or given.get("version") != VERSION:
            if isinstance(given, dict) and "choice" in given:
                raise ArgumentError(f"{what}: this is a plan; expected a profile, as `penstock profile` writes it")
            version = quoted(given.get("version") if isinstance(given, dict) else given)
            raise ArgumentError(f"{what}: expected a profile of version {VERSION}, not of {version}; make a new one")
        loaded = validate(cls, {key: value for key, value in given.items() if key not in ("version", "identity")}, what)
        if given.get("identity", loaded.identity) != loaded.identity:
            raise ArgumentError(f"{what}: its parameters do not match its identity; make a new one")
        return loaded

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON. Raise ArgumentError if the file cannot be written."""
        write_json(path, self.to_dict())


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile from a JSON file. Raise ArgumentError if there is none."""
    label = f"profile {os.fspath(path)!r}"
    return Profile.from_dict(read_json(path, label), label)


def quantity_fields(cost: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are seconds or bytes, with their defaults."""
    return {entry.name: entry.default for entry in fields(cost) if "seconds" in entry.name or "bytes" in entry.name}


def check_numbers(owner: str, value: Any) -> None:
    """Raise ArgumentError if one of a dataclass's seconds or bytes is not a number of 0 or more."""
    for name, default in quantity_fields(type(value)).items():
        number = getattr(value, name)
        if number is None and default is None:
            continue
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < math.inf:
            raise ArgumentError(f"{owner}: {name}={quoted(number)}; expected a number of 0 or more")


def first_difference(made: ModelFingerprint, here: ModelFingerprint) -> str:
    """Return the first difference between what something was made for and a model on a device; empty if there is
    none."""
    for name, shape in here.parameters.items():
        if name not in made.parameters:
            return f"it has no parameter {name!r}"
        if tuple(made.parameters[name]) != tuple(shape):
            return f"its {name!r} is {list(made.parameters[name])}, and the model's {list(shape)}"
    for name in made.parameters:
        if name not in here.parameters:
            return f"the model has no parameter {name!r}"
    for attribute in ("device", "dtype"):
        expected, actual = getattr(made, attribute), getattr(here, attribute)
        if expected != actual:
            return f"it was made for {attribute} {expected!r}, and this is {actual!r}"
    return ""
