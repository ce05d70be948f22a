"""What a studio that watches a run costs the training: windows with and without it, in turn, within one run.

    python benchmarks/studio/watching.py [SECONDS]

Two ranks train an MLP on this machine's cores and record their run. In one of every two windows of two seconds a
client asks the studio for the run's state once a second, as the page does. The training does not know of it. Printed
are the median step of both kinds of windows, what watching adds over pairs of neighboring windows, as for recording,
and the processor time that the studio took.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.pairs import added

WINDOW = 2.0
SCRIPT = """
import sys, time, torch, penstock
from penstock.trace.runs import RunConfig
torch.manual_seed(0)
model = torch.nn.Sequential(*[m for _ in range(8) for m in (torch.nn.Linear(512, 512), torch.nn.ReLU())])
x, y = torch.randn(64, 512), torch.randn(64, 512)
run = RunConfig(sys.argv[1])
pipe = penstock.pipeline(model, (x,), loss_fn=torch.nn.functional.mse_loss, microbatches=8, run_dir=run)
end = time.time() + float(sys.argv[2])
going = torch.ones(())
while going:
    pipe.step(x, target=y)
    going = torch.tensor(float(time.time() < end))
    torch.distributed.broadcast(going, 0)
pipe.close()
"""


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 120.0
    folder = Path(tempfile.mkdtemp())
    script, run = folder / "train.py", folder / "runs" / "mlp"
    script.write_text(SCRIPT)
    studio = subprocess.Popen(
        [sys.executable, "-m", "penstock", "studio", "--port", "0", "--runs", str(folder / "runs")],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert studio.stdout is not None
    link = studio.stdout.readline().split()[2]
    training = subprocess.Popen(
        [sys.executable, "-m", "penstock", "run", "--ranks", "2", str(script), str(run), str(seconds)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    while not (run / "steps.jsonl").exists():
        time.sleep(0.1)
    time.sleep(3.0)
    watched, spent, polls = watch(link, training, studio.pid)
    training.wait()
    studio.terminate()
    studio.wait()
    report(run, watched, spent, polls)


def watch(link: str, training: subprocess.Popen[bytes], pid: int) -> tuple[list[tuple[float, float, bool]], float, int]:
    """The windows: begin, end, and whether they were watched. And what the studio spent, and on how many answers."""
    windows, spent, polls, place = [], 0.0, 0, 0
    client = httpx.Client()
    while training.poll() is None:
        for on in random.sample((True, False), 2):
            begin, before = time.time(), cpu_seconds(pid)
            while time.time() < begin + WINDOW and training.poll() is None:
                if on:
                    place = client.get(f"{link}api/live", params={"name": "mlp", "place": place}).json()["place"]
                    polls += 1
                time.sleep(1.0)
            windows.append((begin, time.time(), on))
            spent += cpu_seconds(pid) - before
    return windows, spent, polls


def report(run: Path, windows: list[tuple[float, float, bool]], spent: float, polls: int) -> None:
    about = json.loads((run / "run.json").read_text())
    from datetime import datetime

    zero = datetime.fromisoformat(about["started"]).timestamp()
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    medians = []
    for begin, end, on in windows:
        took = [one["seconds"] for one in steps if begin + 0.1 < zero + one["at_seconds"] < end]
        if len(took) > 5:
            medians.append((on, statistics.median(took)))
    pairs = [(one, two) for one, two in zip(medians[::2], medians[1::2], strict=False)]
    percents = [100 * (dict([one, two])[True] / dict([one, two])[False] - 1) for one, two in pairs]
    on = statistics.median(value for kind, value in medians if kind)
    off = statistics.median(value for kind, value in medians if not kind)
    print(f"median step: {1e3 * off:.2f} ms alone, {1e3 * on:.2f} ms watched")
    print(f"watching adds, in percent, over {len(percents)} pairs of windows: {added(percents)}")
    share = spent / sum(end - begin for begin, end, watching in windows if watching) / (os.cpu_count() or 1)
    print(f"the studio's processor time: {1e3 * spent / max(polls, 1):.1f} ms an answer, {polls} answers; ", end="")
    print(f"{share:.2%} of {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
