"""The private parts of torch that the recording stands on behave as it expects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock._base import compat, compat_compiler


def test_backward_runs_without_torchs_own_checks() -> None:
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


def test_a_torch_that_does_not_count_who_holds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_USE_COUNT", None)
    assert compat.holders(torch.ones(3), None) == 2


def test_hooks_on_saved_tensors_are_known_while_they_are_active() -> None:
    assert compat.saved_tensors_hooks() is None

    def pack(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert compat.saved_tensors_hooks() == (pack, pack)


def test_memory_behind_a_tensor_is_counted_whole() -> None:
    x = torch.ones(3)
    assert compat.storage_bytes(x[1:]) == 12
    assert compat.storage_bytes(x.to_sparse()) == 12


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
