"""A run that was killed goes on from its last checkpoint, on other ranks and by another schedule, as if nothing was."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaffolding.patient import PENSTOCK, TEST_SECONDS, finished

pytestmark = pytest.mark.timeout(TEST_SECONDS)

TRAIN = """
import itertools, os, signal
import torch, torch.nn.functional as F
from torch import nn
import penstock
from penstock import checkpoint

torch.manual_seed(0)
model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1))))
batches = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(9)]
pipe = penstock.pipeline(model, batches[0][:1], loss=F.mse_loss, schedule=os.environ["SCHEDULE"], microbatches=4)
optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-2)
restored = checkpoint.load("checkpoints", pipe, optimizer)
done = restored.extra if restored else 0
for number, (x, y) in enumerate(itertools.islice(batches, done, None), done):
    result = pipe.step(x, target=y)
    optimizer.step()
    optimizer.zero_grad()
    if number % 3 == 2:
        checkpoint.save("checkpoints", pipe, optimizer, extra=number + 1)
    loss = float(result.loss)
    if pipe.is_first:
        print(number, loss.hex(), flush=True)
    if os.environ.get("DIES_AT") == str(number) and pipe.world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def losses(folder: Path, ranks: int, *, fails: bool = False, **environment: str) -> dict[int, str]:
    """The loss of each step, to the bit."""
    done = finished(*PENSTOCK, "run", "--ranks", str(ranks), "train.py", folder=folder, **environment)
    assert bool(done.returncode) == fails, done.stderr
    return {int(number): loss for number, loss in map(str.split, done.stdout.splitlines())}


@pytest.mark.long
@pytest.mark.distributed
def test_killed_on_two_ranks_goes_on_on_four(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(TRAIN)
    whole = losses(tmp_path / "whole", 2, SCHEDULE="1f1b")
    assert sorted(whole) == list(range(9))
    before = losses(tmp_path / "killed", 2, fails=True, SCHEDULE="1f1b", DIES_AT="7")
    after = losses(tmp_path / "killed", 4, SCHEDULE="zb-h1")
    assert sorted(after) == [6, 7, 8], "the last checkpoint was of 6 steps"
    assert all(whole[number] == loss for number, loss in (before | after).items())
    assert sorted(path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()) == [
        "step-00000006",
        "step-00000009",
    ]
