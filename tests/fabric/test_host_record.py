"""What a run's record says of its host."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from penstock.fabric.emulation.run_file import told_apart
from penstock.network import conditions as record
from penstock.network.conditions import cpu_usage, environment


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
    found = told_apart([{"host": "vm", "cores": 2}, {"host": "other"}, {"host": "vm"}])
    assert [(one["host"], one["machine"]) for one in found] == [("host 0", "vm"), ("other", "other"), ("host 2", "vm")]
    assert found[0]["cores"] == 2


def test_without_tc_and_interface_there_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "tool", lambda name: None)
    found = json.loads(json.dumps(environment("nothing0")))
    assert found["qdiscs"] is None
    assert found["offloads"] is None
    assert found["mtu"] is None
    assert found["interface"] == "nothing0"
    assert found["cores"] >= 1


def test_the_congestion_control_of_a_route_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "10.64.0.0/24 proto kernel scope link src 10.64.0.1 congctl cubic \n"
    monkeypatch.setattr(record, "_output", lambda *command: line)
    assert environment("eth0")["congestion_control"] == "cubic"


def test_processor_time_is_that_of_all_threads_and_waiting_is_not_work() -> None:
    before = cpu_usage()
    while cpu_usage().cpu_seconds - before.cpu_seconds < 0.1:
        sum(range(10_000))
    worked = cpu_usage()
    time.sleep(0.3)
    waited = cpu_usage()
    used, idle = worked.since(before), waited.since(worked)
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


def test_a_machine_without_an_idle_moment_is_busy_all_the_time() -> None:
    before = record.CpuUsage(0, 0, 0, 0, record.MachineTime(22542.57, 0, 118039.13))
    after = record.CpuUsage(0, 1, 0, 0, record.MachineTime(22543.06, 0, 118039.62))  # 49 ticks, of which all were used
    assert after.since(before)["busy"] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells")
def test_a_machine_that_does_not_tell_gives_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_machine_time", lambda: None)
    used = cpu_usage().since(cpu_usage())
    assert used["busy"] is None
    assert used["steal"] is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells")
def test_who_waits_for_a_disk_is_not_busy_and_whom_others_hold_up_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "stat"
    told.write_text("cpu  100 20 30 400 50 6 7 8 90 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    monkeypatch.setattr(record, "Path", lambda path: told if path == "/proc/stat" else Path(path))
    time_of = record._machine_time()
    assert time_of is not None
    tick = os.sysconf("SC_CLK_TCK")
    assert time_of.busy_seconds * tick == pytest.approx(100 + 20 + 30 + 6 + 7 + 8)
    assert time_of.steal_seconds * tick == pytest.approx(8)
    assert time_of.total_seconds * tick == pytest.approx(621), "guests' time is within user's"
