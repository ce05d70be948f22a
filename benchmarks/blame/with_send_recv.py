"""A pipeline written by hand with send and recv, with one fault, or none: FAULT in the environment."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from model import LAYERS, LENGTH, OPTIONS, ROWS, WIDTH, Net, batch, loss_of, model, optimizer_of
from torch import Tensor, nn

FAULT = os.environ.get("FAULT", "")
M = 4


class WithLoss(nn.Module):
    """A last stage that takes the targets and leaves the loss."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers, self.loss_fn = layers, nn.CrossEntropyLoss()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss_fn(self.layers(x).flatten(0, 1), target.flatten())


def build(net: Net, rank: int, world: int) -> nn.Module:
    each = LAYERS // world
    layers = [*net.layers][rank * each : (rank + 1) * each]
    if FAULT == "dropped layer" and rank == 1:
        layers = layers[1:]
    if FAULT == "layers in another order" and rank == 1:
        layers = layers[::-1]
    if rank == 0:
        return nn.Sequential(net.embed, *layers)
    stage = nn.Sequential(*layers, net.norm, net.head) if rank == world - 1 else nn.Sequential(*layers)
    return WithLoss(stage) if "loss inside" in OPTIONS else stage


def run(stage: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    if isinstance(stage, WithLoss):
        return stage(x, target)
    if "loop" in OPTIONS:  # no module is the stage
        for layer in stage:
            x = layer(x)
        return x
    return stage(x)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    first, last = rank == 0, rank == world - 1
    whole = model()
    if "shapes" in OPTIONS:
        whole(batch(0)[0])  # only to see them
    stage = build(whole, rank, world)
    if "captured" in OPTIONS:  # what a script says that does not call its stage as a module
        import penstock

        penstock.verification.blame.capture(stage, stage=rank).__enter__()
    optimizer = optimizer_of(stage)
    if FAULT == "learning rate" and rank == 0:
        optimizer.param_groups[0]["lr"] /= 10
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (s + 1)) if "scheduler" in OPTIONS else None
    buffer = torch.zeros(ROWS // M + 1, LENGTH, WIDTH)
    stale: Tensor | None = None
    previous: Tensor | None = None
    for step in range(4):
        tokens, labels = batch(step)
        inputs, targets = tokens.tensor_split(M), labels.tensor_split(M)
        shown, previous = (
            (previous if FAULT == "labels of the batch before" and previous is not None else labels),
            labels,
        )
        targets = shown.tensor_split(M)
        if FAULT == "labels swapped":
            targets = (targets[1], targets[0], *targets[2:])
        optimizer.zero_grad() if not (FAULT == "not zeroed" and last) else None
        received: list[Tensor] = []
        outputs: list[Tensor] = []
        losses: list[Tensor] = []
        order = [1, 0, *range(2, M)] if FAULT == "microbatches swapped" and first else range(M)
        works, sent = [], []
        made: dict[int, Tensor] = {}
        for k in range(M):
            rows = len(inputs[k])
            if first:
                x = inputs[k]
            elif FAULT == "stale buffer":
                if k != 2:
                    dist.recv(buffer[:rows], rank - 1)
                else:
                    dist.recv(torch.empty(rows, LENGTH, WIDTH), rank - 1)
                x = buffer[:rows].clone().requires_grad_()
            elif FAULT == "buffer reused":
                dist.recv(buffer[:rows], rank - 1)
                x = buffer[:rows].detach().requires_grad_()
            elif FAULT == "not waited for":
                x = torch.zeros(rows, LENGTH, WIDTH)
                if k == 1:
                    late = dist.irecv(torch.empty_like(x), rank - 1)
                    late.blocking()
                else:
                    dist.recv(x, rank - 1)
                x.requires_grad_()
            else:
                x = torch.empty(rows, LENGTH, WIDTH)
                dist.recv(x, rank - 1)
                x.requires_grad_()
            if FAULT == "stale step" and not first and k == 0:
                stale, x = x.detach().clone(), (x if stale is None else stale.clone().requires_grad_())
            received.append(x)
            with torch.autocast("cpu", torch.bfloat16, enabled="bfloat16" in OPTIONS):
                y = run(stage, x, targets[k])
            outputs.append(y)
            if last:
                loss = y if "loss inside" in OPTIONS else loss_of(y, targets[k])
                if FAULT == "not scaled":
                    weight = 1.0
                elif FAULT == "short weighed the same" or "even" in OPTIONS:
                    weight = 1 / M
                else:
                    counts = [int((t != -100).sum()) for t in labels.tensor_split(M)]
                    weight = counts[k] / sum(counts)
                    if FAULT == "ignored averaged":
                        weight = 1 / M
                if FAULT == "last counts twice" and k == M - 1:
                    weight *= 2
                losses.append(loss * weight)
            else:
                made[k] = y.detach().clone()
                if FAULT == "send overwritten":
                    sent.append(made[k])
                elif FAULT == "microbatches swapped":
                    pass
                else:
                    dist.send(made[k], rank + 1)
        if FAULT == "send overwritten" and not last:
            sent[1].copy_(sent[2])  # one buffer for both
            works = [dist.isend(y, rank + 1) for y in sent]
            for work in works:
                work.blocking()
        if FAULT == "microbatches swapped" and not last:
            for k in order:
                dist.send(made[k], rank + 1)
        before = torch.empty(0)
        for k in range(M):
            if last:
                losses[k].backward()
            else:
                grad = torch.empty_like(outputs[k])
                if FAULT == "gradient of another microbatch" and k == 2:
                    dist.recv(torch.empty_like(outputs[k]), rank + 1)
                    grad.copy_(before)
                else:
                    dist.recv(grad, rank + 1)
                before = grad
                outputs[k].backward(grad)
                if FAULT == "backward twice" and k == 0:
                    stage(inputs[0]).backward(grad)
            if not first:
                sending = received[k].grad
                dist.send(sending * 2 if FAULT == "gradient doubled on the way" else sending, rank - 1)
        if "tie" in OPTIONS and FAULT != "tie not summed":
            tied = stage[0].weight if first else stage[-1].weight if last else None
            if tied is not None:
                dist.all_reduce(tied.grad)
        if FAULT == "double reduce":
            for p in stage.parameters():
                p.grad.mul_(2)
        if FAULT == "microbatch skipped" and first:
            pass
        if "handmade" in OPTIONS:
            with torch.no_grad():
                for p in stage.parameters():
                    p -= 0.1 * p.grad
        elif not (FAULT == "no optimizer step" and last):
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
