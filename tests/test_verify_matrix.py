"""Every schedule x ranks x microbatches gives the bits of one device, on models of each kind.

Batches have 11 rows, so that 2, 3 and 8 microbatches are of different sizes. A model is recorded once for each size of
microbatch and its reference made once for each number of them: neither knows the schedule or the ranks.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from models import GPT, Case, SkipsTwice, squared_error, token_error
from penstock.errors import ArgumentError, PartitionError
from penstock.schedule import Schedule, generate, generator, generators
from penstock.schedule.generators import Numbers
from representatives import representatives
from zoo.shared import Shared

ROWS = 11
MICROBATCHES = (1, 2, 3, 8)
NOT_USED = {"model.rotary_emb.original_inv_freq"}  # a buffer that Llama's forward does not look at


def mlp() -> Case:
    layers = [m for _ in range(8) for m in (nn.Linear(33, 33), nn.Tanh())]
    return Case(nn.Sequential(*layers, nn.Linear(33, 5)), _noise(33), {}, torch.randn(ROWS, 5), squared_error)


def tied_gpt_with_dropout() -> Case:
    ids = torch.randint(0, 37, (ROWS, 8))
    model = GPT(vocabulary=37, width=24, layers=8, dropout=0.1)
    return Case(model, (ids[:, :-1],), {}, ids[:, 1:], token_error)


def skips() -> Case:
    return Case(SkipsTwice(33), _noise(33), {}, torch.randn(ROWS, 33), squared_error)


class DigitsNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [1, 5, 7, 7, 9, 9]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
            for a, b in pairwise(widths)
        )
        self.head = nn.Linear(9, 10)

    def forward(self, images: Tensor) -> Tensor:
        for block in self.blocks:
            images = block(images)
        return self.head(images.mean((2, 3)))


def batch_norm_on_digits() -> Case:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images[:ROWS], dtype=torch.float32)[:, None] / 16
    return Case(DigitsNet(), (images,), {}, torch.tensor(digits.target[:ROWS]), F.cross_entropy)


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=37, hidden_size=24, intermediate_size=33, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    mask = torch.ones(ROWS, 6, dtype=torch.int64)
    mask[:, -1] = 0
    return Case(LlamaForCausalLM(config), (), {**_tokens(), "attention_mask": mask}, None, None)


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=37, n_embd=24, n_layer=4, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    config.loss_type = "ForCausalLMLoss"
    assert config.resid_pdrop > 0
    return Case(GPT2LMHeadModel(config), (), _tokens(), None, None)


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=37, d_model=24, d_kv=8, d_ff=33, num_layers=2, num_heads=3, decoder_start_token_id=0
    )  # fmt: skip
    assert config.dropout_rate > 0
    return Case(T5ForConditionalGeneration(config), (), _tokens(), None, None)


def _noise(width: int) -> tuple[Tensor]:
    return (torch.randn(ROWS, width),)


def _tokens() -> dict[str, Tensor]:
    ids = torch.randint(4, 37, (ROWS, 6))
    return {"input_ids": ids, "labels": ids.clone()}


pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = {f.__name__: f for f in (mlp, tied_gpt_with_dropout, skips, batch_norm_on_digits, llama, gpt2, t5)}


DEPTHS = {
    "mlp": 17, "tied_gpt_with_dropout": 8, "skips": 6, "batch_norm_on_digits": 6, "llama": 4, "gpt2": 4, "t5": 4,
}  # fmt: skip
"""Into how many stages each can be cut."""


@lru_cache(maxsize=1)  # a fixture with that parameter would be made anew for every test
def shared(example: str) -> Shared:
    torch.manual_seed(0)
    made = EXAMPLES[example]()
    made.model.train()
    return Shared(made)


def schedules_of(name: str, ranks: int) -> list[Schedule]:
    """For numbers of microbatches that the schedule allows; fewer for those whose row differs little from another's."""
    entry = generator(name)
    numbers = [Numbers(ranks, m, entry.chunks) for m in MICROBATCHES]
    allowed = [generate(name, ranks, n.microbatches) for n in numbers if entry.broken(n) is None]
    return allowed if name in CLASSIC else allowed[-2:]


CLASSIC = ("naive", "gpipe", "1f1b")
RUNNABLE = [entry.name for entry in generators() if entry.slices == 1]
CASES = [
    case
    for names, ranks in ((CLASSIC, [1, 2, 3, 4]), ([name for name in RUNNABLE if name not in CLASSIC], [2, 4]))
    for case in representatives(4, list(EXAMPLES), names, ranks)
    if case.values[2] * generator(case.values[1]).chunks <= DEPTHS[case.values[0]]
]


@pytest.mark.parametrize(("example", "name", "ranks"), CASES)
def test_bits_of_one_device(example: str, name: str, ranks: int) -> None:
    schedules = schedules_of(name, ranks)
    assert schedules, f"{name} is for no number of microbatches of {MICROBATCHES}"
    copies, model = schedules[0].placement.pipelines, shared(example).model
    if copies > 1 and any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        with pytest.raises(PartitionError, match=f"updates 'blocks.0.1.running_mean' .* runs {copies} copies"):
            shared(example).verify(schedules[0])
        return
    for schedule in schedules:
        report = shared(example).verify(schedule)
        assert report.ok, f"{schedule.microbatches} microbatches: {report.summary()}"
        kinds = {row.kind for row in report.rows}
        assert kinds >= {"output", "loss", "gradient"}
        gradients = [row for row in report.rows if row.kind == "gradient"]
        assert len(gradients) == len(list(model.parameters()))
        if copies == 1:
            assert sum(row.verdict == "equal" for row in gradients) >= len(gradients) - 1  # but for one that is tied
        assert all(row.verdict == "equal" for row in report.rows if row.kind in ("output", "loss"))
        buffers = {name for name, _ in model.named_buffers()} - NOT_USED
        assert {row.name for row in report.rows if row.kind == "buffer"} == buffers


def test_the_short_cases_have_every_schedule_and_every_example() -> None:
    short = [case.values for case in CASES if not case.marks]
    assert {name for _, name, _ in short} == set(RUNNABLE)
    assert {example for example, _, _ in short} == set(EXAMPLES)


def test_slices_are_not_run() -> None:
    with pytest.raises(ArgumentError, match="'seq1f1b' cuts microbatches into 2 slices of the sequence"):
        penstock.pipeline(nn.Linear(2, 2), (torch.randn(4, 2),), ranks=1, schedule="seq1f1b", microbatches=2)


@pytest.mark.parametrize(
    ("example", "name", "split"), representatives(3, list(EXAMPLES), ["naive", "gpipe"], [(1, 3), (2, 2), (2, 3)])
)
def test_several_chunks_a_rank(example: str, name: str, split: tuple[int, int]) -> None:
    ranks, chunks = split
    report = shared(example).verify(generate(name, ranks, 3, chunks))
    assert report.stages == ranks * chunks
    assert report.ok, report.summary()
