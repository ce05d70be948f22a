"""`penstock fabric`: what is wrong is said in one line before anything is made; its verbs work on real runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from command_line import as_json, output, penstock, refusal

from network.fabric.drawn_runs import run_of
from network.fabric.made_runs import write_run
from penstock._base.errors import FabricError
from penstock.cli._traffic import TrafficOptions
from penstock.cli.fabric import _progress
from penstock.network import machines, namespaces, shapers
from penstock.network.fabric.emulation import coordinate
from penstock.network.fabric.emulation.spec import Spec
from penstock.network.fabric.samples import RUN, SAMPLES, SPEC, Run
from penstock.network.fabric.views import page
from penstock.network.fabric.workload import mlp
from penstock.network.namespaces import why_not

NO_ROOT = "emulated hosts need root; this is user 1000"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command is run; no torchrun has started it, and the page is drawn of the module's runs only."""
    monkeypatch.setattr(page, "write_page", lambda *given: None)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def nothing_is_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither hosts nor files."""
    monkeypatch.setattr(machines.Machines, "__enter__", lambda self: pytest.fail("hosts are made"))
    monkeypatch.setattr(coordinate, "emulate", lambda *given: pytest.fail("hosts are started"))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    yield
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


SIZES = ("--sizes", "4000")
TRAINING = Path(__file__).parents[2] / "benchmarks/fabric/mlp_training.py"
WRONG = {
    "--sizes 0": "'0' is 0 bytes: expected an integer number of bytes >= 1",
    "--sizes 2600,6": "a multiple of the element size, 4 bytes",
    "probe": "penstock fabric has no command 'probe': it has show, compare, predict, clean",
    "sho": "did you mean 'show'?",
    "--sizes 999TiB": "GiB of memory on 4 hosts, but this machine has",
    "--sizes 4parsec": "'4parsec' is not a size: pass bytes, or a number with KiB",
    "--sizes 4 --algorithm rong": "'rong' is not an algorithm for all_reduce: did you mean 'ring'?",
    "--preset mpl": "--preset mpl: expected one of mlp",
    "--sizes 4 --hosts 1": "--hosts 1: a network has at least 2",
    "--sizes 4 --iterations 0": "--iterations 0: expected an integer >= 1",
    "--preset mlp --reduce-op max": "--reduce-op requires --sizes or --from and --to, but --preset was passed; omit it",
    "--sizes 4 --reduce-op avg --algorithm engine": "gloo cannot average",
    "--sizes 4 --uneven 1,2,3,4": "--uneven requires --collective all_to_all",
    "--sizes 4 --collective all_to_all --uneven 1,2": "--uneven 1,2: expected 4 integers, one per host",
    "--sizes 4 --backend glue": "backend 'glue' is not available: this torch has gloo",
    "--sizes 4 --stall-timeout 0": "--stall-timeout 0: expected a time above 0",
    "--trials 5": "expected one kind of traffic, got nothing; pass one of --preset, --model",
    "--model m:f --ranks 0": "--ranks 0: expected an integer >= 1",
    "--model m:f --cuts a": "--cuts applies to a pipeline's stages, but --ranks is 1",
    "--sizes 4 --cuts a": "--cuts requires --model, but --sizes was passed",
    "--sizes 4 --trials 3 --epochs 2": "pass --trials, or both --batches and --epochs",
    "--from 8KiB": "a sweep needs both --from and --to",
    "--sizes 4 --collective all_to_all --uneven 1,2,3,4 --algorithm bruck": "pass one of pairwise, direct, engine",
    "--replay nowhere": "nowhere holds no run of penstock fabric: there is no such folder. Pass a folder",
    "--model m:f --hosts 4 --ranks 3": "--hosts 4 is not a multiple of --ranks 3",
    "--model m:f --compute fast": "--compute fast: pass none, measure or a number of seconds",
    "--sizes 4 --out taken": "--out taken already contains a run",
    "--sizes 4 --out samples": "--out samples already contains a run",
    "show begun": "the run in begun ended before its hosts had joined, so it has no samples",
    "--sizes 4 --out taken/run.json": "--out taken/run.json: ",
    "--hosts 3 show taken": "--hosts comes before show: pass show's own options after it",
    "show nowhere": "nowhere holds no run of penstock fabric: there is no such folder. Pass a folder",
    "show empty": "empty holds no run of penstock fabric: it has no run.json. Pass a folder that a run was written to",
    "show taken": "taken holds no run of penstock fabric: run.json: workload is missing",
}


@pytest.fixture
def taken(folder: Path) -> None:
    """Folders with something of a run, and an empty one."""
    (folder / "taken").mkdir()
    (folder / "taken" / RUN).write_text("{}")
    for name, file in (("samples", SAMPLES), ("begun", SPEC)):
        (folder / name).mkdir()
        (folder / name / file).write_text("{}")
    (folder / "empty").mkdir()


@pytest.mark.usefixtures("taken", "nothing_is_made")
@pytest.mark.parametrize("command", WRONG)
def test_what_is_wrong_is_said_before_anything_is_made(command: str) -> None:
    assert WRONG[command] in refusal("fabric", *command.split())
    if "--out" in command:
        assert WRONG[command] in refusal("fabric", *command.split(), "--dry-run")


@pytest.mark.skipif((why_not() or shapers.why_no_switch()) is not None, reason="needs a network of its own")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--scenario", "none.toml"], "--scenario needs --link"),
        (["--link", "1mbit", "--link-for", "1=1mbit", "--link-for", "1=2mbit"], "host 1 is given twice"),
        (["--link", "1mbit", "--scenario", "none.toml"], "No such file"),
        (["--link", "1mbit", "--background", "1mbit to 7"], "host 7 does not exist"),
        (["--link", "1mbit", "--slow", "7=10%"], "host 7 does not exist: the hosts are 0 to"),
        (["--link", "100gbit delay 1ms"], "a rate of"),
    ],
)
def test_a_network_that_cannot_be_is_refused_before_anything_is_made(
    folder: Path, options: list[str], said: str
) -> None:
    done = penstock("fabric", "--hosts", "2", "--out", "run", "--sizes", "4", *options)
    assert done.exit_code == 2
    assert said in " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in done.stderr
    assert not (folder / "run" / "run.json").exists()


@pytest.mark.usefixtures("nothing_is_made")
def test_a_link_that_cannot_be_read_is_pointed_to() -> None:
    text, place = "100mbit brust 16kb", "brust"
    done = penstock("fabric", *SIZES, "--link", text)
    assert (done.exit_code, done.stdout) == (2, "")
    said, shown, marked = done.stderr.splitlines()
    assert said.startswith(f"penstock: error: the link, at position {text.index(place) + 1}: ")
    assert shown.strip() == text
    assert shown[marked.index("^") : marked.rindex("^") + 1] == place


@pytest.mark.usefixtures("nothing_is_made")
def test_a_dry_run_shows_what_would_be_sent_and_sends_nothing(folder: Path) -> None:
    asked = ("fabric", "--model", TARGET, "--hosts", "4", "--ranks", "2", "--microbatches", "8", "--dry-run")
    found = json.loads(penstock(*asked, "--json").stdout)["transfers"]
    sends = [row for row in found if row["collective"] == "send"]
    assert [(row["name"], row["kind"], row["times"]) for row in sends] == [
        ("stage 0->1", "activation", 16),
        ("stage 1->0", "activation gradient", 16),
    ], "one row a cut and direction, of 8 microbatches on 2 replicas"
    assert {row["collective"] for row in found} == {"send", "all_reduce"}
    whole = sum(row["bytes"] * row["times"] for row in found)
    shown = penstock(*asked, columns=36)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert f"{whole:,}" in shown.stdout, "numbers are whole, whatever the width"
    assert "activation gradient" in shown.stdout
    assert not (folder / "runs").exists()
    tensor = json.loads(penstock("fabric", "--model", TARGET, "--traffic", "tensor", "--dry-run", "--json").stdout)
    assert {row["collective"] for row in tensor["transfers"]} == {"all_reduce", "all_gather"}


@pytest.mark.usefixtures("nothing_is_made")
def test_a_dry_run_asks_what_shapes_the_links(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (namespaces, machines):
        monkeypatch.setattr(module, "why_not", lambda: None)
    asked = ("fabric", *SIZES, "--link", "100mbit delay 5ms", "--shaper", "tbf", "--dry-run")
    assert refusal(*asked).startswith("tbf limits only the rate: 100mbit delay 5ms")
    assert penstock("fabric", *SIZES, "--link", "100mbit", "--shaper", "tbf", "--dry-run").exit_code == 0
    for module in (namespaces, machines):
        monkeypatch.setattr(module, "why_not", lambda: NO_ROOT)
    assert NO_ROOT in refusal(*asked[:-3], "--dry-run")


def test_a_dry_run_writes_traces_and_nothing_else(folder: Path) -> None:
    said = output("fabric", *SIZES, "--hosts", "2", "--dry-run", "--chakra", "--out", "traces/of")
    assert sorted(path.name for path in (folder / "traces/of").iterdir()) == [
        "penstock.0.et", "penstock.1.et", "penstock.groups.json",
    ]  # fmt: skip
    assert "traces/of: written: penstock.0.et, penstock.1.et, penstock.groups.json" in said
    assert "somewhere/else: a run would be written there" in output(
        "fabric", *SIZES, "--dry-run", "--out", "somewhere/else"
    )
    assert not (folder / "somewhere").exists()
    found = as_json("fabric", *SIZES, "--dry-run", "--out", "somewhere")
    assert (found["folder"], found["files"]) == ("somewhere", [])
    asked = ("fabric", "--sizes", "12", "--collective", "gather", "--hosts", "3", "--dry-run")
    assert [as_json(*asked)[key] for key in ("sent_bytes", "port_bytes")] == [4, 8], "each sends a third to the first"


@pytest.mark.usefixtures("nothing_is_made")
@pytest.mark.parametrize("how", [("--link", "100mbit"), ("--slow", "0=50%")])
def test_where_no_hosts_can_be_made_links_are_refused(how: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "why_not", lambda: NO_ROOT)
    said = refusal("fabric", *SIZES, *how)
    assert said == f"{NO_ROOT}. Without --link and --slow, hosts are plain processes of this machine"


@pytest.mark.usefixtures("nothing_is_made")
def test_what_torchrun_has_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    said = refusal("fabric", *SIZES)
    assert "WORLD_SIZE='' in the environment" in said
    assert "start every host with torchrun, or pass --hosts" in said
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "no MASTER_ADDR" in refusal("fabric", *SIZES)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "2x")
    assert "MASTER_PORT='2x' in the environment" in refusal("fabric", *SIZES)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert "--link is for hosts created here" in refusal("fabric", *SIZES, "--link", "1mbit")


@pytest.mark.parametrize("package", ["jinja2", "scipy"])
def test_the_command_asks_for_its_extra_before_any_host_starts(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert f"penstock fabric: this needs {package}, pip install 'penstock[fabric]'" in refusal(
        "fabric", "--preset", "mlp"
    )


# -- runs that end before their first trial -------------------------------------------------------------------------


def _ends(monkeypatch: pytest.MonkeyPatch, error: BaseException, *, joined: bool) -> None:
    """Hosts that end so, whether or not they had found each other."""

    def emulate(spec: Spec, folder: Path, *_: object, **__: object) -> None:
        spec.write(folder)
        if joined:
            record = {"workload": asdict(spec.workload), "algorithm": "ring", "backend": "gloo", "hosts": spec.hosts}
            record |= {"trials": spec.trials, "complete": False, "missing": "host 1 does not answer"}
            (folder / RUN).write_text(json.dumps(record))
        raise error

    monkeypatch.setattr(coordinate, "emulate", emulate)


def test_why_a_run_ended_in_its_warm_up_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _ends(monkeypatch, FabricError("host 1 was killed by SIGKILL"), joined=True)
    done = penstock("fabric", *SIZES, "--hosts", "2", "--trials", "7", "--out", "run")
    assert (done.exit_code, done.stderr) == (2, "penstock: error: host 1 was killed by SIGKILL\n")
    assert "0 of 7 trials" in done.stdout
    assert "missing: host 1 does not answer; 7 of 7 trials" in " ".join(done.stdout.split())
    assert as_json("fabric", "show", "run")["trials"] == 0
    assert "already contains a run" in refusal("fabric", *SIZES, "--out", "run")


def test_a_run_that_is_stopped_before_its_hosts_have_joined_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    _ends(monkeypatch, KeyboardInterrupt(), joined=False)
    done = penstock("fabric", *SIZES, "--out", "run")
    assert (done.exit_code, done.stdout) == (130, "")
    assert done.stderr == "penstock: error: stopped before all hosts had joined; run has no run\n"
    assert "Run it again with --out run, which replaces it" in refusal("fabric", "show", "run")
    again = penstock("fabric", *SIZES, "--out", "run")
    assert again.stderr == done.stderr, "nothing is in the way of another one"
    _ends(monkeypatch, KeyboardInterrupt(15), joined=False)
    assert penstock("fabric", *SIZES, "--out", "run").exit_code == 143, "of another signal"


# -- real runs --------------------------------------------------------------------------------------------------------


class Runs(NamedTuple):
    training: Path
    said: str
    emulation: Path
    printed: dict[str, Any]


def _recorded(folder: Path) -> None:
    """A folder as `TRAINING` writes it, of nine steps on two hosts; each layer computes for 2 ms and sends for 1."""
    layers = tuple(replace(transfer, compute_seconds=2e-3) for transfer in mlp().transfers)
    workload = replace(mlp(), transfers=layers)
    write_run(
        run_of(np.full((9, len(layers)), 1e-3), layers, 2, workload=workload, algorithm="engine", backend="gloo"),
        folder,
    )


@pytest.mark.long
@pytest.mark.distributed
def test_a_training_is_recorded_as_a_run(folder: Path) -> None:
    asked = ("--ranks", "2", str(TRAINING), "--trials", "9", "--out", "training")
    assert penstock("run", *asked).exit_code == 0
    run = Run.read(folder / "training")
    assert run.end_ns.shape == (9, 4, 2)
    assert min(one.compute_seconds for one in run.record.workload.transfers) > 0
    assert "fc4" in output("fabric", "show", "training")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A training that was recorded, and its emulation."""
    place = tmp_path_factory.mktemp("runs")
    training, emulation = place / "training", place / "emulation"
    _recorded(training)
    said = output("fabric", "show", str(training))
    like = ("--replay", str(training), "--hosts", "2", "--trials", "10", "--warmup", "2", "--algorithm", "engine")
    return Runs(training, said, emulation, as_json("fabric", *like, "--out", str(emulation), "--chakra"))


@pytest.mark.distributed
def test_training_and_its_emulation(runs: Runs) -> None:
    sizes = [(transfer.name, transfer.bytes) for transfer in mlp().transfers]
    first, second = Run.read(runs.training), Run.read(runs.emulation)
    assert (first.end_ns.shape, second.end_ns.shape) == ((9, 4, 2), (10, 4, 2))
    assert [(one["name"], one["bytes"]) for one in runs.printed["transfers"]] == sizes
    assert {one["algorithm"] for one in runs.printed["transfers"]} == {"engine"}
    assert second.record.workload == first.record.workload, "with the compute times that it had"
    compute_ns = [int(one.compute_seconds * 1e9) for one in first.record.workload.transfers]
    assert min(compute_ns) > 0
    assert (second.start_ns[:, 1:] - second.end_ns[:, :-1] >= np.array(compute_ns)[1:, None]).all()
    assert all((run / "report.html").exists() for run in (runs.training, runs.emulation))
    assert all(name in runs.said for name, _ in sizes)
    assert [one["host"] for one in runs.printed["environment"]["hosts"]] == ["host 0", "host 1"]
    assert f"{runs.training}: samples.csv, results.json" in runs.said


@pytest.mark.distributed
def test_compare(runs: Runs) -> None:
    found = as_json("fabric", "compare", str(runs.training), str(runs.emulation))
    assert [one["name"] for one in found["transfers"]] == ["fc4", "fc3", "fc2", "fc1"]
    assert all(one["trials"] == [9, 10] for one in (*found["transfers"], found["step"]))
    assert found["only_in_a"] == found["only_in_b"] == []
    assert set(found["warnings"]) == {"a", "b"}
    said = output("fabric", "compare", str(runs.training), str(runs.emulation), columns=120)
    assert all(name in said for name in ("fc4", "fc1", "step"))
    assert said.startswith(f"A: {runs.training}\nB: {runs.emulation}\n")


@pytest.mark.distributed
def test_show_again(runs: Runs) -> None:
    shown = as_json("fabric", "show", str(runs.emulation))
    assert shown == runs.printed == json.loads((runs.emulation / "results.json").read_text())
    assert sorted(path.name[-5:] for path in runs.emulation.glob("*.et")) == [".0.et", ".1.et"], "as --chakra asked"
    assert "2 hosts, torch.distributed's own all_reduce, 10 trials" in output("fabric", "show", str(runs.emulation))
    said = output("fabric", "show", str(runs.emulation), "--nccl")
    rows = [line.split() for line in said.splitlines() if line.strip() and not line.startswith("#")]
    assert [int(row[0]) for row in rows] == [transfer.bytes for transfer in mlp().transfers]
    assert refusal("fabric", "show", str(runs.emulation), "--nccl", "--json").startswith("--nccl prints columns")


# -- workloads of a model ---------------------------------------------------------------------------------------------

TARGET = str(Path(__file__).parents[2] / "examples" / "target_mlp.py") + ":target"


@pytest.mark.parametrize(("microbatches", "rows"), [(None, 3), (5, 5), (100, 1)])
def test_a_models_messages_are_those_of_a_microbatch_of_its_batch(microbatches: int | None, rows: int) -> None:
    """24 rows of 48 numbers cross the cut in the middle of the example."""
    made = TrafficOptions(model=TARGET, ranks=2, microbatches=microbatches).workload(4)
    sent = [transfer for transfer in made.transfers if transfer.kind == "activation"]
    assert {transfer.bytes for transfer in sent} == {rows * 48 * 4}
    pieces = -(-24 // rows)
    assert len(sent) == 2 * pieces, "for each replica"
    size = f"{rows} sample{'s' if rows > 1 else ''}"
    assert made.notes[-1].startswith(f"{pieces} microbatches of {size}, from TARGET's batch")
    assert ("do not divide evenly" in made.notes[-1]) == (24 % rows > 0)


@pytest.mark.usefixtures("folder")
def test_gradients_of_a_model_in_low_precision_take_twice_the_bytes_if_they_accumulate_in_float32(folder: Path) -> None:
    (folder / "low.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef make():\n"
        "    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).bfloat16()\n"
        "    return model, (torch.zeros(4, 8).bfloat16(),), torch.zeros(4, 8), nn.MSELoss()\n"
    )
    asked = ("fabric", "--model", "low.py:make", "--dry-run")
    low, high = (as_json(*asked, *more) for more in ((), ("--grad-dtype", "float32")))
    assert sum(t["bytes"] for t in high["transfers"]) == 2 * sum(t["bytes"] for t in low["transfers"])
    assert "--grad-dtype requires --model" in refusal("fabric", *SIZES, "--grad-dtype", "float32")


def test_without_a_terminal_there_is_no_progress_bar(capsys: Any) -> None:
    """Not even a disabled one, which prints an empty line with rich 13."""
    with _progress(3, quiet=False) as watch:
        assert watch is None
    assert capsys.readouterr() == ("", "")
