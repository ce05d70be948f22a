"""The stages, chained by hand, give the model's own output and every gradient, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from chained import NoStreams, assert_same, run_chained, run_unsplit

from penstock.partition import Partitioner
from scaffolding.models import CASES


@pytest.mark.parametrize("name", CASES)
def test_stages_that_share_no_memory_give_the_same_output(name: str) -> None:
    case = CASES[name]()
    partitioner = Partitioner(case.model, 4, streams=NoStreams())
    reference = copy.deepcopy(partitioner.model)
    with torch.no_grad():
        partition = partitioner(case.args, case.kwargs)
        assert_same(run_chained(partition, case, sent=True), run_unsplit(reference, case))
    assert_same(partitioner.model, reference)


def test_every_tensor_that_travels_is_used() -> None:
    for build in CASES.values():
        case = build()
        partition = Partitioner(case.model, 3, streams=NoStreams())(case.args, case.kwargs)
        for stage in partition.stages[:-1]:
            for output in stage.meta.outputs:
                users = [
                    s.meta.index
                    for s in partition.stages
                    for i in s.meta.inputs
                    if (i.name, i.source) == (output.name, stage.meta.index)
                ]
                assert users, f"{output.name} leaves stage {stage.meta.index} for nobody"
