"""Networks of our own: what users write besides transformers, each with one thing that a pipeline may get wrong."""

from __future__ import annotations

import random
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaffolding.models import GPT, Case, EncoderDecoder, InPlace, Layers, SkipsTwice, UNet, squared_error, token_error
from zoo.entry import ROWS, Entry, noise, tokens

WIDTH = 7


def mlp() -> Case:
    layers = [m for _ in range(5) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return _numbers(nn.Sequential(*layers))


def _numbers(model: nn.Module | list[nn.Module]) -> Case:
    return Case(model, (noise(WIDTH),), {}, noise(WIDTH), squared_error)


# -- pictures ---------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions with batch norm, and a way past them."""

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(inward, outward, 3, padding=1), nn.Conv2d(outward, outward, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(outward), nn.BatchNorm2d(outward)
        self.past = nn.Conv2d(inward, outward, 1) if inward != outward else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu_(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.past(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(a, b) for a, b in pairwise([4, 4, 5, 5, 6, 6, 7]))
        self.head = nn.Linear(7, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(images), 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def resnet() -> Case:
    return Case(ResNet(), (noise(3, 6, 6),), {}, noise(3), squared_error)


def unet() -> Case:
    return Case(UNet((3, 4, 5, 6, 7)), (noise(3, 16, 16),), {}, noise(3, 16, 16), squared_error)


class ChannelsLast(nn.Module):
    """Its values keep the strides of channels-last pictures, which decide which kernel runs."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(8))

    def forward(self, images: Tensor) -> Tensor:
        x = images.contiguous(memory_format=torch.channels_last)
        for conv in self.convs:
            x = torch.tanh(conv(x))
            assert x.is_contiguous(memory_format=torch.channels_last)
        return x


def channels_last() -> Case:
    model = ChannelsLast().to(memory_format=torch.channels_last)
    return Case(model, (noise(3, 6, 6),), {}, noise(3, 6, 6), squared_error)


# -- sequences --------------------------------------------------------------------------------------------------------


class Speller(nn.Module):
    """A stack of LSTMs; each hands its last state to the next."""

    def __init__(self, vocabulary: int = 23, width: int = 6, layers: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x, state = self.embed(ids), None
        for layer in self.layers:
            x, state = layer(x, state)
        return self.head(x)


def lstm() -> Case:
    ids = tokens()
    return Case(Speller(), (ids,), {}, ids.roll(-1, 1), token_error)


def dropout() -> Case:
    """Inside of blocks, inside of attention, and between blocks."""
    ids = tokens()
    return Case(GPT(vocabulary=23, width=8, layers=8, dropout=0.2), (ids,), {}, ids.roll(-1, 1), token_error)


def encoder_decoder() -> Case:
    ids = tokens()
    model = EncoderDecoder(vocabulary=23, layers=4)
    return Case(model, (tokens(6),), {"shifted": ids}, ids.roll(-1, 1), token_error)


# -- values between layers --------------------------------------------------------------------------------------------


def skips() -> Case:
    return _numbers(SkipsTwice(WIDTH, layers=9))


def in_place() -> Case:
    return Case(InPlace(layers=9), (noise(6),), {}, noise(6), squared_error)


class TwoTasks(nn.Module):
    """A dict in, a dict out, and dicts in between."""

    def __init__(self) -> None:
        super().__init__()
        self.join = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.number, self.kind = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 3)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        values = {"x": self.join(batch["x"]), "weight": batch["weight"][:, None]}
        for layer in self.layers:
            values = {**values, "x": values["x"] + layer(values["x"]).tanh() * values["weight"]}
        return {"number": self.number(values["x"])[:, 0], "kind": self.kind(values["x"])}


def two_losses(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output["number"], target["number"]) + F.cross_entropy(output["kind"], target["kind"])


def dicts() -> Case:
    batch = {"x": noise(WIDTH), "weight": torch.rand(ROWS)}
    return Case(TwoTasks(), (batch,), {}, {"number": noise(), "kind": torch.randint(3, (ROWS,))}, two_losses)


class Adjustable(Layers):
    """Takes a number, a flag and text besides its tensor, and branches on two of them."""

    def forward(self, x: Tensor, strength: float, *, mirror: bool = False, kind: str = "tanh") -> Tensor:
        for layer in self.layers:
            y = getattr(torch, kind)(layer(x)) * strength
            x = y.flip(-1) + x if mirror else y
        return x


def plain_arguments() -> Case:
    return Case(
        Adjustable(WIDTH, 8), (noise(WIDTH), 0.5), {"mirror": True, "kind": "sigmoid"}, noise(WIDTH), squared_error
    )


# -- chance -----------------------------------------------------------------------------------------------------------


class LayerDrop(Layers):
    """Leaves layers out, as torch draws it, and scales by a number that Python draws."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number % 2 and self.training and torch.rand([]) < 0.3:
                continue
            x = x + layer(x).tanh()
        return x * (0.5 + random.random())


def layer_drop() -> Case:
    return _numbers(LayerDrop(WIDTH, 8))


# -- what is trained --------------------------------------------------------------------------------------------------


def frozen_first() -> Case:
    case = mlp()
    assert isinstance(case.model, nn.Sequential)
    case.model[0].requires_grad_(False)
    return case


def frozen_base() -> Case:
    """As adapters have it: small matrices are trained beside a large one that is not."""
    return _numbers(nn.Sequential(*(Adapted() for _ in range(8))))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def no_parameters() -> Case:
    """Only the first layer has any: with several stages, at least one has none."""
    kinds = (nn.Tanh, nn.Softplus, nn.SiLU, nn.Sigmoid, nn.GELU, nn.ELU, nn.Mish)
    return _numbers([nn.Linear(WIDTH, WIDTH), *(kind() for kind in kinds)])


# -- ties -------------------------------------------------------------------------------------------------------------


class There(nn.Module):
    """One matrix there and back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.t()) + x


def tied_within() -> Case:
    return _numbers(nn.Sequential(*(There() for _ in range(8))))


def _tied(*places: int) -> Case:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    for place in places[1:]:
        layers[place].weight = layers[places[0]].weight
    return _numbers(nn.Sequential(*(m for layer in layers for m in (layer, nn.Tanh()))))


def tied_two() -> Case:
    return _tied(0, 7)


def tied_three() -> Case:
    return _tied(0, 4, 7)


class Again(nn.Module):
    """One layer for all depths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scales = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for scale in self.scales:
            x = scale(x + self.layer(x).tanh())
        return self.last(x)


def one_layer_often() -> Case:
    return _numbers(Again())


NETWORKS = (
    Entry(mlp, "nothing", 10),
    Entry(resnet, "batch norm", 8, updates="blocks.0.norm1.running_mean"),
    Entry(unet, "long skips", 9),
    Entry(channels_last, "channels-last strides", 8),
    Entry(lstm, "LSTM, its state handed on", 9),
    Entry(dropout, "dropout everywhere, tied embedding", 10, tied=("wte.weight",)),
    Entry(encoder_decoder, "the encoder's output in every block of the decoder", 10, tied=("embed.weight",)),
    Entry(skips, "values that skip stages and are used twice", 9),
    Entry(in_place, "updates in place after a cut", 9),
    Entry(dicts, "dict inputs, dict of targets", 9),
    Entry(plain_arguments, "a number, a flag and text among the inputs", 8),
    Entry(layer_drop, "blocks left out by chance, a number that Python draws", 8),
    Entry(frozen_first, "a frozen first layer", 10),
    Entry(frozen_base, "adapters on a frozen base", 8),
    Entry(no_parameters, "stages without parameters", 8),
    Entry(tied_within, "a tie within a layer", 8),
    Entry(tied_two, "a tie of the first and the last layer", 16, tied=("0.weight",)),
    Entry(tied_three, "a tie of three layers", 16, tied=("0.weight",)),
    Entry(one_layer_often, "one layer at every depth", 9, tied=("layer.weight", "layer.bias")),
)
