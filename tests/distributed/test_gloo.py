"""Real processes give what one process gives: verification, training, results, memory, with either transport."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jobs
import mesh_jobs
import pytest
import torch
from jobs import TASKS
from torch import Tensor

import penstock
from penstock import checkpoint
from penstock.runtime.execute.transport_choice import TransportChoice
from penstock.schedule import Op
from scaffolding.proofs import after_each_step
from scaffolding.ranks import Ranks, RanksError
from scaffolding.refusals import refusal_of
from scaffolding.representatives import long_after

pytestmark = pytest.mark.distributed

# -- the proof --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "name", "schedule"),
    long_after(
        *(4, (2, "in_place", "1f1b"), (2, "deep_with_dropout", "chimera"), (3, "skips", "gpipe")),
        *((3, "frozen_first_stage", "1f1b"), (3, "tied_gpt_with_dropout", "1f1b")),
    ),
)
def test_bits_of_one_device(request: pytest.FixtureRequest, n: int, name: str, schedule: str) -> None:
    """Every schedule: `test_nccl_rules.py` and `test_support_matrix.py`."""
    reports = request.getfixturevalue(f"ranks{n}").run(jobs.verify, name, {"schedule": schedule, "microbatches": 6})
    assert len(set(map(str, reports))) == 1, "each rank has the same report"
    ok, summary, kinds = reports[0]
    assert ok, summary
    assert kinds == ["gradient", "loss", "output"]


def test_a_rank_without_parameters(ranks3: Ranks) -> None:
    name = "a_rank_without_parameters"
    for ok, summary, _ in ranks3.run(jobs.verify, name, {"microbatches": 3}):
        assert ok, summary
    trained = ranks3.run(jobs.train_here, name, 2, {"microbatches": 3})
    assert [sorted(one.weights) for one in trained] == [["0.bias", "0.weight"], [], ["2.bias", "2.weight"]]


# -- training ---------------------------------------------------------------------------------------------------------


def merged(trained: list[jobs.Trained], attribute: str) -> dict[str, Tensor]:
    """By name; what several ranks hold must be the same to the bit."""
    found: dict[str, Tensor] = {}
    for one in trained:
        for name, tensor in getattr(one, attribute).items():
            assert torch.equal(found.setdefault(name, tensor), tensor), f"the copies of {name} have drifted apart"
    return found


def test_tied_weights_begin_with_the_first_ranks_bits(ranks2: Ranks) -> None:
    """Signs of zero, too: pruned weights, `w * mask`, have -0.0."""
    assert ranks2.run(jobs.pruned_tied_weights) == [["-0x0.0p+0", "0x1.8000000000000p+1"] * 2] * 2


def test_weights_from_the_meta_device_are_those_of_one_process(ranks3: Ranks) -> None:
    alone = jobs.from_meta(0, 5)
    found: dict[str, Tensor] = {}
    for weights in ranks3.run(jobs.from_meta, 5):
        for key, tensor in weights.items():
            assert torch.equal(tensor, alone[key]), key
        found |= weights
    assert set(found) == set(alone)


def test_two_pipelines_side_by_side(ranks4: Ranks) -> None:
    trained = ranks4.run(jobs.two_pipelines_side_by_side)
    alone = jobs.train("tied_gpt", 3, ranks=1, microbatches=3)
    assert [one.needs for one in trained] == [(True, False), (False, True)] * 2
    assert all("wte.weight" in one.weights for one in trained)
    for row in (trained[:2], trained[2:]):
        got = merged(row, "weights")
        for key, expected in alone.weights.items():
            assert (got[key] - expected).abs().max() <= 1e-6 * expected.abs().max(), key
        for one in row:
            torch.testing.assert_close(one.losses, alone.losses, rtol=1e-6, atol=0)
            torch.testing.assert_close(one.evaluated, alone.evaluated, rtol=1e-6, atol=0)


# -- what a step gives back -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def looks(ranks3: Ranks) -> list[dict[str, Any]]:
    return ranks3.run(jobs.look, "tied_gpt", {"microbatches": 4, "schedule": "1f1b"})


def test_the_loss_is_on_every_rank_and_the_rest_on_the_last(looks: list[dict[str, Any]]) -> None:
    assert len({float(seen["loss"]) for seen in looks}) == 1
    assert [len(seen["losses"]) for seen in looks] == [0, 0, 4]
    assert [len(output) for output in looks[2]["outputs"]] == [3, 3, 3, 3]
    for seen in looks[:2]:
        assert "read them where pipe.has_outputs is true" in seen["outputs"]


def test_parameters_and_buffers_of_other_ranks_are_on_the_meta_device(
    looks: list[dict[str, Any]], ranks3: Ranks
) -> None:
    held = [set(seen["held"]) for seen in looks]
    assert held[0] & held[2] == {"wte.weight"}
    assert not held[1] & (held[0] | held[2])
    for seen, mine in zip(looks, held, strict=True):
        assert set.union(*held) == set(seen["devices"])
        assert {name for name, device in seen["devices"].items() if device == "cpu"} == mine
    names = set(dict(jobs.convnet().model.named_buffers()))
    here = [names - set(seen["meta buffers"]) for seen in ranks3.run(jobs.look, "convnet", {"microbatches": 4})]
    assert sum(map(len, here)) == len(set.union(*here)) == len(names)


def test_the_timeline_is_gathered(looks: list[dict[str, Any]]) -> None:
    schedule = looks[0]["schedule"]
    assert len({str(seen["schedule"]) for seen in looks}) == 1
    assert any(action.op is Op.REDUCE_GRAD for action in schedule.rows[0])
    for seen in looks:
        timeline = seen["timeline"]
        assert not timeline.serialized
        assert 0 <= timeline.bubble_rate < 1
        assert [list(track.actions) for track in timeline.tracks] == [list(row) for row in schedule.rows]
        for rank in range(3):
            spans = list(timeline.spans(rank))
            assert all(span.start_seconds <= span.end_seconds for span in spans)
            assert all(a.end_seconds <= b.start_seconds for a, b in pairwise(spans))
        ends = {str(span.action): span.end_seconds for span in timeline}
        for span in timeline:  # one clock: nothing starts before what it needs has ended
            if span.action.op is Op.F and span.action.stage:
                assert ends[f"{span.action.stage - 1}F{span.action.microbatch}"] <= span.start_seconds


def test_transports_and_losses_that_are_not_shared(looks: list[dict[str, Any]], ranks2: Ranks) -> None:
    assert {seen["transport"] for seen in looks} == {"SharedMemoryTransport"}
    options = {"transport": "distributed", "broadcast_loss": False, "microbatches": 2}
    first, last = ranks2.run(jobs.look, "mlp", options)
    assert first["transport"] == last["transport"] == "DistributedTransport"
    assert float(last["loss"]) > 0
    assert first["loss"] == "result.loss: there is no loss on this rank; pass loss_fn=..., and keep broadcast_loss=True"


def test_trap_23_reading_the_loss_on_one_rank_waits_for_nobody(ranks2: Ranks) -> None:
    mine, others = ranks2.run(jobs.read_on_one_rank, 0)
    assert len(mine) == 6
    assert others == []


def test_wrong_arguments_are_refused_on_every_rank(ranks4: Ranks) -> None:
    said = ranks4.run(jobs.wrong_calls, 4)
    assert said[0] == said[1] == said[2] == said[3]
    assert "ranks=5, but 4 processes were started; leave ranks out" in said[0]["ranks"]
    assert "transport='pigeon': expected one of 'auto', 'distributed', 'staged'" in said[0]["transport"]
    assert "mesh has a dimension 'cp', which a pipeline cannot have: context parallelism" in said[0]["context"]
    assert "mesh has a dimension 'x', which a pipeline cannot have: the dimensions are" in said[0]["unknown axis"]
    assert "expected one named 'pp'" in said[0]["no axis"]
    assert "devices has 5 entries; expected one for each of 4 ranks" in said[0]["devices"]


# -- the transports by themselves -------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["auto", "distributed"])
def test_conformance(ranks2: Ranks, transport: str) -> None:
    kind = {"auto": "SharedMemoryTransport", "distributed": "DistributedTransport"}[transport]
    assert ranks2.run(jobs.conform, transport) == [(kind, jobs.SCRIPTS)] * 2


# -- several machines -------------------------------------------------------------------------------------------------


@pytest.mark.long  # in test_bad_network.py they are on two hosts
def test_ranks_that_are_told_apart_give_the_bits_of_one_device(ranks4: Ranks) -> None:
    for rank, (neighbors, report) in enumerate(ranks4.run(jobs.on_two_machines)):
        assert neighbors == [rank ^ 1], "shared memory ends at the machine's edge"
        assert report[0], report[1]


def test_a_rank_whose_clock_is_ahead_is_in_its_place(ranks2: Ranks) -> None:
    """To half of the shortest of several round trips, on a machine that may be busy."""
    ahead_seconds, max_wrong_seconds = 5000, 5.0
    times, others = ranks2.run(jobs.timed_on_another_host, ahead_seconds)
    assert times == others
    for microbatch in range(2):
        for before, after in (("0F", "1F"), ("1F", "1B"), ("1B", "0B")):
            (_, ended), (started, _) = times[f"{before}{microbatch}"], times[f"{after}{microbatch}"]
            assert -max_wrong_seconds < started - ended < ahead_seconds / 2


def test_a_pool_says_what_a_rank_raised(ranks2: Ranks) -> None:
    """Else every test of this file could pass because nothing ran."""
    with pytest.raises(RanksError, match="KeyError: 'no such model'"):
        ranks2.run(jobs.verify, "no such model", {})


# -- what is wrong on one rank alone is in every rank's report --------------------------------------------------------


class Found(NamedTuple):
    """What was reported: of each row that is not as promised, its kind, name, verdict and step."""

    ok: bool
    summary: str
    wrong: list[tuple[str, str, str, int]]


def _no_gradient(pipe: penstock.Pipeline, name: str) -> None:
    dict(pipe.named_parameters())[name].grad = None


def _buffer(pipe: penstock.Pipeline, name: str) -> None:
    dict(pipe.named_buffers())[name].view(-1)[0] += 1


SPOILS: dict[str, Callable[[penstock.Pipeline, str], None]] = {
    "no gradient": _no_gradient,
    "buffer": _buffer,
}


def verify_spoiled(rank: int, task: str, what: str, name: str) -> Found:
    """Spoils what is called `name` on rank 1 alone, after each step."""
    made = TASKS[task]()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            after_each_step(patch, lambda pipe: SPOILS[what](pipe, name))
        report = penstock.verify(made.model, made.args, target=made.target, loss_fn=made.loss, microbatches=3)
    return Found(report.ok, report.summary(), [(r.kind, r.name, r.verdict, r.step) for r in report.failures])


@pytest.mark.parametrize(
    ("task", "what", "row"),
    [
        ("tied_gpt", "no gradient", ("gradient", "wte.weight", "missing", 1)),
        ("convnet", "buffer", ("buffer", "norm.running_mean", "different", 1)),
    ],
)
def test_what_one_rank_has_wrong_is_in_every_report(
    ranks2: Ranks, task: str, what: str, row: tuple[str, str, str, int]
) -> None:
    seen = ranks2.run(verify_spoiled, task, what, row[1])
    assert seen[0] == seen[1], "each rank has the same report"
    assert not seen[0].ok
    in_steps = [wrong for wrong in seen[0].wrong if not wrong[1].endswith(" in evaluation")]
    assert in_steps == [row]
    assert (len(seen[0].wrong) > 1) == (what == "buffer"), "an evaluation after the second step reads the buffer"
    assert f"the first is {row[0]} {row[1]} on stage" in seen[0].summary


# -- what a rank gives back -------------------------------------------------------------------------------------------


SECONDS = 5.0
"""How long threads may take to end: rank 0's serves the others until they have left."""


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def threads_of_a_closed_pipeline(rank: int, folder: Path, options: dict[str, Any]) -> tuple[int, int, str]:
    """How many threads two replicas with a tie, which save in the background, add to this process; how many of them are
    left once the pipeline is closed, which this function still holds; and what asking the others then says.

    Nothing collects what refers to itself.
    """
    mesh = mesh_jobs.mesh_of((2, 2), ("dp", "pp"))
    task = jobs.tied_gpt()
    gc.collect()
    gc.disable()
    try:
        before = threads()
        with penstock.pipeline(task.model, task.args, loss=task.loss, microbatches=3, mesh=mesh, **options) as pipe:
            result = pipe.step(*task.args, target=task.target)
            checkpoint.save(folder, pipe, blocking=False)
            within = threads()
        end = time.monotonic() + SECONDS
        while threads() > before and time.monotonic() < end:
            time.sleep(0.01)
        left = threads() - before
        assert result.loss.isfinite()  # not read before: what brings it is over as well
        return within - before, left, refusal_of(pipe.all_gather_object, rank)
    finally:
        gc.enable()


def test_memory_of_other_ranks_stages_is_free(ranks3: Ranks) -> None:
    held = ranks3.run(jobs.memory)
    assert all(sum(rank[parameter] for rank in held) == 1 for parameter in range(len(held[0])))


@pytest.mark.parametrize(("transport", "broadcast_loss"), [("auto", True), ("distributed", False)])
def test_rank_that_is_done_first_fails_nobody(ranks3: Ranks, transport: TransportChoice, broadcast_loss: bool) -> None:
    assert ranks3.run(jobs.end_early, transport, broadcast_loss) == [3, 3, 3]


@pytest.mark.parametrize("transport", [pytest.param("auto", marks=pytest.mark.long), "distributed"])
def test_threads_end_with_the_pipeline(ranks4: Ranks, transport: TransportChoice, tmp_path: Path) -> None:
    """A group of gloo polls for as long as it is referred to."""
    seen = ranks4.run(threads_of_a_closed_pipeline, tmp_path, {"transport": transport})
    for added, left, said in seen:
        assert added >= 3 * 5
        assert left == 0
        assert said == "PipelineClosedError: this pipeline was closed; make a new one"
