"""Which modules run as a unit: repeated blocks, torch's own layers, and those that the user names.

Everything else is opened, and its torch calls are recorded one by one. A module whose result is used outside its unit
(Mixtral's router logits, which a hook collects for a loss) is a separate unit, and the modules around it are
opened.

Other modules are opened so that cuts can fall inside them (`Opening`): a stage of a hierarchical model (ConvNeXt, Swin,
MaxViT) is one element of a list, yet may do most of the work. A module is opened if `split_inside=` names it, if a cut
lies inside it, or if the stages would be less even with it whole.

Random streams are unaffected: draws inside a block come from the stream of its innermost module, wherever that is
called. Only what an opened module draws in its own forward would come from another stream if it ran as a whole. So such
a module is opened only for `split_inside=`, which does not depend on the number of stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock._base.errors import PartitionError
from penstock.partition.given_model import Chain
from penstock.partition.names import is_below

UnitCall = Callable[..., Any]

LISTS = (nn.ModuleList, nn.ModuleDict)  # they have no forward: always opened
STACKS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)  # torch's own, but made of repeated blocks


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that runs as a whole. `repeated`: a child of a list or sequence of modules."""

    name: str
    module: nn.Module
    repeated: bool


@dataclass(frozen=True, slots=True)
class Opening:
    """Names of modules to open.

    Attributes:
        asked: opened because the user asked for it.
        for_cuts: opened because a cut lies inside.
        for_balance: opened for balance; they stay whole if they cannot be recorded call by call.
        cannot_open: so opened once, but could not be recorded call by call.
    """

    asked: frozenset[str] = frozenset()
    for_cuts: frozenset[str] = frozenset()
    for_balance: frozenset[str] = frozenset()
    cannot_open: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        return self.asked | self.for_cuts | self.for_balance

    def without(self, names: Collection[str]) -> Opening:
        """Return the same, but with these tried modules left whole."""
        closed = self.for_balance & set(names)
        return replace(self, for_balance=self.for_balance - closed, cannot_open=self.cannot_open | closed)

    def around(self, scope: str) -> str:
        """Return the outermost module that was tried and is, or encloses, the one named `scope`; empty if there is
        none."""
        return min(filter(partial(is_below, scope), self.for_balance), key=len, default="")

    def cut_inside(self, scope: str) -> str:
        """Return the same for modules that are opened because a cut lies inside."""
        return min(filter(partial(is_below, scope), self.for_cuts), key=len, default="")

    def refusal(self, name: str, reason: str) -> str:
        """Build the message for a module with a cut inside that cannot be opened."""
        return (
            f"cuts: one lies inside {name!r}, which then has to be recorded call by call, but {reason}. "
            f"Or cut at {name!r}"
        )

    def refuse_draw(self, scope: str, source_line: str) -> None:
        """Refuse, or leave whole, a module that was opened unasked and draws random numbers in its own forward."""
        if name := self.around(scope):
            raise Lesson(keep_whole=name)
        if name := self.cut_inside(scope):
            raise PartitionError(
                f"it draws random numbers in its own forward at {source_line}: opened, it would draw others than as a "
                f"whole. Pass split_inside=[{name!r}] for any number of stages"
            )


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Which modules are units, beyond what follows from the model's structure: by the user's wish, for the cuts, and by
    what running the forward has shown.

    Attributes:
        leaves: names of modules that are units, whatever they contain.
        opening: which modules are opened so that cuts can fall inside them.
        opened: names of modules that are not units, since they take or leave tensors other than as arguments and
            results; their contents are units.
        run_whole: names of modules that are units because a call in them uses modules as constants.
        stay_whole: names of units that cannot be recorded call by call: not opened for what they leave.
        for_loss: names of the places whose contents are carried to the last stage for the loss function.
        attributes_read: names of attributes that are read after calls of units that depend on values.
        functions: functions that are recorded as one call each, since they draw from Python's or numpy's generators.
    """

    leaves: tuple[str, ...] = ()
    opening: Opening = Opening()
    opened: frozenset[str] = frozenset()
    run_whole: frozenset[str] = frozenset()
    stay_whole: frozenset[str] = frozenset()
    for_loss: frozenset[str] = frozenset()
    attributes_read: frozenset[str] = frozenset()
    functions: frozenset[FunctionType] = frozenset()

    def __or__(self, more: UnitSpec) -> UnitSpec:
        """Return the same and what the other has learned."""
        learned = [field.name for field in fields(self) if field.name not in ("leaves", "opening")]
        return replace(self, **{name: getattr(self, name) | getattr(more, name) for name in learned})

    def opening_more(self, **names: Iterable[str]) -> UnitSpec:
        """Return the same with more modules to open, for the reasons that `Opening` lists."""
        more = {reason: getattr(self.opening, reason).union(added) for reason, added in names.items()}
        return replace(self, opening=replace(self.opening, **more))


NO_SPEC = UnitSpec()


class Lesson(BaseException):
    """The forward has shown what must be recorded otherwise: record again.

    Not an Exception, so that the model's own `except` clauses do not catch it.

    Args:
        refusal: what to say if that is impossible.
        needed: whether the model is then refused; otherwise it is recorded with the opened modules shut.
        keep_whole: the name of a module that was opened for balance but cannot be recorded call by call; empty for all.
        unknown: the numbers of all calls on this path whose results must count as unknown, since unknown values are
            written into them later; negative ones are inputs.
        likely: names of modules that the next attempts would open for the same reason.
        additions: what to add to the `UnitSpec`.
    """

    def __init__(
        self,
        refusal: str = "",
        *,
        needed: bool = True,
        keep_whole: str | None = None,
        unknown: frozenset[int] | None = None,
        likely: Iterable[str] = (),
        **additions: Iterable[Any],
    ) -> None:
        super().__init__(refusal)
        self.refusal, self.needed, self.keep_whole, self.unknown = refusal, needed, keep_whole, unknown
        self.likely = frozenset(likely)
        added: dict[str, Any] = {name: frozenset(names) for name, names in additions.items()}
        self.additions = UnitSpec(**added)


def find_units(model: nn.Module, spec: UnitSpec = NO_SPEC) -> dict[int, Unit]:
    """Return the units of a model, by `id` of the module."""
    opened_ids = {id(model.get_submodule(name)) for name in spec.opening.names}
    leaf_ids = {id(model.get_submodule(name)) for name in (*spec.leaves, *spec.run_whole)}
    units: dict[int, Unit] = {}
    seen: set[int] = {id(model)}

    def descend(parent: nn.Module, prefix: str, in_block: bool = False) -> None:
        container = isinstance(parent, (*LISTS, nn.Sequential, Chain))
        for child_name, child in parent.named_children():
            name = prefix + child_name
            if id(child) in seen:
                continue
            seen.add(id(child))
            is_torch_layer = type(child).__module__.startswith("torch.nn") and not isinstance(child, STACKS)
            is_whole = (in_block or container or is_torch_layer) and not _is_opened(child, parent)
            is_opened = id(child) in opened_ids or name in spec.opened
            if id(child) in leaf_ids or (is_whole and not is_opened):
                units[id(child)] = Unit(name, child, repeated=container)
            else:
                descend(child, name + ".", in_block=is_whole)

    descend(model, "")
    return units


def _is_opened(child: nn.Module, parent: nn.Module) -> bool:
    """Whether to open a child that would otherwise be a unit, because it only wraps repeated blocks."""
    if not has_forward(child):
        return True
    if isinstance(child, nn.Sequential):
        return not isinstance(parent, (nn.ModuleList, Chain))
    alone = sum(type(sibling) is type(child) for sibling in parent.children()) == 1
    if not (isinstance(parent, (nn.Sequential, nn.ModuleDict)) and alone):
        return False
    return any(repeats(inner) for inner in child.modules() if not isinstance(inner, nn.ModuleDict))


def refuse_compiled(model: nn.Module) -> None:
    """Raise PartitionError for a TorchScript module: its code can be neither inspected nor given other parameters."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise PartitionError(
                f"{f'{name!r}' if name else 'the model'} is a module of TorchScript, which cannot be recorded. Use the "
                "Python module that torch.jit.script or torch.jit.trace was given; PYTORCH_JIT=0 in the environment "
                "does so for torch.jit.script everywhere"
            )


def refuse_lazy(model: nn.Module) -> None:
    """Raise PartitionError for a parameter or buffer that gets its shape only from the first batch."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise PartitionError(
                f"{name!r} has no shape yet, since its module is lazy. Run the model once on one batch before "
                "(model(x)), in each process alike"
            )


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called. Lists and other pure containers cannot."""
    if "forward" in vars(module):
        return True
    namespaces = (vars(kind) for kind in type(module).__mro__)  # TorchScript's cannot be read from its class
    return next((names["forward"] for names in namespaces if "forward" in names), None) is not nn.Module.forward


def repeats(module: nn.Module) -> bool:
    """Whether this is a list of blocks of one kind."""
    kinds = Counter(type(child) for child in module.children() if not type(child).__module__.startswith("torch.nn"))
    return isinstance(module, (*LISTS, nn.Sequential)) and any(count > 1 for count in kinds.values())


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, or entries of dicts, within a context. A change is an object or dict, a name and a value."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            is_dict = type(owner) is dict
            put, names = (owner.__setitem__, owner) if is_dict else (partial(setattr, owner), vars(owner))
            stack.callback(*((put, name, names[name]) if name in names else (delattr, owner, name)))
            put(name, value)
        yield


@contextmanager
def intercept(modules: Iterable[nn.Module], handler: Callable[[UnitCall, nn.Module, Any, Any], Any]) -> Iterator[None]:
    """Send every call of the modules' classes through `handler(original, module, args, kwargs)`.

    This replaces the classes' `__call__` rather than the modules' `forward`, so that an override of `__call__`
    (gradient checkpointing in `transformers`) and the modules' hooks stay inside the unit.
    """

    def replacement(original: UnitCall) -> UnitCall:
        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it stands in for the method
            return handler(original, self, args, kwargs)

        return __call__

    # looked up before any is replaced
    with replaced([(cls, "__call__", replacement(cls.__call__)) for cls in dict.fromkeys(map(type, modules))]):
        yield
