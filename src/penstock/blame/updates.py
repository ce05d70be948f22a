"""What happens to gradients once they are there: clipping, then the optimizer.

An optimizer's update is checked from the pipeline's own gradients and weights, step by step, so rounding of gradients
does not count, not even where Adam divides by it.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.blame.data import Feed
from penstock.blame.finding import Finding
from penstock.blame.names import Noted, Part
from penstock.blame.replay import Replay, scale_of
from penstock.proof.comparison import compare
from penstock.proof.first_difference import describe_difference
from penstock.words import shortened

_ALIKE = 1e-4


@dataclass(slots=True)
class Updates:
    """Optimizers that follow the pipeline's, one for each of its own, and the unsplit model's."""

    compared: int = 0
    notes: list[str] = field(default_factory=list)
    _made: dict[tuple[int, int], Any] = field(default_factory=dict)

    def step(
        self, noted: Noted, step: int, expected: Mapping[str, Tensor], feed: Feed, replay: Replay
    ) -> Finding | None:
        """The first that is wrong."""
        self.compared, self.notes = 0, []
        return (
            self._clipping(noted, step, expected, feed, replay)
            or self._missed(noted, step)
            or self._rates(noted, step, feed, replay)
            or self._updates(noted, step)
        )

    def _clipping(
        self, noted: Noted, step: int, expected: Mapping[str, Tensor], feed: Feed, replay: Replay
    ) -> Finding | None:
        """Gradients after clipping, against those clipped by the norm of all, in which a tie counts once."""
        clips = [clip for files in noted.files.values() for clip in files[step]["clips"]]
        limit = feed.max_norm if feed.max_norm is not None else clips[0][0] if clips else None
        if limit is None:
            return None
        own = dict(replay.model.named_parameters())
        norm = float(torch.stack([grad.norm() for name, grad in expected.items() if name in own]).norm())
        scale = min(1.0, limit / (norm + 1e-6))
        for part in noted.parts:
            for name, value in part.of(step, "grads").items():
                if name not in expected or not expected[name].any():
                    continue
                self.compared += 1
                by = scale_of(value, expected[name])
                if by is None or abs(by - scale) <= _ALIKE * scale:
                    continue
                used = [norm for _, norm in noted.files[part.rank][step]["clips"]]
                mine = used[-1] if used else limit / by
                text = f"gradients are clipped by the norm {mine:.6g}; that of all gradients is {norm:.6g}"
                why = _why(mine, norm**2, noted, expected, part)
                return Finding("clipping", text + why, "clipping", **part.where())
        return None

    def _missed(self, noted: Noted, step: int) -> Finding | None:
        """Parameters with a gradient that no optimizer has, and that stay as they were."""
        if not any(files[step]["updates"] for files in noted.files.values()):
            return None
        for part in noted.parts:
            updates, own = noted.files[part.rank][step]["updates"], part.steps[step]
            has = {tuple(key) for update in updates for group in update["groups"] for key in group["params"]}
            left = [
                n for n, grad in own["grads"].items() if n in part.tensors and grad.any() and (part.index, n) not in has
            ]
            missed = [part.tensors[n] for n in left if torch.equal(own["before"][n], own["after"][n])]
            if missed:
                who = "the optimizer lacks" if updates else f"rank {part.rank} takes no optimizer step for"
                text = f"{who} {shortened(missed)}: they have gradients, and stay as they are"
                return Finding("optimizer", text, "update", **part.where(module=missed[0]))
        return None

    def _rates(self, noted: Noted, step: int, feed: Feed, replay: Replay) -> Finding | None:
        """Options of optimizers that differ from the unsplit model's; or, if these are unknown, by rank."""
        mine = {
            part.tensors[name]: (group["options"], part)
            for part in noted.parts
            for update in noted.files[part.rank][step]["updates"]
            for group in update["groups"]
            for index, name in group["params"]
            if index == part.index and name in part.tensors
        }
        if feed.optimizer is not None:
            of = {id(t): name for name, t in replay.tensors.items()}
            groups: list[dict[str, Any]] = feed.optimizer(replay.model).param_groups
            right = {of[id(p)]: group for group in groups for p in group["params"] if id(p) in of}
            pairs = [(name, *mine[name], right[name]) for name in mine if name in right]
            rates = [
                options["lr"] / group["lr"] for _, options, _, group in pairs if options.get("lr") and group.get("lr")
            ]
            usual = 1.0 if not rates or 1.0 in rates else sorted(rates)[len(rates) // 2]  # a scheduler's
            for name, options, part, group in pairs:
                for key in ("lr", "weight_decay", "momentum", "betas", "eps"):
                    is_rate, value, expected = key == "lr", options.get(key), group.get(key)
                    if is_rate and value is not None and expected is not None:
                        expected *= usual
                        value = expected if abs(value - expected) <= _ALIKE * expected else value
                    if value == expected:
                        continue
                    kind, what = ("learning rate", "the learning rate") if is_rate else ("optimizer", key)
                    text = f"{what} of {name!r} is {value}; expected {expected}"
                    return Finding(kind, text, "update", **part.where(module=name))
            return None
        by_rank: dict[int, set[float]] = {}
        for options, part in mine.values():
            by_rank.setdefault(part.rank, set()).add(options.get("lr"))
        if all(len(rates) == 1 for rates in by_rank.values()) and len(set.union(set(), *by_rank.values())) > 1:
            text = ", ".join(f"{next(iter(by_rank[rank])):g}" for rank in sorted(by_rank))
            return Finding("learning rate", f"the learning rate differs by rank: {text}", "update")
        return None

    def _updates(self, noted: Noted, step: int) -> Finding | None:
        """Weights after the step, against the same optimizer's from the same gradients."""
        for rank, files in noted.files.items():
            parts = {part.index: part for part in noted.parts if part.rank == rank}
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
                        before = own["before"][name].double()
                        of = own["after"][name].double() - before, parameter.detach().double() - before
                        shape = describe_difference(*of, {2.0: "twice"})
                        text = f"the update of {part.tensors.get(name, name)!r} is not its optimizer's"
                        return Finding("update", f"{text}{shape and '; '}{shape}", "update", **part.where(row))
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


def _why(mine: float, square: float, noted: Noted, expected: Mapping[str, Tensor], part: Part) -> str:
    """What a wrong norm is the norm of."""
    held = [(p, n) for p in noted.parts for n in dict.fromkeys(p.tensors.values())]
    every = sum(float(grad.double().norm()) ** 2 for _, name in held if (grad := expected.get(name)) is not None)
    own = sum(
        float(grad.double().norm()) ** 2
        for p, name in held
        if p.rank == part.rank and (grad := expected.get(name)) is not None
    )
    if abs(mine**2 - own) <= 2 * _ALIKE * own and abs(own - square) > _ALIKE * square:
        return ": it is that of this rank's gradients alone"
    if every > square * (1 + _ALIKE) and abs(mine**2 - every) <= 2 * _ALIKE * every:
        return ": tied parameters are counted once for each stage that holds them"
    return ""
