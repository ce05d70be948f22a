"""Errors say in one line what the user typed, options and not the library's arguments, and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import output, refusal

from penstock import __version__
from penstock.cli._errors import in_options

OPTIONS = {"--ranks", "--schedule", "--split-inside", "--microbatches", "--join-timeout", "--factor"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ranks=0: expected 1", "--ranks 0: expected 1"),
        ("schedule='1f2b' is not a known schedule", "--schedule 1f2b is not a known schedule"),
        ("join_seconds is 0.0: expected a time", "--join-timeout 0: expected a time"),
        ("factor is -1.5: pass a factor above 1", "--factor -1.5: pass a factor above 1"),
        ("ranks is 0, but", "--ranks 0, but"),
        ("is said by microbatches=)", "is said by --microbatches)"),
        ("take some apart with split_inside=['a', 'b', ...]", "take some apart with --split-inside a,b,..."),
        ("stages=9, but the model has 3. Pass ranks=3.", "9 stages, but the model has 3. Pass --ranks 3."),
        # What has no option, and what is code, stays as it is.
        ("seed=3: no", "seed=3: no"),
        ("recompute={2: 'always'} and pipeline(ranks=2)", "recompute={2: 'always'} and pipeline(ranks=2)"),
        ("--costs a.json, links: ranks=0: no", "--costs a.json, links: ranks=0: no"),
        ("what is 0, is 0: ranks", "what is 0, is 0: ranks"),
    ],
)
def test_arguments_are_written_as_options(text: str, expected: str) -> None:
    assert in_options(text, OPTIONS) == expected


def test_stages_stay_an_option_where_there_is_one() -> None:
    assert in_options("stages=0: expected 1", {"--stages"}) == "--stages 0: expected 1"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("simulate --schedule gpipe --ranks 4 --forward 5ms", "--forward 5ms: expected a number, such as 1.5"),
        ("fabric --hosts four", "--hosts four: expected an integer, such as 4"),
        ("fabric --trials x", "--trials x: expected an integer, such as 4"),
        ("run --ranks two x.py", "--ranks two: expected an integer, such as 4"),
        (
            "verify a:b --balance weight",
            "--balance weight: expected one of time, flops, memory, parameters, layers, type:",
        ),
        ("search --ranks 2 --time-limit 0", "--time-limit 0: expected a time above 0"),
        (
            "simulate --schedule 1f2b --ranks 4",
            "--schedule 1f2b is not a known schedule; did you mean '1f1b'? expected",
        ),
        (
            "simulate --schedule 1f1b --ranks 4 --stages-per-rank 3",
            "--stages-per-rank 3: 1f1b works with exactly 1 stage per rank;",
        ),
        ("simulat", "penstock has no command 'simulat': did you mean 'simulate'? it has run, demo, "),
        ("frobnicate", "penstock has no command 'frobnicate': it has run, demo, "),
        ("simulate --pp-size 4", "simulate has no option --pp-size; pass --ranks"),
        (
            "verify a:b --micro-batch-size=4",
            "verify has no option --micro-batch-size; pass --microbatches, samples per batch / samples per microbatch",
        ),
        (
            "simulate --batch-size 8",
            "simulate has no option --batch-size; omit it: batches have their size; pass --microbatches, the number",
        ),
    ],
)
def test_one_line_has_what_was_given_and_expected(command: str, says: str) -> None:
    assert refusal(*command.split()).startswith(says)


def test_so_does_a_model_that_has_too_few_layers(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\ndef made():\n    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))), "
        "(torch.ones(2, 4),), torch.ones(2, 4), torch.nn.functional.mse_loss\n"
    )
    target = f"{tmp_path}/model.py:made"
    assert refusal("verify", target, "--ranks", "99").startswith("99 stages, but the model has only 3 layers")
    assert refusal("inspect", target, "--stages", "99").startswith("--stages 99, but the model has only 3 layers")


def test_version() -> None:
    assert output("--version") == f"penstock {__version__}\n"
