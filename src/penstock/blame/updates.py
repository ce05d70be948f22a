"""What happens to gradients once they are there: clipping, then the optimizer.

An optimizer's update is checked from the pipeline's own gradients and weights, step by step, so rounding of gradients
does not count, not even where Adam divides by it.
"""

from __future__ import annotations

import importlib
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
    _made: dict[tuple[int, int], tuple[torch.optim.Optimizer, dict[tuple[int, str], Tensor]]] = field(default_factory=dict)

    def step(
        self, noted: Noted, step: int, expected: Mapping[str, Tensor], feed: Feed, replay: Replay
    ) -> Finding | None:
        """The first that is wrong."""
        self.compared, self.notes = 0, []
        return (
            self._clipping(noted, step, expected, feed)
            or self._missed(noted, step)
            or self._rates(noted, step, feed, replay)
            or self._updates(noted, step)
        )

    def _clipping(self, noted: Noted, step: int, expected: Mapping[str, Tensor], feed: Feed) -> Finding | None:
        """Gradients after clipping, against those clipped by the norm of all, in which a tie counts once."""
        clips = [clip for files in noted.files.values() for clip in files[step]["clips"]]
        limit = feed.max_norm if feed.max_norm is not None else clips[0][0] if clips else None
        if limit is None:
            return None
        norm = float(torch.stack([grad.norm() for grad in expected.values()]).norm())
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
                why = _why(mine, noted, step, expected, part)
                where = {"stage": part.stage, "rank": part.rank, "difference": abs(mine - norm), "largest": norm}
                return Finding("clipping", text + why, "clipping", **where)
        return None

    def _missed(self, noted: Noted, step: int) -> Finding | None:
        """Parameters with a gradient that no optimizer has, and that stay as they were."""
        if not any(files[step]["updates"] for files in noted.files.values()):
            return None
        for part in noted.parts:
            updates = noted.files[part.rank][step]["updates"]
            has = {tuple(key) for update in updates for group in update["groups"] for key in group["params"]}
            noted_step = part.steps[step]
            held = {id(noted_step["before"][name]): name for name in noted_step["before"]}
            missed = [
                name
                for name, grad in noted_step["grads"].items()
                if (part.index, name) not in has
                and name in part.tensors
                and name in held.values()
                and grad.any()
                and torch.equal(noted_step["before"][name], noted_step["after"][name])
            ]
            if missed:
                names = shortened([part.tensors[name] for name in missed])
                who = "the optimizer has not" if updates else f"rank {part.rank} takes no optimizer step for"
                text = f"{who} {names}: these weights stay as they are although they have gradients"
                return Finding("optimizer", text, "update", stage=part.stage, rank=part.rank, module=part.tensors[missed[0]])
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
            groups = feed.optimizer(replay.model).param_groups
            right = {of[id(p)]: group for group in groups for p in group["params"] if id(p) in of}
            ratios = {n: (o["lr"] / right[n]["lr"], p) for n, (o, p) in mine.items() if n in right and right[n]["lr"] and o.get("lr")}
            plain = [ratio for ratio, _ in ratios.values()]
            usual = 1.0 if not plain or 1.0 in plain else sorted(plain)[len(plain) // 2]
            for name, (ratio, part) in ratios.items():
                if abs(ratio - usual) > _ALIKE * usual:
                    text = f"the learning rate of {name!r} is {mine[name][0]['lr']:g}; expected {right[name]['lr'] * usual:g}"
                    return Finding("learning rate", text, "update", stage=part.stage, rank=part.rank, module=name)
            for name, (options, part) in mine.items():
                for key in ("weight_decay", "momentum", "betas", "eps"):
                    if name in right and key in options and key in right[name] and options[key] != right[name][key]:
                        text = f"{key} of {name!r} is {options[key]}; expected {right[name][key]}"
                        return Finding("optimizer", text, "update", stage=part.stage, rank=part.rank, module=name)
            return None
        rates: dict[int, set[float]] = {}
        for options, part in mine.values():
            rates.setdefault(part.rank, set()).add(options.get("lr"))
        if len(rates) > 1 and all(len(one) == 1 for one in rates.values()) and len(set.union(*rates.values())) > 1:
            by_rank = [next(iter(rates[rank])) for rank in sorted(rates)]
            usual = max(by_rank, key=by_rank.count)
            rank = next(rank for rank in sorted(rates, reverse=True) if next(iter(rates[rank])) != usual)
            text = f"the learning rate differs by rank: {', '.join(f'{rate:g}' for rate in by_rank)}"
            return Finding("learning rate", text, "update", rank=rank)
        return None

    def _updates(self, noted: Noted, step: int) -> Finding | None:
        """Weights after the step, against the same optimizer's from the same gradients."""
        for rank, files in noted.files.items():
            parts = {part.index: part for part in noted.parts if part.rank == rank}
            taken = [tuple(key) for update in files[step]["updates"] for group in update["groups"] for key in group["params"]]
            if len(taken) > len({*taken}):
                part = parts[next(key for key in taken if taken.count(key) > 1)[0]]
                return Finding("update", "the optimizer takes two steps in one", "update", stage=part.stage, rank=rank)
            for number, update in enumerate(files[step]["updates"]):
                keys = [[tuple(key) for key in group["params"]] for group in update["groups"]]
                follower = self._follower(rank, number, update, keys, parts, step)
                if follower is None:
                    continue
                for (index, name), parameter in follower.items():
                    part = parts[index]
                    after = part.steps[step]["after"][name]
                    self.compared += 1
                    row = compare("update", name, (part.stage,), after, parameter.detach(), False)
                    if not row.ok and row.verdict == "different":
                        before = part.steps[step]["before"][name].double()
                        shape = describe_difference(after.double() - before, parameter.detach().double() - before, {2.0: "twice"})
                        text = f"the update of {part.tensors.get(name, name)!r} is not its optimizer's{shape and '; '}{shape}"
                        size = {"difference": row.max_difference, "largest": row.max_reference}
                        return Finding("update", text, "update", stage=part.stage, rank=rank, **size)
        return None

    def _follower(
        self, rank: int, number: int, update: Mapping[str, Any], keys: Sequence[Sequence[Any]], parts: Mapping[int, Part], step: int
    ) -> dict[tuple[int, str], Tensor] | None:
        module, name = update["kind"]
        if not module.startswith("torch.optim.") or not any(keys):
            self.notes += [] if module.startswith("torch.optim.") else [f"updates of {module}.{name} were not compared"]
            return None
        steps = {index: part.steps[step] for index, part in parts.items()}
        if any(index not in steps for group in keys for index, _ in group):
            return None
        options = [{k: v for k, v in group["options"].items() if v is not None} for group in update["groups"]]
        if (rank, number) not in self._made:
            made = {key: torch.nn.Parameter(steps[key[0]]["before"][key[1]].clone()) for group in keys for key in group}
            groups = [{"params": [made[key] for key in group], "lr": 0.0} for group in keys if group]
            kind = getattr(importlib.import_module(module), name)
            self._made[rank, number] = kind(groups), made
        optimizer, made = self._made[rank, number]
        for group, now in zip(optimizer.param_groups, [o for o, g in zip(options, keys, strict=True) if g], strict=True):
            group.update(now)
        for (index, local), parameter in made.items():
            parameter.data.copy_(steps[index]["before"][local])
            grad = steps[index]["grads"].get(local)
            parameter.grad = None if grad is None else grad.clone()
        optimizer.step()
        return made


def _why(mine: float, noted: Noted, step: int, expected: Mapping[str, Tensor], part: Part) -> str:
    """What a wrong norm is the norm of."""
    square = sum(float(grad.double().norm()) ** 2 for grad in expected.values())
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
