"""Workloads from models: hand counts of what is sent, and for every rank its own order of work."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from penstock._base.errors import ArgumentError
from penstock.network.fabric.traffic import from_model, layers, pipeline
from penstock.network.fabric.workload import Workload, mlp
from penstock.schedule import Op, generate
from scaffolding import models
from scaffolding.representatives import representatives

SCHEDULES = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe"]


def classifier() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip


def by_kind(workload: Workload) -> dict[str, int]:
    total: Counter[str] = Counter()
    for transfer in workload.transfers:
        total[transfer.kind] += transfer.bytes
    return dict(total)


def of(case: models.Case, **options: object) -> Workload:
    return from_model(case.model, case.args, case.kwargs, **options)


# -- gradients of layers ----------------------------------------------------------------------------------------------


def test_the_classic_classifier_sends_what_the_preset_does():
    workload = from_model(classifier(), (torch.randn(2, 1, 28, 28),), hosts=4)
    assert [t.bytes for t in workload.transfers] == [t.bytes for t in mlp().transfers]
    assert {(t.collective, t.kind, t.ranks) for t in workload.transfers} == {("all_reduce", "gradient", ())}
    assert (workload.hosts, workload.element_bytes) == (4, 4)


class Odd(nn.Module):
    """Registered in another order than used, with frozen, unused and half-precision parameters, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(9, 9)
        self.last = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.ones(7))
        self.first = nn.Linear(7, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.short = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.tied = nn.Linear(3, 5, bias=False)
        self.tied.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.first(x * self.scale))
        x = self.short(x.bfloat16()).float()
        with torch.no_grad():
            x = x + 0 * self.spare(torch.ones(9)).sum()
        return self.last(x) + self.tied(x)


def test_layers_go_in_reverse_order_of_use_and_what_has_no_gradient_stays():
    workload = from_model(Odd(), (torch.randn(2, 7),), hosts=3)
    assert [(t.name, t.bytes) for t in workload.transfers] == [
        ("last", 4 * (3 * 5 + 5)),
        ("short", 2 * (3 * 3 + 3)),
        ("first", 4 * (3 * 7 + 3)),
        ("(model)", 4 * 7),
    ]
    assert workload.element_bytes == 2
    assert "spare.weight, spare.bias" in workload.notes[-1]


def test_layers_are_used_in_the_order_in_which_their_gradients_come():
    """Held against autograd's own: GPT's blocks use their layers in another order than they are registered in."""
    case = models.gpt()
    workload = of(case, hosts=2)
    model = copy.deepcopy(case.model)
    ended: dict[str, None] = {}

    def note(layer: str, _: Tensor) -> None:
        ended.pop(layer, None)
        ended[layer] = None

    for name, parameter in model.named_parameters():
        layer = name.rpartition(".")[0]
        parameter.register_post_accumulate_grad_hook(partial(note, layer))
    case.loss(model(*case.args), case.target).backward()
    assert set(ended) == {t.name for t in workload.transfers}
    # The two embeddings end together: wpe does not wait for the head that wte is tied to.
    assert [t.name for t in workload.transfers[:-2]] == [name for name in ended if name not in ("wte", "wpe")]


@pytest.mark.parametrize("name", sorted(models.CASES))
def test_all_gradients_are_sent_once(name):
    case = models.CASES[name]()
    parameters = (
        case.model.parameters() if isinstance(case.model, nn.Module) else nn.ModuleList(case.model).parameters()
    )
    total = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    assert by_kind(of(case, hosts=2)) == {"gradient": total}


def test_mixed_types_of_a_layer_go_apart():
    layer = nn.Linear(4, 4)
    layer.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    layer.forward = lambda x: x @ layer.weight.T + layer.bias.float()
    workload = from_model(nn.Sequential(layer), (torch.randn(2, 4),), hosts=2)
    assert {(t.name, t.bytes) for t in workload.transfers} == {("0 (float32)", 64), ("0 (float64)", 32)}


def test_gradients_are_sent_in_the_dtype_in_which_they_accumulate():
    small = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)).bfloat16()
    small.append(nn.Linear(4, 4, dtype=torch.float64))
    small.forward = lambda x: small[2](small[1](small[0](x)).double())
    given = {"args": (torch.randn(2, 4).bfloat16(),), "hosts": 2}
    asked = from_model(small, **given, grad_dtype=torch.float32)
    assert [t.bytes for t in asked.transfers] == [8 * 20, 4 * 20, 4 * 20]
    assert asked.element_bytes == 4
    small[1].weight.grad_dtype = torch.float64  # by hand
    by_hand = from_model(small, **given)
    assert sorted(t.bytes for t in by_hand.transfers) == sorted([8 * 20, 8 * 16 + 2 * 4, 2 * 20])
    assert small[0].weight.grad_dtype == torch.bfloat16


def test_gradients_of_a_pipelines_stages_go_between_its_replicas():
    case = models.mlp()  # 7 -> 7, four times, then 7 -> 3
    workload = of(case, hosts=6, ranks=2, cuts=["4"])
    assert [(t.name, t.bytes, t.ranks) for t in workload.transfers] == [
        ("8", 4 * (7 * 3 + 3), (1, 3, 5)),
        ("6", 4 * 56, (1, 3, 5)),
        ("4", 4 * 56, (1, 3, 5)),
        ("2", 4 * 56, (0, 2, 4)),
        ("0", 4 * 56, (0, 2, 4)),
    ]


def test_sharded_layers_are_gathered_twice_and_scattered_once():
    workload = from_model(
        nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), (torch.randn(2, 3),), hosts=4, sharded=True
    )
    first, last = 4 * (8 * 3 + 8), 4 * (4 * 5 + 4)  # rows padded to a multiple of four
    assert [(t.name, t.collective, t.bytes, t.kind) for t in workload.transfers] == [
        ("0, forward", "all_gather", first, "parameters"),
        ("2, forward", "all_gather", last, "parameters"),
        ("2, backward", "all_gather", last, "parameters"),
        ("2, gradients", "reduce_scatter", last, "gradient"),
        ("0, backward", "all_gather", first, "parameters"),
        ("0, gradients", "reduce_scatter", first, "gradient"),
    ]


def test_frozen_parameters_are_gathered_twice_all_the_same_and_have_no_gradients_to_scatter():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].requires_grad_(False)  # a backward goes through it
    model[4].bias.requires_grad_(False)
    workload = from_model(model, (torch.randn(2, 4),), hosts=2, sharded=True)
    assert [(t.name, t.bytes) for t in workload.transfers] == [
        *((f"{layer}, forward", 80) for layer in (0, 2, 4)),
        ("4, backward", 80),
        ("4, gradients", 64),
        ("2, backward", 80),
        ("0, backward", 80),
        ("0, gradients", 80),
    ]


# -- pipelines --------------------------------------------------------------------------------------------------------


def test_an_mlps_activations_by_hand():
    workload = of(models.mlp(), hosts=3, ranks=3, traffic="pipeline", schedule="gpipe", microbatches=2, cuts=["2", "6"])
    assert {(t.bytes, t.collective) for t in workload.transfers} == {(4 * 7 * 4, "send")}  # rows, width, float32
    assert [(t.name, t.ranks, t.kind) for t in workload.transfers] == [
        ("F0 stage 0->1", (0, 1), "activation"),
        ("F1 stage 0->1", (0, 1), "activation"),  # at one moment with the next, and the first rank's
        ("F0 stage 1->2", (1, 2), "activation"),
        ("F1 stage 1->2", (1, 2), "activation"),
        ("B0 stage 2->1", (2, 1), "activation gradient"),
        ("B0 stage 1->0", (1, 0), "activation gradient"),
        ("B1 stage 2->1", (2, 1), "activation gradient"),
        ("B1 stage 1->0", (1, 0), "activation gradient"),
    ]


def test_a_tied_gpt_by_hand():
    m = 4
    case = models.gpt()  # two rows of five tokens, width 8, 19 words, wte tied to the head
    workload = of(case, hosts=8, ranks=4, traffic="pipeline", microbatches=m)
    rows = 2 * 5 * 8 * 4
    tie = 4 + 640  # 19 * 8 * 4, up to a cache line; a number says of each gradient that is summed whether it is there
    whole = sum(4 + -(-p.numel() * 4 // 64) * 64 for p in case.model.parameters())
    assert by_kind(workload) == {
        "activation": 2 * m * 3 * rows,  # replicas, microbatches, cuts; the mask is made on each stage
        "activation gradient": 2 * m * 3 * rows,
        "tied gradient": 2 * tie,  # in each replica
        "gradient": (whole - tie) + 2 * tie,  # between replicas, the tie on both of its ranks
    }
    assert [t.ranks for t in workload.transfers if t.kind == "tied gradient"] == [(0, 3), (4, 7)]
    assert {t.ranks for t in workload.transfers if t.kind == "gradient"} == {(r, r + 4) for r in range(4)}


def test_skips_by_hand():
    m, value = 3, 4 * 7 * 4
    workload = of(models.skips(), hosts=3, ranks=3, traffic="pipeline", microbatches=m, cuts=["layers.2", "layers.4"])
    sent = Counter((t.ranks, t.kind, t.bytes) for t in workload.transfers)
    assert sent == {
        ((0, 1), "activation", 2 * value): m,  # first and second, both used on stage 1
        ((0, 2), "activation", value): m,  # first; second is added to y in front of layers.4
        ((1, 2), "activation", value): m,
        ((2, 1), "activation gradient", 2 * value): m,  # that of first goes by stage 1, which adds its own
        ((1, 0), "activation gradient", 2 * value): m,
    }


def test_sharded_stages():
    case = models.gpt()
    workload = of(case, hosts=6, ranks=2, traffic="pipeline", microbatches=2, sharded=True, schedule="zb-h1")
    tie = case.model.wte.weight
    parts = layers.record(case.model, case.args, case.kwargs, 2).partition.stages
    for index, stage in enumerate(parts):
        size = layers.sharded_bytes([p for p in stage.parameters.values() if p is not tie], 3)
        mine = [t for t in workload.transfers if f"of stage {index}" in t.name]
        assert [(t.collective, t.bytes, t.kind, t.ranks) for t in mine] == [
            ("all_gather", size, "parameters", (index, index + 2, index + 4)),
            ("reduce_scatter", size, "gradient", (index, index + 2, index + 4)),
        ]
    assert sum(t.bytes for t in workload.transfers if "tied parameters" in t.name) == 2 * (4 + 640)


def test_a_frozen_stage_sends_no_gradients():
    case = models.mlp()
    for parameter in case.model[:4].parameters():
        parameter.requires_grad_(False)
    workload = of(case, hosts=4, ranks=2, traffic="pipeline", microbatches=2, cuts=["4"])
    assert Counter(t.kind for t in workload.transfers) == {"activation": 4, "gradient": 1}


def test_stages_are_averaged_in_buckets(monkeypatch):
    monkeypatch.setattr(pipeline, "BUCKET_BYTES", 250)
    case = models.mlp()
    workload = of(case, hosts=4, ranks=2, traffic="pipeline", microbatches=1, cuts=["4"])
    sizes = [t.bytes for t in workload.transfers if t.name.startswith("gradients of stage 0")]
    both = 256 + 64 + 2 * 4  # a weight of 196 bytes and its bias of 28, up to cache lines, and are they there
    assert sizes == [both, both]


@pytest.mark.parametrize(("name", "microbatches", "replicas"), representatives(3, SCHEDULES, [4, 6], [1, 2]))
def test_each_rank_finds_its_transfers_in_the_order_of_its_row(name, microbatches, replicas):
    case = models.gpt()
    order = generate(name, 2, microbatches)
    workload = of(case, hosts=2 * replicas, ranks=2, traffic="pipeline", schedule=order)
    recorded = layers.record(case.model, case.args, case.kwargs, order.placement.depth)
    row_of = pipeline.lowered(layers.TrainingJob(recorded, order, 2 * replicas, False)).rows
    place = {t.name: number for number, t in enumerate(workload.transfers)}
    for replica in range(replicas):
        suffix = f" of replica {replica}" if replicas > 1 else ""
        seen = set()
        for rank, row in enumerate(row_of):
            sent, made, received = [], {}, {}
            for action in row:
                letter = {Op.SEND_F: "F", Op.SEND_B: "B"}.get(action.op)
                if letter:
                    sent.append(place[f"{letter}{action.microbatch} stage {action.stage}->{action.peer}{suffix}"])
                    made.setdefault((letter, action.stage, action.microbatch), []).append(sent[-1])
                elif action.op.is_receive:
                    letter = "F" if action.op is Op.RECV_F else "B"
                    at = place[f"{letter}{action.microbatch} stage {action.peer}->{action.stage}{suffix}"]
                    received.setdefault((letter, action.stage, action.microbatch), []).append(at)
                    seen.add(at)
            assert sent == sorted(sent)
            assert all(workload.transfers[at].ranks[0] == replica * 2 + rank for at in sent)
            for work, arrivals in received.items():  # what a piece of work needs comes before what it makes
                assert max(arrivals) < min(made.get(work, [len(place)]))
        sends = {n for t, n in place.items() if "stage" in t and "->" in t and t.endswith(suffix)}
        assert seen == sends


# -- computation ------------------------------------------------------------------------------------------------------


def test_seconds_of_a_stage_are_put_in_front():
    workload = of(models.mlp(), hosts=2, ranks=2, traffic="pipeline", schedule="gpipe", microbatches=2, compute=0.5)
    # the longest of both ranks: F0 | F1 and F0 | F1, B0 | B1 | then the first rank's B1 is left
    assert [(t.name[:2], t.compute_seconds) for t in workload.transfers] == [
        ("F0", 0.5), ("F1", 0.5), ("B0", 1.5), ("B1", 1.0),
    ]  # fmt: skip
    assert workload.compute_seconds == 1.0


def test_a_split_backward_takes_as_long_as_a_whole_one():
    options = {"hosts": 2, "ranks": 2, "traffic": "pipeline", "microbatches": 1, "compute": 1.0}
    split, whole = (of(models.mlp(), schedule=name, **options) for name in ("zb-h1", "1f1b"))
    assert [t.compute_seconds for t in split.transfers] == [1.0, 1.0 + 1.0]  # F, then F and I
    assert [t.compute_seconds for t in whole.transfers] == [1.0, 1.0 + 2.0]
    assert split.compute_seconds == whole.compute_seconds == 2.0  # the first rank's, after the last message


def test_seconds_of_layers_are_divided_by_what_they_train():
    workload = of(models.mlp(), hosts=2, compute=1.0, microbatches=3)
    shares = [t.compute_seconds for t in workload.transfers]
    assert sum(shares) == pytest.approx(3 * (1 + 2))
    assert shares[1:] == pytest.approx([2 * 56 / (4 * 56 + 24)] * 4)


@pytest.mark.parametrize(
    ("name", "options"),
    representatives(
        3,
        ["convnet", "gpt", "in_place", "dicts"],
        [{"hosts": 2}, {"hosts": 2, "sharded": True}, {"hosts": 2, "ranks": 2, "traffic": "pipeline"}],
    ),
)
def test_measured_seconds(name, options):
    case = models.CASES[name]()
    before = copy.deepcopy(case.model.state_dict())
    generator = torch.get_rng_state()
    workload = of(case, compute="measure", **options)
    assert sum(t.compute_seconds for t in workload.transfers) > 0
    assert {t.name: t.bytes for t in workload.transfers} == {t.name: t.bytes for t in of(case, **options).transfers}
    assert all(torch.equal(value, before[key]) for key, value in case.model.state_dict().items())
    assert all(parameter.grad is None for parameter in case.model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


# -- wrong arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hosts": 4, "traffic": "ring"}, "traffic='ring': expected one of 'gradients', 'pipeline'"),
        ({"hosts": 5, "ranks": 2}, r"hosts=5, ranks=2, replicas=2"),
        ({"hosts": 0}, "hosts=0"),
        ({"hosts": 1}, "sends nothing"),
        ({"hosts": 2, "ranks": 2}, "sends nothing"),
        ({"hosts": 2, "ranks": 2, "sharded": True}, "sharded=True"),
        ({"hosts": 2, "compute": "guess"}, "compute='guess'"),
        ({"hosts": 2, "compute": -1.0}, "compute=-1.0"),
        ({"hosts": 2, "schedule": "1f2b"}, "1f2b"),
        ({"hosts": 2, "schedule": generate("1f1b", 2, 4)}, "is for 2 ranks"),
        ({"hosts": 2, "grad_dtype": torch.float16}, r"grad_dtype=torch.float16: expected torch\.float32"),
        ({"hosts": 2, "grad_dtype": torch.float64, "sharded": True}, "sums the gradient of '0.weight' itself"),
        ({"hosts": 2, "grad_dtype": torch.float32, "traffic": "tensor"}, "sends no gradients of parameters"),
    ],
)
def test_bad_input(options, text):
    with pytest.raises(ArgumentError, match=text):
        of(models.mlp(), **options)


def _tensor(model: nn.Module, *shape: int, **options: object) -> tuple[list[tuple[str, int, str]], Workload]:
    workload = from_model(model, (torch.zeros(shape),), hosts=4, traffic="tensor", **options)
    return [(t.name, t.bytes, t.collective) for t in workload.transfers], workload


def test_divided_layers_of_an_mlp_by_hand():
    """Columns, rows, columns: one sum for the first two, and the last one's pieces are put together."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    found, workload = _tensor(model, 5, 8)
    assert found == [
        ("forward 2", 5 * 8 * 4, "all_reduce"),
        ("forward 4", 5 * 3 * 4, "all_gather"),
        ("backward 4", 5 * 8 * 4, "all_reduce"),  # of the first two none: nobody wants the gradient of the input
    ]
    assert [t.kind for t in workload.transfers] == ["activation", "activation", "activation gradient"]
    assert workload.hosts == 4
    assert "divided by columns and rows: 0 with 2" in workload.notes
    twice, _ = _tensor(model, 5, 8, microbatches=2)
    assert [name for name, *_ in twice] == [f"{name} of microbatch {n}" for n in range(2) for name, *_ in found]
    _, timed = _tensor(model, 5, 8, compute=0.3)
    assert [t.compute_seconds for t in timed.transfers] == pytest.approx([0.15, 0.15, 0.6])


class Speaks(nn.Module):
    """A language model of two blocks; head and tokens may have one matrix."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 8), nn.Embedding(5, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))
        self.head = nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("tied", [False, True])
def test_a_divided_language_model_by_hand(tied: bool):
    """A matrix that is divided for the head is divided for the lookup, too: no host has all rows."""
    workload = from_model(Speaks(tied=tied), (torch.zeros(2, 5, dtype=torch.long),), hosts=4, traffic="tensor")
    whole, head = 2 * 5 * 8 * 4, "tokens" if tied else "head"
    assert [(t.name, t.bytes, t.collective) for t in workload.transfers] == [
        *([("forward tokens, lookup", whole, "all_reduce")] if tied else []),
        ("forward blocks.0.2", whole, "all_reduce"),
        ("forward blocks.1.2", whole, "all_reduce"),
        (f"forward {head}", 2 * 5 * 50 * 4, "all_gather"),
        (f"backward {head}", whole, "all_reduce"),
        ("backward blocks.1.0", whole, "all_reduce"),
        ("backward blocks.0.0", whole, "all_reduce"),
    ]
    share = 50 / (50 + 8 * (6 if tied else 5))
    assert f"{share:.0%} of the bytes are the outputs of {head}, the last matrix, gathered whole" in workload.notes[-1]
    assert "divided by columns and rows: blocks.*.0 with blocks.*.2" in workload.notes
    said = "embeddings that are divided, since their matrix is: an all-reduce follows: tokens"
    assert (said in workload.notes) == tied
    assert ("embeddings that stay whole on each host: tokens" in workload.notes) != tied


class Attends(nn.Module):
    """Queries, keys and values apart or in one matrix, as in Llama or GPT-2; in front a matrix that has no partner."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = nn.ModuleDict({"out": nn.Linear(8, 8)})
        self.block.update({"qkv": nn.Linear(8, 24)} if fused else {name: nn.Linear(8, 8) for name in "qkv"})
        self.fused = fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.fused:
            q, k, v = self.block["qkv"](x).chunk(3, -1)
        else:
            q, k, v = (self.block[name](x) for name in "qkv")
        return x + self.block["out"]((q @ k.transpose(-1, -2)).softmax(-1) @ v)


@pytest.mark.parametrize("fused", [False, True])
def test_divided_attention_by_hand(fused: bool):
    whole = 2 * 5 * 8 * 4
    found, _ = _tensor(Attends(fused=fused), 2, 5, 8)
    assert found == [
        ("forward first", whole, "all_gather"),
        ("forward block.out", whole, "all_reduce"),
        (f"backward block.{'qkv' if fused else 'q'}", whole, "all_reduce"),  # one, for all three
    ]


def test_a_transformer_of_torch_divides_its_attention_and_its_mlp():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    found, _ = _tensor(nn.Sequential(nn.Linear(32, 32), layer), 2, 6, 32)
    whole = 2 * 6 * 32 * 4
    assert found == [
        ("forward 0", whole, "all_gather"),
        ("forward 1.self_attn", whole, "all_reduce"),
        ("forward 1.linear2", whole, "all_reduce"),
        ("backward 1.linear1", whole, "all_reduce"),
        ("backward 1.self_attn", whole, "all_reduce"),
    ]


def test_sharded_traffic_is_that_of_sharded_gradients():
    sharded = of(models.mlp(), hosts=4, traffic="sharded")
    assert sharded.transfers == of(models.mlp(), hosts=4, sharded=True).transfers
    assert {t.collective for t in sharded.transfers} == {"all_gather", "reduce_scatter"}
    assert sharded.name.startswith("parameters and gradients of ")


class Scored(nn.Module):
    """Takes its labels at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.last(self.middle(self.first(x)).relu())
        return nn.functional.cross_entropy(x, labels)


def test_labels_that_pass_a_cut_are_no_activations():
    three = {"hosts": 3, "ranks": 3, "traffic": "pipeline", "microbatches": 1, "cuts": ["middle", "last"]}
    workload = from_model(Scored(), (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)), **three)
    assert [(t.name, t.kind) for t in workload.transfers] == [
        ("F0 stage 0->1", "activation"),
        ("F0 stage 0->2", "integers"),
        ("F0 stage 1->2", "activation"),
        ("B0 stage 2->1", "activation gradient"),
        ("B0 stage 1->0", "activation gradient"),
    ]


def test_what_divided_layers_do_not_go_with():
    for options, said in (
        ({"ranks": 2}, "neither ranks nor sharded"),
        ({"sharded": True}, "neither ranks nor sharded"),
        ({"compute": "measure"}, "cannot measure divided layers"),
    ):
        with pytest.raises(ArgumentError, match=said):
            of(models.mlp(), hosts=4, traffic="tensor", **options)
    with pytest.raises(ArgumentError, match="nothing is divided"):
        _tensor(nn.Sequential(nn.LayerNorm(8)), 2, 8)


def test_measuring_needs_weights():
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    assert [t.bytes for t in from_model(model, (torch.randn(2, 3),), hosts=2).transfers] == [48]
    with pytest.raises(ArgumentError, match="meta device"):
        from_model(model, (torch.randn(2, 3),), hosts=2, compute="measure")
