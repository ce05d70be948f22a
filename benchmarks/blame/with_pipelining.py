"""A pipeline written with `torch.distributed.pipelining`, with one fault, or none: FAULT in the environment."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from model import LAYERS, LENGTH, OPTIONS, WIDTH, WORDS, Net, batch, loss_of, model, optimizer_of
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
    pipeline,
)
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

FAULT = os.environ.get("FAULT", "")
MICROBATCHES = 4


class Stage(nn.Module):
    def __init__(self, net: Net, begin: int, end: int) -> None:
        super().__init__()
        self.embed = net.embed if begin == 0 else None
        self.layers = nn.ModuleList(net.layers[begin:end])  # numbered anew
        self.norm = net.norm if end == LAYERS else None
        self.head = net.head if end == LAYERS else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            if "recompute" in OPTIONS:
                x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=FAULT != "another mask")
            else:
                x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = model()
    chunks = 2 if "interleaved" in OPTIONS else 1
    stages = world * chunks
    cuts = [LAYERS * s // stages for s in range(stages + 1)]
    own = [s for s in range(stages) if s % world == rank]
    parts = []
    for s in own:
        begin, end = cuts[s], cuts[s + 1]
        if FAULT == "dropped layer" and s == 1:
            begin += 1
        if FAULT == "layer on two stages" and s == 1:
            begin -= 1
        parts.append(Stage(net, begin, end))
    if FAULT == "eval mode" and rank == 1:
        for part in parts:
            part.eval()
    if FAULT == "frozen layer" and rank == 0:
        parts[0].layers[0].requires_grad_(False)
    tokens, labels = batch(0)
    example = [tokens[:2], torch.zeros(2, LENGTH, WIDTH, requires_grad=True)]
    out = torch.zeros(2, LENGTH, WORDS, requires_grad=True)
    static = "dynamic" not in OPTIONS
    built = []
    for s, part in zip(own, parts, strict=True):
        shapes = (
            {"input_args": example[min(s, 1)], "output_args": out if s == stages - 1 else example[1]} if static else {}
        )
        built.append(PipelineStage(part, s, stages, torch.device("cpu"), **shapes))
    if "traced" in OPTIONS:
        pipe = pipeline(net, mb_args=(tokens[:2],), split_spec={"layers.2": SplitPoint.BEGINNING})
        built = [pipe.build_stage(rank, torch.device("cpu"))]
        parts = [built[0].submod]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = loss_of(output, target)
        if FAULT == "scaled twice":
            return loss / MICROBATCHES
        if FAULT == "scaled by tokens":
            return loss / target.numel()
        if FAULT == "loss of another kind":
            return loss + 0.1 * output.square().mean()
        if "summed" in OPTIONS:
            return loss / MICROBATCHES
        return loss

    scale = FAULT != "not scaled" and "summed" not in OPTIONS
    if chunks > 1:
        schedule = ScheduleInterleaved1F1B(built, MICROBATCHES, loss_fn, scale_grads=scale)
    else:
        kind = ScheduleGPipe if "gpipe" in OPTIONS else Schedule1F1B
        schedule = kind(built[0], MICROBATCHES, loss_fn, scale_grads=scale)
    module = nn.ModuleList(parts)
    parameters = list(module.parameters())
    if FAULT == "group missed" and rank == 0:
        parameters = [p for p in module.parameters() if p.dim() > 1]
    optimizer = optimizer_of(module)
    if FAULT == "group missed":
        optimizer = type(optimizer)(parameters, lr=1e-2)
    if FAULT == "learning rate" and rank == 1:
        optimizer.param_groups[0]["lr"] *= 2
    if FAULT == "hook twice" and rank == 0:
        for p in module.parameters():
            p.register_hook(lambda g: g * 2)
    previous = labels
    for step in range(int(os.environ.get("STEPS", "4"))):
        tokens, labels = batch(step)
        target = previous if FAULT == "labels of the batch before" else labels
        if FAULT == "labels shifted":
            target = labels.roll(1, 0)
        if FAULT == "wrong rows":
            tokens = torch.cat([tokens[:2], tokens[:-2]])
        previous = labels
        if not (FAULT == "not zeroed" and rank == 0):
            optimizer.zero_grad()
        losses: list[Tensor] = []
        kwargs = {"target": target, "losses": losses} if own[-1] == stages - 1 else {}
        schedule.step(*([tokens] if own[0] == 0 else []), **kwargs)
        if "tie" in OPTIONS and FAULT != "tie not summed":
            part = parts[0].embed if rank == 0 else parts[-1].head if rank == world - 1 else None
            if part is not None:
                dist.all_reduce(part.weight.grad)
                if FAULT == "tie averaged":
                    part.weight.grad /= 2
        if "clip" in OPTIONS:
            clip(module, rank, world)
        if not (FAULT == "no optimizer step" and rank == 1):
            optimizer.step()
        if FAULT == "two optimizer steps" and rank == 1:
            optimizer.step()
        if "evaluates" in OPTIONS:
            module.eval()
            with torch.no_grad():
                schedule.eval(*([tokens] if own[0] == 0 else []), **kwargs)
            module.train()
    dist.destroy_process_group()


def clip(module: nn.Module, rank: int, world: int) -> None:
    if FAULT == "clipped by rank":
        clip_grad_norm_(module.parameters(), 0.5)
        return
    grads = [p.grad for n, p in module.named_parameters() if not ("tie" in OPTIONS and rank == 1 and "head" in n)]
    if FAULT == "tie counted twice":
        grads = [p.grad for p in module.parameters()]
    square = torch.stack([g.norm() ** 2 for g in grads]).sum()
    dist.all_reduce(square)
    coefficient = min(1.0, 0.5 / (float(square.sqrt()) + 1e-6))
    for p in module.parameters():
        p.grad *= coefficient


if __name__ == "__main__":
    main()
