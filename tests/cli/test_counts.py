"""Every count on a command's line has a limit, which is checked before any work begins."""

from __future__ import annotations

import pytest
from command_line import refusal

MANY = "99999999999"


@pytest.mark.parametrize(
    ("command", "option", "most"),
    [
        ("plan no:file --devices {} --global-batch-size 8", "--devices", "20,000"),
        ("plan no:file --devices 4xold,{}xnew --global-batch-size 8", "--devices", "20,000"),
        ("plan no:file --devices 2 --global-batch-size {}", "--global-batch-size", "100,000"),
        ("verify no:file --microbatches {}", "--microbatches", "10,000"),
        ("verify no:file --ranks {}", "--ranks", "10,000"),
        ("verify no:file --replicas {}", "--replicas", "10,000"),
        ("profile no:file --microbatches {}", "--microbatches", "10,000"),
        ("search --ranks {} --microbatches 4", "--ranks", "10,000"),
        ("inspect no:file --stages {}", "--stages", "10,000"),
        ("demo --ranks {}", "--ranks", "10,000"),
        ("run --ranks {} no_file.py", "--ranks", "10,000"),
        ("plan --transformer gpt2,layers={} --device h100 --devices 8 --global-batch-size 8", "layers=", "1,000"),
    ],
)
def test_a_number_beyond_reason_is_refused_at_once(command: str, option: str, most: str) -> None:
    said = refusal(*command.format(MANY).split())
    if option.endswith("="):
        assert said == f"{option}{MANY}: expected an integer from 1 to {most}"
    else:
        assert said == f"{option} {MANY}: expected at most {most}; pass a smaller number"


def test_a_proof_of_too_many_actions_is_refused_at_once() -> None:
    many = refusal("verify", "no:file", "--ranks", "10000", "--microbatches", "10000")
    assert "that makes 200,000,000 actions; at most" in many


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("profile no:file --threads 0", "--threads 0: expected an integer >= 1"),
        (
            "plan no:file --devices 2 --global-batch-size 8 --search-time -1",
            "--search-time -1: expected seconds, 0 or more",
        ),
        (
            "plan no:file --devices 2 --global-batch-size 8 --search-time nan",
            "--search-time nan: expected seconds, 0 or more",
        ),
        ("verify", "penstock verify: Missing argument 'TARGET'; see penstock verify --help"),
        ("fabric show", "penstock fabric show: Missing argument 'FOLDER'; see penstock fabric show --help"),
        ("top --bogus", "penstock top: No such option: --bogus; see penstock top --help"),
        ("devices a b", "penstock devices: Got unexpected extra argument(s) (b); see penstock devices --help"),
    ],
)
def test_what_is_wrong_with_arguments_is_one_line(command: str, expected: str) -> None:
    assert refusal(*command.split()) == expected
