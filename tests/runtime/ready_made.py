"""A front end without fx: a list of modules is the stages of a pipeline. Each takes and returns one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from penstock._base.stages import MODEL_INPUT, Input, Output, StageMeta, TensorMeta
from penstock.partition import RandomSource


class Returns(nn.Module):
    """A stage's code: a module of the user's, which returns its only output in a tuple."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.inner(x),)


@dataclass(frozen=True)
class ReadyStage:
    meta: StageMeta
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    device: torch.device = torch.device("cpu")  # noqa: RUF009  (it never changes)
    buffers: ClassVar[Mapping[str, Tensor]] = {}
    frame = None
    may_update = reads = remembered = checkpointed = norms_as_functions = ()
    draws_outside_modules = False
    depends_on_values = True

    @property
    def code(self) -> str:
        return repr(self.module)

    def on(self, device: torch.device) -> ReadyStage:
        return ReadyStage(self.meta, self.module, self.parameters, device)


@dataclass(frozen=True)
class ReadyPartition:
    stages: tuple[ReadyStage, ...]
    draw_offsets: tuple[Mapping[str, int], ...]
    drawing_modules: ClassVar[Mapping[str, nn.Module]] = {}
    may_draw: ClassVar[frozenset[str]] = frozenset()
    origins: ClassVar[Mapping[str, Any]] = {}
    elsewhere: ClassVar[Mapping[str, Tensor]] = {}
    overwritten: ClassVar[frozenset[str]] = frozenset()
    is_foreign = reorders_gradients = False
    notes = left = ()

    @property
    def code(self) -> str:
        return "\n".join(stage.code for stage in self.stages)

    def holds(self, leaves: Sequence[Any]) -> bool:
        return True

    def arrange(self, leaves: Sequence[Any]) -> list[Tensor]:
        return list(leaves)

    def build_output(self, leaves: Sequence[Tensor]) -> Tensor:
        return leaves[0]

    def leaving(self, leaves: Sequence[Tensor]) -> AbstractContextManager[None]:
        return nullcontext()


class ReadyMade:
    """The front end: runs copies of the modules on the meta device to see what travels between them."""

    cuts = division = ()

    def __init__(self, modules: Sequence[nn.Module], stages: int, streams: RandomSource) -> None:
        self.model = nn.Sequential(*modules)
        assert len(self.model) == stages
        self._known: dict[Any, ReadyPartition] = {}

    def __call__(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> ReadyPartition:
        (x,) = args
        key = tuple(x.shape), torch.is_grad_enabled()
        if key not in self._known:
            self._known[key] = self._partition(x.detach().to("meta"))
        return self._known[key]

    def _partition(self, x: Tensor) -> ReadyPartition:
        stages: list[ReadyStage] = []
        source, name = MODEL_INPUT, "x"
        for index, module in enumerate(self.model):
            parameters = {f"{index}.{key}": value for key, value in module.named_parameters()}
            entering = Input(name, source, _described(x))
            x, source, name = deepcopy(module).to("meta")(x), index, f"y{index}"
            meta = StageMeta(index, (entering,), (Output(name, _described(x)),), tuple(parameters))
            stages.append(ReadyStage(meta, Returns(module), parameters))
        return ReadyPartition(tuple(stages), ({},) * len(stages))

    def names(self) -> dict[str, str]:
        return {name: name for name, _ in self.model.named_parameters()}

    def divide(self, division: Any) -> None: ...

    def forget(self) -> None:
        self._known.clear()

    def attributes(self) -> tuple[()]:
        return ()

    def settle(self, attributes: Any) -> None: ...

    def opened_modules(self) -> frozenset[int]:
        return frozenset()


def _described(x: Tensor) -> TensorMeta:
    return TensorMeta(tuple(x.shape), x.stride(), str(x.dtype).removeprefix("torch."), x.requires_grad)
