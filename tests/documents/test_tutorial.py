"""docs/tutorial.md, followed literally: its script trains alone and in processes, its commands print what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from blocks import ROOT, Block, blocks
from typer.testing import CliRunner

from penstock.cli import app
from scaffolding.ranks import Ranks
from scaffolding.scripts import lines_here, lines_of_rank

PAGE = ROOT / "docs" / "tutorial.md"
PLAIN, CHANGED, TIMELINE, SAVING = (block.text for block in blocks() if block.path == PAGE and block.language)
PRINTED = [block for block in blocks() if block.path == PAGE and not block.language and not block.commands]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`train.py` as it stands after the second step, with what later steps add behind a quarter of the loop."""
    kept, _, _ = PLAIN.partition("def main():")
    more = "".join(f"        {line}\n" for line in (TIMELINE + SAVING).splitlines() if line)
    changed = CHANGED.replace("batches(100)", "batches(25)").replace("\n\n\nif __name__", f"\n{more}\n\nif __name__")
    path = tmp_path / "train.py"
    path.write_text(kept.replace("import torch\n", "import torch\nimport penstock\n", 1) + changed)
    monkeypatch.chdir(tmp_path)
    return path


def output(*words: str) -> str:
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    return done.output


def printed(start: str) -> Block:
    (block,) = (block for block in PRINTED if block.text.startswith(start))
    return block


def test_the_plain_loop_learns(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    losses = [float(line.split()[-1]) for line in lines_here(tmp_path / "plain.py")]
    assert len(losses) == 4
    assert losses[-1] < losses[0] < 1


def assert_written() -> None:
    assert "rank" in output("explain", "timeline.json")
    assert list(Path("runs/checkpoints").iterdir())


@pytest.mark.distributed
def test_one_process_and_two_print_the_same(script: Path, ranks2: Ranks) -> None:
    alone = lines_here(script)
    (line,), said = alone, printed("step").text.splitlines()[0]
    assert float(line.split()[-1]) == pytest.approx(
        float(said.split()[-1]), abs=0.01
    )  # other processors round otherwise
    assert_written()
    for written in ("timeline.json", "runs"):
        Path(written).rename(f"before_{written}")
    assert ranks2.run(lines_of_rank, script) == [alone, []]
    assert_written()


def test_it_is_cut_as_shown(script: Path) -> None:
    assert printed("stage").text in re.sub(r" +\n", "\n", output("inspect", "train.py:make", "--stages", "4"))


def test_it_is_proven_as_shown(script: Path) -> None:
    said = output("verify", "train.py:make", "--ranks", "4", "--schedule", "zb-h1", "--transport", "local")
    assert said.endswith(printed("zb-h1").text)


def test_schedules_are_timed(script: Path) -> None:
    names = "1f1b,zb-h1,interleaved-1f1b"
    said = output("simulate", "train.py:make", "--schedule", names, "--ranks", "4", "--microbatches", "8")
    assert all(name in said for name in names.split(","))
