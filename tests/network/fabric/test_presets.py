"""Workloads by name: the classic emulation's sizes, in the order in which its backward makes them."""

from penstock.network.fabric.workload import preset


def test_mlp_sends_the_sizes_of_the_reference_in_backward_order():
    workload = preset("mlp")
    assert [(t.name, t.bytes) for t in workload.transfers] == [
        ("fc4", 2600),
        ("fc3", 33024),
        ("fc2", 131584),
        ("fc1", 803840),
    ]
    assert {(t.collective, t.kind, t.ranks) for t in workload.transfers} == {("all_reduce", "gradient", ())}
    assert workload.hosts == 0
