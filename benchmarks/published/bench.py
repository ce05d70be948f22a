"""Verifies small models of every family that other libraries publish; see README.md.

python benchmarks/published/bench.py [transformers timm torchvision vit_pytorch] [--json FILE] [--only TEXT]
"""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import json
import logging
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

SECONDS = 120
"""A model that takes longer is left."""
LARGEST = 60_000_000
"""Models with more parameters are left out."""
WEIGHTY = 2_000_000
"""Models with more parameters are split over two ranks, others over four."""


class Case(NamedTuple):
    """A model and a batch; `loss` is None if the model computes its own."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor | None = None
    loss: Callable[[Any, Any], Tensor] | None = None


class LeftOut(Exception):  # noqa: N818 - it is no fault of anyone's
    """The model is too large, or its small configuration does not make one that trains by itself."""


def classified(output: Any, target: Tensor) -> Tensor:
    if isinstance(output, (tuple, list, dict)):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    scores = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(scores.mean((2, 3)) if scores.dim() == 4 else scores, target)


def pictures(model: nn.Module, size: tuple[int, ...] = (3, 224, 224)) -> Case:
    return Case(model.train(), (torch.randn(2, *size),), {}, torch.randint(5, (2,)), classified)


# -- timm, torchvision and vit-pytorch ---------------------------------------------------------------------------------

# fmt: off
SMALL_NAMES = (
    "atto", "femto", "pico", "nano", "xxs", "tiny_", "_tiny", "xs", "small", "_s", "18", "26", "_50", "_0", "b0",
    "mini",
)
TORCHVISION = (
    "alexnet", "densenet121", "efficientnet_b0", "googlenet", "inception_v3", "mnasnet0_5", "mobilenet_v2",
    "mobilenet_v3_small", "regnet_y_400mf", "resnet18", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_1",
    "swin_t", "swin_v2_t", "convnext_tiny", "vgg11_bn", "vit_b_16", "maxvit_t", "fcn_resnet50",
    "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large", "r3d_18", "swin3d_t",
)
VIT = (
    "vit", "simple_vit", "cait", "deepvit", "cvt", "rvt", "t2t", "xcit", "parallel_vit", "normalized_vit",
    "vit_for_small_dataset", "vit_with_patch_dropout", "vit_with_patch_merger", "simple_vit_with_value_residual",
)
VIT_SIZES = {
    "image_size": 64, "patch_size": 16, "num_classes": 5, "dim": 32, "depth": 4, "heads": 2, "mlp_dim": 48,
    "dropout": 0.1, "emb_dropout": 0.1, "layer_dropout": 0.1, "cls_depth": 1, "dim_head": 16,
}
TASKS = {
    "words": "CAUSAL_LM", "gaps": "MASKED_LM", "translation": "SEQ_TO_SEQ_CAUSAL_LM",
    "pictures": "IMAGE_CLASSIFICATION", "speech": "CTC", "sounds": "AUDIO_CLASSIFICATION",
    "classes": "SEQUENCE_CLASSIFICATION",
}
# fmt: on


def of_timm() -> Iterator[tuple[str, Callable[[], Case]]]:
    """The smallest of each file, by name, with stochastic depth where it has that."""
    import timm

    def size(name: str) -> tuple[int, int]:
        return next((place for place, text in enumerate(SMALL_NAMES) if text in name), 99), len(name)

    def made(name: str) -> Case:
        try:
            model = timm.create_model(name, num_classes=5, drop_path_rate=0.1)
        except TypeError:
            model = timm.create_model(name, num_classes=5)
        return pictures(model, (model.default_cfg or {}).get("input_size", (3, 224, 224)))

    for module in timm.list_modules():
        for name in sorted(timm.list_models(module=module), key=size)[:1]:
            yield name, partial(made, name)


def of_torchvision() -> Iterator[tuple[str, Callable[[], Case]]]:
    from torchvision import models

    def made(name: str) -> Case:
        video = (3, 16, 112, 112) if "3d" in name else (3, 299, 299) if name == "inception_v3" else (3, 224, 224)
        more = {"weights_backbone": None} if name.startswith(("fcn", "deeplab", "lraspp")) else {}
        return pictures(models.get_model(name, weights=None, num_classes=5, **more), video)

    yield from ((name, partial(made, name)) for name in TORCHVISION)


def of_vit_pytorch() -> Iterator[tuple[str, Callable[[], Case]]]:
    def made(name: str) -> Case:
        module = importlib.import_module(f"vit_pytorch.{name}")
        kinds = [
            each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__
        ]
        kind = [each for each in kinds if "num_classes" in inspect.signature(each.__init__).parameters][-1]
        known = inspect.signature(kind.__init__).parameters
        return pictures(kind(**{name: value for name, value in VIT_SIZES.items() if name in known}), (3, 64, 64))

    yield from ((name, partial(made, name)) for name in VIT)


# -- transformers ------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "attention_window"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "num_conv_pos_embeddings"), 16),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "n_group", "num_conv_pos_embedding_groups"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "state_size", "q_lora_rank", "kv_lora_rank", "v_head_dim", "patch_size"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "window_size"), 4),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop", "layerdrop"), 0.2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_feat_extract_layers"), 3),
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "decoder_ffn_dim": 48,
    "num_decoder_layers": 2, "word_embed_proj_dim": 32, "image_size": 32, "topk_group": 1, "first_k_dense_replace": 1,
    "conv_dim": (16, 16, 16), "conv_kernel": (4, 3, 3), "conv_stride": (2, 2, 2), "num_labels": 5, "num_mel_bins": 8,
    "max_source_positions": 16, "max_target_positions": 64, "attn_pdrop": 0.1,
}  # fmt: skip


def of_transformers() -> Iterator[tuple[str, Callable[[], Case]]]:
    """One model of each family, for the first of these tasks that it has."""
    from transformers.models.auto import modeling_auto

    seen = set[str]()
    for task, table in TASKS.items():
        for family, names in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").items():
            name = names if isinstance(names, str) else names[0]
            if not {family, name} & seen:
                yield name, partial(_transformer, task, name)
            seen |= {family, name}


def _transformer(task: str, name: str) -> Case:
    import transformers

    kind = getattr(transformers, name)
    usual = kind.config_class()
    sizes = {key: value for key, value in SIZES.items() if _fits(usual, key, value)}
    for key, values in {"hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4, "num_heads": [2] * 4}.items():
        if task == "pictures" and isinstance(given := getattr(usual, key, None), (list, tuple)):
            sizes[key] = (values * len(given))[: len(given)] if key != "hidden_sizes" else values[: len(given)]
    config = kind.config_class(**sizes)
    with torch.device("meta"):
        _check_size(kind(config))
    return Case(kind(config).train(), (), _inputs(task, config, inspect.signature(kind.forward).parameters))


def _fits(usual: Any, key: str, value: Any) -> bool:
    there = getattr(usual, key, None)
    return hasattr(usual, key) and isinstance(there, (list, tuple)) is isinstance(value, tuple)


def _inputs(task: str, config: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    ids, labels = torch.randint(3, 60, (4, 8)), torch.randint(2, (4,))
    if task == "pictures":
        size = config.image_size if isinstance(getattr(config, "image_size", None), int) else 64
        return {"pixel_values": torch.randn(4, 3, size, size), "labels": labels}
    if task in ("speech", "sounds"):
        labels = torch.randint(3, 20, (4, 3)) if task == "speech" else labels
        return {"input_values" if "input_values" in known else "input_features": torch.randn(4, 800), "labels": labels}
    inputs = {"input_ids": ids, "labels": labels if task == "classes" else ids}
    return inputs | ({"attention_mask": torch.ones_like(ids)} if "attention_mask" in known else {})


# -- judging -----------------------------------------------------------------------------------------------------------

LIBRARIES = {
    "transformers": of_transformers, "timm": of_timm, "torchvision": of_torchvision, "vit_pytorch": of_vit_pytorch,
}  # fmt: skip


class _Late(BaseException):
    """Not an Exception, so that nothing on the way takes it for a fault of the model."""


def _check_size(model: nn.Module) -> int:
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > LARGEST:
        raise LeftOut(f"it has {size / 1e6:.0f} million parameters")
    return size


def _alone(case: Case) -> None:
    """Raises LeftOut if the model does not train by itself."""
    try:
        output = case.model(*case.args, **case.kwargs)
        (output.loss if case.loss is None else case.loss(output, case.target)).backward()
    except Exception as error:
        raise LeftOut(f"by itself it raises {type(error).__name__}: {error}") from error
    case.model.zero_grad()


def judged(make: Callable[[], Case]) -> tuple[str, str]:
    """What `verify` says of a model: exact, refused, differs, late or left out; and its words."""
    signal.alarm(SECONDS)
    try:
        torch.manual_seed(0)
        try:
            _alone(make())
            torch.manual_seed(0)
            case = make()
            ranks = 2 if _check_size(case.model) > WEIGHTY else 4
        except Exception as error:
            return "left out", str(error)
        given = {"target": case.target, "loss_fn": case.loss, "ranks": ranks, "microbatches": 2, "full_batch": False}
        report = penstock.verify(case.model, case.args, case.kwargs, **given)
        return ("exact" if report.ok else "differs"), str(report)
    except penstock.PenstockError as error:
        return "refused", str(error)
    except _Late:
        return "late", f"more than {SECONDS} seconds"
    finally:
        signal.alarm(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", nargs="*", help=f"of {', '.join(LIBRARIES)}; none: all")
    parser.add_argument("--only", default="", help="models whose names contain this")
    parser.add_argument("--json", type=Path, help="write a line for each model here, too")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)

    def late(*_: object) -> None:
        raise _Late

    signal.signal(signal.SIGALRM, late)
    importlib.import_module("crowd.torchvision_operators").declare()
    counts: dict[str, Counter[str]] = {}
    for library in options.libraries or LIBRARIES:
        for name, make in LIBRARIES[library]():
            if options.only not in name:
                continue
            start = time.perf_counter()
            verdict, words = judged(make)
            counts.setdefault(library, Counter())[verdict] += 1
            print(f"{library:12} {name:45} {verdict:9}", "" if verdict == "exact" else words[:150], flush=True)
            if options.json:
                row = {"library": library, "model": name, "verdict": verdict, "words": words[:1000]}
                with options.json.open("a", encoding="utf-8") as file:
                    print(json.dumps(row | {"seconds": round(time.perf_counter() - start, 1)}), file=file)
            gc.collect()
    for library, found in counts.items():
        print(library, dict(found))


if __name__ == "__main__":
    main()
