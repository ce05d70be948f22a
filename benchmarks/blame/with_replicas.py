"""Two data-parallel replicas of a pipeline of two stages, on four ranks, with one fault, or none: FAULT."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from model import LAYERS, LENGTH, OPTIONS, WIDTH, WORDS, Net, batch, loss_of, model, optimizer_of
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

FAULT = os.environ.get("FAULT", "")
REPLICAS, STAGES, M, ROWS = 2, 2, 2, 2


def by_hand(stage: nn.Module, inputs: tuple[Tensor, ...], labels: tuple[Tensor, ...], peer: int, *, last: bool) -> None:
    """All forwards, then all backwards."""
    entered, left = [], []
    for k in range(M):
        x = torch.empty(ROWS, LENGTH, WIDTH) if last else inputs[k]
        if last:
            dist.recv(x, peer)
            x.requires_grad_()
        y = stage(x.detach() if FAULT == "detached" else x)
        if last:
            y = loss_of(y, labels[k]) / M
        else:
            dist.send(y.detach(), peer)
        entered.append(x)
        left.append(y)
    for x, y in zip(entered, left, strict=True):
        gradient = None if last else torch.empty_like(y)
        if gradient is not None:
            dist.recv(gradient, peer)
        y.backward(gradient)
        if last:
            dist.send(torch.zeros_like(x) if x.grad is None else x.grad, peer)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stages_first = "stages first" in OPTIONS  # neighbours are replicas, not stages
    replica, s = divmod(rank, STAGES)[:: -1 if stages_first else 1]
    of = (lambda r, s: s * REPLICAS + r) if stages_first else (lambda r, s: r * STAGES + s)
    same_stage = [dist.new_group([of(r, s) for r in range(REPLICAS)]) for s in range(STAGES)][s]
    same_replica = [dist.new_group([of(r, s) for s in range(STAGES)]) for r in range(REPLICAS)][replica]
    net = model()
    if FAULT == "drawn anew":
        torch.manual_seed(rank)
        net = Net()
    if FAULT == "weights exchanged":  # as by a checkpoint whose names were mapped wrongly
        net.layers[0], net.layers[1] = net.layers[1], net.layers[0]
    half = LAYERS // 2
    stage = nn.Sequential(*([net.embed, *net.layers[:half]] if s == 0 else [*net.layers[half:], net.norm, net.head]))
    optimizer = optimizer_of(stage)
    if FAULT == "learning rate" and rank == 3:
        optimizer.param_groups[0]["lr"] *= 3
    last, peer = s == STAGES - 1, of(replica, 1 - s)
    tokens = batch(0)[0]
    example = [tokens[:ROWS], *(torch.zeros(ROWS, LENGTH, n, requires_grad=True) for n in (WIDTH, WORDS))]
    built = PipelineStage(
        stage, s, STAGES, torch.device("cpu"), input_args=example[s], output_args=example[s + 1], group=same_replica
    )
    schedule = Schedule1F1B(built, M, loss_of) if "hand" not in OPTIONS else None
    for step in range(4):
        tokens, labels = (part.chunk(REPLICAS)[0 if FAULT == "same rows" else replica] for part in batch(step))
        if FAULT == "labels swapped" and replica == 1:
            labels = torch.cat([*labels.chunk(M)[::-1]])
        optimizer.zero_grad()
        if schedule is None:
            by_hand(stage, tokens.chunk(M), labels.chunk(M), peer, last=last)
        else:
            schedule.step(*([] if last else [tokens]), **({"target": labels} if last else {}))
        for parameter in stage.parameters():
            if not (FAULT == "not averaged" and s == 1):
                dist.all_reduce(parameter.grad, group=same_stage)
                parameter.grad /= 1 if FAULT == "summed" else REPLICAS
        if FAULT == "zeroed too early":
            optimizer.zero_grad()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
