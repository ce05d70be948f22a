"""Training that is saved and goes on elsewhere, as the ranks of a pool run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jobs import TASKS
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import penstock
from penstock import checkpoint
from scaffolding.refusals import refusal_of

Trained = tuple[list[float], dict[str, torch.Tensor]]
"""The losses of the steps, and what this process holds after them."""


def train(
    rank: int,
    options: dict[str, Any],
    name: str,
    steps: int,
    folder: Path | None = None,
    save_at: int | None = None,
) -> Trained:
    """Trains until `steps` steps have been taken, from a checkpoint if there is one, and saves after `save_at`."""
    del rank
    task = TASKS[name]()
    with penstock.pipeline(task.model, task.args, task.kwargs, loss=task.loss, microbatches=4, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        others = {"scheduler": scheduler}
        if folder is not None and save_at is None:
            restored = checkpoint.load(folder, pipe, optimizer, stateful=others)
            assert restored is not None
            assert restored.extra == {"batches": restored.step}
            assert scheduler.last_epoch == restored.step
        losses = []
        while pipe.step_count < steps:
            losses.append(float(pipe.step(*task.args, target=task.target, **task.kwargs).loss))
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if pipe.step_count == save_at:
                assert folder is not None
                checkpoint.save(folder, pipe, optimizer, stateful=others, extra={"batches": pipe.step_count})
        return losses, {name: tensor.clone() for name, tensor in pipe.state_dict().items()}


def save_twice(rank: int, folder: Path, keep: int | None) -> list[str]:
    task = TASKS["mlp"]()
    with penstock.pipeline(task.model, task.args, loss=task.loss, microbatches=4) as pipe:
        for _ in range(3):
            pipe.step(*task.args, target=task.target)
            checkpoint.save(folder, pipe, keep_last=keep)
        checkpoint.save(folder, pipe, keep_last=keep)  # the same step once more
    return sorted(path.name for path in folder.iterdir())


def refusal(rank: int, folder: Path, name: str, action: str) -> str:
    """What a save or a load says."""
    task = TASKS[name]()
    with penstock.pipeline(task.model, task.args, task.kwargs, loss=task.loss, microbatches=4) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        if action == "save":
            return refusal_of(checkpoint.save, folder, pipe, optimizer)
        return refusal_of(checkpoint.load, folder, pipe, optimizer if action == "load with optimizer" else None)


class Averages:
    """An average of the weights in each form that is published, updated as their authors do."""

    def __init__(self, pipe: penstock.Pipeline) -> None:
        self.model = AveragedModel(pipe.model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        self.by_name = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
        self.nested = Shadow({"decay": 0.5, "shadow": {name: p.clone() for name, p in self.by_name.items()}})
        self.listed = Shadow({"optimization_step": 0, "shadow_params": [p.detach().clone() for p in pipe.parameters()]})
        self.whole = Shadow({"shadow_params": [p.detach().clone() for p in pipe.model.parameters()]})

    def update(self, pipe: penstock.Pipeline) -> None:
        self.model.update_parameters(pipe.model)
        for tensors in (self.by_name, self.nested.state["shadow"]):
            for name, parameter in pipe.named_parameters():
                tensors[name].lerp_(parameter.detach(), 0.5)
        for shadow, parameters in ((self.listed, pipe.parameters()), (self.whole, pipe.model.parameters())):
            for mine, parameter in zip(shadow.state["shadow_params"], parameters, strict=True):
                mine.sub_(0.5 * (mine - parameter.detach()))
        self.listed.state["optimization_step"] += 1

    def others(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "averages": [self.by_name, self.nested],
            "lists": {"a": self.listed, "b": self.whole},
        }

    def held(self, pipe: penstock.Pipeline) -> dict[str, torch.Tensor]:
        """Every average's tensors of this process, by the average and the parameter."""
        found = {f"model {n}": t for n, t in self.model.state_dict().items() if not t.is_meta}
        found |= {f"by name {name}": tensor for name, tensor in self.by_name.items()}
        found |= {f"nested {name}": tensor for name, tensor in self.nested.state["shadow"].items()}
        for what, shadow, parameters in (
            ("listed", self.listed, dict(pipe.named_parameters())),
            ("whole", self.whole, dict(pipe.model.named_parameters())),
        ):
            pairs = zip(parameters, shadow.state["shadow_params"], strict=True)
            found |= {f"{what} {name}": tensor for name, tensor in pairs if not tensor.is_meta}
        return {key: tensor.detach().clone() for key, tensor in found.items()}


class Shadow:
    """An object with nothing but a state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def train_with_averages(
    rank: int, options: dict[str, Any], steps: int, folder: Path, save_at: int | None = None
) -> Trained:
    """As `train`, with two optimizers and averages; returns these, too."""
    del rank
    task = TASKS["convnet"]()
    with penstock.pipeline(task.model, task.args, loss=task.loss, microbatches=4, **options) as pipe:
        matrices = pipe.parameter_groups(lambda _, p: {} if p.dim() > 1 else None)
        vectors = pipe.parameter_groups(lambda _, p: None if p.dim() > 1 else {})
        optimizers = {"matrices": torch.optim.SGD(matrices, 1e-2, 0.9), "rest": torch.optim.AdamW(vectors, lr=1e-2)}
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.7) for one in optimizers.values()]
        averages = Averages(pipe)
        others = {"schedulers": schedulers, **averages.others()}
        if save_at is None:
            assert checkpoint.load(folder, pipe, optimizers, stateful=others) is not None
            assert [one.last_epoch for one in schedulers] == [pipe.step_count] * 2
            assert averages.listed.state["optimization_step"] == pipe.step_count
        losses = []
        while pipe.step_count < steps:
            losses.append(float(pipe.step(*task.args, target=task.target).loss))
            for optimizer, scheduler in zip(optimizers.values(), schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            averages.update(pipe)
            if pipe.step_count == save_at:
                checkpoint.save(folder, pipe, optimizers, stateful=others)
        return losses, pipe.state_dict() | averages.held(pipe)


class Container(torch.optim.SGD):
    """As torchtitan's `OptimizersContainer`: its own state is empty, and its state dict is flat."""

    def state_dict(self) -> dict[str, Any]:
        return {"param_groups.0.weight.lr": 0.1}


def refusals_of_parts(rank: int, folder: Path) -> list[str]:
    """What is said of states that cannot be divided, and of averages that are not as they were."""
    del rank
    task = TASKS["mlp"]()
    with penstock.pipeline(task.model, task.args, loss=task.loss, microbatches=4) as pipe:
        flat = torch.cat([p.detach().flatten() for p in pipe.parameters()])
        moments = torch.optim.AdamW(pipe.parameters())
        pipe.step(*task.args, target=task.target)
        moments.step()
        averages = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
        said = []
        for optimizer, others in (
            (None, {"flat": Shadow({"average": flat})}),
            (None, {"wrapped": Shadow({"inner": moments.state_dict()})}),
            (Container(pipe.parameters(), lr=0.1), None),
            ([moments, "adam"], None),
            (None, {"decay": 0.9}),
        ):
            said.append(refusal_of(checkpoint.save, folder, pipe, optimizer, stateful=others))
        checkpoint.save(folder, pipe, {"adam": moments}, stateful={"ema": averages})
        adam = {"adam": moments}
        for optimizer, others in ((moments, {}), (adam, {"ema": {}}), (adam, {"ema": Shadow({"lr": 0.1})})):
            said.append(refusal_of(checkpoint.load, folder, pipe, optimizer, stateful=others))
        return said
