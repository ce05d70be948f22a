"""`penstock.testing.bad_network`: jobs over it end as they should and say so, and a machine that cannot is skipped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from penstock._base.errors import ArgumentError
from penstock.network import nodes, reaper
from penstock.testing import BadNetwork
from penstock.testing import bad_network as make

MakesNetworks = Callable[..., AbstractContextManager[BadNetwork]]

SCRIPT = """
import os, sys, time
rank = os.environ["RANK"]
print("rank", rank, *sys.argv[1:], file=sys.stderr if rank == "1" else sys.stdout, flush=True)
if "stay" in sys.argv:
    time.sleep(600)
sys.exit(4 if rank == "1" and "fail" in sys.argv else 0)
"""

USER = """
pytest_plugins = ["penstock.testing.fixtures"]

def test_mine(bad_network):
    with bad_network(2, "10mbit"):
        pass
"""


@pytest.mark.distributed
def test_jobs_run_one_after_the_other_and_their_output_is_kept(
    bad_network: MakesNetworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon = replace(nodes.PATIENCE, failed_seconds=1.0)  # how long the other host's agent is waited for
    monkeypatch.setitem(nodes.run.__kwdefaults__, "patience", soon)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with bad_network(2, "10mbit delay 1ms", host_links={1: "5mbit"}, background=["1mbit to 0"]) as network:
        done = network.run([str(script), "good"]).check()
        assert (done.status, done.said, done.outputs) == (0, "", ("rank 0 good\n", "rank 1 good\n"))
        assert done.seconds > 0
        told = network.told()
        assert told["frames"] > 0
        assert told["links"][0]["down"]["background_bytes"] > 0 == told["links"][1]["down"]["background_bytes"]
        failed = network.run([str(script), "fail"])
        assert failed.status == 4
        with pytest.raises(AssertionError, match=r"rank 1 ended with exit status 4\n(.*\n)*rank 1 fail"):
            failed.check()
        name = network.machines.id
    assert reaper.list_namespaces(name) == []


@pytest.mark.distributed
def test_job_that_takes_too_long_is_ended(bad_network: MakesNetworks, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with bad_network(1, None) as network:
        assert network.told() == {}
        with pytest.raises(TimeoutError, match=r"script\.py stay took more than 3 s"):
            network.run([str(script), "stay"], ranks=1, timeout=3)
        deadline = time.monotonic() + 30  # one that was killed takes its time to go on a crowded machine
        while left := list(reaper._processes(network.machines.id, network.machines.hosts, [])):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


def test_what_cannot_be_run_is_refused(bad_network: MakesNetworks, tmp_path: Path) -> None:
    with bad_network(2, None) as network:
        with pytest.raises(ArgumentError, match=r"no script 'nothing\.py'"):
            network.run("nothing.py")
        with pytest.raises(ArgumentError, match="3 ranks cannot be spread evenly over 2 hosts"):
            network.run(__file__, ranks=3)


@pytest.mark.parametrize("arguments", [{"own": {1: "1mbit"}}, {"shaper": "tbf"}])
def test_links_of_some_hosts_need_one_of_the_others(arguments: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match="pass link= as well"), make(2, None, **arguments):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("from penstock.network import namespaces; namespaces.os.geteuid = lambda: 1000", "this is user 1000"),
        (
            "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n: None if n == 'numba' else f(n)",
            "numba",
        ),
    ],
)
def test_fixture_skips_with_the_reason(tmp_path: Path, program: str, says: str) -> None:
    (tmp_path / "test_of_a_user.py").write_text(f"{program}\n{USER}")
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "test_of_a_user.py"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, check=False)
    assert "1 skipped" in done.stdout, done.stdout
    assert says in done.stdout


def test_kit_loads_no_torch() -> None:
    program = "import sys, penstock.testing.fixtures as f; f.network.bad_network; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
