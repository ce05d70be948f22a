"""Replicas of a pipeline, sharded by FSDP2: a DeviceMesh of dp x pp processes trains the model of train_gpt.py.

    penstock run --ranks 4 examples/train_mesh.py --replicas 2             # 2 replicas of a pipeline of 2
    penstock run --ranks 4 examples/train_mesh.py --replicas 2 --shard     # each stage's weights divided between both
    python examples/train_mesh.py                                          # one process, the same training

Each replica reads its own rows of a batch, and the losses are those of one device with all of them, but for rounding.
"""

import argparse
import os

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_gpt import GPT, Block, batch, loss

import penstock
from penstock import checkpoint


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--folder", default="runs/mesh")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    mesh = None
    if processes > 1:
        shape = (options.replicas, processes // options.replicas)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "pp"))
    mine = slice(0, None) if mesh is None else slice(mesh.get_local_rank("dp"), None, options.replicas)

    def shard(stage):
        """Called with each of this process's stages, which holds the model's modules under their names."""
        for module in list(stage.modules()):
            if isinstance(module, Block):
                fully_shard(module, mesh=mesh["dp"])
        fully_shard(stage, mesh=mesh["dp"])

    torch.manual_seed(0)  # every process builds the same model
    example = batch(0)[0][mine]
    with penstock.pipeline(
        GPT(),
        (example,),
        microbatches=8 // options.replicas,  # of each replica: eight of eight rows in all
        loss_fn=loss,
        mesh=mesh,
        devices=device,
        parallelize=shard if options.shard and mesh is not None else None,
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
        checkpoint.load(options.folder, pipe, optimizer)  # what any other mesh has saved
        while pipe.step_count < options.steps:
            inputs, targets = batch(pipe.step_count + 1)
            result = pipe.step(inputs[mine], target=targets[mine])
            norm = pipe.clip_grad_norm_(1.0)  # one norm over all shards, ranks and replicas
            optimizer.step()
            optimizer.zero_grad()
            if pipe.step_count % 20 == 0:
                value = float(result.loss)  # of the whole batch, on every rank
                if pipe.is_main_process:
                    print(f"step {pipe.step_count:4d}  loss {value:.4f}  norm {norm:.4f}", flush=True)
        checkpoint.save(options.folder, pipe, optimizer)


if __name__ == "__main__":
    main()
