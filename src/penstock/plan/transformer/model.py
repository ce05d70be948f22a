"""A transformer by its numbers, those that have a name, and the parameters that follow from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from penstock._base.aliases import accept_old_names
from penstock._base.errors import ArgumentError
from penstock._base.formatting import did_you_mean

Style = Literal["gpt", "llama"]
"""What the numbers leave open: "gpt" has biases, LayerNorm, learned positions, dropout, GELU and an output layer that
shares the embedding's matrix; "llama" has none of these, but RMSNorm, rotary positions, a gated feed-forward and a
matrix of its own for the output."""

_MAX_LAYERS, _MAX_NUMBER = 1_000, 1_000_000_000

_NUMBERS = (
    *("layers", "hidden_size", "num_attention_heads", "vocab_size"),
    *("num_key_value_heads", "intermediate_size", "positions"),
)


@accept_old_names(
    hidden="hidden_size",
    last_norm="final_norm",
    heads="num_attention_heads",
    kv_heads="num_key_value_heads",
    vocabulary="vocab_size",
    feedforward="intermediate_size",
)
@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """A decoder of equal layers.

    Attributes:
        layers, hidden_size, num_attention_heads, vocab_size: as in the model's paper.
        num_key_value_heads: of keys and values; None: as many as heads.
        intermediate_size: its inner width; None: 4 hidden.
        positions: how many are learned ("gpt" only).
        style: what else it is made of.

    Raises:
        ArgumentError: a number is less than one, or heads do not divide what they share.
    """

    layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    positions: int = 2048
    style: Style = "gpt"

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value, limit = getattr(self, name), _MAX_LAYERS if name == "layers" else _MAX_NUMBER
            if value is not None and not (isinstance(value, int) and 1 <= value <= limit):
                raise ArgumentError(f"{name}={value!r}: expected an integer from 1 to {limit:,}")
        if self.style not in ("gpt", "llama"):
            raise ArgumentError(f"style={self.style!r}: expected 'gpt' or 'llama'")
        for name, total, parts in (
            ("hidden_size", self.hidden_size, self.num_attention_heads),
            ("num_attention_heads", self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads),
        ):
            if total % parts:
                raise ArgumentError(f"{name}={total} cannot be divided into {parts} equal parts, one for each head")

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
        return self.intermediate_size or 4 * self.hidden_size

    @property
    def kv_width(self) -> int:
        """The width of all keys together, and of all values."""
        return self.hidden_size // self.num_attention_heads * (self.num_key_value_heads or self.num_attention_heads)

    @property
    def layer_matrices(self) -> int:
        """Parameters of a layer's matrices, which tensor parallelism divides."""
        attention = self.hidden_size * (2 * self.hidden_size + 2 * self.kv_width)
        return attention + (3 if self.gated else 2) * self.hidden_size * self.inner

    @property
    def layer_vectors(self) -> int:
        """A layer's other parameters: norms and biases."""
        if self.style == "llama":
            return 2 * self.hidden_size
        biases = self.hidden_size + 2 * self.kv_width + self.hidden_size + self.inner + self.hidden_size
        return biases + 4 * self.hidden_size

    @property
    def embedding(self) -> int:
        """Parameters before the first layer."""
        return (self.vocab_size + (self.positions if self.style == "gpt" else 0)) * self.hidden_size

    @property
    def output(self) -> int:
        """Parameters of the output layer's matrix; "gpt" shares them with the embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def final_norm(self) -> int:
        """Parameters of the norm after the last layer."""
        return self.hidden_size * (2 if self.style == "gpt" else 1)

    @property
    def parameters(self) -> int:
        """All parameters, shared ones once.

        >>> from penstock.plan.transformer import transformer
        >>> transformer("llama3-405b").parameters
        405853388800
        """
        layers = self.layers * (self.layer_matrices + self.layer_vectors)
        return layers + self.embedding + self.final_norm + (self.output if self.style == "llama" else 0)

    def flops(self, tokens: int, sequence: int) -> float:
        """Return the FLOPs of forward and backward for this many tokens, without recomputation.

        6 for each parameter of a matrix, and those of attention, over all positions though half of them are masked: as
        in Narayanan et al. 2021, equation 3, without the recomputed forward.
        """
        attention = 4 * sequence * self.hidden_size
        return 3.0 * tokens * (self.layers * (2 * self.layer_matrices + attention) + 2 * self.output)


NAMED = {
    # Radford et al. 2019, and the checkpoint's configuration.
    "gpt2": TransformerConfig(12, 768, 12, 50257, positions=1024),
    # Brown et al. 2020, table 2.1.
    "gpt3-175b": TransformerConfig(96, 12288, 96, 50257),
    # Grattafiori et al. 2024 (Llama 3), table 3.
    "llama3-8b": TransformerConfig(32, 4096, 32, 128256, 8, 14336, style="llama"),
    "llama3-70b": TransformerConfig(80, 8192, 64, 128256, 8, 28672, style="llama"),
    "llama3-405b": TransformerConfig(126, 16384, 128, 128256, 8, 53248, style="llama"),
}
"""Each with its source."""

_KEYS = {
    **{name: name for name in (*_NUMBERS, "style")},
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocabulary": "vocab_size",
    "vocab": "vocab_size",
    "feedforward": "intermediate_size",
    "ffn": "intermediate_size",
}


def transformer(text: str) -> TransformerConfig:
    """Return the named model, or the one with these numbers: "layers=96,hidden=12288,heads=96,vocabulary=50257".

    A name may come first, and numbers replace its own: "llama3-70b,layers=12".

    Raises:
        ArgumentError: the name or a key is unknown, a value is no number, or one that is needed is missing.
    """
    values: dict[str, Any] = {}
    for index, part in enumerate(filter(None, (part.strip() for part in text.split(",")))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and index == 0:
            if part not in NAMED:
                raise ArgumentError(
                    f"transformer {part!r}: not known; {did_you_mean(part, NAMED)}expected one of {', '.join(NAMED)}; "
                    "or pass its numbers: layers=96,hidden=12288,heads=96,vocabulary=50257"
                )
            values = asdict(NAMED[part])
            continue
        name = _KEYS.get(key.replace("-", "_"))
        if name is None or not equals:
            raise ArgumentError(f"transformer {text!r}: {part!r} is none of {'=, '.join(_KEYS)}=")
        try:
            values[name] = value if name == "style" else int(value.replace("_", ""))
        except ValueError:
            raise ArgumentError(f"transformer {text!r}: {part!r}: expected an integer") from None
    if missing := [
        name for name in ("layers", "hidden_size", "num_attention_heads", "vocab_size") if name not in values
    ]:
        raise ArgumentError(f"transformer {text!r}: {missing[0]}= is missing; or pass one of {', '.join(NAMED)}")
    return TransformerConfig(**values)
