"""Where the host waits for the device in a steady step: nowhere, and once where a user reads something.

torch's debug mode sees values that are read and copies that block, and no waits for events.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import penstock
from cases.case import Case, Found, Setting, UnsupportedError
from cases.models import Model, convnet, gpt, mlp
from cases.ranks import on_ranks

PART = 1

STEADY = 6
"""After so many steps all is known that a pipeline learns while it runs."""

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "1f1b": ("convnet", {}),
    "zb-h1": ("gpt", {"schedule": "zb-h1"}),
    "interleaved-1f1b": ("gpt", {"schedule": "interleaved-1f1b"}),
    "dualpipe": ("mlp", {"schedule": "dualpipe"}),
    "recompute": ("gpt", {"recompute": "always"}),
    "offload": ("mlp", {"schedule": "gpipe", "offload": True}),
    "deferred batch norm": ("convnet", {"deferred_batch_norm": True}),
}
"""By name: the model, and the pipeline's options."""


def cases() -> Iterator[Case]:
    for name, (model, options) in OPTIONS.items():
        yield Case(f"waits/{name}", PART, partial(steady_step, model, options, "", 0))
    for also in ("clip", "read"):  # a watcher that sees nothing fails here
        yield Case(f"waits/{also}", PART, partial(steady_step, "mlp", {}, also, 1))
    for name in ("1f1b", "zb-h1"):
        yield Case(f"waits/2 processes/{name}", PART, partial(in_several, {"schedule": name}))


def _model(setting: Setting, name: str) -> Model:
    torch.manual_seed(0)
    return {"mlp": mlp, "gpt": gpt, "convnet": convnet}[name](not setting.is_real)


def steady_step(name: str, options: dict[str, Any], also: str, number: int, setting: Setting) -> Found:
    """The synchronizations of a step, by place. `also`: what the user does in it, which takes `number`."""
    setting.prepare()
    given = _model(setting, name)
    with penstock.pipeline(
        given.model, given.args, ranks=2, microbatches=4, loss_fn=given.loss, devices=setting.device, **options
    ) as pipe:
        return judged(_waits(setting, pipe, given, also), number)


def in_several(options: dict[str, Any], setting: Setting) -> Found:
    """Over the staged transport, whose own waits, for copies, are events."""
    by_rank = on_ranks(setting, 2, of_rank, {"transport": "staged", **options})
    return judged(Counter({f"rank {rank}: {at}": n for rank, of in enumerate(by_rank) for at, n in of.items()}), 0)


def of_rank(setting: Setting, rank: int, options: dict[str, Any]) -> Counter[str]:
    given = _model(setting, "mlp")
    options = {"broadcast_loss": False, "devices": setting.device, **options}
    with penstock.pipeline(given.model, given.args, microbatches=4, loss_fn=given.loss, **options) as pipe:
        found = _waits(setting, pipe, given, "")
    # The stand-in counts waits for events, too, which torch's debug mode does not report.
    return Counter({place: number for place, number in found.items() if place not in ("event", "event in a thread")})


def _waits(setting: Setting, pipe: penstock.Pipeline, given: Model, also: str) -> Counter[str]:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        result = pipe.step(*given.args, target=given.target)
        if also == "clip":
            pipe.clip_grad_norm_(1.0)
        if also == "read":
            float(result.loss)
        optimizer.step()

    for _ in range(STEADY):
        step()
    setting.synchronize()
    with _watched(setting) as found:
        step()
    return found


@contextmanager
def _watched(setting: Setting) -> Iterator[Counter[str]]:
    """Collects synchronizations by place."""
    found: Counter[str] = Counter()
    if setting.device == "cpu":
        yield found
        raise UnsupportedError("nothing waits for a CPU")
    if setting.device == "standin":
        from scaffolding import stand_in

        stand_in.waits.clear()
        yield found
        found.update(stand_in.waits)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first call says that the mode is a prototype, which is no synchronization
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found.update(f"{each.filename}:{each.lineno}" for each in caught if "synchroniz" in str(each.message))


def judged(waits: Counter[str], number: int) -> Found:
    """Whether there are exactly so many."""
    places = ", ".join(f"{count} at {place}" for place, count in waits.most_common(3))
    says = f"{waits.total()} synchronizations in a steady step{': ' if places else ''}{places} (expected: {number})"
    return {"ok": waits.total() == number, "says": says, "places": dict(waits)}
