"""Whether what a pipeline's rank holds after a step is what one device has, and whether its timeline is possible."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.schedule import Action, Op
from penstock.schedule.timeline import Timeline

NEAR = 1e-6
"""The largest difference over the largest entry, where bits are not demanded."""


def differences(
    pipe: penstock.Pipeline, reference: nn.Module, loss: Tensor, result: Any, *, exact: bool = True
) -> list[str]:
    """The loss and the gradients of this rank that are not those of one device.

    `exact`: to the bit, for what one stage holds.
    """
    found = [] if torch.isclose(torch.tensor(float(result.loss)), loss.cpu(), rtol=NEAR, atol=0) else ["the loss"]
    holders = Counter(name for stage in pipe.stages for name in stage.parameters)
    alone = exact and pipe.schedule.placement.pipelines == 1
    names, compared = dict(reference.named_parameters()), 0
    for name, parameter in pipe.named_parameters():
        mine, other = parameter.grad, names[name].grad
        if mine is None or other is None:
            found += [f"the gradient of {name}"] if mine is not other else []
            continue
        compared += 1
        most = 0.0 if alone and holders[name] == 1 else NEAR * float(other.abs().max())
        if not float((mine - other).abs().max()) <= most:
            found.append(f"the gradient of {name}")
    return found if compared else [*found, "no gradient was compared"]


def impossible_messages(timeline: Timeline, slack_seconds: float = 0.0) -> list[str]:
    """Messages that arrive before they could leave, or after what needs them has started.

    `slack_seconds`: by how much clocks of two devices may differ.
    """
    spans = {span.action: span for span in timeline}
    users = {Op.RECV_F: (Op.F,), Op.RECV_B: (Op.B, Op.I)}
    found = []
    for action, span in spans.items():
        if action.op.is_send:
            arrived = spans[action.other_end].end_seconds
            if arrived < span.start_seconds - slack_seconds:
                found.append(f"{action} arrives {arrived}, leaves {span.start_seconds}")
        for op in users.get(action.op, ()):
            user = spans.get(Action(action.stage, op, action.microbatch))
            if user is not None and user.start_seconds < span.end_seconds:
                found.append(f"{user.action} starts {user.start_seconds}, {action} ends {span.end_seconds}")
    return found
