"""What happens to gradients once they are there: clipping, then the optimizer.

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

from penstock._base.words import shortened
from penstock.distributed.launch.target import Target
from penstock.verification.blame.finding import Finding
from penstock.verification.blame.names import Noted, Part
from penstock.verification.blame.replay import Replay, scale_of
from penstock.verification.comparison import compare

_ALIKE = 1e-4

Taken = tuple[Part, str, Mapping[str, Any]]
"""A parameter that an optimizer takes, by its part and its own name there, and the options of its group."""


@dataclass(slots=True)
class Updates:
    """Optimizers that follow the pipeline's, one for each of its own, and the unsplit model's."""

    noted: Noted
    given: Target
    replay: Replay
    compared: int = 0
    notes: list[str] = field(default_factory=list)
    _made: dict[tuple[int, int], tuple[Any, list[tuple[Part, str, Tensor]]]] = field(default_factory=dict)

    def step(self, step: int, expected: Mapping[str, Tensor]) -> Finding | None:
        """Return the first wrong update."""
        taken: list[Taken] = [
            (part, name, group["options"])
            for rank, files in self.noted.files.items()
            for update in files[step]["updates"]
            for group in update["groups"]
            for part, name in self._held(rank, group)
        ]
        taken.sort(key=lambda one: one[0].place)
        return (
            self._clipping(step, expected)
            or self._missed(step, taken)
            or self._rates(taken)
            or self._updates(step, taken)
        )

    def _held(self, rank: int, group: Mapping[str, Any]) -> list[tuple[Part, str]]:
        """The parameters of an optimizer's group."""
        parts = {part.index: part for part in self.noted.parts if part.rank == rank}
        return [(parts[index], name) for index, name in group["params"] if index in parts]

    def _clipping(self, step: int, expected: Mapping[str, Tensor]) -> Finding | None:
        """Gradients after clipping, against those clipped by the norm of all, in which a tie counts once."""
        clips = [limit for files in self.noted.files.values() for limit in files[step]["clips"]]
        limit = self.given.training.get("clip_grad_norm", clips[0] if clips else None)
        if limit is None:
            return None
        norm = _norm(expected[name] for name, _ in self.replay.model.named_parameters() if name in expected)
        scale = min(1.0, limit / (norm + 1e-6))
        for part in self.noted.parts:
            for name, value in part.renamed(part.steps[step].grads).items():
                if name not in expected or not expected[name].any():
                    continue
                self.compared += 1
                by = scale_of(value, expected[name])
                if by is None or abs(by - scale) <= _ALIKE * scale:
                    continue
                held = [(p.rank, expected[n]) for p in self.noted.parts for n in {*p.tensors.values()} if n in expected]
                norms = {
                    ": it is that of this rank's gradients alone": _norm(g for rank, g in held if rank == part.rank),
                    ": tied parameters are counted once for each stage that holds them": _norm(g for _, g in held),
                }
                said, mine = ("", limit / by) if by < 1 - _ALIKE else ("at most ", limit)
                fits = [t for t, of in norms.items() if abs(mine - of) <= _ALIKE * of or (said and of <= mine)]
                text = f"gradients are clipped by the norm {said}{mine:.6g}; that of all gradients is {norm:.6g}"
                text += fits[0] if fits else ""
                return part.found("clipping", text, "clipping")
        return None

    def _missed(self, step: int, taken: Sequence[Taken]) -> Finding | None:
        """Parameters with a gradient that no optimizer has, and that stay as they were."""
        ranks = {rank for rank, files in self.noted.files.items() if files[step]["updates"]}
        has = {(part.place, name) for part, name, _ in taken}
        for part in self.noted.parts if ranks else ():
            own = part.steps[step]
            left = [n for n, grad in own.grads.items() if grad.any() and (part.place, n) not in has]
            left = [n for n in left if n in part.tensors and torch.equal(own.before[n], own.after[n])]
            if missed := [part.tensors[n] for n in left]:
                who = "the optimizer lacks" if part.rank in ranks else f"rank {part.rank} takes no optimizer step for"
                text = f"{who} {shortened(missed)}: there is a gradient, but no update"
                return part.found("optimizer", text, "update", module=missed[0])
        return None

    def _rates(self, taken: Sequence[Taken]) -> Finding | None:
        """Find options of optimizers that differ from the unsplit model's; or, if these are unknown, by rank."""
        mine = {part.tensors[name]: (options, part) for part, name, options in taken if name in part.tensors}
        if "optimizer" in self.given.training:
            of = {id(tensor): name for name, tensor in self.replay.tensors.items()}
            groups: list[dict[str, Any]] = self.given.training["optimizer"](self.replay.model).param_groups
            right = {of[id(p)]: group for group in groups for p in group["params"] if id(p) in of}
        else:  # unknown: if each rank has one rate, the first one's
            rates = {(part.rank, options.get("lr")) for options, part in mine.values()}
            usual = [{"lr": rate} for _, rate in sorted(rates, key=lambda one: one[0])]
            right = dict.fromkeys(mine, usual[0]) if len(usual) == len({rank for rank, _ in rates}) else {}
        pairs = [(name, *mine[name], right[name]) for name in mine if name in right]
        ratios = sorted(o["lr"] / group["lr"] for _, o, _, group in pairs if o.get("lr") and group.get("lr"))
        by = 1.0 if not ratios or 1.0 in ratios else ratios[len(ratios) // 2]  # a scheduler's
        for name, options, part, group in pairs:
            for key in ("lr", "weight_decay", "momentum", "betas", "eps"):
                value, expected = options.get(key), group.get(key)
                if key == "lr" and value is not None and expected is not None:
                    expected *= by
                    value = expected if abs(value - expected) <= _ALIKE * expected else value
                if key in group and value != expected:
                    kind = "learning rate" if key == "lr" else "optimizer"
                    text = f"{key.replace('lr', 'the learning rate')} of {name!r} is {value}; expected {expected}"
                    text += "" if "optimizer" in self.given.training else ", as on the first rank"
                    return part.found(kind, text, "update", module=name)
        return None

    def _updates(self, step: int, taken: Sequence[Taken]) -> Finding | None:
        """Compare weights after the step with the same optimizer's from the same gradients."""
        counts = Counter((part.place, name) for part, name, _ in taken)
        for part, name, _ in taken:
            if counts[part.place, name] > 1:
                return part.found("update", "the optimizer takes two steps in one", "update")
        for rank, files in self.noted.files.items():
            for number, update in enumerate(files[step]["updates"]):
                for part, name, value in self._follow(rank, number, update, step):
                    self.compared += 1
                    row = compare("update", name, (), part.steps[step].after[name], value, exact=False)
                    if row.verdict == "different":
                        text = f"the update of {part.tensors.get(name, name)!r} is not what its optimizer does"
                        return part.found("update", text, "update", row)
        return None

    def _follow(self, rank: int, number: int, update: Mapping[str, Any], step: int) -> list[tuple[Part, str, Tensor]]:
        """Return the weights after the step of a like optimizer."""
        module, name = update["kind"]
        if not module.startswith("torch.optim."):
            self.notes.append(f"updates of {module}.{name} were not compared")
            return []
        groups = [(group["options"], held) for group in update["groups"] if (held := self._held(rank, group))]
        if not groups:
            return []
        if (rank, number) not in self._made:
            made = [
                [(part, n, nn.Parameter(part.steps[step].before[n].clone())) for part, n in own] for _, own in groups
            ]
            kind = getattr(importlib.import_module(module), name)
            optimizer = kind([{"params": [parameter for *_, parameter in own], "lr": 0.0} for own in made])
            self._made[rank, number] = optimizer, [one for own in made for one in own]
        optimizer, followers = self._made[rank, number]
        for group, (options, _) in zip(optimizer.param_groups, groups, strict=True):
            group.update({option: value for option, value in options.items() if value is not None})
        for part, own, parameter in followers:
            grad = part.steps[step].grads.get(own)
            parameter.data.copy_(part.steps[step].before[own])
            parameter.grad = None if grad is None else grad.clone()
        optimizer.step()
        return [(part, own, parameter.detach()) for part, own, parameter in followers]


def _norm(gradients: Iterable[Tensor]) -> float:
    return math.hypot(*(float(gradient.double().norm()) for gradient in gradients))
