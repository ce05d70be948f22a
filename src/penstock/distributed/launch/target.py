"""A training case that is named on the command line: `module:function` or `file.py:function`, and what it returns."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import nn

from penstock._base.aliases import PIPELINE_ALIASES
from penstock._base.errors import ArgumentError, PenstockError
from penstock._base.formatting import a, one_line, printable_line
from penstock.distributed.launch import transformers_config

_FORM = "pass module:function or file.py:function"
_MAX_MESSAGE = 500
_RETURNS = "expected (model, args, target, loss)"
_DEFAULT = "make"
"""The function of a TARGET that names none."""

SEED = 0
"""Of torch's, Python's and numpy's generators when a TARGET is called."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model, one batch for it, and its loss.

    Attributes:
        model: a module, or a list of layers.
        args: the model's positional inputs.
        kwargs: its inputs by keyword.
        target: what the loss takes besides the model's output; None where the model computes its own loss.
        loss: `loss(output, target)`, a scalar; None where the model computes its own.
        cutting: of `batch_dims`, `split_fn` and `merge_fn` those that are given, as `penstock.pipeline` takes them.
        again: calls the function once more, as it was called.
        reduction: how the microbatches' losses make the batch's, as `penstock.pipeline` takes it; None: not given.
        training: of `batches`, `optimizer` and `clip_grad_norm` those that are given, for `penstock blame`.
    """

    model: nn.Module | Sequence[nn.Module]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    loss: Callable[..., Any] | None
    cutting: Mapping[str, Any]
    again: Callable[[], Target]
    training: Mapping[str, Any] = field(default_factory=dict)
    reduction: Any = None

    @property
    def dividing(self) -> dict[str, Any]:
        """How a batch becomes microbatches: `cutting` without `merge_fn`, as `penstock.profile` takes it."""
        return {name: value for name, value in self.cutting.items() if name != "merge_fn"}


def load(text: str, *, weights: bool = True) -> Target:
    """Call the function that `text` names, from seed 0, and check what it returns.

    The function returns `(model, args, target, loss)`: `args` is the tuple of the model's positional inputs, or a pair
    of such a tuple and a dict of inputs by keyword. Behind these may come a dict that says how a batch is cut:
    `batch_dims`, `split_fn` and `merge_fn`; and `reduction`. Modules are looked up in the current folder too; a file
    finds the modules next to it. Without a colon, the function is `make`. `hf:path/to/config.json` is a model of
    transformers by its configuration; with weights=False it is built on the meta device.

    Raises:
        ArgumentError: there is no such module, file or function, it raises, or it returns something else.
    """
    if text.startswith(transformers_config.PREFIX):
        return call(text, partial(transformers_config.case, text, weights=weights))
    return call(text, load_function(text if ":" in text else _with_default_function(text)))


def load_function(text: str, label: str = "TARGET") -> Callable[..., Any]:
    """Return what `module:function` or `file.py:function` names. `label`: the argument, for messages. Raise
    ArgumentError if there is no such module, file or function, or its module raises."""
    source, colon, name = text.rpartition(":")
    if not colon or not source or not name:
        raise ArgumentError(f"{label} {text!r}: expected a colon between a module and a function; {_FORM}")
    with user_code(f"{label} {text!r}"):
        module = _from_file(Path(source), label) if source.endswith(".py") else _from_name(source, label)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ArgumentError(f"{label} {text!r}: {source} has no function {name!r}; it has {', '.join(names) or 'none'}")
    return function


def _with_default_function(source: str) -> str:
    """Return the TARGET with its default function. Its code is read before it runs: a script may train when it is
    imported."""
    path = Path(source)
    if source.endswith(".py") and path.is_file():
        with user_code(f"TARGET {source!r}"):
            names = {name for node in ast.parse(path.read_bytes(), path.name).body for name in _bound_names(node)}
        if _DEFAULT not in names:
            raise ArgumentError(
                f"TARGET {source!r}: it has no function {_DEFAULT}; add one that returns a case, such as "
                f"'def {_DEFAULT}(): return model, (inputs,), target, loss_fn', or name another: {source}:function"
            )
    return f"{source}:{_DEFAULT}"


def _bound_names(statement: ast.stmt) -> list[str]:
    """Return the names that a statement of a module may bind to a function."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [name.asname or name.name for name in statement.names]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return [statement.name] if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) else []


def call(text: str, function: Callable[[], Any]) -> Target:
    """Call a function as `load` does; `text` names it in messages."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    numpy.random.seed(SEED)
    with user_code(f"TARGET {text!r}"):
        returned = function()
    return _check(text, returned, partial(call, text, function))


@contextlib.contextmanager
def user_code(name: str) -> Iterator[None]:
    """Run the user's code, which must not end this process with status 0: that would pass for a result.

    Raises:
        PenstockError: as the block raised it.
        KeyboardInterrupt: Ctrl-C.
        ArgumentError: the block raised anything else, `SystemExit` included.
    """
    try:
        yield
    except (PenstockError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ArgumentError(f"{name} raised {describe(error)}") from error


def describe(error: BaseException) -> str:
    """Describe an exception on one line: its type, its message, and where it was raised."""
    text = printable_line(one_line(error), _MAX_MESSAGE)
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


def _from_file(path: Path, label: str) -> ModuleType:
    if not path.is_file():
        raise ArgumentError(f"{label}: there is no file {str(path)!r} in {Path.cwd()}; {_FORM}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as for a script
    name = f"_{label.strip('-').lower()}_{path.stem}"  # a file random.py must not hide the module of that name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up here
    spec.loader.exec_module(module)
    return module


def _from_name(name: str, label: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current folder, as with `python -m`
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        hint = f"; did you mean {name}.py?" if Path(f"{name}.py").is_file() else ""
        raise ArgumentError(f"{label}: there is no module {error.name!r}{hint}; {_FORM}") from None


def _check(text: str, returned: Any, rebuild: Callable[[], Target]) -> Target:
    if not isinstance(returned, tuple) or len(returned) not in (4, 5):
        got = f"{len(returned)} values" if isinstance(returned, tuple) else a(type(returned).__name__)
        raise ArgumentError(f"TARGET {text!r} returned {got}; {_RETURNS}")
    model, args, target, loss, *extra = returned
    options = extra[0] if extra else {}
    if isinstance(options, dict):
        options = {PIPELINE_ALIASES.get(key, key): value for key, value in options.items()}
    if not isinstance(options, dict) or not options.keys() <= _CUTTING | _TRAINING | {"reduction"}:
        got = f"a dict with {', '.join(map(str, options))}" if isinstance(options, dict) else a(type(options).__name__)
        raise ArgumentError(
            f"TARGET {text!r} returned {got} after the loss; expected a dict with any of "
            f"{', '.join(sorted(_CUTTING))}, reduction; for penstock blame, also {', '.join(sorted(_TRAINING))}"
        )
    reduction = options.get("reduction")
    if reduction is not None and reduction not in ("mean", "sum") and not callable(reduction):
        raise ArgumentError(
            f"TARGET {text!r}: reduction={reduction!r}: expected 'mean', 'sum' or a function of the target"
        )
    cutting, training = ({key: options[key] for key in keys & options.keys()} for keys in (_CUTTING, _TRAINING))
    if not isinstance(model, nn.Module) and not _is_layers(model):
        raise ArgumentError(
            f"TARGET {text!r} returned {a(type(model).__name__)} as the model; {_RETURNS}, model: a module"
        )
    kwargs: Mapping[str, Any] = {}
    if isinstance(args, tuple) and len(args) == 2 and isinstance(args[0], tuple) and isinstance(args[1], dict):
        args, kwargs = args
    if not isinstance(args, tuple):
        raise ArgumentError(
            f"TARGET {text!r} returned {a(type(args).__name__)} as args; {_RETURNS}, "
            "args: a tuple such as (inputs,), or a pair of a tuple and a dict"
        )
    if loss is not None and not callable(loss):
        raise ArgumentError(
            f"TARGET {text!r} returned {a(type(loss).__name__)} as the loss; {_RETURNS}, "
            "loss: a function of output and target, or None"
        )
    return Target(model, args, kwargs, target, loss, cutting, rebuild, training, reduction)


_CUTTING = {"batch_dims", "split_fn", "merge_fn"}
_TRAINING = {"batches", "optimizer", "clip_grad_norm"}


def _is_layers(model: Any) -> bool:
    return isinstance(model, (list, tuple)) and bool(model) and all(isinstance(layer, nn.Module) for layer in model)
