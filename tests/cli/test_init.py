"""`penstock init`: each script trains as it is, the same in two processes, and is a target for the other commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import output, refusal

from scaffolding.ranks import Ranks
from scaffolding.representatives import long_after
from scaffolding.scripts import lines_here, lines_of_rank

ROOT = Path(__file__).parents[2]


@pytest.mark.distributed
@pytest.mark.parametrize("model", long_after(1, "gpt", "cnn", "transformers"))
def test_a_script_trains_and_is_verified(
    model: str, ranks2: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = output("init", "--model", model)
    script = tmp_path / "train.py"
    script.write_text(
        script.read_text()
        .replace("range(1, 101)", "range(1, 13)")
        .replace("step % 20", "step % 6")
        .replace("runs/", f"{tmp_path}/runs/")
    )
    assert f"$ penstock init\n{said}```" in (ROOT / "docs" / "get-started.md").read_text()
    alone = lines_here(script)
    assert ranks2.run(lines_of_rank, script) == [alone, []]
    losses = [float(line.split()[3]) for line in alone]
    assert losses[1] < losses[0]
    assert "gradients are bitwise identical" in output("verify", str(script), "--ranks", "2")


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine")
    assert "file exists; pass another name" in refusal("init", str(tmp_path / "train.py"))
    assert (tmp_path / "train.py").read_text() == "mine"
