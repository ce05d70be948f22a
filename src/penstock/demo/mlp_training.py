"""The real training run that the preset "mlp" emulates: a classifier whose gradients are all-reduced layer by layer.

A layer's all-reduce starts as soon as backward has produced its gradients, and ends before backward goes on, as in the
emulation. To run it, make a process group, then call `train_mlp(200)` on each rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.errors import ArgumentError
from penstock.fabric.emulation import clock
from penstock.fabric.emulation.host import main
from penstock.fabric.emulation.run_file import gathered, recorded
from penstock.fabric.emulation.spec import Spec
from penstock.fabric.presets import MLP_WIDTHS, mlp, with_compute
from penstock.fabric.samples import HEAD, SAMPLES, SampleFile
from penstock.fabric.workload import Workload
from penstock.network.conditions import cpu_usage

Images = tuple[Tensor, Tensor, str]
"""Pixels between 0 and 1 as (rows, 784), the digits as (rows,), and where they come from."""

RANDOM_ROWS = 1797
"""The number of digits in scikit-learn's data set."""


def digits() -> Images:
    """scikit-learn's 8 x 8 digits scaled up to 28 x 28. Without scikit-learn, the images of `random_images`."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError:
        return random_images()
    found = load_digits()
    small = torch.from_numpy(found.images).float()[:, None] / 16
    large = F.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
    return large.flatten(1), torch.from_numpy(found.target).long(), "scikit-learn's digits, scaled up from 8 x 8"


def random_images() -> Images:
    """Random images in the digits' shape, the same ones on every call."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(RANDOM_ROWS, MLP_WIDTHS[0], generator=generator)
    return images, torch.randint(MLP_WIDTHS[-1], (RANDOM_ROWS,), generator=generator), "random images"


def classifier() -> nn.Sequential:
    """Fully connected layers fc1, fc2, ... with ReLUs between them."""
    model = nn.Sequential()
    for number, (fed, made) in enumerate(pairwise(MLP_WIDTHS), start=1):
        if number > 1:
            model.add_module(f"relu{number - 1}", nn.ReLU())
        model.add_module(f"fc{number}", nn.Linear(fed, made))
    return model


@dataclass(frozen=True, slots=True)
class Training:
    """What rank 0 recorded. Arrays are in nanoseconds, by step, layer (in backward order) and rank.

    Attributes:
        data: where the images come from.
        losses: each step's loss, averaged over ranks.
        start_ns, end_ns: when each layer's all-reduce started and ended, as in `penstock.fabric.samples.Run`.
        compute_ns: the time from the end of the previous all-reduce (at first, from the start of the step) to the
            start of this one.
        after_ns: the time from the last all-reduce to the end of the step, by step and rank.
    """

    data: str
    losses: tuple[float, ...]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    compute_ns: NDArray[np.int64]
    after_ns: NDArray[np.int64]

    def workload(self) -> Workload:
        """A workload that emulates this run: the same sizes, and the median compute times of its ranks."""
        seconds = np.median(self.compute_ns, axis=(0, 2)) / 1e9
        return with_compute(mlp(), seconds.tolist(), float(np.median(self.after_ns)) / 1e9)


def train_mlp(
    steps: int,
    batch: int = 32,
    *,
    warmup: int = 3,
    seed: int = 0,
    offset_ns: int = 0,
    learning_rate: float = 0.1,
    images: Images | None = None,
    keep: Callable[[Rows], None] | None = None,
) -> Training | None:
    """Trains the classifier on all ranks of the default process group, each on its own part of the digits.

    Args:
        steps: how many steps to record; for whole epochs, `penstock.fabric.presets.trials_of(batches, epochs)`.
        batch: rows per rank.
        warmup: steps to take before those recorded.
        seed: for the weights and the order of the rows.
        offset_ns: added to this rank's `time.monotonic_ns` to give rank 0's.
        images: the data; None means `digits()`.
        keep: called on rank 0 with each step's samples when the step ends. Pass it on all ranks or on none.

    Returns:
        What rank 0 gathered; None on the other ranks.

    Raises:
        ArgumentError: a number is out of range, or there is no process group.
    """
    if not dist.is_initialized():
        raise ArgumentError("train_mlp sums over a process group: call torch.distributed.init_process_group first")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    data, targets, source = digits() if images is None else images
    if steps < 1 or warmup < 0 or not 1 <= batch * ranks <= len(data):
        raise ArgumentError(
            f"steps={steps}, warmup={warmup}, batch={batch} on {ranks} ranks: give 1 step or more, a warm-up of 0 or "
            f"more, and a batch of at most {len(data) // ranks} rows a rank"
        )

    def reduce(gradients: Tensor) -> None:
        dist.all_reduce(gradients)
        gradients /= ranks

    training = _Steps(seed, learning_rate, reduce)
    order = torch.Generator().manual_seed(seed)
    stamps, losses = [], []
    for number in range(warmup + steps):
        rows = torch.randperm(len(data), generator=order)[rank * batch : (rank + 1) * batch]
        dist.barrier()
        loss, marks = training.step(data[rows], targets[rows])
        if number >= warmup:
            losses.append(loss)
            stamps.append([mark + offset_ns for mark in marks])
            if keep is not None and (every := _of_all_ranks(torch.tensor(stamps[-1]))) is not None:
                keep(_rows(number - warmup, every))
    return _gathered(source, torch.tensor(losses), torch.tensor(stamps))


Rows = list[tuple[int, ...]]
"""Rows of samples.csv."""

Marks = list[int]
"""A step's times: its start, then the start and end of each layer's all-reduce, then its end."""


class _Steps:
    """Takes training steps that pass each layer's gradients to `reduce` as soon as they exist."""

    def __init__(self, seed: int, learning_rate: float, reduce: Callable[[Tensor], None]) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = classifier()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=learning_rate)
        self._reduce = reduce
        self._marks: Marks = []
        self._arrived: dict[nn.Linear, int] = {}
        for layer in self.model.children():
            if isinstance(layer, nn.Linear):
                for parameter in layer.parameters():
                    hook = partial(self._arrive, layer)
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def step(self, images: Tensor, targets: Tensor) -> tuple[float, Marks]:
        self._marks = [time.monotonic_ns()]
        self._optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._marks.append(time.monotonic_ns())
        return float(loss.detach()), self._marks

    def _arrive(self, layer: nn.Linear, _: Tensor) -> None:
        """Reduces weight and bias gradients as one message, once both exist."""
        self._arrived[layer] = self._arrived.get(layer, 0) + 1
        if self._arrived[layer] < 2:
            return
        self._arrived[layer] = 0
        grads = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        self._marks.append(time.monotonic_ns())
        self._reduce(flat)
        self._marks.append(time.monotonic_ns())
        for grad, total in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))


def _compute(marks: NDArray[np.int64]) -> NDArray[np.int64]:
    """The time from each end to the next start. Marks are in the last dimension."""
    between: NDArray[np.int64] = marks[..., 1:-1:2] - marks[..., 0:-2:2]
    return between


def _of_all_ranks(marks: Tensor) -> NDArray[np.int64] | None:
    """All ranks' marks on rank 0, with the rank as the last dimension but one; None on the others."""
    first = dist.get_rank() == 0
    everyone = [torch.empty_like(marks) for _ in range(dist.get_world_size())] if first else None
    dist.gather(marks, everyone, dst=0)
    return None if everyone is None else torch.stack(everyone, dim=-2).numpy()


def _rows(step: int, every: NDArray[np.int64]) -> Rows:
    """One step's marks, by rank, as rows of samples.csv."""
    return [
        (step, place, rank, int(start), int(end))
        for rank, marks in enumerate(every)
        for place, (start, end) in enumerate(zip(marks[1:-1:2], marks[2:-1:2], strict=True))
    ]


def _gathered(source: str, losses: Tensor, marks: Tensor) -> Training | None:
    dist.all_reduce(losses)
    every = _of_all_ranks(marks)  # step, rank, mark
    if every is None:
        return None

    def by_layer(values: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.ascontiguousarray(values.transpose(0, 2, 1))

    return Training(
        data=source,
        losses=tuple((losses / dist.get_world_size()).tolist()),
        start_ns=by_layer(every[..., 1:-1:2]),
        end_ns=by_layer(every[..., 2:-1:2]),
        compute_ns=by_layer(_compute(every)),
        after_ns=every[..., -1] - every[..., -2],
    )


def train(spec: Spec, folder: Path) -> None:
    """Runs this host's part of the training that the spec's preset emulates. Host 0 records it as a run.

    Raises:
        ArgumentError: the spec is for another workload.
        FabricError: a host did not join, or was lost.
    """
    if [one.bytes for one in spec.workload.transfers] != [one.bytes for one in mlp().transfers]:
        raise ArgumentError(f"only the preset mlp can be trained, not {spec.workload.name!r}: give --preset mlp")
    torch.set_num_threads(1)
    with recorded(spec, folder) as (members, record):
        offset = clock.estimate(members.control)
        began = cpu_usage()
        samples = SampleFile(folder / SAMPLES, HEAD) if members.rank == 0 else None
        training = train_mlp(
            spec.trials,
            warmup=spec.checked,
            seed=spec.seed,
            offset_ns=offset.offset_ns,
            keep=samples.add if samples else lambda rows: None,
        )
        record.add(
            cpu=gathered(cpu_usage().since(began), members),
            clock=gathered(asdict(offset), members),
            training=digits()[2],
            links=[],
            warmup=spec.checked,
        )
        if samples is None or training is None:
            return
        samples.close()
        record.add(workload=training.workload().to_dict(), losses=[training.losses[0], training.losses[-1]])


if __name__ == "__main__":
    main(train)
