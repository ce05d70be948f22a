"""The job of one host: joins the others, checks the results, runs the trials, and, on host 0, writes every sample.

Started by torchrun on each host: `python -m penstock.fabric.emulation.host FOLDER`, where FOLDER has the run's spec.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import FabricError, PenstockError
from penstock.fabric.algorithms import generate
from penstock.fabric.emulation import clock, probe
from penstock.fabric.emulation.collectives import Engine, Place, Stepwise, check_backend, wrong
from penstock.fabric.emulation.joining import Members, first_line, hosts_text, joined
from penstock.fabric.emulation.payload import DTYPES
from penstock.fabric.emulation.spec import ENGINE, SPEC, Spec
from penstock.fabric.emulation.trials import Trials
from penstock.fabric.emulation.watch import Watch
from penstock.fabric.emulation.wires import Delayed, Plain, Wire
from penstock.fabric.models import fit_link
from penstock.fabric.network.record import cpu_usage, environment
from penstock.fabric.samples import HEAD, RUN, SAMPLES, STEPS, STEPS_HEAD, SampleFile


def run(spec: Spec, folder: Path, watch: Watch | None = None) -> None:
    """This host's part of a run. A collective: every host calls it with the same spec.

    Args:
        folder: where host 0 writes; made if it is not there.

    Raises:
        ArgumentError: the environment or the backend does not fit the spec.
        FabricError: a host did not join, was lost, or got a wrong result. What was sampled so far is in the folder.
    """
    check_backend(spec.backend)
    torch.set_num_threads(1)
    with joined(spec) as members:
        record = _Record(spec, folder, members)
        try:
            wire: Wire = Plain() if spec.bytes_per_second is None else Delayed(spec.bytes_per_second)
            record.add(
                links=_links(spec, wire, members), clock=_gathered(asdict(clock.estimate(members.control)), members)
            )
            parts = _parts(spec, members, wire)
            _check(spec, parts, members)
            trials = Trials(spec, parts, members)
            began = cpu_usage()
            if members.rank == 0:
                _write(spec, folder, trials, watch)
            else:
                for _ in range(spec.trials):
                    trials.one()
                trials.last_steps()
            record.add(cpu=_gathered(cpu_usage().since(began), members), complete=True)
        except (RuntimeError, OSError) as error:
            lost = hosts_text(gone) + " does not answer" if (gone := members.who_is_lost()) else ""
            text = "; ".join(part for part in (lost, first_line(error)) if part)
            record.add(missing=text)
            raise FabricError(f"host {members.rank}: {text}") from None


class _Record:
    """run.json, on host 0: whole at any moment."""

    def __init__(self, spec: Spec, folder: Path, members: Members) -> None:
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        hosts = _gathered(environment(interface), members)
        kernels = set(_gathered(clock.kernel(), members))
        self._path = folder / RUN if members.rank == 0 else None
        self._found: dict[str, Any] = {
            "version": 1,
            **{key: value for key, value in asdict(spec).items() if key != "workload"},
            "workload": spec.workload.to_dict(),
            "algorithms": [spec.algorithm_of(place) for place in range(len(spec.workload.transfers))],
            "environment": hosts,
            "machine_cores": os.cpu_count(),
            "shared_machine": len(kernels) == 1 and "" not in kernels,
            "complete": False,
            "missing": "",
        }
        if self._path is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self.add()

    def add(self, **found: Any) -> None:
        self._found.update(found)
        if self._path is not None:
            aside = self._path.with_suffix(".tmp")
            aside.write_text(json.dumps(self._found, indent=1))
            aside.replace(self._path)


def _gathered(mine: Any, members: Members) -> list[Any]:
    values: list[Any] = [None] * members.size
    dist.all_gather_object(values, mine, group=members.control)
    return values


def _links(spec: Spec, wire: Wire, members: Members) -> list[dict[str, Any]]:
    """Of every pair of neighbours, measured one after the other; nothing where messages are not sent by ourselves."""
    if not spec.measures_links or spec.backend != "gloo":
        return []
    found = []
    for pair in probe.neighbours(spec.hosts):
        points = probe.measure(pair, wire)
        dist.barrier(group=members.control)
        found.append({"from": pair[0], "to": pair[1], "points": points})
    everyone = _gathered(found, members)
    links = []
    for place, (source, target) in enumerate(probe.neighbours(spec.hosts)):
        points = everyone[source][place]["points"]
        fitted = fit_link([(size, seconds) for size, seconds in points])
        links.append(
            {
                "from": source,
                "to": target,
                "latency_seconds": fitted.alpha_seconds,
                "bytes_per_second": 1 / fitted.beta_seconds_per_byte if fitted.beta_seconds_per_byte else None,
                "points": points,
            }
        )
    return links


def _parts(spec: Spec, members: Members, wire: Wire) -> list[tuple[Place, Stepwise | Engine] | None]:
    """Of every transfer, this host's part; None where it has none."""
    device = torch.device("cpu")
    if spec.backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    everyone = tuple(range(spec.hosts))
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {everyone: None}
    made: list[tuple[Place, Stepwise | Engine] | None] = []
    for number, transfer in enumerate(spec.workload.transfers):
        ranks = transfer.ranks or (everyone[:2] if transfer.collective == "send" else everyone)
        if spec.algorithm == ENGINE and ranks not in groups and transfer.collective != "send":
            groups[ranks] = dist.new_group(list(ranks))  # every host makes every group
        if members.rank not in ranks:
            made.append(None)
            continue
        elements = transfer.bytes // spec.workload.element_bytes
        place = Place(
            transfer,
            ranks,
            ranks.index(members.rank),
            elements,
            spec.seed + number,
            DTYPES[spec.workload.element_bytes],
        )
        if spec.algorithm == ENGINE:
            made.append((place, Engine(place, groups.get(ranks), device)))
        else:
            steps = generate(transfer.collective, spec.algorithm_of(number), len(ranks))
            made.append((place, Stepwise(place, steps, wire, device)))
    return made


def _check(spec: Spec, parts: list[tuple[Place, Stepwise | Engine] | None], members: Members) -> None:
    """The warm-up: every transfer's result is compared on every host."""
    for _ in range(spec.warmup):
        faults = [fault for part in parts if part is not None and (fault := wrong(*part))]
        found = [fault for one in _gathered(faults, members) for fault in one]
        if found:
            raise FabricError(found[0])


def _write(spec: Spec, folder: Path, trials: Trials, watch: Watch | None) -> None:
    samples, steps = SampleFile(folder / SAMPLES, HEAD), SampleFile(folder / STEPS, STEPS_HEAD)
    try:
        for number in range(spec.trials):
            trial = trials.one()
            samples.add(trial.rows(number))
            steps.add(trial.step_rows)
            if watch is not None:
                watch.trial(number, trial.longest_ns())
        steps.add(trials.last_steps())
    finally:
        samples.close()
        steps.close()


def main() -> None:
    """Called on every host by torchrun."""
    folder = Path(sys.argv[1])
    try:
        run(Spec.read(folder / SPEC), folder)
    except PenstockError as error:
        print(f"penstock: error: {error}", file=sys.stderr, flush=True)
        time.sleep(0.2)
        os._exit(2)  # a gloo that lost a host may wait for it in a destructor


if __name__ == "__main__":
    main()
