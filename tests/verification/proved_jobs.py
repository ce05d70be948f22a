"""What ranks run to verify their first step."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

import penstock
from penstock._base.errors import VerificationError
from penstock.pipe import verified
from penstock.runtime.loss.loss import LossHead
from scaffolding.models import GPT, token_error


def first_step(_: int, spoiled: bool) -> Any:
    """Each rank passes only what it needs, as a data loader of its own would. Returns whether it is verified before and
    after the first step, and the losses with and without; or the error."""
    verified.verified_fingerprints.clear()
    seed, losses, done = LossHead.seed, [], []

    def wrong(self: LossHead, microbatch: int) -> Any:
        return seed(self, microbatch) * (2 if microbatch == 1 else 1)

    for ask in (True, False):
        torch.manual_seed(0)
        ids = torch.randint(0, 19, (4, 7))
        args, target = (ids[:, :-1].clone(),), ids[:, 1:].clone()
        with mock.patch.object(LossHead, "seed", wrong if spoiled else seed):
            pipe = penstock.pipeline(GPT(), args, microbatches=2, loss_fn=token_error, verify=ask)
            done.append(pipe.verified)
            args = args if pipe.needs_inputs else ()
            try:
                losses.append(float(pipe.step(*args, target=target if pipe.needs_targets else None).loss))
            except VerificationError as error:
                return str(error)
            finally:
                pipe.close()
    return done[0], losses, done[1]
