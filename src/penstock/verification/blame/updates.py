"""Checks what happens to accumulated gradients: clipping, then the optimizer.

An optimizer's update is checked from the pipeline's own gradients and weights, step by step, so rounding of gradients
does not count, not even where Adam divides by it.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.formatting import list_names
from penstock.distributed.launch.target import Target
from penstock.verification.blame.finding import Finding
from penstock.verification.blame.names import Part, RecordedJob
from penstock.verification.blame.replay import Replay, find_scale
from penstock.verification.comparison import compare

_TOLERANCE = 1e-4

OptimizedParameter = tuple[Part, str, Mapping[str, Any]]
"""A parameter that an optimizer takes, by its part and its own name there, and the options of its group."""


@dataclass(slots=True)
class Updates:
    """Replays the pipeline's optimizers, one for each, and compares updates and options."""

    job: RecordedJob
    spec: Target
    replay: Replay
    compared: int = 0
    notes: list[str] = field(default_factory=list)
    _optimizers: dict[tuple[int, int], tuple[Any, list[tuple[Part, str, Tensor]]]] = field(default_factory=dict)

    def step(self, step: int, expected: Mapping[str, Tensor]) -> Finding | None:
        """Return the first wrong update."""
        parameters: list[OptimizedParameter] = [
            (part, name, group["options"])
            for rank, files in self.job.files.items()
            for update in files[step]["updates"]
            for group in update["groups"]
            for part, name in self._parameters(rank, group)
        ]
        parameters.sort(key=lambda t: t[0].order)
        return (
            self._check_clipping(step, expected)
            or self._check_missed(step, parameters)
            or self._check_options(parameters)
            or self._check_updates(step, parameters)
        )

    def _parameters(self, rank: int, group: Mapping[str, Any]) -> list[tuple[Part, str]]:
        """Return the parameters of an optimizer's group."""
        parts = {part.index: part for part in self.job.parts if part.rank == rank}
        return [(parts[index], name) for index, name in group["params"] if index in parts]

    def _check_clipping(self, step: int, expected: Mapping[str, Tensor]) -> Finding | None:
        """Compare clipped gradients with those clipped by the norm of all, in which a tie counts once."""
        clips = [limit for files in self.job.files.values() for limit in files[step]["clips"]]
        limit = self.spec.training.get("clip_grad_norm", clips[0] if clips else None)
        if limit is None:
            return None
        norm = _norm(expected[name] for name, _ in self.replay.model.named_parameters() if name in expected)
        scale = min(1.0, limit / (norm + 1e-6))
        for part in self.job.parts:
            for name, value in part.to_reference_names(part.steps[step].grads).items():
                if name not in expected or not expected[name].any():
                    continue
                self.compared += 1
                factor = find_scale(value, expected[name])
                if factor is None or abs(factor - scale) <= _TOLERANCE * scale:
                    continue
                grads = [(p.rank, expected[n]) for p in self.job.parts for n in {*p.tensors.values()} if n in expected]
                norms = {
                    ": it is that of this rank's gradients alone": _norm(g for rank, g in grads if rank == part.rank),
                    ": tied parameters are counted once for each stage that holds them": _norm(g for _, g in grads),
                }
                prefix, used = ("", limit / factor) if factor < 1 - _TOLERANCE else ("at most ", limit)
                fits = [t for t, n in norms.items() if abs(used - n) <= _TOLERANCE * n or (prefix and n <= used)]
                text = f"gradients are clipped by the norm {prefix}{used:.6g}; that of all gradients is {norm:.6g}"
                text += fits[0] if fits else ""
                return part.make_finding("clipping", text, "clipping")
        return None

    def _check_missed(self, step: int, parameters: Sequence[OptimizedParameter]) -> Finding | None:
        """Find parameters with a gradient that no optimizer has, and that did not change."""
        ranks = {rank for rank, files in self.job.files.items() if files[step]["updates"]}
        optimized = {(part.order, name) for part, name, _ in parameters}
        for part in self.job.parts if ranks else ():
            record = part.steps[step]
            unchanged = [n for n, grad in record.grads.items() if grad.any() and (part.order, n) not in optimized]
            unchanged = [n for n in unchanged if n in part.tensors and torch.equal(record.before[n], record.after[n])]
            if missed := [part.tensors[n] for n in unchanged]:
                cause = "the optimizer lacks" if part.rank in ranks else f"rank {part.rank} takes no optimizer step for"
                text = f"{cause} {list_names(missed)}: there is a gradient, but no update"
                return part.make_finding("optimizer", text, "update", module=missed[0])
        return None

    def _check_options(self, parameters: Sequence[OptimizedParameter]) -> Finding | None:
        """Find options of optimizers that differ from the unsplit model's; or, if these are unknown, by rank."""
        used = {part.tensors[name]: (options, part) for part, name, options in parameters if name in part.tensors}
        if "optimizer" in self.spec.training:
            names = {id(tensor): name for name, tensor in self.replay.tensors.items()}
            groups: list[dict[str, Any]] = self.spec.training["optimizer"](self.replay.model).param_groups
            correct = {names[id(p)]: group for group in groups for p in group["params"] if id(p) in names}
        else:  # unknown: if each rank has one rate, the first one's
            rates = {(part.rank, options.get("lr")) for options, part in used.values()}
            lrs = [{"lr": rate} for _, rate in sorted(rates, key=lambda pair: pair[0])]
            correct = dict.fromkeys(used, lrs[0]) if len(lrs) == len({rank for rank, _ in rates}) else {}
        pairs = [(name, *used[name], correct[name]) for name in used if name in correct]
        ratios = sorted(o["lr"] / group["lr"] for _, o, _, group in pairs if o.get("lr") and group.get("lr"))
        factor = 1.0 if not ratios or 1.0 in ratios else ratios[len(ratios) // 2]  # a scheduler's
        for name, options, part, group in pairs:
            for key in ("lr", "weight_decay", "momentum", "betas", "eps"):
                value, expected = options.get(key), group.get(key)
                if key == "lr" and value is not None and expected is not None:
                    expected *= factor
                    value = expected if abs(value - expected) <= _TOLERANCE * expected else value
                if key in group and value != expected:
                    kind = "learning rate" if key == "lr" else "optimizer"
                    text = f"{key.replace('lr', 'the learning rate')} of {name!r} is {value}; expected {expected}"
                    text += "" if "optimizer" in self.spec.training else ", as on the first rank"
                    return part.make_finding(kind, text, "update", module=name)
        return None

    def _check_updates(self, step: int, parameters: Sequence[OptimizedParameter]) -> Finding | None:
        """Compare weights after the step with the same optimizer's from the same gradients."""
        counts = Counter((part.order, name) for part, name, _ in parameters)
        for part, name, _ in parameters:
            if counts[part.order, name] > 1:
                return part.make_finding("update", "the optimizer takes two steps in one", "update")
        for rank, files in self.job.files.items():
            for number, update in enumerate(files[step]["updates"]):
                for part, name, value in self._replay(rank, number, update, step):
                    self.compared += 1
                    comparison = compare("update", name, (), part.steps[step].after[name], value, exact=False)
                    if comparison.verdict == "different":
                        text = f"the update of {part.tensors.get(name, name)!r} is not what its optimizer does"
                        return part.make_finding("update", text, "update", comparison)
        return None

    def _replay(self, rank: int, number: int, update: Mapping[str, Any], step: int) -> list[tuple[Part, str, Tensor]]:
        """Return the weights after a step of the same optimizer."""
        module, class_name = update["kind"]
        if not module.startswith("torch.optim."):
            self.notes.append(f"updates of {module}.{class_name} were not compared")
            return []
        groups = [(group["options"], taken) for group in update["groups"] if (taken := self._parameters(rank, group))]
        if not groups:
            return []
        if (rank, number) not in self._optimizers:
            copies = [
                [(part, n, nn.Parameter(part.steps[step].before[n].clone())) for part, n in taken]
                for _, taken in groups
            ]
            cls = getattr(importlib.import_module(module), class_name)
            optimizer = cls([{"params": [parameter for *_, parameter in group], "lr": 0.0} for group in copies])
            self._optimizers[rank, number] = optimizer, [item for group in copies for item in group]
        optimizer, followers = self._optimizers[rank, number]
        for group, (options, _) in zip(optimizer.param_groups, groups, strict=True):
            group.update({option: value for option, value in options.items() if value is not None})
        for part, name, parameter in followers:
            grad = part.steps[step].grads.get(name)
            parameter.data.copy_(part.steps[step].before[name])
            parameter.grad = None if grad is None else grad.clone()
        optimizer.step()
        return [(part, name, parameter.detach()) for part, name, parameter in followers]


def _norm(gradients: Iterable[Tensor]) -> float:
    return math.hypot(*(float(gradient.double().norm()) for gradient in gradients))
