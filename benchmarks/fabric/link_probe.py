"""What the probe reports for links of known rate and delay. Run as root: `python benchmarks/fabric/link_probe.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

RATES = {"10mbit": 10.0, "100mbit": 100.0, "1gbit": 1000.0}
DELAYS_MS = (0, 1, 5, 10, 25, 50)


def probed(link: str) -> list[dict[str, float]]:
    """Both directions between two hosts, as in run.json."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--sizes", "64KiB", "--hosts", "2", "--link", link, "--trials", "6", "--out", folder]
        subprocess.run([sys.executable, "-m", "penstock", "fabric", *options], check=True, capture_output=True)
        found: list[dict[str, float]] = json.loads((Path(folder) / "run.json").read_text())["links"]
        return found


def main() -> None:
    print("| link | latency, ms | Mbit/s there and back | load |\n|---|---|---|---|")
    for rate in RATES:
        for delay in DELAYS_MS:
            link = rate + (f" delay {delay}ms" if delay else "")
            there, back = probed(link)
            rates = " / ".join(f"{one['bytes_per_second'] * 8e-6:.1f}" for one in (there, back))
            print(f"| {link} | {there['latency_seconds'] * 1e3:.2f} | {rates} | {os.getloadavg()[0]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
