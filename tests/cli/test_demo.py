"""`penstock demo`: it proves, trains, writes readable files, refuses bad options, and leaves no process behind."""

import io
import json
import signal
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from penstock.cli import app
from penstock.demo import data, show
from penstock.demo.model import GPT, loss
from penstock.demo.settings import CONTEXT, LAYERS, PARAMETERS, ROWS
from penstock.demo.train import main
from penstock.schedule import generate
from penstock.simulate import simulate
from penstock.simulate.costs import StageCost
from penstock.trace.runs import read_run
from scaffolding.patient import PENSTOCK, TEST_SECONDS, finished
from scaffolding.ranks import Ranks


def rank_of_demo(rank: int, arguments: list[str]) -> str:
    """What a rank of the demo prints, but for its start. A batch has a quarter of its rows, which takes less long."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
        patch.setattr("penstock.demo.train.ROWS", ROWS // 4)
        patch.setattr("penstock.demo.train.HELD_OUT_BATCHES", 1)
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", "2")
        main(arguments)
    return said.getvalue()


@pytest.fixture
def in_pool(ranks2: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's two ranks are the pool's."""

    def launch(arguments: list[str], ranks: int) -> int:
        assert (arguments[:2], ranks) == (["-m", "penstock.demo"], 2)
        print(*ranks2.run(rank_of_demo, arguments[2:]), sep="")
        return 0

    monkeypatch.setattr("penstock.cli.demo.launch", launch)


@pytest.mark.distributed
@pytest.mark.usefixtures("in_pool")
def test_demo_proves_trains_and_leaves_a_trace_and_a_log(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["demo", "--ranks", "2", "--steps", "3", "--microbatches", "4", "--out", str(out)])
    assert done.exit_code == 0, done.output
    said = done.stdout
    lines = said.splitlines()
    assert any("of 52 gradients are bitwise identical" in line for line in lines)
    assert all(len(line) <= 80 for line in lines if str(out) not in line)
    assert not any(line != line.rstrip() for line in lines)
    assert "\x1b" not in said
    for label in ("loss", "bubble", "speed", "memory", "trace", "log", "run"):
        assert any(line.startswith(f"  {label} ") for line in lines), label

    steps = read_run(out).steps()
    assert [step.step for step in steps] == [1, 2, 3]
    assert steps[2].loss < steps[0].loss < 6

    events = json.loads((out / show.TIMELINE).read_text())["traceEvents"]
    ran = {(event["pid"], event["args"].get("action")) for event in events if event["ph"] == "X"}
    assert {(rank, f"{rank}{op}{k}") for rank in range(2) for op in "FB" for k in range(4)} <= ran


@pytest.mark.long  # the ranks of a pool are quicker
@pytest.mark.distributed
@pytest.mark.timeout(TEST_SECONDS)
def test_demo_launches_its_ranks(tmp_path: Path) -> None:
    done = finished(*PENSTOCK, "demo", "--ranks", "2", "--steps", "3", "--microbatches", "4", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(read_run(tmp_path / "runs" / "demo").steps()) == 3


@pytest.mark.long  # its step and its screen are those of two ranks, above
def test_one_rank_needs_no_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["demo", "--ranks", "1", "--steps", "1", "--microbatches", "2"])
    assert done.exit_code == 0, done.output
    assert "52 of 52 gradients are bitwise identical" in done.stdout
    assert len(read_run(tmp_path / "runs" / "demo").steps()) == 1


def test_ctrl_c_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What becomes of the processes is shown by test_run.py."""

    def launch(*_: object) -> int:
        raise KeyboardInterrupt(signal.SIGINT)

    monkeypatch.setattr("penstock.cli.demo.launch", launch)
    done = CliRunner().invoke(app, ["demo", "--ranks", "2", "--out", str(tmp_path)])
    assert done.exit_code == 128 + signal.SIGINT
    assert done.stderr.splitlines() == ["penstock: stopped by Ctrl-C; no process is left running"]


def test_model_is_as_it_was_announced() -> None:
    torch.manual_seed(0)
    model = GPT(layers=LAYERS, context=CONTEXT)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS
    assert model.head.weight is model.embedding.weight
    tokens, targets = torch.randint(0, 256, (2, 4, CONTEXT))
    assert 5.0 < float(loss(model.eval()(tokens), targets).detach()) < 7.0  # it knows nothing yet; guessing is 5.55


def test_batches_are_the_same_everywhere_and_differ_from_step_to_step() -> None:
    corpus, state = data.standard_library(), torch.random.get_rng_state()
    inputs, targets = corpus.batch(3, 4, 50)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(inputs, data.standard_library().batch(3, 4, 50)[0])
    assert not torch.equal(inputs, corpus.batch(4, 4, 50)[0])


def test_held_out_text_is_of_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        (tmp_path / f"m{number:02}.py").write_bytes(bytes([number]) * 100)
    for left_out in ("test/x.py", "package/deeper/x.py", "x.txt"):
        (tmp_path / left_out).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / left_out).write_bytes(bytes([99]) * 100)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    corpus = data.standard_library(max_bytes=3550)
    assert corpus.held_out.tolist() == [number for number in (0, 10, 20, 30) for _ in range(100)]
    assert corpus.train.tolist() == [n for n in range(36) if n % 10 for _ in range(50 if n == 35 else 100)]
    inputs, targets = corpus.held_out_batches(2, 3, 20)[1]
    assert inputs[0].tolist() == corpus.held_out[189:209].tolist()  # windows lie 380 // 6 = 63 bytes apart
    assert targets.shape == inputs.shape == (3, 20)


def test_bubble_of_a_run_that_went_as_simulated() -> None:
    order = generate("1f1b", 2, 8)
    costs = [StageCost(1.0, 2.0, 0.0), StageCost(1.5, 2.5, 0.0)]
    ran = simulate(order, costs)
    bubble = show.compare(order, [ran])
    assert show.stage_costs(order, [ran]) == pytest.approx(costs)
    assert bubble.measured == pytest.approx(bubble.simulated)
    assert bubble.textbook == pytest.approx(1 / 9)
    assert bubble.formula == "(p - 1)/(m + p - 1)"
    assert bubble.simulated > bubble.textbook
