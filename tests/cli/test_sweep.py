"""`penstock simulate` with several numbers: speed-up and efficiency against one device, on one model throughout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import as_json, output, refusal
from hypothesis import given, settings
from hypothesis import strategies as st

MANY = ("--ranks", "1,2,4,8", "--microbatches", "32")


def test_gpipes_table_2() -> None:
    """Huang et al., "GPipe": what pipelines of 2, 4 and 8 could reach with 32 microbatches, without communication."""
    made = as_json("simulate", "--schedule", "gpipe", *MANY)
    assert [cell["speedup"] for cell in made["sweep"]] == pytest.approx([1, 1.94, 3.66, 6.56], abs=0.005)
    assert [cell["efficiency"] * cell["ranks"] for cell in made["sweep"]] == [c["speedup"] for c in made["sweep"]]


@settings(max_examples=15)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 9), st.integers(1, 9))
def test_1f1b_by_its_closed_form(p: int, m: int, f: int, b: int) -> None:
    """Costs are the whole model's, so a rank's share of a microbatch takes (f + b) / p."""
    costs = ("--forward", str(f), "--backward-input", str(b), "--backward-weight", "0")
    numbers = ("--ranks", f"{p},{p + 1}", "--microbatches", str(m))
    cell = as_json("simulate", "--schedule", "1f1b", *numbers, *costs)["sweep"][0]
    assert cell["one_device"] == m * (f + b)
    assert cell["makespan"] == pytest.approx((m + p - 1) * (f + b) / p)


def test_chunks_and_copies_train_the_same_model() -> None:
    """However many stages: one device takes as long, and with many microbatches each schedule nears its ranks."""
    names = "1f1b,interleaved-1f1b,zb-v,hanayo,dualpipe"
    made = as_json("simulate", "--schedule", names, "--ranks", "2,4", "--microbatches", "64", "--forward", "6")
    assert {cell["one_device"] for cell in made["sweep"]} == {64 * 18}
    assert [cell["name"] for cell in made["sweep"]] == [name for name in names.split(",") for _ in range(2)]
    assert all(0.8 < cell["efficiency"] <= 1 for cell in made["sweep"])


def test_a_file_of_stages_is_merged_for_fewer_ranks(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    stages = [{"forward": 1 + s, "backward_input": 2, "backward_weight": 1, "output_bytes": 3} for s in range(4)]
    file.write_text(json.dumps({"stages": stages, "links": {"latency": 0.5, "bandwidth": 6}}))
    made = as_json("simulate", "--schedule", "gpipe", "--ranks", "1,2,3,4", "--microbatches", "1", "--costs", str(file))
    assert [(c["ranks"], c["makespan"]) for c in made["sweep"]] == [(1, 22), (2, 22 + 2), (4, 22 + 6)]
    assert {cell["one_device"] for cell in made["sweep"]} == {22}
    assert made["not_allowed"] == [
        {
            "name": "gpipe",
            "ranks": 3,
            "microbatches": 1,
            "reason": f"--costs {file} has 4 stages, which cannot be combined into 3",
        }
    ]


def test_what_a_schedule_does_not_allow_is_shown_and_not_fatal() -> None:
    options = ("simulate", "--schedule", "gpipe,chimera", "--ranks", "1,2", "--microbatches", "3,4")
    lines = output(*options).splitlines()
    chimera = lines.index("chimera")
    assert [line.split() for line in lines[chimera + 2 : chimera + 4]] == [
        ["1", "-", "-"],
        ["2", "-", "2.00", "(100%)"],
    ]
    assert any(line.startswith("chimera, p = 1, m = 3, 4: works with an even number of ranks") for line in lines)
    assert len(as_json(*options)["not_allowed"]) == 3
    says = refusal("simulate", "--schedule", "chimera", "--ranks", "1,3", "--microbatches", "4")
    assert says.startswith("--schedule chimera: no schedule works with these numbers: chimera works with an even")


def test_names_alone_are_compared() -> None:
    numbers = ("--ranks", "4", "--microbatches", "8")
    made = as_json("simulate", "--schedule", "gpipe,ZB-H1", *numbers)
    everything = as_json("simulate", "--schedule", "all", *numbers)
    assert made["schedules"] == [one for one in everything["schedules"] if one["name"] in ("gpipe", "zb-h1")]
    says = refusal("simulate", "--schedule", "chimera,dualpipe", "--ranks", "3", "--microbatches", "8")
    assert says.startswith(
        "--schedule chimera,dualpipe: no schedule works with these numbers: chimera works with an even"
    )


@pytest.mark.parametrize(
    ("verb", "options", "says"),
    [
        ("simulate", ("--ranks", "1,x"), "--ranks 1,x: expected comma-separated integers, as in 1,2,4"),
        ("simulate", ("--ranks", "1,0"), "--ranks 0: expected an integer >= 1"),
        ("simulate", ("--ranks", "1,,2"), "--ranks 1,,2: expected comma-separated integers"),
        ("simulate", ("--microbatches", "1,2"), "--schedule 1f1b needs --ranks"),
        ("simulate", ("--ranks", "1,2", "--perfetto", "x"), "--perfetto: a trace shows one schedule; pass one number"),
        ("simulate", ("--ranks", "1,20000"), "--ranks 20000 with 1 stage per rank makes 20,000 stages"),
        ("draw", ("--ranks", "1,2"), "--ranks 1,2: this command takes one number; `penstock simulate` takes several"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(verb: str, options: tuple[str, ...], says: str) -> None:
    assert refusal(verb, "--schedule", "1f1b", *options).startswith(says)
