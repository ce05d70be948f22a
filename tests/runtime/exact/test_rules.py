"""Each rule of `penstock.runtime.exact.rules` is broken on purpose, and the proof sees it.

A rule is broken inside of the pipeline's step only, so that the reference keeps it. Whether a matrix product's bits
depend on an address is the machine's affair; a layer that reads its input's address shows the same on every machine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

import penstock
from penstock.pipe.pipeline import Pipeline
from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.rules import Buffer, Layout
from penstock.runtime.exact.streams import Streams
from penstock.runtime.execute.stage import BoundStage
from penstock.schedule import check, generate
from scaffolding.models import ConvNet, InPlace, OneLayer, SkipsTwice, squared_error
from scaffolding.proofs import after_each_step

ROWS, WIDTH, MICROBATCHES = 11, 33, 3

Break = Callable[[object, str, Any], None]


@pytest.fixture
def break_in_step(monkeypatch: pytest.MonkeyPatch) -> Break:
    """`break_in_step(owner, name, value)`: the attribute has that value as long as a pipeline's step runs."""

    def break_it(owner: object, name: str, value: Any) -> None:
        step = Pipeline.step

        def broken_step(self: Pipeline, *args: Any, **kwargs: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, name, value)
                return step(self, *args, **kwargs)

        monkeypatch.setattr(Pipeline, "step", broken_step)

    return break_it


def verify(model: nn.Module, x: Tensor, y: Tensor, ranks: int, **options: Any) -> penstock.VerificationReport:
    given = {"loss_fn": squared_error, "microbatches": MICROBATCHES, "exact": True, **options}
    return penstock.verify(model, (x,), target=y, ranks=ranks, **given)


def verify_skips(**options: Any) -> penstock.VerificationReport:
    """The first value is used twice on stage 1 and once on stage 2; stage 0 returns two values."""
    torch.manual_seed(0)
    model, x, y = SkipsTwice(WIDTH), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    return verify(model, x, y, 3, cuts=("layers.2", "layers.4"), **options)


def wrong_gradients(report: penstock.VerificationReport) -> list[str]:
    return [row.name for row in report.failures if row.kind == "gradient"]


def test_the_rules_kept() -> None:
    assert verify_skips().ok


# -- 1. ascending order of microbatch ---------------------------------------------------------------------------------


def test_descending_weight_gradients_are_reported_as_inexact_and_have_other_bits() -> None:
    gpipe = generate("gpipe", 3, MICROBATCHES)
    rows = [[*row[:MICROBATCHES], *reversed(row[MICROBATCHES:])] for row in gpipe.rows]
    assert str(rows[0][-1]) == "0B0"
    descending = gpipe.with_rows(rows)
    violations = check(descending)
    assert {v.kind for v in violations} == {"inexact"}
    assert not any(v.fatal for v in violations)
    report = verify_skips(schedule=descending)
    assert len(wrong_gradients(report)) > 6
    assert {row.kind for row in report.failures} == {"gradient"}


# -- 2. one backward from all roots -----------------------------------------------------------------------------------


def test_a_backward_for_each_root(break_in_step: Break) -> None:
    def one_after_the_other(roots: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
        for root, grad in zip(roots, grads, strict=True):
            torch.autograd.backward((root,), (grad,), retain_graph=True)

    break_in_step(exact, "run_backward", one_after_the_other)
    report = verify_skips()
    assert "layers.0.weight" in wrong_gradients(report)  # stage 0 returns what its two layers made


# -- 3. the loss is scaled by its seed --------------------------------------------------------------------------------


def test_gradients_divided_afterwards(monkeypatch: pytest.MonkeyPatch, break_in_step: Break) -> None:
    break_in_step(exact, "seeds", lambda weights, total: list(weights))

    def divide(pipe: Pipeline) -> None:
        for parameter in pipe.parameters():
            assert parameter.grad is not None
            parameter.grad /= ROWS

    after_each_step(monkeypatch, divide)
    report = verify_skips()
    assert wrong_gradients(report)
    for row in report.failures:
        if row.kind == "gradient":  # the right value, but for the last bits
            assert row.max_difference < 1e-6 * row.max_reference


# -- 4. gradients go from consumer to consumer ------------------------------------------------------------------------


def test_gradients_of_later_stages_added_after_the_own_terms(break_in_step: Break) -> None:
    """As if they were sent straight to the producer and added there."""

    def add_after(roots: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
        pairs = list(zip(roots, grads, strict=True))
        own = [(root, grad) for root, grad in pairs if not hasattr(root.node, "slot")]
        torch.autograd.backward(tuple(root for root, _ in own), tuple(grad for _, grad in own))
        for root, grad in pairs:
            if hasattr(root.node, "slot"):
                root.node.slot[0] = root.node.slot[0] + grad

    break_in_step(exact, "run_backward", add_after)
    names = wrong_gradients(verify_skips())
    assert names
    assert set(names) <= {f"layers.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")}


# -- 5. strides and addresses -----------------------------------------------------------------------------------------


class Product(nn.Module):
    """A first layer, something between, and a layer on the next stage whose bits depend on how its input lies."""

    def __init__(self, between: Callable[[Tensor], Tensor], width: int, second: nn.Linear) -> None:
        super().__init__()
        self.first, self.between, self.second = nn.Linear(7, width), between, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


@torch.library.custom_op("penstock_tests::bytes_past_a_cache_line", mutates_args=())
def bytes_past_a_cache_line(x: Tensor) -> Tensor:
    return torch.tensor(float(x.data_ptr() % exact.CACHE_LINE_BYTES))


@bytes_past_a_cache_line.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(())


class ReadsAddress(nn.Linear):
    """Its output depends on where its input lies, whatever the machine's products do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + bytes_past_a_cache_line(x.detach())


Lie = Callable[[Tensor, int, int], Tensor]


def shifted(values: Tensor, rows: int, width: int) -> Tensor:
    return values.flatten()[1 : 1 + rows * width].view(rows, width)


def without_first_column(values: Tensor, rows: int, width: int) -> Tensor:
    return values.flatten()[: rows * (width + 1)].view(rows, width + 1)[:, 1:]


@pytest.mark.parametrize("lie", [shifted, without_first_column])
def test_received_tensors_at_another_address(break_in_step: Break, lie: Lie) -> None:
    def run() -> penstock.VerificationReport:
        torch.manual_seed(0)
        model = Product(lambda x: lie(x, len(x), 7), 10, ReadsAddress(7, 11))
        x, y = torch.randn(21 * MICROBATCHES, 7), torch.randn(21 * MICROBATCHES, 11)
        return verify(model, x, y, 2, cuts=["second"], full_batch=False)  # `lie` mixes rows

    def aligned(layout: Layout, device: torch.device) -> Buffer:
        return allocate(layout._replace(misalignment=0), device)

    assert run().ok
    allocate = exact.allocate
    break_in_step(exact, "allocate", aligned)
    assert {row.kind for row in run().failures} >= {"output"}


def test_microbatches_that_are_slices_of_the_batch(break_in_step: Break) -> None:
    def run() -> penstock.VerificationReport:
        torch.manual_seed(0)
        x, y = torch.randn(21 * MICROBATCHES, 7), torch.randn(21 * MICROBATCHES, 3)
        return verify(nn.Sequential(ReadsAddress(7, 11), nn.Linear(11, 3)), x, y, 2)

    assert run().ok
    break_in_step(exact, "copy_parts_aligned", torch.split)
    assert wrong_gradients(run())


def test_received_tensors_with_other_strides(break_in_step: Break) -> None:
    class ChannelsLast(ConvNet):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images.to(memory_format=torch.channels_last))

    def run() -> penstock.VerificationReport:
        torch.manual_seed(0)
        return verify(ChannelsLast(), torch.randn(ROWS, 3, 9, 9), torch.randn(ROWS, 3), 3)

    assert run().ok

    def contiguous(layout: Layout, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        return tensor.detach().contiguous().clone(memory_format=torch.contiguous_format)

    break_in_step(exact, "copy_as", contiguous)
    assert wrong_gradients(run())


# -- 6. what is received may be updated in place ----------------------------------------------------------------------


def receive_as_leaf(anchor: Tensor, buffer: Tensor) -> tuple[Tensor, list[Tensor]]:
    slot: list[Tensor] = []
    leaf = buffer.requires_grad_()
    leaf.register_post_accumulate_grad_hook(lambda tensor: slot.append(tensor.grad))
    return leaf, slot


def verify_in_place() -> penstock.VerificationReport:
    torch.manual_seed(0)
    return verify(InPlace(), torch.randn(ROWS, 6), torch.randn(ROWS, 6), 3)


def test_received_leaves_cannot_be_updated_in_place(break_in_step: Break) -> None:
    assert verify_in_place().ok
    break_in_step(exact, "as_graph_input", receive_as_leaf)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad is being used in an in-place"):
        verify_in_place()


class Turned(nn.Linear):
    """The gradient of its input comes with the strides of the transpose."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.t().contiguous())


def test_gradients_of_received_leaves_lose_their_strides(break_in_step: Break) -> None:
    def run() -> penstock.VerificationReport:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(7, WIDTH), Turned(12, 5)), torch.randn(12 * MICROBATCHES, 7)
        return verify(model, x, x, 2, loss_fn=lambda y, _: y.square().mean())

    assert run().ok
    break_in_step(exact, "as_graph_input", receive_as_leaf)
    assert wrong_gradients(run()) == ["0.bias"]


def test_views_of_what_is_received_cannot_be_updated_in_place(break_in_step: Break) -> None:
    """A buffer must be no view of what travelled: autograd refuses to update what a function returned as a view."""
    copy_as = exact.copy_as

    def view(layout: Layout, tensor: Tensor, device: torch.device) -> Tensor:
        made = copy_as(layout, tensor, device)
        return made.view_as(made)

    break_in_step(exact, "copy_as", view)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        verify_in_place()


# -- 7. random streams ------------------------------------------------------------------------------------------------


def verify_dropout() -> penstock.VerificationReport:
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))]
    return verify(nn.Sequential(*layers), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), 3)


def test_all_draws_from_one_stream(break_in_step: Break) -> None:
    assert verify_dropout().ok

    def once(self: Streams, name: str) -> None:
        if not self._calls:
            torch.default_generator.manual_seed(self.seed)
            self._calls[name] = 1

    break_in_step(Streams, "enter", once)
    assert {row.kind for row in verify_dropout().failures} == {"output", "loss", "gradient"}


@pytest.mark.parametrize("forgotten", ["microbatch", "module"])
def test_streams_that_forget_a_part_of_their_key(
    monkeypatch: pytest.MonkeyPatch, break_in_step: Break, forgotten: str
) -> None:
    enter, beginning = Streams.enter, BoundStage._make_begin
    if forgotten == "module":
        break_in_step(Streams, "enter", lambda self, name: enter(self, "the same"))
    else:
        monkeypatch.setattr(BoundStage, "_make_begin", lambda self, _, **options: beginning(self, 0, **options))
    assert wrong_gradients(verify_dropout())


# -- 9. W computes a product before it adds it ------------------------------------------------------------------------


def test_products_that_are_added_in_place(break_in_step: Break) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4))).double()
    x, y = torch.randn(2, 4 * 600, 40, dtype=torch.float64)
    given: dict[str, Any] = {"ranks": 2, "microbatches": 4, "schedule": "zb-h1"}
    assert verify(copy.deepcopy(model), x, y, **given).ok
    break_in_step(exact, "computes_apart", lambda device: False)
    assert "0.weight" in wrong_gradients(verify(model, x, y, **given))


class Memory(OneLayer):
    """Writes each result into the same memory."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        memory = getattr(self, "memory", h)
        self.memory = memory.detach() if memory.shape == h.shape and memory is not h else torch.zeros_like(h)
        return self.memory.copy_(h)


def test_a_result_that_waits_in_memory_which_its_module_writes_into(break_in_step: Break) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)

    def report() -> penstock.VerificationReport:
        return verify(nn.Sequential(nn.Linear(WIDTH, WIDTH), Memory(WIDTH)), x, y, 2, cuts=["1"])

    assert report().ok
    break_in_step(
        exact, "detach_or_copy", lambda values: [None if value is None else value.detach() for value in values]
    )
    assert {row.kind for row in report().failures} == {"output"}


@pytest.mark.parametrize("grad", [True, False])
def test_values_that_share_memory_with_each_other_are_not_copied(grad: bool) -> None:
    """A chunk of another value, or its view, in any order."""
    sharing: list[Callable[[Tensor], list[Tensor | None]]] = [
        lambda whole: [*whole.chunk(3)],
        lambda whole: [whole, None, whole.view(-1)],
        lambda whole: [whole.view(-1), whole],
    ]
    for share in sharing:
        values = share(torch.randn(6, 4, requires_grad=grad) * 2)
        places = [None if value is None else value.data_ptr() for value in values]
        handed_on = exact.detach_or_copy(values)
        assert [None if value is None else value.data_ptr() for value in handed_on] == places
