"""What a forward keeps for its backward, and what backwards leave: hooks, functions of autograd, checkpoints."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.registry import SPLIT, WIDTH, Block, Layered, blocks, mean, model

KEPT, LEFT = "kept for the backward", "hooks and backwards with state"


class Slotted:
    __slots__ = ("scale",)


def function() -> None:
    """Has an attribute."""


def variable() -> tuple[Any, Any]:
    held = None

    def put(value: Any) -> None:
        nonlocal held
        held = value

    return put, lambda: held


SLOTTED, LOCAL, CONTEXT, TOLD, TAPE = (
    Slotted(),
    threading.local(),
    ContextVar[Any]("kept"),
    dict[str, Any](),
    list[Any](),
)
PUT, GET = variable()


class Recalls(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Any) -> Tensor:
        ctx.block = block
        block.put(1 + x.detach().abs().mean())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.block.get(), None


class Recalling(nn.Module):
    """Its backward multiplies by what its forward has put."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.prepare()

    def prepare(self) -> None:
        """For what holds it."""

    def forward(self, x: Tensor) -> Tensor:
        return Recalls.apply(self.linear(x), self)

    def put(self, scale: Any) -> None:
        raise NotImplementedError

    def get(self) -> Any:
        raise NotImplementedError


def recalls(*, one: bool = False) -> Any:
    """Adds a case; `one`: of what is kept in one place for all, one block may use it."""

    def add(kind: type[Recalling]) -> type[Recalling]:
        rest = (lambda: [nn.Linear(WIDTH, WIDTH) for _ in range(3)]) if one else (lambda: [kind() for _ in range(3)])
        model(KEPT, name=f"Keeps{kind.__name__}", schedules=SPLIT)(lambda: nn.Sequential(kind(), *rest()))
        return kind

    return add


@recalls()
class InAttribute(Recalling):
    def put(self, scale: Any) -> None:
        self.scale = scale

    def get(self) -> Any:
        return self.scale


@recalls()
class InSlots(Recalling):
    def prepare(self) -> None:
        self.slots = Slotted()

    def put(self, scale: Any) -> None:
        self.slots.scale = scale

    def get(self) -> Any:
        return self.slots.scale


@recalls()
class InNamespace(Recalling):
    def prepare(self) -> None:
        self.state = SimpleNamespace()

    def put(self, scale: Any) -> None:
        self.state.scale = scale

    def get(self) -> Any:
        return self.state.scale


@recalls(one=True)
class InGlobalSlots(Recalling):
    def put(self, scale: Any) -> None:
        SLOTTED.scale = scale

    def get(self) -> Any:
        return SLOTTED.scale


@recalls()
class InArray(Recalling):
    def prepare(self) -> None:
        self.array = np.zeros(1, dtype=np.float32)

    def put(self, scale: Any) -> None:
        self.array[0] = float(scale)

    def get(self) -> Any:
        return float(self.array[0])


@recalls()
class InSet(Recalling):
    def prepare(self) -> None:
        self.kept: set[Any] = set()

    def put(self, scale: Any) -> None:
        self.kept.clear()
        self.kept.add(scale)

    def get(self) -> Any:
        return next(iter(self.kept))


@recalls(one=True)
class InVariable(Recalling):
    def put(self, scale: Any) -> None:
        PUT(scale)

    def get(self) -> Any:
        return GET()


@recalls(one=True)
class InThread(Recalling):
    def put(self, scale: Any) -> None:
        LOCAL.scale = scale

    def get(self) -> Any:
        return LOCAL.scale


@recalls(one=True)
class InContext(Recalling):
    def put(self, scale: Any) -> None:
        CONTEXT.set(scale)

    def get(self) -> Any:
        return CONTEXT.get()


@recalls(one=True)
class OnFunction(Recalling):
    def put(self, scale: Any) -> None:
        function.scale = scale  # type: ignore[attr-defined]

    def get(self) -> Any:
        return function.scale  # type: ignore[attr-defined]


@recalls()
class InDeepList(Recalling):
    def prepare(self) -> None:
        self.kept: Any = [[[[[[None]]]]]]

    def put(self, scale: Any) -> None:
        self.kept[0][0][0][0][0][0] = scale

    def get(self) -> Any:
        return self.kept[0][0][0][0][0][0]


@recalls()
class OnParameter(Recalling):
    def put(self, scale: Any) -> None:
        self.linear.weight.scale = scale  # type: ignore[assignment]

    def get(self) -> Any:
        return self.linear.weight.scale


@recalls()
class InTensor(Recalling):
    def prepare(self) -> None:
        self.kept = torch.zeros(())

    def put(self, scale: Any) -> None:
        self.kept.fill_(float(scale))

    def get(self) -> Any:
        return float(self.kept)


@recalls()
class InBuffer(Recalling):
    def prepare(self) -> None:
        self.register_buffer("kept", torch.zeros(()))

    def put(self, scale: Any) -> None:
        self.kept.copy_(scale)

    def get(self) -> Any:
        return self.kept


@recalls()
class InFrozenParameter(Recalling):
    def prepare(self) -> None:
        self.kept = nn.Parameter(torch.zeros(()), requires_grad=False)

    def put(self, scale: Any) -> None:
        self.kept.data.fill_(float(scale))

    def get(self) -> Any:
        return float(self.kept)


@recalls()
class OnAStack(Recalling):
    def prepare(self) -> None:
        self.stack: list[Any] = []

    def put(self, scale: Any) -> None:
        self.stack.append(scale)

    def get(self) -> Any:
        return self.stack.pop()


@recalls()
class OnAStackInADict(Recalling):
    def prepare(self) -> None:
        self.kept: dict[str, list[Any]] = {"stack": []}

    def put(self, scale: Any) -> None:
        self.kept["stack"].append(scale)

    def get(self) -> Any:
        return self.kept["stack"].pop()


@recalls()
class InNewObjects(Recalling):
    def prepare(self) -> None:
        self.states: list[Any] = []

    def put(self, scale: Any) -> None:
        self.states.append(SimpleNamespace(scale=scale))

    def get(self) -> Any:
        return self.states.pop().scale


@recalls()
class InAQueue(Recalling):
    """First in, first out: right where backwards come in the order of forwards."""

    def prepare(self) -> None:
        self.queue: list[Any] = []

    def put(self, scale: Any) -> None:
        self.queue.append(scale)

    def get(self) -> Any:
        return self.queue.pop(0)


@recalls()
class InItsClass(Recalling):
    def put(self, scale: Any) -> None:
        type(self).scale = TOLD["scale"] = scale

    def get(self) -> Any:
        return self.scale + TOLD["scale"]


@recalls()
class OnATape(Recalling):
    """All push to one global list, which their backwards pop from."""

    def put(self, scale: Any) -> None:
        TAPE.append(scale)

    def get(self) -> Any:
        return TAPE.pop()


class Scales(nn.Module):
    """A hook on a weight's gradient takes what the forward has noted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.noted = nn.Linear(WIDTH, WIDTH), torch.tensor(1.0)
        self.linear.weight.register_hook(lambda gradient: gradient * self.take())

    def take(self) -> Any:
        return self.noted

    def forward(self, x: Tensor) -> Tensor:
        self.noted = x.detach().mean()
        return torch.tanh(self.linear(x))


blocks(KEPT, schedules=SPLIT)(Scales)


@blocks(KEPT, schedules=SPLIT)
class Pops(Scales):
    def __init__(self) -> None:
        super().__init__()
        self.stack: list[Tensor] = []

    def take(self) -> Tensor:
        return self.stack.pop()

    def forward(self, x: Tensor) -> Tensor:
        self.stack.append(x.detach().mean())
        return torch.tanh(self.linear(x))


@blocks(KEPT, schedules=SPLIT)
class FromBuffer(Scales):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def take(self) -> Any:
        return self.mean

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.detach().mean(), 0.5)
        return torch.tanh(self.linear(x))


@blocks(KEPT, schedules=SPLIT)
class FromTensor(Scales):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.noted.copy_(x.detach().mean())
        return torch.tanh(self.linear(x))


@blocks(KEPT, schedules=SPLIT)
class SetsData(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data = mean(x)
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * self.mean)
        return y


@blocks(KEPT, schedules=SPLIT)
class Hooking(Block):
    """Each forward installs a hook on the weight, which its backward removes."""

    def forward(self, x: Tensor) -> Tensor:
        def hook(gradient: Tensor) -> Tensor:
            handle.remove()
            return gradient * scale

        if torch.is_grad_enabled():
            scale, handle = x.detach().mean(), self.linear.weight.register_hook(hook)
        return super().forward(x)


@blocks(KEPT)
class NotesLate(Block):
    """Sets an attribute only where values ask for it."""

    scale: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().mean()) > 0.1:
            self.scale = x.detach().mean()
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * self.scale)
        return y


@blocks(KEPT)
class KeepsLate(Block):
    """Begins in the middle of a step."""

    calls, scale = 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls > 6:
            self.scale = x.detach().mean()
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * self.scale)
        return y


@model(KEPT)
class ModelHooks(Layered):
    """The model's own forward hooks an activation with what it has noted in an attribute."""

    noted: Any = 1.0

    def forward(self, x: Tensor) -> Any:
        self.noted = x.detach().mean()
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * self.noted)
        return y


@model(KEPT)
class Clamped(Layered):
    """The model's own forward clips the gradient of an activation."""

    def forward(self, x: Tensor) -> Any:
        x = self.layers[0](x)
        y = self.layers[1](x.tanh())
        if y.requires_grad:
            y.register_hook(lambda g: g.clamp(-1e-2, 1e-2))
        return self.layers[2](y.relu()) + self.layers[3](y)


@blocks(KEPT)
class Equilibrium(Block):
    """A hook solves for the gradient of a fixed point, as in the tutorial on deep equilibrium models."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.linear(torch.zeros_like(x)) + x)
        if not z.requires_grad:
            return z
        start = z.detach().requires_grad_()
        again = torch.tanh(self.linear(start) + x.detach())
        z.register_hook(lambda g: g + 0.5 * torch.autograd.grad(again, start, g, retain_graph=True)[0])
        return z


# -- what backwards leave ---------------------------------------------------------------------------------------------


@blocks(LEFT, schedules=SPLIT)
class Fades(nn.Module):
    """Its forward takes what a hook on the gradient of its weight adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH, WIDTH))
        self.linear.weight.register_hook(self.note)

    def note(self, grad: Tensor) -> None:
        self.seen += grad.detach() ** 2

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.linear.weight / (1 + self.seen)))


class Divides(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient / ctx.module.calls, None


@blocks(LEFT, schedules=SPLIT)
class DividesByCalls(Block):
    """Its backward divides by how often its forward has run."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return Divides.apply(super().forward(x), self)


@blocks(LEFT, schedules=SPLIT)
class UnderWay(Block):
    """Counts the microbatches that are under way."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            self.count += 1
            y.register_hook(self.leave)
        return y

    def leave(self, gradient: Tensor) -> Tensor:
        self.count -= 1
        return gradient * (1.0 + self.count)


@blocks(LEFT, schedules=SPLIT)
class CountsBackwards(Block):
    """Its forward takes how many backwards there were."""

    backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * (1 + 0.1 * self.backwards)
        if y.requires_grad:
            y.register_hook(self.count)
        return y

    def count(self, _gradient: Tensor) -> None:
        self.backwards += 1


@blocks(LEFT, schedules=SPLIT)
class AveragesInBackward(Block):
    """A hook updates a buffer that forwards read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) + self.mean.clone()
        if y.requires_grad:
            y.register_hook(self.update)
        return y

    @torch.no_grad()
    def update(self, gradient: Tensor) -> None:
        self.mean.add_(gradient.mean(0))


@blocks(LEFT)
class CountsItsBackwardsInItsBackward(Block):
    """The n-th backward is another function: right where they come in order."""

    backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(self.scale)
        return y

    def scale(self, gradient: Tensor) -> Tensor:
        self.backwards += 1
        return gradient * (1 + 0.1 * (self.backwards % 5))


class WritesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor) -> Tensor:
        ctx.state = state
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.state.data.add_(1)
        return grad, None


@blocks(LEFT, schedules=SPLIT)
class WritesFrozenInBackward(Block):
    """Its backward writes to a frozen parameter, which its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return WritesInBackward.apply(super().forward(x) * (1 + 0.1 * self.state.clone()), self.state)


@blocks(LEFT, schedules=SPLIT)
class ClampsInAHook(Block):
    """A full backward hook of the module writes to its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda module, *_: module.clamp())

    def clamp(self) -> None:
        self.linear.weight.data.clamp_(-0.05, 0.05)


@model(LEFT)
class ModelBackwardHook(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 2,))


@model(LEFT)
class BlockBackwardHook(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].register_full_backward_pre_hook(lambda _, grads: (grads[0] * 2,))


@model(LEFT)
class BackwardHookWithACount(Layered):
    """A hook of a layer counts for another layer."""

    backwards = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].register_full_backward_hook(self.count)
        self.layers[0].register_forward_hook(lambda _l, _a, out: out * (1 + 0.1 * (self.backwards % 5)))

    def count(self, *_: Any) -> None:
        self.backwards += 1


@blocks(LEFT, schedules=SPLIT)
class AccumulationHook(Block):
    """Clips a parameter's gradient once it is added up, in each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.register_post_accumulate_grad_hook(lambda p: (p.grad.clamp_(-0.01, 0.01), None)[1])


@blocks(LEFT, schedules=SPLIT)
class ClipsByAHook(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.register_hook(lambda g: g.clamp(-0.001, 0.001))


class Checkpointing(Block):
    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


@blocks(LEFT, schedules=SPLIT)
class CheckpointAverages(Checkpointing):
    """A moving average, which its checkpoint updates twice for each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def body(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.scale.lerp_(y.var(0), 0.1)
        return torch.tanh(y * self.scale.rsqrt())


@blocks(LEFT, schedules=SPLIT)
class CheckpointCounts(Checkpointing):
    calls = 0

    def body(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.linear(x)) * (1 + 0.1 * (self.calls % 5))


@blocks(LEFT, schedules=SPLIT)
class CheckpointNorms(Checkpointing):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


@model(LEFT)
class ModelCheckpoints(Layered):
    """The model checkpoints its layers with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = checkpoint(nn.Sequential(layer, norm, nn.Tanh()), x, use_reentrant=False)
        return x


class Layers(torch.autograd.Function):
    """Layers that it takes as constants; what it needs in backward it makes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: Any) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        with torch.no_grad():
            for layer in layers:
                x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = x
            for layer in ctx.layers:
                y = layer(y)
        y.backward(grad)
        return x.grad, None


@model(LEFT)
class Reversible(Layered):
    """The two layers in the middle are run by a function of autograd."""

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.layers[0](x))
        return self.layers[3](Layers.apply(x, self.layers[1:3]))


@blocks(LEFT, schedules=SPLIT)
class ReversibleItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return Layers.apply(x, self.layers).tanh() if x.requires_grad else self.layers[1](self.layers[0](x)).tanh()


@blocks(LEFT, schedules=SPLIT)
class GradientOfGradient(Block):
    """Takes a gradient in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)
        return x + slope
