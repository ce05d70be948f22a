"""A TARGET that is a configuration of transformers: `hf:path/to/config.json`, a model of it and a made-up batch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from penstock._base.errors import ArgumentError, require
from penstock._base.formatting import format_bytes

PREFIX = "hf:"
_FORM = f"{PREFIX}path/to/config.json, or {PREFIX}path/to/config.json:ROWSxLENGTH"
_SIZES = re.compile(r"(?P<path>.+):(?P<rows>[1-9]\d{0,5})(x(?P<length>[1-9]\d{0,6}))?")
_ROWS, _LENGTH, _IMAGE = 8, 128, 224
_TOKEN_ARCHITECTURES = ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "LMHeadModel")
"""Suffixes of the names of architectures whose labels are tokens."""


def case(text: str, *, weights: bool = True) -> tuple[Any, ...]:
    """Return (model, args, target, loss) of `hf:PATH` or `hf:PATH:ROWSxLENGTH`, as a TARGET's function does.

    The model is the first of the configuration's `architectures` (a causal language model, if it names none), with
    random weights. It computes its own loss, of tokens or pixels drawn at random.

    Args:
        text: the TARGET. By default 8 rows of 128 tokens, or as many as the model has positions for.
        weights: False builds the model on the meta device, where it takes no memory.

    Raises:
        MissingExtraError: transformers is not installed.
        ArgumentError: there is no such file, no batch is known for such a model, or its weights are larger than memory.
    """
    require("transformers", "transformers", for_what=f"TARGET {text!r}")
    import transformers

    match = _SIZES.fullmatch(text.removeprefix(PREFIX))
    path = Path(match["path"] if match else text.removeprefix(PREFIX))
    if not path.exists():
        raise ArgumentError(f"TARGET {text!r}: there is no file {str(path)!r} in {Path.cwd()}; expected {_FORM}")
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    name = next(iter(config.architectures or ()), None)
    model_type: Any = transformers.AutoModelForCausalLM if name is None else getattr(transformers, name, None)
    if name is not None and not (isinstance(model_type, type) and issubclass(model_type, transformers.PreTrainedModel)):
        raise ArgumentError(f"TARGET {text!r}: transformers {transformers.__version__} has no architecture {name!r}")
    make = model_type if name is not None else model_type.from_config
    with torch.device("meta"):
        model = make(config)
    if weights:
        weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if weight_bytes > memory_bytes:
            raise ArgumentError(
                f"TARGET {text!r}: its weights take {format_bytes(weight_bytes)}, and this machine has "
                f"{format_bytes(memory_bytes)} of memory. inspect --balance flops needs none, and neither do profile "
                "and plan with --device h100"
            )
        model = make(config)
    rows = int(match["rows"]) if match else _ROWS
    length = int(match["length"]) if match and match["length"] else None
    return model, ((), _batch(text, model, rows, length)), None, None


def _batch(text: str, model: Any, rows: int, length: int | None) -> dict[str, Any]:
    """Return what the model's forward takes, labels included. Raise ArgumentError if only the model's authors know."""
    config, kind = model.config, type(model).__name__
    classes = torch.randint(max(getattr(config, "num_labels", 2), 1), (rows,))
    if model.main_input_name == "input_ids":
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.pad_token_id = config.decoder_start_token_id = config.pad_token_id or 0
        text_config = config.get_text_config()
        default_length = min(_LENGTH, getattr(text_config, "max_position_embeddings", None) or _LENGTH)
        tokens = torch.randint(text_config.vocab_size, (rows, length or default_length))
        if kind.endswith(_TOKEN_ARCHITECTURES):
            return {"input_ids": tokens, "labels": tokens}
        if kind.endswith("ForSequenceClassification"):
            if config.pad_token_id is None:  # without it, only a single row has a last token
                config.pad_token_id = text_config.vocab_size - 1
            return {"input_ids": tokens, "labels": classes}
    elif model.main_input_name == "pixel_values" and kind.endswith("ForImageClassification"):
        size = getattr(config, "image_size", None) or _IMAGE
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return {"pixel_values": torch.randn(rows, config.num_channels, height, width), "labels": classes}
    raise ArgumentError(
        f"TARGET {text!r}: no batch is known for {kind}; expected a language model, or a classifier of sequences or "
        "images. Write a function that returns (model, args, target, loss), and pass file.py:function"
    )
