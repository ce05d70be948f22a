"""docs/extending.md, followed literally: its code runs in order, prints what it says, and a step has its frames."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import ROOT, Block, blocks, follow
from torch import nn
from torch.nn.functional import mse_loss
from typer.testing import CliRunner

import penstock
from penstock.cli import app
from penstock.schedule import check, generate, peak_activations, schedule_specs
from penstock.simulate import StageCost, simulate

PAGE = ROOT / "docs" / "extending.md"
BLOCKS = [block for block in blocks() if block.path == PAGE]
SOURCE = ROOT / "src" / "penstock"


def section(title: str) -> list[Block]:
    """The blocks under a heading."""
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(f"\n## {title}\n") + 1
    end = text.find("\n## ", start)
    first, last = text[:start].count("\n"), text[: end if end > 0 else None].count("\n")
    return [block for block in BLOCKS if first < block.line <= last]


@pytest.fixture
def names() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    return {"model": model, "x": torch.randn(8, 6), "y": torch.randn(8, 6), "loss_fn": mse_loss}


def test_a_schedule_is_added(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    *story, registered = section("Add a schedule")
    follow(story, names)
    registry = schedule_specs.__globals__  # the entry stands in that module
    entry = eval(registered.text, {**registry, "in_groups": names["in_groups"]})
    for table in ("_GENERATORS", "_BY_NAME"):
        monkeypatch.setitem(registry[table], entry.name, entry)
    p, m = 4, 8
    schedule = generate("in-groups", p, m)
    assert check(schedule) == []
    numbers = {"p": p, "m": m, "v": 1, "r": 0, "F": 2.0, "I": 1.0, "W": 3.0}
    assert max(peak_activations(schedule)) == eval(entry.memory, numbers | {"min": min})
    timeline = simulate(schedule, StageCost(2.0, 1.0, 3.0))
    assert timeline.waited_seconds(0) == eval(entry.idle, numbers)
    assert simulate(schedule, StageCost(1.0, 1.0, 1.0)).bubble_rate == pytest.approx(eval(entry.bubble, numbers))
    with pytest.raises(penstock.ArgumentError, match="in-groups works with exactly 1 stage per rank"):
        generate("in-groups", p, m, stages_per_rank=2)
    listed = CliRunner().invoke(app, ["schedules"])
    assert listed.exit_code == 0
    assert "in-groups" in listed.output


def test_a_transport_is_added(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")  # type: ignore[no-untyped-call]
    follow(section("Add a transport"), names)


def test_a_feature_and_recomputations_are_added(names: dict[str, Any]) -> None:
    follow(section("Add a recomputation, or another feature"), names)
    counts, odd, elsewhere = names["Counts"], names["odd"], names["NotTheLastStage"].of
    model = names["model"]
    given: dict[str, Any] = {"ranks": 2, "microbatches": 4, "schedule": "gpipe"}
    given["features"] = [counts.of]
    for kind, forwards in (("never", (4, 4)), (odd, (6, 6)), (elsewhere, (8, 4)), ({1: elsewhere, 0: odd}, (6, 4))):
        with penstock.pipeline(model, (names["x"],), loss_fn=mse_loss, recompute=kind, **given) as pipe:
            counts.counts.clear()
            pipe.step(names["x"], target=names["y"])
        assert counts.counts == {(0, "F"): forwards[0], (1, "F"): forwards[1], (0, "B"): 4, (1, "B"): 4}
        report = penstock.verify(model, (names["x"],), target=names["y"], loss_fn=mse_loss, recompute=kind, **given)
        assert report.ok, kind


def test_its_tables_have_every_method_and_every_hook() -> None:
    from penstock.runtime.features.feature import Feature
    from penstock.runtime.transport.protocol import POINT_TO_POINT

    page = PAGE.read_text(encoding="utf-8")
    hooks = [name for name in vars(Feature) if not name.startswith("_")]
    rows = re.findall(r"^\| `.*?` \|", page, re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)\(", row)) == sorted([*POINT_TO_POINT, *hooks])


def test_a_step_has_these_frames_which_docs_design_draws_too(names: dict[str, Any]) -> None:
    (drawn,) = section("How a step runs")
    calls, files = _drawn(drawn.text)
    assert len(calls) == 6
    assert _drawn((ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("```\n")[1])[0] == calls
    taken: list[tuple[str, ...]] = []
    found: dict[str, str] = {}

    def note(frame: Any, event: str, _: Any) -> None:
        name = _name_of(frame)
        if event == "call" and name in files:
            found[name] = str(Path(frame.f_code.co_filename).relative_to(SOURCE))
            taken.append(tuple(_frames(frame)))

    x = names["x"]
    with penstock.pipeline(names["model"], (x,), ranks=2, microbatches=2, loss_fn=mse_loss) as pipe:
        sys.setprofile(note)
        try:
            pipe.step(x, target=names["y"])
        finally:
            sys.setprofile(None)
    assert found == files
    each = {
        "await_values": 6,
        "run_forward": 4,
    }  # the last stage's backwards wait for nothing
    assert {call: taken.count(call) for call in taken} == {call: each.get(call[-1], 1) for call in calls}


def _drawn(text: str) -> tuple[list[tuple[str, ...]], dict[str, str]]:
    """Each call of a diagram, as the functions from the outermost inwards, and what is written beside each function."""
    calls: list[tuple[str, ...]] = []
    beside: dict[str, str] = {}
    for line in text.splitlines():
        name, said = line.split(maxsplit=1)
        depth = (len(line) - len(line.lstrip())) // 2
        calls.append((*(calls[-1][:depth] if calls else ()), name))
        beside[name] = said
    return calls, beside


def _name_of(frame: Any) -> str:
    """What a function is called, within the one that makes it if it is a closure."""
    return str(frame.f_code.co_qualname).rpartition("<locals>.")[2]


def _frames(frame: Any) -> Iterator[str]:
    """The functions that are being called, from `Pipeline.step` inwards."""
    names: list[str] = []
    while frame is not None:
        names.append(_name_of(frame))
        frame = frame.f_back
    names.reverse()
    yield from names[names.index("Pipeline.step") :]


def test_its_files_and_functions_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    files = {path for path in re.findall(r"[\w/]+\.py", text) if "/" in path}
    assert len(files) > 12
    assert not [path for path in files if not any((base / path).exists() for base in (SOURCE, ROOT))]
    code = "".join((SOURCE / path).read_text() for path in files if (SOURCE / path).exists())
    named = re.findall(r"`(Pipeline|Steps|Engine|BoundStage|BoundSchedules|Agreement)\.(\w+)`", text)
    assert {kind for kind, _ in named} == {"Pipeline", "Steps", "Engine", "BoundStage", "BoundSchedules", "Agreement"}
    for kind, method in named:
        assert re.search(rf"def {method}\(", code), (kind, method)
