"""Values that blocks and models leave in attributes for each other: within a forward, or from one to the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from models.registry import BOTH_WAYS, WIDTH, Block, Layered, blocks, mean, model

KIND = "attributes between blocks"


class Talks(nn.Module):
    """Takes what a block before it has left in an object that all share."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.linear, self.shared = nn.Linear(WIDTH, WIDTH), shared

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)) + self.take()
        self.leave(y)
        return y

    def take(self) -> Any:
        return getattr(self.shared, "left", 0.0)

    def leave(self, y: Tensor) -> None:
        self.shared.left = y * 0.5


class Talking(nn.Module):
    def __init__(self, kind: type[Talks], shared: Any = None) -> None:
        super().__init__()
        shared = SimpleNamespace() if shared is None else shared
        self.blocks = nn.ModuleList(kind(shared) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def talking(kind: type[Talks]) -> type[Talks]:
    model(KIND, name=kind.__name__)(lambda: Talking(kind))
    return kind


class Clears(Talking):
    def forward(self, x: Tensor) -> Tensor:
        self.blocks[0].shared.left = torch.zeros(())
        return super().forward(x)


model(KIND, name="LeavesATensor")(lambda: Clears(Talks))


@talking
class LeavesADetachedTensor(Talks):
    def leave(self, y: Tensor) -> None:
        self.shared.left = y.detach() * 0.5


@talking
class LeavesAMean(Talks):
    def leave(self, y: Tensor) -> None:
        self.shared.left = mean(y)


@talking
class LeavesANumber(Talks):
    """A number of data, which fake tensors do not have."""

    def leave(self, y: Tensor) -> None:
        self.shared.left = float(y.detach().mean())


@talking
class LeavesACount(Talks):
    def take(self) -> Any:
        return 0.1 * (getattr(self.shared, "left", 0) % 7)

    def leave(self, y: Tensor) -> None:
        self.shared.left = getattr(self.shared, "left", 0) + 1


@talking
class LeavesAFloat(Talks):
    def leave(self, y: Tensor) -> None:
        self.shared.left = getattr(self.shared, "left", 0.0) * 0.5 + 0.1


@talking
class LeavesInAList(Talks):
    def take(self) -> Any:
        return self.shared.__dict__.setdefault("seen", [0.0])[-1]

    def leave(self, y: Tensor) -> None:
        self.shared.seen.append(y * 0.5)


@talking
class LeavesInADict(Talks):
    def take(self) -> Any:
        return self.shared.__dict__.setdefault("seen", {}).get("last", 0.0)

    def leave(self, y: Tensor) -> None:
        self.shared.seen["last"] = mean(y)


@talking
class LeavesInABoundFunction(Talks):
    """In the variable of a closure."""

    def take(self) -> Any:
        return self.shared.get() if hasattr(self.shared, "get") else 0.0

    def leave(self, y: Tensor) -> None:
        held = mean(y)
        self.shared.get = lambda: held


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.flag, self.scale, self.extra = nn.Linear(WIDTH, WIDTH), False, 1.0, None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y = (y.relu() if self.flag else y) * self.scale
        return y if self.extra is None else y + self.extra


class Telling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Told() for _ in range(4))

    def tell(self, number: int, block: Any, x: Tensor) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            self.tell(number, block, x)
            x = block(x)
        return x


@model(KIND)
class TellsAFlag(Telling):
    def tell(self, number: int, block: Any, x: Tensor) -> None:
        block.flag = number % 2 == 0


@model(KIND)
class TellsATensor(Telling):
    def tell(self, number: int, block: Any, x: Tensor) -> None:
        block.extra = x * 0.5


@model(KIND)
class TellsADetachedTensor(Telling):
    def tell(self, number: int, block: Any, x: Tensor) -> None:
        block.extra = mean(x)


@model(KIND)
class TellsANumberOfData(Telling):
    def tell(self, number: int, block: Any, x: Tensor) -> None:
        block.scale = 1 + float(x.detach().mean())


@model(KIND)
class TellsTheNextBlock(Telling):
    """The one after it, for the next forward if it comes first."""

    def tell(self, number: int, block: Any, x: Tensor) -> None:
        self.blocks[number - 1].extra = mean(x)


@model(KIND)
class TellsTheBlockBefore(Telling):
    """For the next forward."""

    def tell(self, number: int, block: Any, x: Tensor) -> None:
        if number:
            self.blocks[number - 1].scale = self.blocks[number - 1].scale * 0.9 + 0.05


@model(KIND)
class TellsByCount(Telling):
    """The first block's scale goes up with every forward."""

    def tell(self, number: int, block: Any, x: Tensor) -> None:
        block.scale = block.scale + 0.1


@model(KIND)
class SwitchesAFlag(Telling):
    """Each forward has it the other way round."""

    def tell(self, number: int, block: Any, x: Tensor) -> None:
        block.flag = not block.flag


@model(KIND)
class TakesTheLastOutput(Layered):
    """Adds its last output, of the microbatch before."""

    memory: Any = None

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        y = y if self.memory is None else y + self.memory
        self.memory = mean(y)
        return y


@model(KIND)
class TakesTheFirstOutput(Layered):
    memory: Any = None

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        if self.memory is None:
            self.memory = mean(y)
        return y - self.memory


@model(KIND)
class ReadsAnAttributeOfALayer(Layered):
    """A layer's hook leaves its output; the model's own forward takes it at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_forward_hook(lambda layer, _a, out: setattr(layer, "left", out))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.layers[0].left


@model(KIND)
class ReadsItBeforeItIsSet(Layered):
    """The model takes what the last layer's hook left in the forward before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].register_forward_hook(lambda layer, _a, out: setattr(layer, "left", mean(out)))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + getattr(self.layers[3], "left", 0.0))


@model(KIND)
class FeedsBack(Layered):
    """The first layer takes what the last one left in the microbatch before."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, Any] = {}
        self.layers[0].register_forward_pre_hook(lambda _l, args: (args[0] + self.held.get("left", 0.0),))
        self.layers[3].register_forward_hook(lambda _l, _a, out: self.held.__setitem__("left", mean(out)))


@model(KIND)
class Reservoir(Layered):
    """Keeps the inputs of some forwards, and mixes one of them in."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.kept = [*self.kept[-2:], x.detach()]
        return super().forward(x + 0.1 * self.kept[0])


@blocks(KIND, schedules=BOTH_WAYS)
class Follows(Block):
    """A block's own state: right where microbatches come in order."""

    last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y, last = super().forward(x), self.last
        self.last = mean(y)
        return y if last is None else y - last


@blocks(KIND, schedules=BOTH_WAYS)
class TakesTheFirst(Block):
    held: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.held is None:
            self.held = mean(y)
        return y - self.held


@blocks(KIND, schedules=BOTH_WAYS)
class Queues(Block):
    def __init__(self) -> None:
        super().__init__()
        self.held: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) - 0.1 * sum(self.held, torch.zeros(WIDTH))
        self.held = [*self.held[-2:], mean(y)]
        return y


class Held:
    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: Any = torch.zeros(WIDTH)


@blocks(KIND, schedules=BOTH_WAYS)
class InSlot(Block):
    def __init__(self) -> None:
        super().__init__()
        self.memory = Held()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        last, self.memory.held = self.memory.held, mean(y)
        return y - last


@blocks(KIND, schedules=BOTH_WAYS)
class InHook(Block):
    def __init__(self) -> None:
        super().__init__()
        held: list[Tensor] = []

        def hook(_m: nn.Module, _a: Any, result: Tensor) -> Tensor:
            held.append(mean(result))
            return result - held[0]

        self.linear.register_forward_hook(hook)


@blocks(KIND, schedules=BOTH_WAYS)
class Recurrent(nn.Module):
    """Each batch continues the sequences of the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.state = nn.GRUCell(WIDTH, WIDTH), None

    def forward(self, x: Tensor) -> Tensor:
        out = self.cell(x, self.state)
        self.state = out.detach()
        return out


@blocks(KIND, schedules=BOTH_WAYS)
class SetsFirst(Block):
    """Looks like state, and is none: set before it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.held.clear()
        self.held.append(mean(x))
        return super().forward(x) - self.held[0]


@model(KIND)
class Shows(Layered):
    """Leaves something to look at, which it never reads."""

    def forward(self, x: Tensor) -> Any:
        self.memory = super().forward(x)
        return self.memory * 2
