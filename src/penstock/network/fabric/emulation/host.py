"""The job of one host: join the others, check results, run the trials, and, on host 0, write every sample.

torchrun starts it on each host: `python -m penstock.network.fabric.emulation.host FOLDER`, where FOLDER holds the
run's spec.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock._base.errors import FabricError, PenstockError
from penstock.distributed.launch.agent import end_with_parent
from penstock.distributed.launch.endings import note_failure
from penstock.network.conditions import cpu_since, cpu_usage
from penstock.network.fabric.algorithms import ENGINE, generate
from penstock.network.fabric.emulation import clock, probe
from penstock.network.fabric.emulation.collectives import Engine, Part, Stepwise, Wire, check_backend, check_result
from penstock.network.fabric.emulation.payload import TYPES, Participant
from penstock.network.fabric.emulation.rendezvous import Members, gather, record_run
from penstock.network.fabric.emulation.spec import Spec, Watch
from penstock.network.fabric.emulation.trials import Trials
from penstock.network.fabric.samples import HEAD, SAMPLES, SPEC, STEPS, STEPS_HEAD, SampleFile
from penstock.network.fabric.statistics import WarmUp
from penstock.network.fabric.steps import REDUCES
from penstock.network.fabric.workload import Op


def run(spec: Spec, folder: Path, watch: Watch | None = None) -> None:
    """Run this host's part. Collective: every host calls it with the same spec; host 0 writes into the folder. Raise
    ArgumentError: the environment or the backend does not fit the spec. Raise FabricError: a host did not join, was
    lost, or got a wrong result. The samples up to then are in the folder."""
    check_backend(spec.backend)
    torch.set_num_threads(1)
    with record_run(spec, folder) as (members, record):
        wire = Wire()
        record.add(
            links=probe.measure_links(spec, wire, members),
            clock=gather(asdict(clock.estimate(members.control)), members),
        )
        parts = _parts(spec, members, wire)
        _check(spec, parts, members)
        trials = Trials(spec, parts, members)
        if members.rank == 0:
            record.add(**({"warmup": spec.checked_trials} if spec.warmup else _warm_up(spec, trials)))
            began = cpu_usage()
            with (
                closing(SampleFile(folder / SAMPLES, HEAD)) as samples,
                closing(SampleFile(folder / STEPS, STEPS_HEAD)) as rounds,
            ):
                for number in range(spec.trials):
                    trial = trials.run_trial()
                    samples.add(trial.rows(number))
                    rounds.add(trial.round_rows)
                    if watch is not None:
                        watch(number)
                rounds.add(trials.last_rounds())
        else:
            began = _follow(spec, trials)
        record.add(cpu=gather(cpu_since(began), members))


def _parts(spec: Spec, members: Members, wire: Wire) -> list[Part | None]:
    """Build this host's part in each transfer; None where it takes no part."""
    device = torch.device("cpu")
    if spec.backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    everyone = tuple(range(spec.hosts))
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {everyone: None}
    parts: list[Part | None] = []
    for number, transfer in enumerate(spec.workload.transfers):
        ranks = transfer.ranks or (everyone[:2] if transfer.collective == "send" else everyone)
        if spec.algorithm == ENGINE and ranks not in groups and transfer.collective != "send":
            groups[ranks] = dist.new_group(list(ranks))  # every host must create every group
        if members.rank not in ranks:
            parts.append(None)
            continue
        workload = spec.workload
        op: Op = workload.op if transfer.collective in REDUCES else "sum"
        payload = transfer.bytes // workload.element_bytes, spec.seed + number, TYPES[workload.type_name], op
        participant = Participant(transfer, ranks, ranks.index(members.rank), *payload)
        if spec.algorithm == ENGINE:
            parts.append(Engine(participant, groups.get(ranks), device))
        else:
            steps = generate(transfer.collective, spec.algorithm_for(number), len(ranks), transfer.shares)
            parts.append(Stepwise(participant, steps, wire, device))
    return parts


def _check(spec: Spec, parts: list[Part | None], members: Members) -> None:
    """Run the first warm-up trials, in which every host checks the result of every transfer."""
    for _ in range(spec.checked_trials):
        faults = [fault for part in parts if part is not None and (fault := check_result(part))]
        all_faults = [fault for host_faults in gather(faults, members) for fault in host_faults]
        if all_faults:
            raise FabricError(all_faults[0])


def _warm_up(spec: Spec, trials: Trials) -> dict[str, Any]:
    """Run unmeasured trials on host 0 until times seem to have settled; return entries for the record."""
    warmup = WarmUp(spec.trials)
    while not warmup.is_over:
        warmup.add(trials.run_trial(counts=False).longest_ns())
    return {"warmup": spec.checked_trials + warmup.count, "steady": warmup.is_steady}


def _follow(spec: Spec, trials: Trials) -> dict[str, Any]:
    """Run all trials, warm-up included, on the other hosts; return the processor usage at the end of the warm-up."""
    began, count = cpu_usage(), 0
    while count < spec.trials:
        if trials.run_trial().counts:
            count += 1
        else:
            began = cpu_usage()
    trials.last_rounds()
    return began


def main() -> None:
    """Entry point on every host, called by torchrun with the run's folder as the only argument."""
    folder = Path(sys.argv[1])
    end_with_parent(os.getppid())  # a killed agent cannot stop its host
    try:
        run(Spec.read(folder / SPEC), folder)
    except PenstockError as error:
        note_failure(int(os.environ.get("RANK", "0")), str(error))
        print(f"penstock: error: {error}", file=sys.stderr, flush=True)
        time.sleep(0.2)
        os._exit(2)  # gloo's destructors may wait for a lost host


if __name__ == "__main__":
    main()
