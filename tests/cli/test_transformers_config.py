"""`hf:config.json` as a TARGET: a model of transformers by its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import output, refusal

from penstock.distributed.launch.target import load

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = SMALL | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 50}
KINDS = {
    "a language model": LLAMA,
    "no architecture named": {key: value for key, value in LLAMA.items() if key != "architectures"},
    "few positions": LLAMA | {"max_position_embeddings": 12},
    "of sequences": SMALL
    | {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "vocab_size": 50}
    | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "of sequences, without a token for padding": LLAMA | {"architectures": ["LlamaForSequenceClassification"]},
    "of images, whose size the configuration leaves open": {
        "model_type": "resnet",
        "architectures": ["ResNetForImageClassification"],
        "embedding_size": 8,
        "hidden_sizes": [8, 8],
        "depths": [1, 1],
        "layer_type": "basic",
    },
    "of images": SMALL
    | {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 16, "patch_size": 8}
    | {"hidden_dropout_prob": 0.0},
}


def written(folder: Path, config: dict[str, Any]) -> str:
    """The TARGET of the configuration, written to a file."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return f"hf:{path}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_makes_a_model_with_a_batch_and_a_loss(kind: str, tmp_path: Path) -> None:
    made = load(written(tmp_path, KINDS[kind]))
    found = made.model(*made.args, **made.kwargs)
    assert (found["loss"] if made.loss is None else made.loss(found, made.target)).isfinite()


@pytest.mark.parametrize("kind", ["a language model", "of images"])
def test_a_configuration_is_verified(kind: str, tmp_path: Path) -> None:
    said = output("verify", written(tmp_path, KINDS[kind]), "--ranks", "2", "--microbatches", "4")
    assert "gradients are bitwise identical" in said


def test_rows_and_length_are_the_targets(tmp_path: Path) -> None:
    target = written(tmp_path, LLAMA)
    found = json.loads(output("inspect", f"{target}:6x20", "--balance", "flops", "--microbatches", "3", "--json"))
    assert found["crossings"][0]["shape"][:2] == [2, 20]


def test_what_needs_shapes_alone_makes_no_weights(tmp_path: Path) -> None:
    """Of the model's 71 GB of weights."""
    wide = {"hidden_size": 16384, "intermediate_size": 57344, "num_hidden_layers": 4, "num_attention_heads": 64}
    target = written(tmp_path, LLAMA | wide | {"num_key_value_heads": 8, "vocab_size": 128256})
    found = json.loads(output("inspect", f"{target}:4x2048", "-n", "2", "--balance", "flops", "--json"))
    assert found["parameters"] > 17e9
    assert all(rank["parameters"] > 30e9 and rank["activations"] for rank in found["memory"])
    assert "an estimate" in output("profile", f"{target}:4x2048", "--device", "h100")


def test_weights_larger_than_memory_are_refused(tmp_path: Path) -> None:
    wide = {"hidden_size": 32768, "intermediate_size": 131072, "num_hidden_layers": 128, "num_attention_heads": 64}
    said = refusal("inspect", written(tmp_path, LLAMA | wide), "-n", "2")
    assert "its weights take 8.8 TB" in said
    assert "inspect --balance flops needs none" in said


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LLAMA | {"architectures": ["LlamaForNothing"]}, "has no architecture 'LlamaForNothing'"),
        (LLAMA | {"architectures": ["pipeline"]}, "has no architecture 'pipeline'"),
        (LLAMA | {"architectures": ["LlamaModel"]}, "no batch is known for LlamaModel; expected a language model"),
        (None, "there is no file"),
        ({"model_type": "nobody's"}, "nobody's"),
    ],
)
def test_what_is_no_model_is_said_in_a_line(config: dict[str, Any] | None, said: str, tmp_path: Path) -> None:
    target = f"hf:{tmp_path}/config.json" if config is None else written(tmp_path, config)
    assert said in refusal("inspect", target)
