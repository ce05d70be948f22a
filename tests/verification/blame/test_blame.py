"""`penstock blame` names faults that are planted in pipelines written without Penstock, and accuses no right one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from penstock._base.errors import ArgumentError, RankFailedError
from penstock.distributed.launch.agent import remaining_processes
from penstock.schedule import generate
from penstock.simulate import StageCost, simulate
from penstock.testing import assert_same_training
from penstock.verification.blame.command import resolve_command, run
from penstock.verification.blame.finding import Blame, Finding, page
from penstock.verification.blame.names import Part, name_parts, read
from penstock.verification.blame.watch import FOLDER, Step
from penstock.verification.first_difference import FORWARD, ModuleTrace, ValueKey, confusable_values, first_value

BENCH = Path(__file__).parents[3] / "benchmarks" / "blame"
QUICK = ("with_replicas.py hand,stages first,dropout right",)
"""What is most likely to be accused. A fault is named by the command below, and each kind of fault in long runs."""
MORE = (
    "with_pipelining.py - labels of the batch before",
    *("with_pipelining.py dropout,recompute right", "with_send_recv.py - not zeroed"),
    *("with_send_recv.py alike right", "with_send_recv.py - stale buffer", "with_replicas.py - not averaged"),
)


def verdicts(only: str) -> dict[str, str]:
    command = [sys.executable, "-W", "ignore", str(BENCH / "bench.py"), "--only", only]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=True)
    lines = [line for line in done.stdout.splitlines() if "with_" in line[:30]]
    return {line[14:]: line[:14].strip() for line in lines}


@pytest.mark.parametrize("titles", [QUICK, pytest.param(MORE, marks=pytest.mark.long)], ids=["quick", "more"])
def test_planted_faults_are_named_and_right_scripts_are_not_accused(titles: tuple[str, ...]) -> None:
    found = verdicts(";".join(titles))
    assert found == {title: "right" if title.endswith("right") else "named" for title in titles}


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    ranks = ["torchrun", "--standalone", "--nproc-per-node", "2", str(BENCH / "with_send_recv.py")]
    command = [sys.executable, "-m", "penstock", "blame", f"{BENCH / 'model.py'}:make", "--json", "--steps", "1"]
    command += ["--out", "page.html", "--"]
    environment = {**os.environ, "FAULT": "not scaled", "CASE": ""}
    done = subprocess.run(
        [*command, *ranks], capture_output=True, text=True, timeout=280, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 1, done.stderr
    finding = json.loads(done.stdout)["finding"]
    assert (finding["kind"], finding["action"], finding["step"]) == ("gradient scale", "gradients", 1)
    assert "4 times what it should be: the number of microbatches" in finding["text"]
    assert "penstock: error: gradient scale: all gradients" in done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]
    text = (tmp_path / "page.html").read_text()
    assert "what is wrong comes after these actions" in text
    for action in ("forward of microbatch 3, stage 0", "backward of microbatch 3, stage 1"):
        assert f"<title>{action}: " in text, "what ranks did, by the clock"


def test_a_page_frames_the_wrong_action() -> None:
    timeline = simulate(generate("1f1b", 2, 2), StageCost(1.0, 1.0, 1.0))
    for action, framed in (("1RECV_F1", "1F1"), ("0B0", "0B0"), ("0RECV_B1", "0B1"), ("clipping", None)):
        finding = Finding("message", "it is <late>", action, 2, 1, 1, 1, difference=0.5, largest=2.0)
        text = page(Blame(finding, 2, 2, 2, 2, 9, ("a note",), timeline))
        assert text.count('class="marked"') == (framed is not None)
        assert (f"step 2; framed: {framed}" in text) is (framed is not None)
        assert "it is &lt;late&gt;" in text
        assert '<th scope="row">off by</th><td>0.5</td>' in text
    assert "trains as the unsplit model does" in page(Blame(None, 2, 2, 2, 2, 9))


SPAWNED = """
import os, runpy, socket
import torch.multiprocessing

def rank(number, port):
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(number)}
    os.environ.update(where)
    runpy.run_path(os.environ["SCRIPT"], run_name="__main__")

if __name__ == "__main__":
    with socket.socket() as held:  # so that nobody else is given the port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        torch.multiprocessing.spawn(rank, held.getsockname()[1:], nprocs=2)
"""


@pytest.mark.long  # the command above does the same
def test_in_a_test_the_first_wrong_action_is_an_assertion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWNED)
    monkeypatch.setenv("SCRIPT", str(BENCH / "with_send_recv.py"))
    monkeypatch.setenv("PYTHONPATH", str(BENCH), prepend=os.pathsep)
    monkeypatch.setenv("CASE", "")
    ranks = [sys.executable, str(script)]
    assert assert_same_training(ranks, f"{BENCH / 'model.py'}:make", steps=2).ranks == 2
    monkeypatch.setenv("FAULT", "labels swapped")
    with pytest.raises(AssertionError, match="labels: the loss of microbatch 0 takes the labels of microbatch 1"):
        assert_same_training(ranks, f"{BENCH / 'model.py'}:make", steps=1)


def test_commands_that_cannot_start_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("train.py").touch()
    ours = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", "--lr", "1"]
    assert resolve_command(["torchrun", "--nproc-per-node", "2", "train.py", "--lr", "1"]) == ours
    assert resolve_command(["penstock", "run", "-n", "2", "train.py"])[1:3] == ["-m", "penstock"]
    assert resolve_command(["sh", "-c", "true"]) == ["sh", "-c", "true"]
    with pytest.raises(ArgumentError, match=r"there is no file 'trian.py' in .*; pass the path of the script"):
        resolve_command(["torchrun", "--nproc-per-node", "2", "trian.py"])
    with pytest.raises(ArgumentError, match="no-such-launcher: no such command; expected one that starts ranks, as in"):
        resolve_command(["no-such-launcher", "train.py"])


def test_a_job_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "noted"
    folder.mkdir()
    script.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(child.pid, file=open('pid', 'w'), flush=True)\n"
        "time.sleep(600)\n"
    )
    command = ["sh", "-c", f"cd {tmp_path} && {sys.executable} -S train.py"]
    assert run(command, folder, steps=3, timeout=3.0) == "took no step for 3 s (--timeout)"
    assert tmp_path.joinpath("pid").exists()
    assert remaining_processes(str(folder), tag=FOLDER) == set()
    with pytest.raises(RankFailedError, match="the job took no step for 3 s before all ranks had taken a step"):
        read(folder, "took no step for 3 s")


def part(rank: int, stage: nn.Module) -> Part:
    """A stage of one rank, as it would be read from a file."""
    before = {name: value.detach() for name, value in stage.named_parameters()}
    modules = {name: type(module).__name__ for name, module in stage.named_modules()}
    return Part(rank, 0, [Step(None, {}, before, modules=modules)])


def test_renumbered_layers_are_known_by_their_weights() -> None:
    model = nn.ModuleDict(
        {"layers": nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(4)))}
    )
    layers = [*model["layers"]]
    parts = [part(0, nn.ModuleList(layers[:2])), part(1, nn.Sequential(layers[3], layers[2]))]
    name_parts(parts, model)
    assert parts[0].modules | {"": "", "2": ""} == {
        "": "",
        "0": "layers.0",
        "0.0": "layers.0.0",
        "0.1": "layers.0.1",
        "1": "layers.1",
        "1.0": "layers.1.0",
        "1.1": "layers.1.1",
        "2": "",
    }
    assert parts[1].tensors["0.1.weight"] == "layers.3.1.weight"  # all layer norms start alike
    assert parts[1].tensors["1.0.bias"] == "layers.2.0.bias"


def test_what_has_no_number_of_its_own_is_named_by_weights_or_by_order() -> None:
    """A layer that was left out, as in DeepSpeed's PipelineModule, which numbers from 0; weights that the script drew
    itself; a frozen stage."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    stages = [part(0, nn.Sequential(model[0], model[2])), part(1, nn.ModuleDict({"2": model[3]}))]
    name_parts(stages, model)
    assert sorted(name for one in stages for name in one.modules.values()) == ["0", "2", "3"]
    drawn = [part(rank, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))) for rank in range(2)]
    name_parts(drawn, model)
    model.requires_grad_(False)
    frozen = [part(0, model[:2]), part(1, nn.Sequential(model[2], model[3]))]
    name_parts(frozen, model)
    for parts in (drawn, frozen):
        assert [*parts[1].tensors.values()] == ["2.weight", "2.bias", "3.weight", "3.bias"]


def test_weights_in_another_dtype_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(
        ArgumentError, match=r"'0.weight' is torch.bfloat16 .* let TARGET return model.to\(torch.bfloat16\)"
    ):
        name_parts([part(0, nn.Sequential(nn.Linear(3, 3)).bfloat16())], model)


def test_a_wrong_argument_is_found_before_what_it_spoils() -> None:
    """Positions that a stage has wrong: what enters the layer, not what a module in it makes of that."""
    x, positions, sums = torch.randn(2, 3), torch.arange(2), torch.randn(2, 3)
    order = ["layer.norm", "layer.attention", "layer"]

    def trace(positions: Tensor, attended: Tensor) -> ModuleTrace:
        entering = {"layer": [x, positions], "layer.norm": [x], "layer.attention": [attended]}
        values = {
            ValueKey(FORWARD[0], name, 0, i, 0): v for name, given in entering.items() for i, v in enumerate(given)
        }
        leaving = {ValueKey(FORWARD[1], name, 0, 0, 0): x if name == "layer.norm" else sums for name in order}
        return ModuleTrace(1, order, values | leaving)

    mine, right = trace(positions * 0, x), trace(positions, x + 1)
    first = first_value(mine, right, exact=True)
    assert first is not None
    assert first[0] == ValueKey(FORWARD[0], "layer", 0, 1, 0)
    spoilt = ValueKey(FORWARD[0], "layer.attention", 0, 0, 0)
    assert "it is what leaves 'layer.norm'" in confusable_values(spoilt, mine, right)  # no layer is between them
