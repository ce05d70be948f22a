"""Records a model's forward, in as many attempts as it takes: runs it on fake tensors and returns what it called.

An attempt may show that a module must be opened or stay whole, or that a function must be one call. The next attempt
starts from that.

This uses neither symbolic tracing nor a compiler: Python runs as it is, so any control flow that does not depend on
tensor values is followed. The model, its buffers and the random generators are left as they were.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributions import Distribution

from penstock._base.compat import (
    DATA_DEPENDENT,
    UNSUPPORTED,
    device_generator,
    fake_mode,
    has_global_backward_hooks,
    quiet,
)
from penstock._base.errors import PartitionError
from penstock._base.marks import calling_at_marks
from penstock._base.pytree import Flat, flatten, unflatten
from penstock.partition.given_model import Chain
from penstock.partition.names import is_below
from penstock.partition.nested import Constant, NodeValue, hides_tensors, holds_tensors, input_path, leaves_of
from penstock.partition.obstacles import Obstacle, depends_on_values, describe_scope
from penstock.partition.record.autograd_functions import following_functions
from penstock.partition.record.fakes import Loan, Snapshot, fake_like, fake_value, untouched_generators
from penstock.partition.record.operator_effects import SEED
from penstock.partition.record.random_branches import merge_branches
from penstock.partition.record.recorder import Attempt, Recorder
from penstock.partition.recording import Recording, is_readable
from penstock.partition.result_checks import drop_unread_shapes
from penstock.partition.state.block_state import Remembered
from penstock.partition.state.loss_values import ALL_UNITS, Left
from penstock.partition.state.reachable import Reach
from penstock.partition.units import NO_SPEC, Lesson, Opening, Unit, UnitSpec, find_units, intercept, replaced
from penstock.partition.user_code import raising_line


def record(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], spec: UnitSpec = NO_SPEC) -> Recording:
    """Record `model(*args, **kwargs)`. Parameters on `meta` are taken to be on the first input's device.

    What a forward needs must not depend on where the model is cut. So if something must be learned while modules are
    opened for cuts or balance, it is learned with these whole. The recording's `unit_spec` has what was learned.

    Raises PartitionError, with the line of the user's code, for anything that a stage could not replay.
    """
    has_learned = False
    while (opening := spec.opening).names != opening.asked:
        try:
            return _record_merged(model, args, kwargs, spec)
        except Lesson as lesson:
            if (name := lesson.keep_whole) is not None:  # others of its class will not work either; all, without a name
                kinds = {n: type(model.get_submodule(n)) for n in opening.for_balance}
                closed = [n for n in kinds if not name or kinds[n] is type(model.get_submodule(name))]
                spec = replace(spec, opening=opening.without(closed))
            elif lesson.additions.functions or lesson.additions.stay_whole:
                spec = _extend_spec(spec, lesson)
            elif not has_learned:
                asked_alone = replace(spec, opening=Opening(opening.asked))
                spec = replace(_learn_units(model, args, kwargs, asked_alone).unit_spec, opening=opening)
                has_learned = True
            elif opening.for_balance:
                spec = replace(spec, opening=opening.without(opening.for_balance))
            else:
                raise PartitionError(opening.refusal(sorted(opening.for_cuts)[0], lesson.refusal)) from None
    return _learn_units(model, args, kwargs, spec)


def _learn_units(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], spec: UnitSpec) -> Recording:
    """Record, and open what must be, until nothing more must be."""
    reason = ""  # why modules were opened, for messages
    fallbacks: list[tuple[UnitSpec, str]] = []  # what to go back to, with its reason, if that does not help
    while True:
        try:
            try:
                return _record_merged(model, args, kwargs, spec)
            except Lesson as lesson:
                new, first = lesson.additions, fallbacks[0][0] if fallbacks else spec
                if new.stay_whole:
                    spec, fallbacks, reason = replace(first, stay_whole=spec.stay_whole | new.stay_whole), [], ""
                elif new.functions:
                    spec = _extend_spec(spec, lesson)
                else:
                    if not lesson.needed:
                        fallbacks = [(replace(first, stay_whole=spec.stay_whole | new.opened), "")]
                    reason = ""  # what is refused now is no consequence of what was opened before
                    spec, reason = _extend_spec(spec, lesson), lesson.refusal
                    if likely := lesson.likely - {*spec.leaves} - spec.opened - spec.run_whole - spec.stay_whole:
                        fallbacks, spec = [*fallbacks, (spec, reason)], spec | UnitSpec(opened=likely)
        except Exception as error:
            if fallbacks:
                spec, reason = fallbacks.pop()
            elif reason and isinstance(error, PartitionError):
                text = f"{reason}. Recording it call by call does not help"
                if isinstance(error, Obstacle):
                    raise Obstacle(f"{text}: {error.reason}", error.scope, error.alternative) from error
                raise PartitionError(f"{text}: {error}") from error
            else:
                raise


def _extend_spec(spec: UnitSpec, lesson: Lesson) -> UnitSpec:
    """Return the spec and what the lesson adds. Raise PartitionError if that is nothing new, or contradicts the spec
    or the user's `leaves`."""
    extended = spec | lesson.additions
    if conflicting := sorted(lesson.additions.opened & {*spec.leaves}):
        raise PartitionError(
            f"{lesson.refusal}; or leave {conflicting} out of leaf_modules, so that it can be recorded call by call"
        )
    if extended == spec or extended.opened & extended.run_whole:
        raise PartitionError(f"{lesson.refusal}{_NOT_ENOUGH if lesson.additions.run_whole else ''}")
    return extended


_NOT_ENOUGH = (
    ", which is not enough. Name the module whose forward this call is part of (one that calls torch.func, say) in "
    "leaf_modules=[...], so that it runs as a whole; if it is the model itself, give this part a module of its own"
)


def _record_merged(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], spec: UnitSpec) -> Recording:
    """Record with these units, on all paths that the forward may take at random."""
    record_choices = partial(record_path, Attempt(model, args, kwargs, find_units(model, spec), spec))
    recording = record_choices({})
    if recording.asks and any(entry.is_carried for entry in recording.left):
        raise Lesson(stay_whole=[ALL_UNITS])  # a randomly skipped module leaves no value to carry
    return merge_branches(recording, record_choices) if recording.asks else recording


def record_path(attempt: Attempt, choices: Mapping[int, bool]) -> Recording:
    """Record the path that the forward takes if its random branches get these answers."""
    unknown = frozenset[int]()
    while True:
        try:
            return _record(attempt, choices, unknown)
        except Lesson as lesson:
            if lesson.unknown is None:
                raise
            unknown = lesson.unknown  # each path numbers its calls from 0


def _record(attempt: Attempt, choices: Mapping[int, bool], unknown: frozenset[int]) -> Recording:
    """Run the forward once."""
    model = attempt.model
    flat = flatten((tuple(attempt.args), dict(attempt.kwargs)))
    snapshot, reach = Snapshot(model), None
    try:
        with untouched_generators(), ExitStack() as stack:
            parameters = (parameter for parameter in model.parameters() if not parameter.is_meta)
            tensors = (*(leaf for leaf in flat.leaves if isinstance(leaf, Tensor)), *parameters)
            device = next((tensor.device for tensor in tensors), torch.device("cpu"))
            for generator in (torch.default_generator, device_generator(device)):
                generator.manual_seed(SEED)
            _refuse_backward_hooks(model, attempt.units.values())
            loan = Loan(model, fake_mode(), device)
            reach = Reach(model)
            recorder = Recorder(attempt, loan, reach, choices, unknown)
            stack.callback(recorder.observer.restore)
            inputs = _make_inputs(recorder, flat)
            with _blame_opened_module(recorder):
                result = _run_checked(recorder, inputs, flat.structure, attempt.unit_spec)
                _check_leftovers(snapshot, recorder)
                left = recorder.side_effects.collect_left(recorder.is_seen, attempt.unit_spec, recorder.ran_for_real)
                recording = _build_recording(recorder, result, left, attempt.unit_spec)
                recorder.side_effects.check_stateless()
                return recording
    finally:
        if reach is not None:
            reach.restore()
        snapshot.restore()


def _run_checked(recorder: Recorder, inputs: list[Any], structure: Any, spec: UnitSpec) -> Any:
    """Run the forward, and check that no block read or changed anything behind the recording's back."""
    try:
        with recorder.chance.redirect_draws(spec.functions):
            result = _run(recorder, inputs, structure)
    except (Lesson, PartitionError) as error:
        additions = error.additions if isinstance(error, Lesson) else None
        if additions is None or additions.opened or additions.run_whole:
            recorder.side_effects.check_units(recorder.on_memory)  # may give a better reason
        if isinstance(error, Lesson) and error.additions.opened:
            error.likely |= _will_be_opened(recorder, spec, error.additions.opened)
        raise
    recorder.side_effects.check_units(recorder.on_memory)
    return result


def _will_be_opened(recorder: Recorder, spec: UnitSpec, names: Collection[str]) -> frozenset[str]:
    """Return the units of the same classes, and the modules in them, that would be opened for what they have left, one
    attempt after another."""
    model, channels = recorder.model, recorder.side_effects
    try:
        channels.collect_left(recorder.is_seen, spec, recorder.ran_for_real)
    except Lesson as lesson:
        kinds = {type(model.get_submodule(name)) for name in names}
        alike = {name for name in lesson.additions.opened if type(model.get_submodule(name)) in kinds}
        return frozenset(name for name in alike | lesson.likely if any(is_below(name, unit) for unit in alike))
    return frozenset()


def _make_inputs(recorder: Recorder, flat: Flat) -> list[Any]:
    """Return the leaves of (args, kwargs) with fakes for tensors whose values are treated as unknown."""
    inputs = list(flat.leaves)
    for index, leaf in enumerate(flat.leaves):
        if isinstance(leaf, Tensor):
            inputs[index] = leaf.clone() if is_readable(leaf) else None
            if inputs[index] is None or not recorder.known_values.assume(inputs[index], index):
                inputs[index] = (fake_like if leaf.is_leaf else fake_value)(leaf, recorder.loan.mode, leaf.device)
            recorder.add_input(_input_name(recorder.model, flat.paths[index]), inputs[index], index)
        elif hides_tensors(leaf):
            raise PartitionError(
                f"the model's input {input_path(flat.paths[index])} is a {type(leaf).__name__}, which holds "
                "tensors that cannot be taken out of it. Pass tensors, or tuples, lists, dicts or plain "
                "objects of tensors"
            )
    return inputs


@contextmanager
def _blame_opened_module(recorder: Recorder) -> Iterator[None]:
    """Blame an error raised inside a module that was opened for balance, or for a cut, on that module."""
    opening = recorder.opening
    try:
        yield
    except Exception as error:
        if opening.for_balance:
            raise Lesson(keep_whole=opening.around(recorder.scope)) from error
        name = opening.cut_inside(recorder.scope)
        if name and isinstance(error, PartitionError):
            reason = error.reason if isinstance(error, Obstacle) else str(error)
            raise PartitionError(opening.refusal(name, reason)) from error
        raise


_HOOKS_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"
"""Compiled blocks warn about the hooks that follow modules."""


def _run(recorder: Recorder, inputs: list[Any], structure: Any) -> Any:
    args, kwargs = unflatten(inputs, structure)
    mode, observer = recorder.loan.mode, recorder.observer
    modules = [u.module for u in recorder.units.values()]
    changes = [(Distribution, "_validate_args", False)]  # checks of arguments, which read values, unless told to
    try:
        with mode, observer, observer.following_modules(), following_functions(recorder), quiet():
            with replaced(changes), warnings.catch_warnings(), intercept(modules, recorder.call_unit), recorder:
                warnings.filterwarnings("ignore", _HOOKS_WARNING)
                with calling_at_marks(recorder.mark):
                    return recorder.model(*args, **kwargs)
    except DATA_DEPENDENT as error:
        raise depends_on_values(error, recorder.scope) from error
    except UNSUPPORTED as error:
        reason = f"{raising_line(error)} in {describe_scope(recorder.scope)} cannot run on fake tensors: {error}"
        raise Obstacle(reason, recorder.scope) from error
    except RuntimeError as error:
        words = ("subclasses", "fake tensor", "allocated")  # of .numpy(), .data_ptr()
        if any(word in str(error).lower() for word in words):
            raise depends_on_values(error, recorder.scope) from error
        raise


def _check_leftovers(snapshot: Snapshot, recorder: Recorder) -> None:
    """Refuse buffers that were replaced; note tensors and numbers that the forward leaves in attributes."""
    for path, slots, fakes in recorder.loan.installed:
        for key, fake in fakes.items():
            if fake is None or (new := slots.get(key)) is fake or _is_cache(recorder, path, key, new):
                continue
            raise PartitionError(
                f"the forward replaces {f'{path}.{key}'.lstrip('.')!r} by a new tensor, which a stage cannot replay. "
                f"Update it in place: self.{key}.copy_(...); if it is a cache of constants, register it with "
                "persistent=False"
            )
    in_units = {id(m) for unit in recorder.units.values() for m in unit.module.modules()}
    for module, attribute, value in snapshot.changed():
        scope = recorder.module_names[id(module)]
        path = f"{scope}.{attribute}".lstrip(".")
        if id(module) not in in_units and (name := recorder.opening.around(scope)):
            raise Lesson(keep_whole=name)
        if id(module) not in in_units and not attribute.startswith("_") and attribute != "training":
            if holds_tensors(value, fake_only=True):
                recorder.notes.append(f"the forward leaves a tensor in {path}; a stage does not set it")
            elif isinstance(value, (int, float)):
                recorder.notes.append(f"the forward changes {path}; a stage keeps the value it had when recorded")


def _is_cache(recorder: Recorder, path: str, key: str, value: Tensor | None) -> bool:
    """Whether a replaced buffer holds only what every forward computes identically, as those of transformers' rotary
    embeddings of dynamic length do (`modeling_rope_utils`)."""
    is_saved = key not in recorder.model.get_submodule(path)._non_persistent_buffers_set
    return value is not None and not is_saved and recorder.observer.is_fixed(value)


def _result_leaves(recorder: Recorder, flat: Flat, outputs: dict[fx.Node, int]) -> Iterator[int | Constant]:
    """Yield, for each leaf of the result, its output's index (new outputs are added to `outputs`), or the constant it
    is."""
    for leaf, path in zip(flat.leaves, flat.paths, strict=True):
        if isinstance(leaf, Tensor):
            yield outputs.setdefault(recorder.get_node(leaf), len(outputs))
        elif isinstance(leaf, NodeValue):
            recorder.chance.refuse(f"a random number, {leaf.node.name!r}, as the model's result{path},")
        elif hides_tensors(leaf, fake_only=True):
            raise PartitionError(
                f"the model's result{path} is a {type(leaf).__name__}, which holds tensors that cannot be taken out of "
                "it. Return tensors, or tuples, lists, dicts or plain objects of tensors"
            )
        else:
            yield Constant(leaf)


def _positions_by_module(recorder: Recorder) -> dict[str, tuple[int, ...]]:
    """Return the positions of the calls of each of the model's modules, by name."""
    calls: dict[str, list[int]] = {}
    for module, position in recorder.observer.calls:
        if id(module) in recorder.module_names:
            calls.setdefault(recorder.module_names[id(module)], []).append(position)
    return {name: tuple(positions) for name, positions in calls.items()}


def _build_recording(recorder: Recorder, result: Any, left: Collection[Left], spec: UnitSpec) -> Recording:
    loan, flat = recorder.loan, flatten(result)
    outputs: dict[fx.Node, int] = {}
    leaves, entered = tuple(_result_leaves(recorder, flat, outputs)), _positions_by_module(recorder)
    if (writer := next((fact for fact in recorder.facts.values() if fact.writes & recorder.reads), None)) is not None:
        reason = f"the forward branches on a buffer and updates it at {writer.source_line}"
        raise Obstacle(f"{reason}, which a recording cannot follow", writer.scope)
    shape_nodes = drop_unread_shapes(recorder.facts, recorder.shapes_read, recorder.sized)
    free = {number for node, number in recorder.sized.items() if node not in shape_nodes}
    tensors = [leaf for leaf in flat.leaves if isinstance(leaf, Tensor)]
    carried = [entry.recorded(lambda t: outputs.setdefault(recorder.get_node(t), len(outputs))) for entry in left]
    tensors += [t for entry in left for t in entry.small]
    texts = frozenset(entry.text for entry in left if entry.small)
    with_generators = [Remembered(f"a torch.Generator in {u!r}", u) for _, u in recorder.observer.generators.values()]
    used_names = [loan.names[id(t)] for t in leaves_of(tensors) if id(t) in loan.names]
    return Recording(
        graph=recorder.graph,
        facts=recorder.facts,
        inputs=recorder.inputs,
        outputs=tuple(outputs),
        result_leaves=leaves,
        result_structure=flat.structure,
        constants=recorder.constants,
        blocks=frozenset(u.name for u in recorder.units.values() if u.repeated),
        held={name: loan.originals[id(fake)] for name, fake in loan.fakes.items()},
        memory=dict(recorder.observer.held),
        drawing=dict(sorted(recorder.drawing.items())),
        may_draw=frozenset(recorder.may_draw),
        entered=entered,
        device=loan.device,
        guards=tuple(replace(guard, is_unread_shape=n in free) for n, guard in enumerate(recorder.guards)),
        notes=recorder.all_notes,
        unit_spec=replace(spec, for_loss=spec.for_loss | texts, attributes_read=frozenset(recorder.attributes_read)),
        left=tuple(carried),
        asks=tuple(recorder.chance.asks),
        is_foreign=recorder.chance.is_foreign,
        needed=frozenset(used_names),
        touched=frozenset(recorder.observer.touched),
        remembered=(*recorder.side_effects.remembered.values(), *with_generators),
    )


def _input_name(model: nn.Module, path: str) -> str:
    """Return a readable name for a leaf of (args, kwargs), such as `input_ids`, from its path, such as
    `[1]['input_ids']`."""
    root, *keys = re.findall(r"\w+", path)
    owner = next(iter(model.children())) if isinstance(model, (Chain, nn.Sequential)) and len(model._modules) else model
    if root == "0":
        parameters = inspect.signature(owner.forward).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        position = int(keys[0])
        keys[0] = names[position] if position < len(names) else f"input_{position}"
    return "_".join(keys)


def _refuse_backward_hooks(model: nn.Module, units: Iterable[Unit]) -> None:
    """Raise Obstacle if a module that does not run as a whole has hooks on its gradients: nothing would call them."""
    if has_global_backward_hooks():
        raise PartitionError(
            "hooks on the gradients of all modules are registered (register_module_full_backward_hook), but a pipeline "
            "does not call modules that it records call by call, the model itself among them, so that nothing would "
            "call the hooks for those. Register them on the blocks: block.register_full_backward_hook(...)"
        )
    for name, module in model.named_modules(memo={unit.module for unit in units}):
        if module._backward_hooks or module._backward_pre_hooks:
            subject = f"module {name!r}" if name else "the model"
            raise Obstacle(
                f"{subject} has a backward hook, but does not run as a whole, so that nothing would call the hook", name
            )
