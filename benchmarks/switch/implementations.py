"""The throughput of a user-space switch: asyncio, threads, and the compiled loop, at normal and real-time priority.

    sudo python benchmarks/switch/implementations.py                  # 20 minutes; wants an idle machine
    sudo python benchmarks/switch/implementations.py --hosts 4 --links "100mbit delay 1ms" --busy 4

The hosts form a ring, each with one TCP stream to the next. Each row is a separate network. Unless a row says otherwise
its links have a delay of 1 ms; networks that would usually be refused are allowed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import tcp_and_ping

from penstock.network import machines as making
from penstock.network import shapers
from penstock.network.conditions import cpu_since, cpu_usage
from penstock.network.machines import Machines
from penstock.network.parse import parse_link
from penstock.network.switch import client
from penstock.network.topology import Topology

HERE = Path(__file__).parent
KINDS = ("asyncio", "threads", "compiled")
FREE = "9gbit"
"""A rate that nothing here can reach."""
LINKS = [f"{rate}{mtu} delay 1ms" for mtu in ("", " mtu 9000") for rate in (FREE, "100mbit", "1gbit")]
RUN_IN_SECONDS = 1.0


def measure(kind: str, usual: bool, hosts: int, text: str, seconds: float) -> dict[str, Any]:
    """Measures one network: how much it carries, and how late."""
    client.PROGRAM = (str(HERE / "plain.py"), kind, *(["--usual"] if usual else []))
    topology = Topology(parse_link(text), {}, 1)
    with Machines(hosts, topology, shaper="switch") as machines:
        goodput: list[float] = []
        ring = [(host, (host + 1) % hosts) for host in range(hosts)]
        streams = threading.Thread(
            target=lambda: goodput.extend(tcp_and_ping.stream(machines, ring, RUN_IN_SECONDS + seconds))
        )
        streams.start()
        while machines.counters()["frames"] < 100:
            time.sleep(0.02)
        time.sleep(RUN_IN_SECONDS)
        before, cpu, began, machine = machines.counters(), _cpu_seconds(machines), time.monotonic(), cpu_usage()
        time.sleep(seconds - 0.5)
        after, wall, used = machines.counters(), time.monotonic() - began, _cpu_seconds(machines) - cpu
        busy = cpu_since(machine)
        streams.join()
    frames = after["frames"] - before["frames"]
    return {
        "kind": kind,
        "priority": after["priority"],
        "hosts": hosts,
        "link": text,
        "goodput_mbit": [round(rate * 8 / 1e6) for rate in goodput],
        "share_of_rate": sum(goodput) / hosts / topology.link.bytes_per_second / topology.link.goodput_ratio,
        "frames_per_second": round(frames / wall),
        "cpu_us_per_frame": used / max(frames, 1) * 1e6,
        "switch_cpu": used / wall,
        "machine_busy": busy["busy"],
        "late_us": {name: None if late is None else late * 1e6 for name, late in after["late"].items()},
        "not_read_in_time": sum(after["unread"]),
        "no_room": after["no_room"],
    }


def _cpu_seconds(machines: Machines) -> float:
    """The switch's CPU seconds over all threads, to the nanosecond."""
    tasks = Path(f"/proc/{machines._switch._process.pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


def show(row: dict[str, Any]) -> None:
    late = {name: "-" if value is None else f"{value:,.0f}" for name, value in row["late_us"].items()}
    lost = f"; {row['not_read_in_time']} not read in time" if row["not_read_in_time"] else ""
    print(
        f"{row['kind']:9} {row['priority']:9} {row['hosts']} hosts  {row['link']:24}"
        f" {sum(row['goodput_mbit']):6,} mbit ({row['share_of_rate']:4.0%})  {row['frames_per_second']:8,} frames/s "
        f"{row['cpu_us_per_frame']:5.1f} us each, {row['switch_cpu']:4.0%} of a core; "
        f"machine {row['machine_busy']:4.0%}; late p50 {late['p50']} p99 {late['p99']} worst {late['worst']} us{lost}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--links", nargs="+", default=LINKS)
    parser.add_argument("--priorities", nargs="+", choices=("real-time", "usual"), default=["real-time", "usual"])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--busy", type=int, default=0, help="processes beside it that want a core each")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.2f}; by a probe this machine passes on ", end="")
    print(
        " and ".join(f"{shapers.frames_per_second(size):,.0f} frames of {size}" for size in (1514, 9014)),
        "bytes a second",
    )
    making.choose = lambda topology, *_: shapers.Shaper("switch", topology)
    rows: list[dict[str, Any]] = []
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(given.busy)]
    try:
        measure_all(given, rows)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    if given.json is not None:
        about = {"kernel": platform.release(), "cores": os.cpu_count(), "python": platform.python_version()}
        given.json.write_text(json.dumps({"machine": about, "busy": given.busy, "rows": rows}, indent=1) + "\n")


def measure_all(given: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    for kind, name, hosts, link in itertools.product(given.kinds, given.priorities, given.hosts, given.links):
        rows.append({**measure(kind, name == "usual", hosts, link, given.seconds), "load": os.getloadavg()[0]})
        show(rows[-1])


if __name__ == "__main__":
    main()
