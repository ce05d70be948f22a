"""Names of modules, parameters and buffers: as users know them, and as `named_modules()` has them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from torch import nn

from penstock._base.errors import PartitionError
from penstock.partition.given_model import Chain

_WRAPPERS = "(?:_orig_mod|_checkpoint_wrapped_module)"
_WRAPPED = re.compile(rf"(?:^|(?<=\+))(?:{_WRAPPERS}(?:\.|$))+|\.{_WRAPPERS}(?!\w)")
"""What `torch.compile` and torch's `checkpoint_wrapper` add to the names in a module."""


def unwrapped(name: str) -> str:
    """Return the name of a module, parameter or buffer as if nothing around it were wrapped."""
    return _WRAPPED.sub("", name)


def public_names(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Return the names by which users know a model's parameters or buffers.

    These are the model's own names; for a `Chain`, the layers' own names, prefixed with the layer's index only if two
    layers would share one.
    """
    plain = {name: unwrapped(name) for name in names}
    if not isinstance(model, Chain):
        return plain
    bare = {name: plain[name].partition(".")[2] for name in names}
    counts = Counter([*bare.values(), *plain.values()])
    return {name: short if counts[short] == 1 else plain[name] for name, short in bare.items()}


def known_names(model: nn.Module) -> dict[str, str]:
    """Map every name of a parameter or buffer in the model, with and without wrappers, to the first, by which users
    know it."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    for name, tensor in tensors:
        first.setdefault(id(tensor), name)
    public = public_names(model, list(first.values()))
    return {alias: public[first[id(tensor)]] for name, tensor in tensors for alias in (name, unwrapped(name))}


def canonical_names(model: nn.Module) -> dict[int, str]:
    """Return the first name of each module, by its `id`."""
    return {id(module): name for name, module in reversed(list(model.named_modules()))}


_MAX_LISTED = 4
"""How many modules a message lists if no name is close."""


def public_name(model: nn.Module, name: str) -> str:
    """Return the name of a module or cut as if nothing around it were wrapped; data parallelism puts `module.` before
    all names."""
    name = unwrapped(name)
    return name if hasattr(model, "module") else name.removeprefix("module.")


def named_module(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module with this name in `named_modules()`, without going through all of them; None if there is
    none."""
    module: nn.Module | None = model
    for key in name.split(".") if name else ():
        if module is None or key not in module._modules:
            return None
        module = module._modules[key]
    return module


def is_below(path: str, name: str) -> bool:
    """Whether a path from the model is `name`, or leads on from there."""
    return path == name or path.startswith((f"{name}.", f"{name}["))


def enclosing(path: str) -> Iterator[str]:
    """Yield every path that encloses a path, and itself, outermost first."""
    yield from (path[: match.start()] for match in re.finditer(r"[.\[]", path))
    yield path


def resolve(model: nn.Module, name: str, argument: str) -> tuple[str, nn.Module]:
    """Return what has this name, with or without the wrappers around it: its name in `named_modules()`, and the module.
    Raise PartitionError with the closest name if there is none."""
    if named_module(model, name) is None:
        plain, paths = public_name(model, name), (path for path, _ in model.named_modules(remove_duplicate=False))
        name = next((path for path in paths if path and unwrapped(path) == plain), plain)
    if name and (module := named_module(model, name)) is not None:
        return name, module
    names = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    matches = get_close_matches(name, names, n=1)
    children = [child for child, _ in model.named_children()]
    listed = f"{', '.join(map(repr, children[:_MAX_LISTED]))}{' and more' if len(children) > _MAX_LISTED else ''}"
    hint = f"; the nearest is {matches[0]!r}" if matches else f"; it begins with {listed}" if children else ""
    raise PartitionError(
        f"{argument}: the model has no module named {name!r}{hint}. Names are those of named_modules()"
    )
