"""Options for the traffic: a preset, a step of a model, explicit sizes, or a sweep."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from penstock._base.errors import ArgumentError, check_counts
from penstock._base.formatting import pluralize
from penstock.cli._errors import flag
from penstock.cli._options import CUT, USUAL_OR_BATCH_SIZE, option, options_on
from penstock.cli._target import GRAD_DTYPE, GradDtypeName, dtype_named, load_target, parse_names
from penstock.network.fabric.samples import Run
from penstock.network.fabric.steps import Collective
from penstock.network.fabric.workload import BYTES, Op, Workload, mlp, parse_dtype
from penstock.network.quantities import parse_size, parse_sizes

DEFAULT_HOSTS = 4
DEFAULT_TRIALS = 200


_option = options_on("Traffic: a preset, a model, an earlier run, sizes or a sweep")
_of_model = options_on("With --model")


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """Traffic of a trial; None if an option was omitted."""

    preset_name: Literal["mlp"] | None = _option(
        "A known job: mlp, the gradients of a 784-256-128-64-10 classifier.", "--preset"
    )
    model: str | None = _option("module:function or file.py:function, as for `penstock verify`.", metavar="TARGET")
    replay: Path | None = _option("Replay the traffic of an earlier run, with its compute times.", metavar="FOLDER")
    sizes: str | None = _option("Explicit sizes, in order: 2600,33024,64KiB.")
    first: str | None = _option("Smallest size of a sweep: 1KiB.", "--from")
    last: str | None = _option("Largest size of a sweep: 64MiB.", "--to")
    factor: float | None = _option("Factor between the sizes of a sweep; default 2.")
    collective: Collective | None = _option("For sizes and sweeps; default all_reduce.")
    dtype: str | None = _option("For sizes and sweeps: float32, float16, bfloat16, int8, ...; default float32.")
    reduce_op: Op | None = _option("Reduction; default sum.")
    uneven: str | None = _option("For all_to_all, the share of each host: 4,2,1,1.", metavar="SHARES")
    cuts: str | None = _of_model("Modules that begin a new stage: a,b,c; default: balanced.")
    split_inside: str | None = _of_model("Modules that cuts may split, besides those found automatically: a,b,c.")
    ranks: int | None = _of_model("Ranks per pipeline; hosts / ranks is the number of replicas. Default 1.")
    schedule: str | None = _of_model("Schedule of the pipeline; default 1f1b.")
    microbatches: int | None = _of_model(f"{CUT}; {USUAL_OR_BATCH_SIZE}, and 1 without a pipeline.")
    traffic: Literal["gradients", "pipeline", "tensor", "sharded"] | None = _of_model(
        "gradients: those of each layer, as in data-parallel training; pipeline: all messages of a pipeline and its "
        "replicas; tensor: activations of layers that are split over all hosts; sharded: gradients, with --sharded. "
        "Default: pipeline, or gradients if --ranks is 1."
    )
    sharded: bool = _of_model("Shard the replicas: all-gathers and reduce-scatters (FSDP2).", default=False)
    grad_dtype: GradDtypeName | None = _of_model(GRAD_DTYPE)
    compute: str | None = _of_model(
        "Compute before each transfer: none, measure (here), or the seconds of a stage's forward."
    )

    def workload(self, hosts: int) -> Workload:
        """Return the workload that the options describe."""
        sources = {
            "--preset": self.preset_name,
            "--model": self.model,
            "--replay": self.replay,
            "--sizes": self.sizes,
            "--from and --to": self.last if self.first is None else self.first,
        }
        sources_passed = [name for name, value in sources.items() if value is not None]
        if len(sources_passed) != 1:
            passed = " and ".join(sources_passed) or "nothing"
            raise ArgumentError(f"expected one kind of traffic, got {passed}; pass one of {', '.join(sources)}")
        for name, owners in _OWNERS.items():
            is_passed = getattr(self, name) is not None and getattr(self, name) is not False  # 0 counts, too
            if is_passed and sources_passed[0] not in owners:
                raise ArgumentError(f"{flag(name)} requires {owners}, but {sources_passed[0]} was passed; omit it")
        if self.preset_name is not None:
            return mlp()
        if self.replay is not None:
            return Run.read(self.replay).record.workload
        if self.model is not None:
            return self._of_model(self.model, hosts)
        workload = self._by_size()
        return workload if self.uneven is None else _uneven(workload, self.uneven, hosts)

    def _by_size(self) -> Workload:
        """Return the workload of explicit sizes, or of a sweep."""
        dtype = parse_dtype(self.dtype or "float32")
        collective, element_bytes = self.collective or "all_reduce", BYTES[dtype]
        if self.sizes is not None:
            workload = Workload.from_sizes(parse_sizes(self.sizes), collective, element_bytes)
        elif self.first is None or self.last is None:
            raise ArgumentError("a sweep needs both --from and --to, and --factor if it is not 2")
        else:
            factor = 2 if self.factor is None else self.factor
            workload = Workload.sweep(parse_size(self.first), parse_size(self.last), factor, collective, element_bytes)
        return replace(workload, dtype=dtype, op=self.reduce_op or "sum")

    def _of_model(self, target: str, hosts: int) -> Workload:
        from penstock._base.pytree import unflatten
        from penstock.network.fabric.traffic import from_model
        from penstock.runtime.batch.cut import Cutting
        from penstock.runtime.batch.example import default_count
        from penstock.runtime.batch.outline import Outline, explaining_cut

        ranks = 1 if self.ranks is None else self.ranks
        check_counts(ranks=ranks)
        if hosts % ranks:
            raise ArgumentError(f"--hosts {hosts} is not a multiple of --ranks {ranks}: replicas are whole pipelines")
        for name in ("cuts", "split_inside", "schedule"):
            if ranks == 1 and getattr(self, name) is not None:
                raise ArgumentError(
                    f"{flag(name)} applies to a pipeline's stages, but --ranks is 1: pass more ranks, or omit it"
                )
        compute: Any = "none" if self.compute is None else self.compute
        if compute not in ("none", "measure"):
            try:
                compute = float(compute)
            except ValueError:
                raise ArgumentError(f"--compute {compute}: pass none, measure or a number of seconds") from None
        traffic = self.traffic or ("gradients" if ranks == 1 else "pipeline")
        check_counts(required=False, microbatches=self.microbatches)
        with load_target(target, "the model") as loaded_target:
            batch = loaded_target.args, dict(loaded_target.kwargs)
            cutting = Cutting.of(**{"batch_dims": None, **loaded_target.cutting})
            microbatches = self.microbatches or (
                default_count(cutting, batch) if ranks > 1 or traffic == "pipeline" else 1
            )
            cut = cutting.into(microbatches).cut_example(batch, "the batch")
            sizes = cut.sizes
            args, kwargs = unflatten(cut.pieces[0].leaves, cut.pieces[0].structure)
            with explaining_cut(Outline.of(cut)):
                workload = from_model(
                    loaded_target.model,
                    args,
                    kwargs,
                    hosts=hosts,
                    ranks=ranks,
                    cuts=parse_names(self.cuts),
                    split_inside=parse_names(self.split_inside),
                    schedule="1f1b" if self.schedule is None else self.schedule,
                    microbatches=len(sizes),
                    traffic=traffic,
                    sharded=self.sharded,
                    compute=compute,
                    grad_dtype=dtype_named(self.grad_dtype),
                )
        uneven = "" if sizes[0] == sizes[-1] else f"; the {sum(sizes)} samples of the batch do not divide evenly"
        pieces = f"{pluralize(len(sizes), 'microbatch')} of {pluralize(sizes[0], 'sample')}"
        note = f"{pieces}, from TARGET's batch per replica{uneven}"
        return replace(workload, name=f"{target}, {workload.name}", notes=(*workload.notes, note))


_OWNERS = {
    "factor": "--from and --to",
    **dict.fromkeys(("collective", "dtype", "reduce_op", "uneven"), "--sizes or --from and --to"),
    **dict.fromkeys(("cuts", "split_inside", "ranks", "schedule", "microbatches", "traffic", "sharded"), "--model"),
    **dict.fromkeys(("grad_dtype", "compute"), "--model"),
}
"""Options that require one of others."""


def _uneven(workload: Workload, text: str, hosts: int) -> Workload:
    """Return the workload with uneven shares for its all-to-alls."""
    shares = tuple(int(share) if share.isascii() and share.isdigit() else -1 for share in text.split(","))
    if any(transfer.collective != "all_to_all" for transfer in workload.transfers):
        raise ArgumentError("--uneven requires --collective all_to_all; pass both, or omit it")
    if len(shares) != hosts or min(shares) < 0 or not any(shares):
        raise ArgumentError(
            f"--uneven {text}: expected {hosts} integers, one per host, not all 0; use, for example, 4,2,1,1"
        )
    transfers = tuple(replace(transfer, shares=shares) for transfer in workload.transfers)
    return replace(workload, hosts=hosts, transfers=transfers)


@dataclass(frozen=True, slots=True)
class CountOptions:
    """Number of trials."""

    trials: int | None = option(f"Number of trials; default {DEFAULT_TRIALS}. p99 needs 368.")
    batches: int | None = option("With --epochs, instead of --trials: batches per epoch.")
    epochs: int | None = option("With --batches: trials = batches x epochs.")

    def count(self) -> int:
        """Return the number of trials."""
        if self.batches is None and self.epochs is None:
            return DEFAULT_TRIALS if self.trials is None else self.trials
        if self.trials is not None or self.batches is None or self.epochs is None:
            raise ArgumentError("pass --trials, or both --batches and --epochs")
        check_counts(batches=self.batches, epochs=self.epochs)
        return self.batches * self.epochs
