"""What a run's record says of its host."""

import json
import sys
import time

import pytest

from penstock.network import conditions as record
from penstock.network.conditions import cpu_since, cpu_usage, environment
from penstock.network.fabric.emulation.rendezvous import unique_host_names


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells")
def test_the_environment_goes_into_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    found = json.loads(json.dumps(environment("lo")))
    assert found["interface"] == "lo"
    assert found["interfaces"]["lo"] == found["mtu"] > 0
    assert found["offloads"]["generic-segmentation-offload"] in (True, False)
    assert found["congestion_control"]
    assert found["torch"].startswith("2.")
    assert "torch" in sys.modules or found["torch"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert environment()["interface"] == "lo"


def test_hosts_of_one_machine_are_told_apart() -> None:
    """Namespaces and processes share a name; machines have one each."""
    found = unique_host_names([{"host": "vm", "cores": 2}, {"host": "other"}, {"host": "vm"}])
    assert [(one["host"], one["machine"]) for one in found] == [("host 0", "vm"), ("other", "other"), ("host 2", "vm")]
    assert found[0]["cores"] == 2


def test_without_tc_and_interface_and_where_a_machine_does_not_tell_there_is_null(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record, "tool", "/nowhere/{}".format)
    monkeypatch.setattr(record, "_machine_time", lambda: None)
    used = cpu_since(cpu_usage())
    assert used["busy"] is used["steal"] is None
    found = json.loads(json.dumps(environment("nothing0")))
    assert found["qdiscs"] is None
    assert found["offloads"] is None
    assert found["mtu"] is None
    assert found["interface"] == "nothing0"
    assert found["cores"] >= 1


def test_processor_time_is_that_of_all_threads_and_waiting_is_not_work() -> None:
    before = cpu_usage()
    while cpu_usage()["cpu_seconds"] - before["cpu_seconds"] < 0.1:
        sum(range(10_000))
    worked = cpu_usage()
    time.sleep(0.3)
    waited = cpu_usage()
    used, idle = cpu_since(before, worked), cpu_since(worked, waited)
    assert used["cpu_seconds"] is not None
    assert used["cpu_seconds"] >= 0.1
    assert idle["wall_seconds"] is not None
    assert idle["wall_seconds"] >= 0.3
    assert idle["cpu_seconds"] is not None
    assert idle["cpu_seconds"] < 0.1
    assert idle["voluntary_switches"]
    if sys.platform == "linux":
        assert used["busy"] is not None
        assert 0 < used["busy"] <= 1
        assert used["steal"] is not None
        assert 0 <= used["steal"] <= 1
