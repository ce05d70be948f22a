"""A transformer by its numbers, those that have a name, and the parameters that follow from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from penstock._base.errors import ArgumentError
from penstock._base.words import did_you_mean

Style = Literal["gpt", "llama"]
"""What the numbers leave open: "gpt" has biases, LayerNorm, learned positions, dropout, GELU and an output layer that
shares the embedding's matrix; "llama" has none of these, but RMSNorm, rotary positions, a gated feed-forward and a
matrix of its own for the output."""

_MAX_LAYERS, _MAX_OF_ANYTHING = 1_000, 1_000_000_000


@dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder of equal layers.

    Attributes:
        layers, hidden, heads, vocabulary: as in the model's paper.
        kv_heads: of keys and values; None: as many as heads.
        feedforward: its inner width; None: 4 hidden.
        positions: how many are learned ("gpt" only).
        style: what else it is made of.

    Raises:
        ArgumentError: a number is less than one, or heads do not divide what they share.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    kv_heads: int | None = None
    feedforward: int | None = None
    positions: int = 2048
    style: Style = "gpt"

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocabulary", "kv_heads", "feedforward", "positions"):
            value, most = getattr(self, name), _MAX_LAYERS if name == "layers" else _MAX_OF_ANYTHING
            if value is not None and not (isinstance(value, int) and 1 <= value <= most):
                raise ArgumentError(f"{name}={value!r}: expected an integer from 1 to {most:,}")
        if self.style not in ("gpt", "llama"):
            raise ArgumentError(f"style={self.style!r}: expected 'gpt' or 'llama'")
        for name, whole, parts in (
            ("hidden", self.hidden, self.heads),
            ("heads", self.heads, self.kv_heads or self.heads),
        ):
            if whole % parts:
                raise ArgumentError(f"{name}={whole} cannot be divided into {parts} equal parts, one for each head")

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate, and so three matrices."""
        return self.style == "llama"

    @property
    def dropout(self) -> bool:
        """Whether activations are dropped at random, so that masks are kept for the backward."""
        return self.style == "gpt"

    @property
    def inner(self) -> int:
        """The feed-forward's width."""
        return self.feedforward or 4 * self.hidden

    @property
    def kv_width(self) -> int:
        """The width of all keys together, and of all values."""
        return self.hidden // self.heads * (self.kv_heads or self.heads)

    @property
    def layer_matrices(self) -> int:
        """Parameters of a layer's matrices, which tensor parallelism divides."""
        attention = self.hidden * (2 * self.hidden + 2 * self.kv_width)
        return attention + (3 if self.gated else 2) * self.hidden * self.inner

    @property
    def layer_vectors(self) -> int:
        """A layer's other parameters: norms and biases."""
        if self.style == "llama":
            return 2 * self.hidden
        biases = self.hidden + 2 * self.kv_width + self.hidden + self.inner + self.hidden
        return biases + 4 * self.hidden

    @property
    def embedding(self) -> int:
        """Parameters before the first layer."""
        return (self.vocabulary + (self.positions if self.style == "gpt" else 0)) * self.hidden

    @property
    def output(self) -> int:
        """Parameters of the output layer's matrix; "gpt" shares them with the embedding."""
        return self.vocabulary * self.hidden

    @property
    def last_norm(self) -> int:
        """Parameters of the norm after the last layer."""
        return self.hidden * (2 if self.style == "gpt" else 1)

    @property
    def parameters(self) -> int:
        """All parameters, shared ones once.

        >>> from penstock.plan.transformer import transformer
        >>> transformer("llama3-405b").parameters
        405853388800
        """
        layers = self.layers * (self.layer_matrices + self.layer_vectors)
        return layers + self.embedding + self.last_norm + (self.output if self.style == "llama" else 0)

    def flops(self, tokens: int, sequence: int) -> float:
        """What forward and backward of that many tokens must compute, without anything computed again.

        6 for each parameter of a matrix, and those of attention, over all positions though half of them are masked: as
        in Narayanan et al. 2021, equation 3, without the recomputed forward.
        """
        attention = 4 * sequence * self.hidden
        return 3.0 * tokens * (self.layers * (2 * self.layer_matrices + attention) + 2 * self.output)


NAMED = {
    # Radford et al. 2019, and the checkpoint's configuration.
    "gpt2": Transformer(12, 768, 12, 50257, positions=1024),
    # Brown et al. 2020, table 2.1.
    "gpt3-175b": Transformer(96, 12288, 96, 50257),
    # Grattafiori et al. 2024 (Llama 3), table 3.
    "llama3-8b": Transformer(32, 4096, 32, 128256, 8, 14336, style="llama"),
    "llama3-70b": Transformer(80, 8192, 64, 128256, 8, 28672, style="llama"),
    "llama3-405b": Transformer(126, 16384, 128, 128256, 8, 53248, style="llama"),
}
"""Each with its source."""

_KEYS = {
    **{name: name for name in ("layers", "hidden", "heads", "vocabulary", "feedforward", "positions", "style")},
    "vocab": "vocabulary",
    "kv-heads": "kv_heads",
    "ffn": "feedforward",
}


def transformer(text: str) -> Transformer:
    """The model of that name, or with these numbers: "layers=96,hidden=12288,heads=96,vocabulary=50257".

    A name may come first, and numbers replace its own: "llama3-70b,layers=12".

    Raises:
        ArgumentError: the name or a key is unknown, a value is no number, or one that is needed is missing.
    """
    values: dict[str, Any] = {}
    for place, part in enumerate(filter(None, (part.strip() for part in text.split(",")))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and place == 0:
            if part not in NAMED:
                raise ArgumentError(
                    f"transformer {part!r}: not known; {did_you_mean(part, NAMED)}expected one of {', '.join(NAMED)}; "
                    "or pass its numbers: layers=96,hidden=12288,heads=96,vocabulary=50257"
                )
            values = asdict(NAMED[part])
            continue
        name = _KEYS.get(key.replace("_", "-"))
        if name is None or not equals:
            raise ArgumentError(f"transformer {text!r}: {part!r} is none of {'=, '.join(_KEYS)}=")
        try:
            values[name] = value if name == "style" else int(value.replace("_", ""))
        except ValueError:
            raise ArgumentError(f"transformer {text!r}: {part!r}: expected an integer") from None
    if missing := [name for name in ("layers", "hidden", "heads", "vocabulary") if name not in values]:
        raise ArgumentError(f"transformer {text!r}: {missing[0]}= is missing; or pass one of {', '.join(NAMED)}")
    return Transformer(**values)
