"""Every block of code in the documents runs, or parses where it needs more than this machine; every name exists."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import typer
from blocks import DOCUMENTS, ROOT, Block, blocks, spoken_names
from typer.testing import CliRunner
from world import assert_runs

import penstock
from penstock.cli import app
from penstock.costs import read_costs

BLOCKS = blocks()
NEEDS_MORE = {
    "parallelize=shard": "a mesh of processes",
    "DistributedSampler": "a mesh of processes",
    "peft.get_peft_model_state_dict": "a model with adapters; tests/test_peft.py runs it",
    "SplitPoint": "ranks in torch's own pipeline",
    "from my_code import": "the reader's own code",
    "penstock.verification.blame.capture": "a stage of the reader's own pipeline",
    "import deepspeed": "a library that is not here",
    "from torchgpipe": "a library that is not here",
    "import fairscale": "a library that is not here",
    "from megatron": "a library that is not here",
}
"""Blocks of Python that are compiled and not run, by words that they have, with the reason."""
STORIES = {"extending.md": "test_extending.py", "recording.md": "test_recording.py", "tutorial.md": "test_tutorial.py"}
"""Their blocks rest on each other; these tests run them in order."""
RUN = {
    "inspect": [],
    "verify": ["--transport", "local"],
    "schedules": [],
    "simulate": [],
    "draw": [],
    "search": ["--time-limit", "0.1"],
}
"""The verbs that need no network, and what keeps them short. Of the others the options are parsed."""
NEED_A_FILE = {"runs/fabric-1/links.json", "profile.json"}
TAKE_SECONDS = {"examples/target_gpt.py:target"}
"""What is only parsed as well; test_shown_output.py runs the latter."""
TRAIN = """
import torch
from world import MyModel, mse_loss

def make():
    return MyModel(), (torch.randn(8, 6),), torch.randn(8, 6), mse_loss
"""


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader might be: with a training script of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "examples").symlink_to(Path(__file__).parents[2] / "examples")
    return tmp_path


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("block", [block for block in of("python") if block.path.name not in STORIES], ids=str)
def test_python_runs(block: Block, folder: Path) -> None:
    if any(words in block.text for words in NEEDS_MORE):
        compile(block.text, str(block), "exec")
    else:
        assert_runs(block.text, folder)


def test_links_lead_somewhere() -> None:
    """To a file that is there, and to a heading by the name that GitHub gives it."""
    for document in DOCUMENTS:
        for path, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", document.read_text(encoding="utf-8")):
            target = document.parent / path if path else document
            assert target.exists(), (document, path)
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
            names = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert not anchor or anchor in names, (document, path, anchor)


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/design.md", "docs/extending.md"])
def test_files_that_maintainers_are_sent_to_exist(document: str) -> None:
    files = {path.relative_to(ROOT).as_posix() for folder in ("src", "tests", "benchmarks", "examples", "docs")
             for path in (ROOT / folder).rglob("*") if path.is_file()}  # fmt: skip
    named = set(re.findall(r"`([\w./-]+\.(?:py|toml|html))`", (ROOT / document).read_text()))
    assert named
    assert [name for name in sorted(named) if not any(f"/{file}".endswith(f"/{name}") for file in files)] == []


def test_the_picture_is_what_the_schedules_are_now() -> None:
    pictures = ROOT / "docs" / "pictures"
    drawn = runpy.run_path(str(pictures / "schedules.py"))["picture"]()
    assert drawn == (pictures / "schedules.svg").read_text(), "run make pictures"


def test_the_run_that_the_report_shows_can_be_made(tmp_path: Path) -> None:
    training = runpy.run_path(str(ROOT / "docs" / "pictures" / "training.py"))
    training["main"](str(tmp_path / "run"), steps=1)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert "1 step" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.commands], ids=str)
def test_commands_run_or_parse(block: Block, folder: Path) -> None:
    for words in block.commands:
        arguments = _arguments_of_penstock(words)
        if not arguments:
            continue
        verb = arguments[0]
        of_a_file = any(word.startswith("hf:") for word in arguments)
        if verb in RUN and not of_a_file and not (NEED_A_FILE | TAKE_SECONDS) & set(arguments):
            done = CliRunner().invoke(app, [*arguments, *RUN[verb]])
            assert done.exit_code == 0, (arguments, done.output)
        else:
            _assert_parses(arguments)


def _arguments_of_penstock(words: list[str]) -> list[str]:
    """Behind `penstock`, or `torchrun ... -m penstock`; without what only the reader fills in."""
    if "penstock" not in words or words[words.index("penstock") + 1] == "demo:":  # what the demonstration prints
        return []
    return [word.strip("[]") for word in words[words.index("penstock") + 1 :] if word != "..."]


def _assert_parses(arguments: list[str]) -> None:
    """By click's own error, where a verb or an option does not exist, or has no such value."""
    command = typer.main.get_command(app)
    context = command.make_context("penstock", ["--debug", *arguments])
    rest = [*context._protected_args, *context.args]
    while isinstance(command, click.Group) and rest:
        found = command.get_command(context, rest[0])
        if found is None:
            raise click.UsageError(f"no command {rest[0]!r}", context)
        command = found
        context = command.make_context(rest[0], rest[1:], parent=context)
        rest = [*context._protected_args, *context.args] if isinstance(command, click.Group) else []


def test_files_are_read(folder: Path) -> None:
    (costs,) = of("json")
    (folder / "costs.json").write_text(costs.text)
    assert read_costs(folder / "costs.json").has_memory
    (scenario,) = of("toml")
    assert len(tomllib.loads(scenario.text)["event"]) == 3


@pytest.mark.parametrize("name", spoken_names())
def test_dotted_names_exist(name: str) -> None:
    if name != "penstock.groups.json":  # a file
        assert _is_there(name)


def test_a_name_that_does_not_exist_is_seen() -> None:
    for name in ("pipelin", "schedule.read_csw", "fabric.nothing", "cli.app.nothing"):
        assert not _is_there(f"penstock.{name}"), name


def _is_there(name: str) -> bool:
    """Whether each part is an attribute of the one before, or a module in it."""
    found: Any = penstock
    path = "penstock"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if hasattr(found, part):
            found = getattr(found, part)
        elif isinstance(found, ModuleType) and find_spec(path) is not None:
            found = import_module(path)
        else:
            return False
    return True


def test_subpackages_need_no_import_of_their_own() -> None:
    """`penstock.schedule.read_csv`, say, in a process that has imported nothing else, and loads no torch for it."""
    look = (
        "import sys, penstock; print(penstock.schedule.names()[0], penstock.report.__name__, "
        "penstock.simulate.__name__, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["naive", "penstock.report", "penstock.simulate", "False"]


def test_no_block_is_of_a_language_that_nobody_looks_at() -> None:
    assert {block.language for block in BLOCKS} == {"", "python", "json", "toml"}
