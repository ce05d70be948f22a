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
from torch import Tensor

from penstock._base.words import shortened
from penstock.distributed.launch.target import Target
from penstock.verification.blame.finding import Finding
from penstock.verification.blame.names import Noted, Part
from penstock.verification.blame.replay import Replay, scale_of
from penstock.verification.comparison import compare

_ALIKE = 1e-4


@dataclass(slots=True)
class Updates:
    """Optimizers that follow the pipeline's, one for each of its own, and the unsplit model's."""

    noted: Noted
    given: Target
    replay: Replay
    compared: int = 0
    notes: list[str] = field(default_factory=list)
    _made: dict[tuple[int, int], Any] = field(default_factory=dict)

    def step(self, step: int, expected: Mapping[str, Tensor]) -> Finding | None:
        """The first that is wrong."""
        return self._clipping(step, expected) or self._missed(step) or self._rates(step) or self._updates(step)

    def _clipping(self, step: int, expected: Mapping[str, Tensor]) -> Finding | None:
        """Gradients after clipping, against those clipped by the norm of all, in which a tie counts once."""
        clips = [limit for files in self.noted.files.values() for limit in files[step]["clips"]]
        limit = self.given.training.get("clip_grad_norm", clips[0] if clips else None)
        if limit is None:
            return None
        norm = _norm(expected[name] for name, _ in self.replay.model.named_parameters() if name in expected)
        scale = min(1.0, limit / (norm + 1e-6))
        for part in self.noted.parts:
            for name, value in part.of(step, "grads").items():
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
                return Finding("clipping", text, "clipping", **part.where())
        return None

    def _missed(self, step: int) -> Finding | None:
        """Parameters with a gradient that no optimizer has, and that stay as they were."""
        if not any(files[step]["updates"] for files in self.noted.files.values()):
            return None
        for part in self.noted.parts:
            updates, own = self.noted.files[part.rank][step]["updates"], part.steps[step]
            has = {tuple(key) for update in updates for group in update["groups"] for key in group["params"]}
            left = [n for n, grad in own["grads"].items() if grad.any() and (part.index, n) not in has]
            left = [n for n in left if n in part.tensors and torch.equal(own["before"][n], own["after"][n])]
            missed = [part.tensors[n] for n in left]
            if missed:
                who = "the optimizer lacks" if updates else f"rank {part.rank} takes no optimizer step for"
                text = f"{who} {shortened(missed)}: there is a gradient, but no update"
                return Finding("optimizer", text, "update", **part.where(module=missed[0]))
        return None

    def _rates(self, step: int) -> Finding | None:
        """Options of optimizers that differ from the unsplit model's; or, if these are unknown, by rank."""
        mine = {
            part.tensors[name]: (group["options"], part)
            for part in self.noted.parts
            for update in self.noted.files[part.rank][step]["updates"]
            for group in update["groups"]
            for index, name in group["params"]
            if index == part.index and name in part.tensors
        }
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
                    return Finding(kind, text, "update", **part.where(module=name))
        return None

    def _updates(self, step: int) -> Finding | None:
        """Weights after the step, against the same optimizer's from the same gradients."""
        for rank, files in self.noted.files.items():
            parts = {part.index: part for part in self.noted.parts if part.rank == rank}
            updates = files[step]["updates"]
            taken = [tuple(key) for update in updates for group in update["groups"] for key in group["params"]]
            if twice := [key for key, count in Counter(taken).items() if count > 1]:
                where = parts[twice[0][0]].where()
                return Finding("update", "the optimizer takes two steps in one", "update", **where)
            for number, update in enumerate(updates):
                keys = [[tuple(key) for key in group["params"]] for group in update["groups"]]
                made = self._follow((rank, number), update, keys, parts, step)
                for (index, name), parameter in made.items():
                    part, own = parts[index], parts[index].steps[step]
                    self.compared += 1
                    row = compare("update", name, (), own["after"][name], parameter.detach(), exact=False)
                    if row.verdict == "different":
                        text = f"the update of {part.tensors.get(name, name)!r} is not what its optimizer does"
                        return Finding("update", text, "update", **part.where(row))
        return None

    def _follow(
        self, key: tuple[int, int], update: Mapping[str, Any], keys: Sequence[Any], parts: Mapping[int, Part], step: int
    ) -> Mapping[tuple[int, str], Tensor]:
        """The weights after the step of a like optimizer."""
        module, name = update["kind"]
        if not module.startswith("torch.optim.") or not any(keys):
            self.notes += [] if module.startswith("torch.optim.") else [f"updates of {module}.{name} were not compared"]
            return {}
        steps = {index: part.steps[step] for index, part in parts.items()}
        groups = [(g["options"], own) for g, own in zip(update["groups"], keys, strict=True) if own]
        if key not in self._made:
            made = {k: torch.nn.Parameter(steps[k[0]]["before"][k[1]].clone()) for _, own in groups for k in own}
            kind = getattr(importlib.import_module(module), name)
            self._made[key] = kind([{"params": [made[k] for k in own], "lr": 0.0} for _, own in groups]), made
        optimizer: torch.optim.Optimizer = self._made[key][0]
        followers: dict[tuple[int, str], Tensor] = self._made[key][1]
        for group, (now, _) in zip(optimizer.param_groups, groups, strict=True):
            group.update({option: value for option, value in now.items() if value is not None})
        for (index, local), parameter in followers.items():
            parameter.data.copy_(steps[index]["before"][local])
            grad = steps[index]["grads"].get(local)
            parameter.grad = None if grad is None else grad.clone()
        optimizer.step()
        return followers


def _norm(gradients: Iterable[Tensor]) -> float:
    return math.hypot(*(float(gradient.double().norm()) for gradient in gradients))
