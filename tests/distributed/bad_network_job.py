"""A training whose every bit is looked at: what ranks of a pool run, and, as a script, ranks over a bad network.

Its arguments are a folder and schedules; each rank leaves FOLDER/trained.RANK, what `train` returned for each of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import torch

import penstock
from scaffolding.models import GPT, token_error

STEPS = 2
ROWS, LENGTH, VOCABULARY = 12, 24, 19

LOST_AFTER = "TEST_LOST_AFTER"
"""Of the environment: `heartbeat_timeout` of the pipeline."""

Trained = dict[str, torch.Tensor]


def train(rank: int, schedule: str) -> Trained:
    """Each step's loss, norm and gradients, and the parameters in the end, of what this process holds."""
    del rank
    torch.manual_seed(0)
    model = GPT(VOCABULARY, width=32, layers=4, dropout=0.2)
    model.wpe = torch.nn.Embedding(LENGTH, 32)
    tokens = torch.randint(0, VOCABULARY, (STEPS, ROWS, LENGTH + 1))
    found: Trained = {}
    with penstock.pipeline(
        model,
        (tokens[0, :, :-1].clone(),),
        loss=token_error,
        schedule=schedule,
        microbatches=4,
        heartbeat_timeout=float(os.environ.get(LOST_AFTER, "5")),
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for step in range(STEPS):
            ids, target = tokens[step, :, :-1].clone(), tokens[step, :, 1:].clone()
            found[f"{step}: loss"] = torch.tensor(float(pipe.step(ids, target=target).loss))
            found[f"{step}: norm"] = pipe.clip_grad_norm_(0.5)
            for name, parameter in pipe.named_parameters():
                assert parameter.grad is not None, name
                found[f"{step}: gradient of {name}"] = parameter.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
        found |= {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    return found


def demonstrate(rank: int, arguments: Sequence[str]) -> None:
    """The demonstration in a pool of two, as `penstock demo` starts it."""
    from penstock.demo.train import main

    with patch.dict(os.environ, {"RANK": str(rank), "WORLD_SIZE": "2"}):
        main(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)
    here = int(os.environ["RANK"])
    trained = {schedule: train(here, schedule) for schedule in sys.argv[2:]}
    torch.save(trained, Path(sys.argv[1]) / f"trained.{here}")
