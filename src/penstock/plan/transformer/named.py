"""Transformers by name, or by the numbers that a user typed."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from penstock._base.errors import ArgumentError
from penstock._base.words import did_you_mean
from penstock.plan.transformer.model import Transformer

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
    "layers": "layers",
    "hidden": "hidden",
    "heads": "heads",
    "vocabulary": "vocabulary",
    "vocab": "vocabulary",
    "kv-heads": "kv_heads",
    "ffn": "feedforward",
    "feedforward": "feedforward",
    "positions": "positions",
    "style": "style",
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
            base = _named(part)
            values = {field.name: getattr(base, field.name) for field in fields(base)}
            continue
        name = _KEYS.get(key.replace("_", "-"))
        if name is None or not equals:
            raise ArgumentError(f"transformer {text!r}: {part!r} is none of {'=, '.join(_KEYS)}=")
        values[name] = value if name == "style" else _number(text, part, value)
    if missing := [name for name in ("layers", "hidden", "heads", "vocabulary") if name not in values]:
        raise ArgumentError(f"transformer {text!r}: {missing[0]}= is missing; or pass one of {', '.join(NAMED)}")
    return Transformer(**values)


def _named(name: str) -> Transformer:
    if name not in NAMED:
        raise ArgumentError(
            f"transformer {name!r}: not known; {did_you_mean(name, NAMED)}expected one of {', '.join(NAMED)}; or pass "
            "its numbers: layers=96,hidden=12288,heads=96,vocabulary=50257"
        )
    return NAMED[name]


def _number(text: str, part: str, value: str) -> int:
    try:
        return int(value.replace("_", ""))
    except ValueError:
        raise ArgumentError(f"transformer {text!r}: {part!r}: expected an integer") from None
