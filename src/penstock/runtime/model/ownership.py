"""Takes a model over for a pipeline: the tensors of this process's stages move to their devices, those of other
processes' stages are freed, and those of a model on the meta device are allocated and initialized, stage by stage.

Two parameters in one memory are refused on ranks of several processes, where each would be updated alone. Public models
tie so: `out.weight.data = embedding.weight.data`, or a slice or the transpose of it.

Each module's own initializer (`reset_parameters`) runs under a stream keyed by the module's name, so the weights do not
depend on the number of stages. They differ from those of a model built directly on a device from one seed, where all
draws come from one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from itertools import combinations
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, fx, nn

from penstock._base.compat import device_generator, storage_id
from penstock._base.errors import ArgumentError
from penstock._base.memory import overlap
from penstock.runtime.exact.streams import hash_name, mix
from penstock.runtime.execute.engine import Engine
from penstock.runtime.front_end import Stage
from penstock.runtime.model.remote_tensors import RemoteTensor, make_remote
from penstock.schedule import Placement

_ENGINES: WeakSet[Engine] = WeakSet()
"""Those of pipelines of several processes."""


def move_to_single_device(model: nn.Module, engine: Engine) -> None:
    """Move the whole model if one device holds it; otherwise the cuts decide what goes where (`take_over`)."""
    devices = set(engine.devices)
    if engine.world.is_local and len(devices) == 1:
        move(model, dict.fromkeys((id(t) for t in _tensors(model) if not t.is_meta), *devices))


def take_over(
    model: nn.Module, stages: Sequence[Stage], rank_of: Sequence[int], engine: Engine, rule: Materialize | None
) -> bool:
    """Allocate the tensors of this process's stages, and free those of the others.

    Args:
        rank_of: the rank of each stage.
        rule: see `materialize`.

    Returns:
        whether recordings made so far hold on to other ranks' parameters, or to old buffers.
    """
    ids_by_rank = _held_ids_by_rank(model, stages, rank_of)
    named = list(model.named_modules())
    if not engine.world.is_local:
        local_ids = set().union(*(ids_by_rank[rank] for rank in engine.ranks))
        engine.held_tensors = {id(t): t for t in _tensors(model) if id(t) in local_ids}
        _ENGINES.add(engine)
        released: dict[int, Tensor] = {}
        for path, module in named:
            _release(module, f"{path}." if path else "", local_ids, released)
    for rank in engine.ranks:
        if engine.devices[rank].type == "meta":
            continue  # nothing runs there
        modules = {
            name: module
            for name, module in named
            if any(t.is_meta and id(t) in ids_by_rank[rank] for _, t in direct_tensors(module))
        }
        materialize(modules, engine.devices[rank], engine.streams.seed, rule)
    devices = {
        id(tensor): engine.devices[rank]
        for rank in engine.ranks
        for tensor in _tensors(model)
        if id(tensor) in ids_by_rank[rank] and not tensor.is_meta
    }
    return move(model, devices) or not engine.world.is_local


def _held_ids_by_rank(model: nn.Module, stages: Sequence[Stage], rank_of: Sequence[int]) -> dict[int, set[int]]:
    """Return, for each rank, which tensors it holds, by id."""
    owned: dict[int, set[int]] = {rank: set() for rank in rank_of}
    for stage in stages:
        owned[rank_of[stage.meta.index]] |= {id(t) for t in (*stage.parameters.values(), *stage.buffers.values())}
    all_ids = {id(tensor) for tensor in _tensors(model)}
    owned[0] |= all_ids - set().union(*owned.values())  # tensors that no stage uses still belong in a checkpoint
    return owned


class HeldElsewhereError(ArgumentError):
    """A rank would need what an earlier pipeline over the same modules (a GAN's discriminator) holds on another.
    `cuts`: those with which none does; None if there are none. `freed`: it would lose what the earlier one runs."""

    def __init__(self, name: str, rank: int, cuts: list[str] | None, freed: bool = False) -> None:
        remedy = f"pass cuts={cuts}, so that each rank runs what it has"
        if cuts is None:
            remedy = "make this pipeline first, or pass both cuts= that put what they share on the same ranks"
        problem = f"rank {rank} needs {name!r}, which an earlier pipeline over the same modules holds on another rank"
        if freed:
            problem = f"{name!r} would leave rank {rank}, where an earlier pipeline over the same modules still runs it"
        super().__init__(f"{problem}; {remedy}")
        self.cuts = cuts


def find_holders(model: nn.Module, engine: Engine) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """Return the ranks on which earlier pipelines left a tensor, by its id, and those where one runs it that is not
    closed; empty without one. Every process calls it."""
    named = [*model.named_parameters(), *model.named_buffers()]
    running_ids = set[int]().union(*(earlier.held_tensors for earlier in _ENGINES))
    absent = {name for name, tensor in named if isinstance(tensor, RemoteTensor)}
    gathered = engine.control.gather_pipeline((absent, {name for name, tensor in named if id(tensor) in running_ids}))
    running = {id(t): {rank for rank, (_, names) in enumerate(gathered) if name in names} for name, t in named}
    holders = {id(t): {rank for rank, (absent, _) in enumerate(gathered) if name not in absent} for name, t in named}
    return {key: ranks for key, ranks in holders.items() if len(ranks) < len(gathered)}, running


def check_held_locally(
    model: nn.Module,
    stages: Sequence[Stage],
    placement: Placement,
    holders: Mapping[int, Set[int]],
    running: Mapping[int, Set[int]],
) -> None:
    """Raise HeldElsewhereError, on every rank, if one is to hold what it does not have, or to lose what it runs."""
    ids_by_rank = _held_ids_by_rank(model, stages, placement.rank_of) if any(running.values()) or holders else {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        for rank, ids in ids_by_rank.items():
            if id(tensor) in ids and rank not in holders.get(id(tensor), ids_by_rank):
                raise HeldElsewhereError(name, rank, _matching_cuts(stages[: placement.depth], placement, holders))
            if id(tensor) not in ids and rank in running.get(id(tensor), ()):
                raise HeldElsewhereError(name, rank, None, freed=True)


def _matching_cuts(stages: Sequence[Stage], placement: Placement, holders: Mapping[int, Set[int]]) -> list[str] | None:
    """Return the first module of each stage but the first, where the next stage's rank holds what runs."""
    cuts: list[str] = []
    graphs = [stage.module for stage in stages if isinstance(stage.module, fx.GraphModule)]
    for graph, unit in ((g, str(node.target)) for g in graphs for node in g.graph.find_nodes(op="call_module")):
        for index, (name, tensor) in enumerate(graph.get_submodule(unit).named_parameters(unit)):
            ranks = holders.get(id(tensor), placement.rank_of)
            if placement.rank_of[len(cuts)] not in ranks:
                cuts.append(name.rpartition(".")[0] if index else unit)
                if len(cuts) == len(stages) or placement.rank_of[len(cuts)] not in ranks:
                    return None
    return cuts if len(cuts) + 1 == len(stages) else None


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _release(module: nn.Module, path: str, local_ids: set[int], released: dict[int, Tensor]) -> None:
    """Move tensors that are not kept to the meta device. One with several names stays one object, as names require."""
    for names in (module._parameters, module._buffers):
        for name, tensor in list(names.items()):
            if tensor is None or id(tensor) in local_ids or isinstance(tensor, RemoteTensor):
                continue  # made by an earlier pipeline over the same modules
            if id(tensor) not in released:
                released[id(tensor)] = make_remote(tensor, path + name)
            setattr(module, name, released[id(tensor)])


def move(model: nn.Module, devices: Mapping[int, torch.device]) -> bool:
    """Move tensors in place, as `Module.to` does, which is called wherever one device holds a whole module, so that
    whatever a module does there (an RNN flattens its weights) is done here too. Return whether there was anything to
    move.

    Modules that shared a parameter or buffer still share it afterwards: if `Module.to` makes a new object for each of
    them, all get the first.

    Args:
        model: the model whose tensors to move.
        devices: the device of each tensor to move, by the tensor's `id`; all others stay where they are.
    """
    slots = [(slot, name, tensor) for module in model.modules() for slot, name, tensor in _slots(module)]
    if all(devices.get(id(tensor), tensor.device) == tensor.device for _, _, tensor in slots):
        return False
    _move(model, devices, set())
    moved: dict[int, Tensor] = {}
    for slot, name, before in slots:  # `slots` keeps the old tensors alive, so that their ids are not reused
        now = slot[name]
        if now is not None:
            slot[name] = moved.setdefault(id(before), now)
    return True


def _move(module: nn.Module, devices: Mapping[int, torch.device], seen: set[int]) -> None:
    """Move whole modules where possible, and single tensors of modules that are divided."""
    if id(module) in seen:
        return
    seen.add(id(module))
    targets = {devices.get(id(t)) for inner in module.modules() for _, _, t in _slots(inner)}
    if len(targets) == 1 and (device := targets.pop()) is not None:
        module.to(device)
        seen.update(map(id, module.modules()))
        return
    for slot, name, tensor in list(_slots(module)):
        if (device := devices.get(id(tensor), tensor.device)) != tensor.device:
            holder = nn.Module()  # its `to` knows how to move a parameter together with its gradient
            wrapped: dict[str, Any] = holder._parameters if isinstance(tensor, nn.Parameter) else holder._buffers
            wrapped[name] = tensor
            holder.to(device)
            slot[name] = wrapped[name]
    for child in module.children():
        _move(child, devices, seen)


def _slots(module: nn.Module) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor]]:
    """Yield the places of a module's own parameters and buffers: the dict, the name in it, and the tensor."""
    for slot in (module._parameters, module._buffers):
        yield from ((slot, name, tensor) for name, tensor in slot.items() if tensor is not None)  # type: ignore[misc]


def check_no_overlaps(stages: Sequence[Stage], location: Callable[[int], Hashable]) -> None:
    """Raise ArgumentError if two parameters overlap, one is trained, and they are in different processes: language
    models tie so by `head.weight.data = embedding.weight.data`.

    A parameter with two names is a tie, and is kept equal. Parameters next to each other in one allocation share
    nothing, nor do columns of one matrix.

    Args:
        stages: all stages.
        location: returns the process, or the device, of a stage.
    """
    by_storage: dict[int, list[tuple[str, int, Tensor]]] = {}
    for stage in stages:
        for name, tensor in stage.parameters.items():
            if not tensor.is_meta and tensor.numel():
                by_storage.setdefault(storage_id(tensor), []).append((name, stage.meta.index, tensor))
    for entries in by_storage.values():
        for (name, index, first), (second_name, second_index, second) in combinations(entries, 2):
            apart = name != second_name and location(index) != location(second_index)
            if apart and (first.requires_grad or second.requires_grad) and overlap(first, second):
                raise ArgumentError(
                    f"{name!r} on stage {index} and {second_name!r} on stage {second_index} are two parameters in the "
                    "same memory: in processes of their own, each would be updated alone. Make them one (b.weight = "
                    "a.weight, which is a tie), or give each its own memory (nn.Parameter(a.weight.detach().clone()))"
                )


Materialize = Callable[[str, nn.Module], None]
"""Given a module's name and the module, sets the module's own tensors, which are allocated but uninitialized."""


def materialize(
    modules: Mapping[str, nn.Module], device: torch.device, seed: int, rule: Materialize | None = None
) -> None:
    """Allocate and initializes, in place, every tensor of these modules that is on the meta device.

    Args:
        modules: each module that holds tensors itself, by its name in the unsplit model.
        device: the device to allocate on.
        seed: the seed of the streams.
        rule: sets a module's tensors in place of its `reset_parameters`.

    Raises:
        ArgumentError: a module has no `reset_parameters` and there is no rule, or nothing sets one of its buffers.
    """
    allocated: dict[int, Tensor] = {}
    for name, module in modules.items():
        if not any(tensor.is_meta for _, tensor in direct_tensors(module)):
            continue
        # A tied parameter keeps the values that its first module gave it.
        tied = [allocated[id(p)] for p in module.parameters(recurse=False) if id(p) in allocated]
        tied_values = [(tensor, tensor.detach().clone()) for tensor in tied]
        _allocate(module, device, allocated)
        buffers = dict(module.named_buffers(recurse=False))
        before = {key: buffer._version for key, buffer in buffers.items()}
        generator = device_generator(device)
        state = generator.get_state()
        generator.manual_seed(mix(seed, hash_name(name)))
        try:
            _initialize(name, module, rule)
        finally:
            generator.set_state(state)
        with torch.no_grad():
            for tensor, value in tied_values:
                tensor.copy_(value)
        after = dict(module.named_buffers(recurse=False))
        for key, buffer in buffers.items():
            if after.get(key) is buffer and buffer._version == before[key]:
                raise ArgumentError(
                    f"buffer {name}.{key} is on the meta device and {type(module).__name__}.reset_parameters does not "
                    "set it: its values cannot be re-created; pass materialize=fn(name, module) that sets it, "
                    "or build the model on a real device"
                )


def _initialize(name: str, module: nn.Module, rule: Materialize | None) -> None:
    if rule is not None:
        rule(name, module)
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ArgumentError(
            f"module {name} ({type(module).__name__}) is on the meta device and has no reset_parameters(); "
            "pass materialize=fn(name, module) that sets its tensors, or build the model on a real device"
        )
    reset()


def _allocate(module: nn.Module, device: torch.device, allocated: dict[int, Tensor]) -> None:
    for names in (module._parameters, module._buffers):  # every name: a tensor may have two in one module
        for name, tensor in list(names.items()):
            if tensor is None or not tensor.is_meta:
                continue
            if id(tensor) not in allocated:
                new = torch.empty_like(tensor, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                allocated[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
            setattr(module, name, allocated[id(tensor)])


def direct_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's parameters and buffers, without those of its children."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)
