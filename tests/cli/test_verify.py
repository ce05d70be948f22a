"""`penstock verify`: 0 only if all is equal, 1 if something differs, 2 for bad input; the last line says what."""

import json
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from command_line import penstock
from rich.console import Console

from penstock.cli import _schedule_options
from penstock.cli.verify import rank_main, show
from penstock.schedule import schedule_spec
from penstock.verification.comparison import Comparison, VerificationReport
from scaffolding.patient import finished
from scaffolding.ranks import Ranks
from scaffolding.tcp import EXAMPLE

CASES = '''
import itertools, os, sys
import torch
from torch import nn

loss_of = nn.functional.cross_entropy

def mlp(layers=3):
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8)) for _ in range(layers)]
    return nn.Sequential(nn.Linear(5, 8), *blocks, nn.Linear(8, 4))

def good():
    print("a line that is no JSON")
    return mlp(), (torch.randn(12, 5),), torch.randint(4, (12,)), loss_of

def uneven():
    widths = (5, 400, 8, 8, 4)
    layers = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths)))
    return layers, (torch.randn(12, 5),), torch.randint(4, (12,)), loss_of

def half():
    layers = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))).bfloat16()
    return layers, (torch.randn(12, 5).bfloat16(),), torch.randint(5, (12,)), loss_of

def odd():
    return mlp(), (torch.randn(11, 5),), torch.randint(4, (11,)), loss_of

calls = itertools.count(1)

def drifting():
    """Its loss grows with every call, so that the pipeline's and the reference's are not the same."""
    return mlp(), (torch.randn(12, 5),), torch.randint(4, (12,)), lambda y, t: loss_of(y, t) * next(calls)

def masked():
    x = torch.randint(9, (12, 6))
    target = x.masked_fill(torch.arange(6) >= torch.arange(12).unsqueeze(1) % 5 + 1, -100)
    loss = lambda y, t: loss_of(y.flatten(0, 1), t.flatten())
    return nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9)), (x,), target, loss

def weighted():
    return *masked(), {"reduction": lambda target: (target != -100).sum()}

class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 4)
    def forward(self, x, *, scale, labels):
        logits = self.head(torch.relu(self.body(x))) * scale
        return {"loss": loss_of(logits, labels), "logits": logits}

def own_loss():
    return OwnLoss(), ((torch.randn(12, 5),), {"scale": 2.0, "labels": torch.randint(4, (12,))}), None, None

def summed():
    return mlp(), (torch.randn(12, 5),), torch.randint(4, (12,)), nn.CrossEntropyLoss(reduction="sum")

def failing_loss():
    def loss(output, target):
        raise ZeroDivisionError("no\\n  such loss")
    return mlp(), (torch.randn(12, 5),), torch.randint(4, (12,)), loss

def raises():
    raise ValueError("boom")

class Ends(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.body, self.head, self.end = nn.Linear(5, 8), nn.Linear(8, 4), end
    def forward(self, x):
        self.end(0)
        return self.head(self.body(x))

def exits_in_forward(): return Ends(sys.exit), (torch.randn(12, 5),), torch.randint(4, (12,)), loss_of
def raises_much(): raise ValueError("\\x1b[31m" + "y" * 10_000)

def raises_on_rank_1():
    return good() if os.environ["RANK"] == "0" else raises()

def no_model(): return "x", (), None, None
nothing = None
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "cases.py").write_text(CASES)
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("cases", "_target_cases", "_target_exits"):
        sys.modules.pop(name, None)


verify = partial(penstock, "verify")


def rank_of_pool(rank: int, folder: str) -> int:
    """What a rank of the command does, but for its start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        return rank_main(Path(folder))


def use_pool(pool: Ranks, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's ranks are the pool's."""

    def launch(arguments: list[str], ranks: int, threads: int | None) -> int:
        *module, folder = arguments
        assert (module, ranks, threads) == (["-m", "penstock.cli.verify"], count, None)
        return max(pool.run(rank_of_pool, folder))

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys.modules["penstock.cli.verify"], "launch", launch)


@pytest.fixture
def in_pool(ranks2: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pool(ranks2, 2, monkeypatch)


def last_line(text: str) -> str:
    return text.splitlines()[-1]


@pytest.mark.parametrize("target", ["cases:good", "cases.py:own_loss"])
def test_equal_model_exits_0(target: str) -> None:
    done = verify(target, "--ranks", "2", "--microbatches", "4", "--all")
    assert done.exit_code == 0, done.output
    assert "gradients are bitwise identical" in last_line(done.stdout)
    assert "different" not in done.stdout
    assert all(line == line.rstrip() for line in done.stdout.splitlines())


def test_json_is_the_only_thing_on_stdout() -> None:
    done = verify("cases.py:good", "--json", "--ranks", "3", "--microbatches", "3", "--schedule", "gpipe")
    report = json.loads(done.stdout)
    assert done.exit_code == 0
    assert (report["ok"], report["ranks"], report["stages"], report["microbatches"]) == (True, 3, 3, 3)
    assert (report["schedule"], report["exact"]) == ("gpipe", True)
    kinds = [row["kind"] for row in report["rows"]]
    assert {kind: kinds.count(kind) for kind in kinds} == {"output": 6, "loss": 2, "gradient": 16, "buffer": 9}
    assert {row["verdict"] for row in report["rows"]} == {"equal"}


def test_recompute_and_the_dtype_of_gradients() -> None:
    options = ("cases.py:good", "--microbatches", "3", "--schedule", "gpipe", "--recompute")
    done = verify(*options, "except_last")
    assert done.exit_code == 0, done.stderr
    assert "note: recompute='except_last': 2 of 3 forwards run again in backward on stages 0-1\n" in done.stdout
    wrong = verify("cases.py:good", "--ranks", "2", "--microbatches", "4", "--recompute", "sometimes")
    assert wrong.exit_code == 2
    assert "--recompute sometimes: expected 'never'" in last_line(wrong.stderr)
    options = ("cases.py:half", "--ranks", "2", "--microbatches", "4", "--exact")
    assert verify(*options, "--grad-dtype", "float32").exit_code == 0
    wrong = verify(*options, "--grad-dtype", "bfloat16")
    assert "--grad-dtype bfloat16: expected one of float32, float64" in wrong.stderr


def test_difference_exits_1_and_the_last_line_says_where() -> None:
    done = verify("cases.py:drifting", "--json", "--ranks", "2", "--microbatches", "4")
    report = json.loads(done.stdout)
    assert done.exit_code == 1
    assert report["ok"] is False
    assert last_line(done.stderr) == f"penstock: error: {report['summary']}"
    (weight,) = (row for row in report["rows"] if (row["kind"], row["name"]) == ("gradient", "4.bias"))
    assert (weight["verdict"], weight["step"]) == ("different", 1), "the first step of two"
    verdicts = {(row["kind"], row["name"]): row["verdict"] for row in report["rows"]}
    assert verdicts["loss", "loss"] == verdicts["gradient", "0.weight"] == "different"
    assert verdicts["output", "0 of microbatch 3"] == "equal"


def test_chunks_and_cuts_reach_the_pipeline() -> None:
    options = ["--json", "--ranks", "2", "--stages-per-rank", "2", "--schedule", "gpipe", "--microbatches", "2"]
    report = json.loads(verify("cases.py:good", *options, "--cuts", "1, 2,4").stdout)
    stage_of = {row["name"]: row["stages"] for row in report["rows"] if row["kind"] == "gradient"}
    assert report["stages"] == 4
    assert [stage_of[f"{n}.weight"] for n in ("0", "1.0", "3.0", "4")] == [[0], [1], [2], [3]]
    assert verify("cases.py:good", "--schedule", "zb-v", "--stages-per-rank", "1").exit_code == 2


def test_reduction_reaches_the_pipeline(recwarn: pytest.WarningsRecorder) -> None:
    """The loss of a batch is then the sum of its microbatches' losses, not their mean."""
    losses = []
    for reduction in ("sum", "mean"):
        done = verify("cases.py:summed", "--json", "--microbatches", "4", "--reduction", reduction)
        assert done.exit_code == 0, done.output
        losses.append(json.loads(done.stdout)["loss"])
    assert losses[0] == pytest.approx(4 * losses[1])
    (warning,) = [each for each in recwarn if "loss_fn sums over its microbatch" in str(each.message)]
    assert warning.filename == "penstock"  # not a file of typer's


def test_a_target_may_bring_its_reduction(recwarn: pytest.WarningsRecorder) -> None:
    """The one that a warning names: then the microbatches' losses make the batch's."""
    assert "pass reduction=lambda" in verify("cases.py:masked").output
    assert "targets of -100" in str(recwarn.pop(UserWarning).message)
    assert "not a mean over rows" not in verify("cases.py:weighted").output
    assert not recwarn.list
    assert "sets a reduction" in verify("cases.py:weighted", "--reduction", "sum").output


def test_long_table_is_folded_unless_all_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"{block}.{part}.{name}" for block in range(12) for part in (0, 2) for name in ("weight", "bias")]
    rows = tuple(Comparison("gradient", name, (0,), "equal") for name in names[4:])
    close = (Comparison("gradient", name, (0,), "close", size, 1, "ties") for size, name in enumerate(names[:4]))
    rows = (*close, *rows)
    report = VerificationReport(rows, "1f1b", 1, 1, 4, 1.0, True).to_dict()
    lines = []
    for show_all in (False, True):
        show(report, Console(width=80), show_all=show_all)
        lines.append([line.split()[:6] for line in capsys.readouterr().out.splitlines()])
    assert ["gradient", "1.*", "(4)", "0", "equal", "0"] in lines[0]
    assert ["gradient", "0.*", "(4)", "0", "close", "3"] in lines[0], "the largest difference"
    assert [line[1] for line in lines[1] if line[:1] == ["gradient"]] == names


def test_a_script_without_make_is_not_run(folder: Path) -> None:
    (folder / "trains.py").write_text("open('trained', 'w')\n")
    assert "it has no function make" in verify("trains.py").stderr
    assert not (folder / "trained").exists()


BAD = [
    ("cases.py", "TARGET 'cases.py': it has no function make; add one that returns a case, such as 'def make(): "),
    ("missing.py:good", "there is no file 'missing.py'"),
    ("cases.py:goood", "cases.py has no function 'goood'; it has "),
    ("cases.py:raises", "raised ValueError: boom (cases.py:"),
    ("cases.py:no_model", "returned a str as the model"),
    ("cases.py:exits_in_forward", "the model or the loss of cases.py:exits_in_forward raised SystemExit: 0 (cases.py:"),
    ("cases.py:raises_much", "TARGET 'cases.py:raises_much' raised ValueError: \N{REPLACEMENT CHARACTER}[31myyyyy"),
    ("exits.py:good", "TARGET 'exits.py:good' raised SystemExit: 0 (exits.py:"),
    ("cases.py:failing_loss", "raised ZeroDivisionError: no such loss (cases.py:"),
]


@pytest.mark.parametrize(("target", "says"), BAD)
def test_bad_target_exits_2_and_says_why(target: str, says: str) -> None:
    done = verify(target, "--microbatches", "2")
    assert done.exit_code == 2
    assert last_line(done.stderr).startswith("penstock: error: ")
    assert says in last_line(done.stderr)
    assert done.stdout == ""


@pytest.mark.parametrize("verb", ["inspect", "profile"])
def test_no_command_ends_well_when_its_target_ends_the_process(verb: str) -> None:
    done = penstock(verb, "cases.py:exits_in_forward")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "raised SystemExit: 0 (cases.py:" in last_line(done.stderr)


def test_every_process_has_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(arguments: list[str], ranks: int, threads: int | None) -> int:
        (Path(arguments[-1]) / "rank-0.json").write_text('{"report": {"ok": true}}')
        return 0

    monkeypatch.setattr(sys.modules["penstock.cli.verify"], "launch", launch)
    done = verify("cases.py:good", "--transport", "distributed")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "ended with exit status 0, and 1 of 2 compared anything" in last_line(done.stderr)


OPTIONS = ("cases.py:good", "--json", "--ranks", "2", "--microbatches", "3")


@pytest.mark.parametrize("processes", ["of a pool", pytest.param("launched", marks=pytest.mark.long)])
@pytest.mark.distributed
@pytest.mark.usefixtures("one_thread")
def test_processes_talk_over_a_transport_of_ones_own(
    folder: Path, processes: str, request: pytest.FixtureRequest
) -> None:
    if processes == "of a pool":
        request.getfixturevalue("in_pool")
    shutil.copy(EXAMPLE, folder / "sockets.py")
    with (folder / "sockets.py").open("a") as file:
        file.write(
            "\n\ndef make(endpoint):\n    open(f'made.{endpoint.rank}', 'w').close()\n    return Sockets(endpoint)\n"
        )
    done = verify(*OPTIONS, "--transport", "sockets.py:make")
    assert done.exit_code == 0, done.stderr
    assert sorted(path.name for path in folder.glob("made.*")) == ["made.0", "made.1"]
    assert json.loads(done.stdout) == json.loads(verify(*OPTIONS).stdout)


@pytest.mark.long  # a rank that raises: test_run_crashes.py; what agents import: distributed/launch/test_named_ends.py
@pytest.mark.distributed
def test_error_of_one_process_is_the_last_line(folder: Path) -> None:
    for name in ("random", "socket", "tempfile", "secrets"):
        (folder / f"{name}.py").write_text("print('code of the current folder')")
    arguments = ("cases.py:raises_on_rank_1", "--ranks", "2", "--transport", "distributed")
    done = finished(
        sys.executable, "-P", "-c", "from penstock.cli import main; main()", "verify", *arguments, folder=folder
    )
    assert done.returncode == 2
    assert "TARGET 'cases.py:raises_on_rank_1' raised ValueError: boom (cases.py:" in last_line(done.stderr)
    assert done.stderr.count("boom") == 1
    assert done.stdout == "", "neither the agent nor a rank imports from the current folder"


@pytest.mark.distributed
def test_replicas_take_equal_parts_of_the_batch(ranks3: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pool(ranks3, 3, monkeypatch)
    done = verify("cases.py:uneven", "--ranks", "1", "--replicas", "3", "--microbatches", "3", "--json")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["ok"], report["replicas"], report["ranks"], report["microbatches"]) == (True, 3, 1, 3)
    parts = [row["name"] for row in report["rows"] if row["kind"] == "output"]
    trained, evaluated = ([f"0 of microbatch {k}{label}" for k in range(9)] for label in ("", " in evaluation"))
    assert parts == trained + evaluated, "all replicas' outputs are compared"
    odd = verify("cases.py:odd", "--ranks", "1", "--replicas", "3")
    assert "the batch of 11 samples has no 3 equal parts" in odd.stderr


def test_balance_is_what_the_stages_share() -> None:
    def cut(balance: str) -> list[int]:
        report = json.loads(verify("cases.py:uneven", "--json", "--microbatches", "2", "--balance", balance).stdout)
        return [row["stages"][0] for row in report["rows"] if row["kind"] == "gradient"]

    assert cut("layers") == [0, 0, 0, 0, 1, 1, 1, 1]
    assert cut("parameters") == [0, 0, 1, 1, 1, 1, 1, 1]


def test_all_schedules_are_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("gpipe", "zb-h1", "chimera")  # the last does not take three ranks
    monkeypatch.setattr(_schedule_options, "schedule_specs", lambda: [schedule_spec(name) for name in names])
    given = ("--schedule", "all", "--ranks", "3", "--microbatches", "4", "--no-full-batch")
    result = verify("cases.py:good", *given)
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines() if "gradients are bitwise identical" in line] == [
        "gpipe",
        "zb-h1",
    ]
    assert "chimera: not verified: " in result.stderr
    named = verify("cases.py:good", "--schedule", "gpipe, zb-h1", *given[2:], "--json")
    assert [report["schedule"] for report in json.loads(named.stdout)] == ["gpipe", "zb-h1"]
    wrong = verify("cases.py:drifting", "--schedule", "gpipe,zb-h1", *given[2:])
    assert (wrong.exit_code, "2 of 2 schedules did not pass: gpipe, zb-h1" in wrong.stderr) == (1, True)


def test_a_named_schedule_that_was_not_verified_is_an_error(folder: Path) -> None:
    """It needs more stages than the model has layers."""
    (folder / "two.py").write_text(
        "import torch\n\n\ndef make():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))\n"
        "    return model, (torch.ones(8, 4),), None, lambda y, target: y.sum()\n"
    )
    named = verify("two.py", "--schedule", "1f1b,interleaved-1f1b", "--ranks", "2", "--no-full-batch", "--json")
    assert named.exit_code == 2
    assert [report["schedule"] for report in json.loads(named.stdout)] == ["1f1b"]
    assert "not verified: interleaved-1f1b; see the lines above" in named.stderr


def test_what_no_schedule_takes_is_said_at_once(folder: Path) -> None:
    (folder / "selects.py").write_text(
        "import torch\n\n\nclass Selects(torch.nn.Sequential):\n    def forward(self, x):\n"
        "        return super().forward(x[x[:, 0] > 0])\n\n\ndef make():\n"
        "    model = Selects(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))\n"
        "    return model, (torch.ones(8, 4),), None, lambda y, target: y.sum()\n"
    )
    result = verify("selects.py", "--schedule", "all", "--ranks", "2")
    assert result.exit_code == 2
    assert result.stderr.count("depends on the values of a tensor") == 2, "with the first schedule, and at the end"
