"""What the proof says of a case, and what training it really gives. Each function runs in a process of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

Values = dict[str, Any]
"""By name, a tensor as numpy's array; None if it is absent."""


def proved(name: str, schedule: str) -> dict[str, Any]:
    """What `verify` says with two ranks."""
    from models import CASES
    from models.registry import MICROBATCHES

    import penstock

    case = CASES[name]
    args, target = case.batch(0)
    report = penstock.verify(
        case.make, args, target=target, schedule=schedule, ranks=2, microbatches=MICROBATCHES, full_batch=False
    )
    return {"seen": seen(report), "summary": report.summary(), "ok": report.ok}


def seen(report: Any) -> str:
    """In which step a report's first difference is; "exact" if there is none."""
    if report.ok:
        return "exact"
    if not report.differing:
        return "undefined"
    step = min(row.step for row in report.differing)
    first = [row for row in report.differing if row.step == step]
    return "seen in evaluation" if all(row.name.endswith(" in evaluation") for row in first) else f"seen in step {step}"


def planted(name: str) -> dict[str, Any]:
    """What `verify` says where a fault is planted in the runtime."""
    import faults

    return faults.planted(name)


def piped(name: str, schedule: str, rank: int, store: str) -> list[Values]:
    """Each step of a pipeline of two real processes: this rank's part."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    return _trained(name, schedule)


def unsplit(name: str) -> list[Values]:
    """Each step in plain torch, microbatch by microbatch; with random draws, in a pipeline of one rank."""
    from models import CASES

    return _trained(name, "naive", ranks=1) if CASES[name].draws else _by_hand(name)


def _trained(name: str, schedule: str, **options: Any) -> list[Values]:
    import torch
    from models import CASES
    from models.registry import MICROBATCHES

    import penstock

    case, found = CASES[name], list[Values]()
    model, loss = case.make()
    pipe = penstock.pipeline(
        model, case.batch(0)[0], loss_fn=loss, schedule=schedule, microbatches=MICROBATCHES, seed=1, **options
    )
    with pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for args, target, training in batches(case):
            if not training:
                found.append({"loss": array(pipe.evaluate(*args, target=target).loss)})
                continue
            optimizer.zero_grad()
            loss_of_step = pipe.step(*args, target=target).loss
            found.append(values(loss_of_step, pipe.named_parameters(), pipe.named_buffers()))
            optimizer.step()
    return found


def _by_hand(name: str) -> list[Values]:
    import torch
    from models import CASES
    from models.registry import MICROBATCHES

    case, found = CASES[name], list[Values]()
    model, loss = case.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = torch.tensor(1 / MICROBATCHES)
    for args, target, training in batches(case):
        optimizer.zero_grad()
        total = torch.zeros(())
        model.train(training)
        with torch.set_grad_enabled(training):
            for *given, wanted in zip(*(t.chunk(MICROBATCHES) for t in (*args, target)), strict=True):
                value = loss(model(*(t.clone() for t in given)), wanted)
                if training:
                    value.backward(weight)
                total += value.detach() * weight
        model.train()
        if not training:
            found.append({"loss": array(total)})
            continue
        of_loss = {"loss": loss} if isinstance(loss, torch.nn.Module) else {}
        whole = torch.nn.ModuleDict(of_loss)
        parameters, buffers = (
            [*getattr(model, of)(), *getattr(whole, of)()] for of in ("named_parameters", "named_buffers")
        )
        found.append(values(total, parameters, buffers))
        optimizer.step()
    return found


def batches(case: Any) -> Iterator[tuple[Any, Any, bool]]:
    """Four steps on other values each, and an evaluation after the second."""
    from models.registry import STEPS

    for step in range(STEPS):
        yield (*case.batch(step), True)
        if step == 1:
            yield (*case.batch(step), False)


def values(loss: Any, parameters: Iterable[Any], buffers: Iterable[Any]) -> Values:
    found = {"loss": array(loss)}
    found |= {f"gradient of {name}": array(parameter.grad) for name, parameter in parameters}
    return found | {f"buffer {name}": array(buffer) for name, buffer in buffers}


def array(tensor: Any) -> Any:
    if tensor is None:
        return None
    tensor = tensor.detach().cpu()
    tensor = tensor.to_dense() if not str(tensor.layout).endswith("strided") else tensor
    return tensor.clone().numpy()


def truth(ranks: list[Any], plain: Any, *, ties: bool) -> str:
    """ "right", or in which step what ranks have is another than without a pipeline."""
    import numpy as np

    failed = [found for found in ranks if isinstance(found, dict)]
    if failed:
        told = next((f for f in failed if f.get("ours")), failed[0])
        return f"{'refused' if told.get('ours') else 'raises'}: {told['error']}"
    if isinstance(plain, dict):
        return f"plain torch raises: {plain['error']}"
    for at, expected in enumerate(plain):
        step = "in evaluation" if at == 2 else f"from step {at + (at < 2)}"
        for found in (rank[at] for rank in ranks):
            for key, value in found.items():
                other = expected.get(key)
                if value is None or other is None:
                    same = value is other
                elif ties:
                    near = (
                        3e-3 * float(np.abs(other).max(initial=0.0)) + 1e-7
                    )  # rounding, which grows from step to step
                    same = value.shape == other.shape and np.allclose(value, other, 0.0, near, equal_nan=True)
                else:
                    same = value.shape == other.shape and np.array_equal(
                        value, other, equal_nan=value.dtype.kind == "f"
                    )
                if not same and not (key == "loss" and value is None):
                    return f"wrong {step} ({key})"
    return "right"
