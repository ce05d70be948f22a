"""The private parts of torch that the recording stands on behave as it expects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from penstock._base import compat, compat_compiler
from penstock._base.trees import flatten, unflatten


class Pair(NamedTuple):
    left: object
    right: object


def test_fake_tensors_have_no_values() -> None:
    with compat.fake_mode():
        x = torch.ones(2, 3)
        assert isinstance(x, compat.FakeTensor)
        with pytest.raises(compat.DATA_DEPENDENT):
            x.sum().item()
        with pytest.raises(compat.DATA_DEPENDENT):
            x.nonzero()


def test_fakes_of_real_numbers_have_no_values_either() -> None:
    mode, number = compat.fake_mode(), torch.tensor(3)
    fake = mode.from_tensor(number)
    with mode:
        for each in (fake, number + fake, fake.view(1)[0]):
            with pytest.raises(compat.DATA_DEPENDENT):
                each.item()


@pytest.mark.parametrize("has_engine", [True, False])
def test_backward_runs_with_and_without_torchs_own_checks(has_engine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_engine:
        monkeypatch.delattr(torch.autograd.graph, "_engine_run_backward")
    weight = torch.ones(3, requires_grad=True)
    for _ in range(2):
        output = weight * 2
        roots = [torch.autograd.graph.get_gradient_edge(output)]
        compat.run_backward(roots, [torch.full((3,), 5.0)])
    assert weight.grad is not None
    assert weight.grad.tolist() == [20.0] * 3
    with pytest.raises(RuntimeError):  # its graph is freed
        compat.run_backward(roots, [torch.full((3,), 5.0)])
    with pytest.raises(RuntimeError, match="shape"):
        compat.run_backward([torch.autograd.graph.get_gradient_edge(weight * 2)], [torch.ones(4)])


@pytest.fixture
def default_group(tmp_path: Path) -> Iterator[Any]:
    """The default process group of a job of one process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_processes_of_a_job_have_a_store(default_group: Any) -> None:
    assert compat.default_store().add("a count", 1) == 1


def test_the_device_of_the_default_group_is_known_and_can_be_taken_from_it(default_group: Any) -> None:
    assert not compat.is_bound()
    with compat.bound_to(torch.device("cuda", 0)):
        assert compat.is_bound()
        assert default_group.bound_device_id == torch.device("cuda", 0)
        with compat.bound_to(None):
            assert not compat.is_bound()
            assert default_group.bound_device_id is None
        assert compat.is_bound()
    assert not compat.is_bound()


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_the_dtype_in_which_a_sharded_module_reduces_is_known(default_group: Any, dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)
    sharded = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    assert compat.reduction_dtype(sharded) == dtype


def test_without_a_default_group_there_is_no_device() -> None:
    assert not compat.is_bound()
    with compat.bound_to(None):
        assert not compat.is_bound()


def test_the_options_of_a_backend_have_a_limit() -> None:
    options = dist.ProcessGroupGloo._Options()
    compat.set_limit(options, timedelta(seconds=7))
    assert options._timeout == timedelta(seconds=7)
    compat.set_limit(object(), timedelta(seconds=7))  # another torch's may have none


def test_views_share_a_storage() -> None:
    with compat.fake_mode():
        x = torch.ones(2, 3)
        assert compat.storage_of(x) == compat.storage_of(x[0].view(3, 1)) == compat.storage_of(x.detach())
        assert compat.storage_of(x) != compat.storage_of(x.clone())


def test_a_torch_that_does_not_count_who_holds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    assert compat.holders(torch.ones(3), None) == 2


def test_the_fake_mode_can_be_left() -> None:
    with compat.fake_mode():
        with compat.unset_fake_temporarily():
            assert not isinstance(torch.ones(1), compat.FakeTensor)
        assert isinstance(torch.ones(1), compat.FakeTensor)


def test_structures() -> None:
    tree = {"a": [1, Pair(2, (3,))], "b": None}
    flat = flatten(tree)
    assert flat.paths[:3] == ["['a'][0]", "['a'][1].left", "['a'][1].right[0]"]
    assert unflatten(flat.leaves, flat.structure) == tree
    assert flatten({"a": [1, Pair(4, (3,))], "b": None}).structure == flat.structure
    hash(flat.structure)


def test_a_checkpoint_is_seen_from_inside() -> None:
    seen = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(compat.in_checkpoint())
        return x * 2

    x = torch.ones(2, requires_grad=True)
    forward(x)
    checkpoint(forward, x, use_reentrant=False)
    with torch.autograd.graph.save_on_cpu():
        forward(x)
    assert seen == [False, True, False]


def test_hooks_on_saved_tensors_are_known_while_they_are_active() -> None:
    assert compat.saved_tensors_hooks() is None

    def pack(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert compat.saved_tensors_hooks() == (pack, pack)


def test_memory_behind_a_tensor_is_counted_whole() -> None:
    x = torch.ones(3)
    assert compat.size_of(x[1:]) == 12
    assert compat.size_of(x.to_sparse()) == 12


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("register_hook", compat.has_gradient_hooks),
        ("register_post_accumulate_grad_hook", compat.has_accumulation_hooks),
    ],
)
def test_hooks_on_a_gradient_are_known_while_they_are_there(kind: str, found: Callable[[Tensor], bool]) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not found(parameter)
    handle = getattr(parameter, kind)(lambda _: None)
    assert found(parameter)
    handle.remove()
    assert not found(parameter)


@pytest.mark.filterwarnings(r"ignore:.torch\.jit")  # by inductor, when it is imported
def test_how_a_module_was_compiled() -> None:
    def compiled(**arguments: Any) -> Any:
        module = nn.Linear(3, 3)
        module.compile(**arguments)
        return compat_compiler.compiled(module)

    eager = compat_compiler.backend_named("eager")
    assert compat_compiler.compiled(nn.Linear(3, 3)) is None
    assert compiled(backend="eager", dynamic=True).arguments == {"backend": eager, "dynamic": True}
    assert compiled(mode="reduce-overhead").arguments["options"] == {"triton.cudagraphs": True}
    assert compiled(options={"fallback_random": True}).arguments == {
        "backend": "inductor",
        "dynamic": None,
        "options": {"fallback_random": True},
    }
    wrapped = compat_compiler.compiled(torch.compile(nn.Linear(3, 3), backend="eager"))
    assert wrapped is not None
    assert wrapped.name == "forward"
    assert wrapped.function(torch.ones(3)).shape == (3,)


def test_backends_of_the_compiler_are_known_by_name() -> None:
    assert callable(compat_compiler.backend_named("inductor"))
    assert compat_compiler.backend_named("eager") is not compat_compiler.backend_named("aot_eager")
    assert compat_compiler.inductor_options("default", None) == {}
    assert compat_compiler.inductor_options("max-autotune-no-cudagraphs", None)["max_autotune"] is True


@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")
def test_a_recorded_graph_can_be_copied_and_given_inputs_whose_sizes_are_known() -> None:
    seen: list[Any] = []

    def backend(module: Any, examples: Any) -> Any:
        copied = compat_compiler.copy_of_recorded(module)
        inputs = module.graph.find_nodes(op="placeholder")
        values = [node.meta["example_value"] for node in inputs]
        symbols = {v.node.expr: place for place, v in enumerate(values) if isinstance(v, torch.SymInt)}
        (output,) = module.graph.find_nodes(op="output")
        (rows, width) = output.args[0][0].meta["example_value"].shape
        node = compat_compiler.add_input(copied.graph, "further")
        copied.recompile()
        found = copied.graph.find_nodes(op="placeholder")
        rows_of, width_of = compat_compiler.size_in(rows, symbols), compat_compiler.size_in(width, symbols)
        seen.append((copied, module, found[-1] is node, rows_of, width_of, compat_compiler.size_in(rows, {})))
        return lambda *given: copied(*given, None)

    compiled = torch.compile(lambda x: torch.cat([x, x.tanh()]), backend=backend, dynamic=True)
    torch.compiler.reset()
    assert compiled(torch.ones(3, 5)).shape == (6, 5)
    ((copied, module, is_last, rows_of, width_of, unknown),) = seen
    assert is_last
    assert len(module.graph.find_nodes(op="placeholder")) + 1 == len(copied.graph.find_nodes(op="placeholder"))
    assert copied.meta == module.meta
    sizes = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
    given = [7 if isinstance(size, torch.SymInt) else None for size in sizes]
    assert rows_of(given) == 14
    assert width_of(given) == 7
    assert unknown is None
    assert compat_compiler.size_in(4, {}) == 4
    torch.compiler.reset()
