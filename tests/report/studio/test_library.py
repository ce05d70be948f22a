"""Nothing outside the runs folder is opened, whatever an address says and whatever links are in the folder."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from starlette.testclient import TestClient
from test_guard import client

from penstock._base import files
from penstock._base.errors import ArgumentError
from penstock.report import write_perfetto
from penstock.report.studio import background
from penstock.schedule import generate, write_csv
from penstock.simulate import StageCost, simulate
from scaffolding.run_folders import a_run

SECRET = "the secret outside"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A runs folder with a trace and a schedule, and a secret beside it."""
    runs = tmp_path / "runs"
    (runs / "deep").mkdir(parents=True)
    (tmp_path / "secret.json").write_text(json.dumps({"traceEvents": [], "note": SECRET}))
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "run.json").write_text(json.dumps({"format": "penstock run", "note": SECRET}))
    schedule = generate("1f1b", 2, 4)
    write_perfetto(simulate(schedule, StageCost(1.0, 1.0, 1.0)), runs / "trace.json")
    write_csv(schedule, runs / "deep" / "mine.csv")
    return runs


@pytest.fixture
def studio(folder: Path) -> TestClient:
    return client(folder)


def test_what_is_there_is_listed_and_opens(studio: TestClient) -> None:
    listed = studio.get("/api/library").json()
    assert {one["name"] for one in listed["entries"]} == {"trace.json", "deep/mine.csv"}
    assert studio.get("/api/open", params={"name": "trace.json"}).json()["kind"] == "run"
    assert studio.get("/api/open", params={"name": "deep/mine.csv"}).json()["ranks"] == 2


NAMES = [
    "../secret.json", "deep/../../secret.json", "..", ".", "", "/etc/passwd", "//etc/passwd", "deep//mine.csv", "deep/",
    "..\\secret.json", "deep/..\\..\\secret.json", "trace.json\0", "trace.json\0.csv", "../secret.json\0", "C:/secret",
    "%2e%2e/secret.json", "..%2fsecret.json", "%2e%2e%2fsecret.json", "....//secret.json", "~/secret.json",
    "\u2025/secret.json", "\uff0e\uff0e/secret.json", "nothing.json", "./trace.json", "file:///etc/passwd",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("address", ["/api/open", "/api/live", "/report"])
def test_names_that_lead_out_are_refused(studio: TestClient, address: str, name: str) -> None:
    refused = studio.get(address, params={"name": name})
    assert refused.status_code == 400
    assert SECRET not in refused.text
    assert "root:" not in refused.text


@pytest.mark.parametrize(
    "address",
    [
        "/../secret.json", "/static/../secret.json", "/static/studio/../../secret.json", "/static/%2e%2e/secret.json",
        "/static/studio/%2e%2e%2f%2e%2e%2fsecret.json", "/static/studio/..%5c..%5csecret.json", "/static//etc/passwd",
        "/static/studio/%00", "/static/studio/app.py", "/export/..%2fsecret.json", "/runs/trace.json",
    ],
)  # fmt: skip
def test_addresses_are_no_paths(studio: TestClient, address: str) -> None:
    refused = studio.get(address)
    assert refused.status_code in (400, 404)
    assert SECRET not in refused.text


def test_links_out_are_refused(studio: TestClient, folder: Path) -> None:
    (folder / "link.json").symlink_to(folder.parent / "secret.json")
    (folder / "away").symlink_to(folder.parent / "outside")
    (folder / "inner").mkdir()
    (folder / "inner" / "run.json").symlink_to(folder.parent / "outside" / "run.json")
    (folder / "hop").symlink_to("away")
    (folder / "latest.json").symlink_to("trace.json")
    listed = [one["name"] for one in studio.get("/api/library").json()["entries"]]
    assert "link.json" not in listed
    assert "latest.json" in listed
    assert studio.get("/api/open", params={"name": "latest.json"}).status_code == 200
    for name in ("link.json", "away", "away/run.json", "inner", "inner/run.json", "hop"):
        for address in ("/api/open", "/api/live"):
            refused = studio.get(address, params={"name": name})
            assert refused.status_code == 400, name
            assert "leads out of the runs folder" in refused.json()["error"]
            assert SECRET not in refused.text


def test_a_file_for_each_rank_is_one_entry(studio: TestClient, folder: Path) -> None:
    (folder / "traced").mkdir()
    timeline = simulate(generate("1f1b", 2, 4), StageCost(1.0, 1.0, 1.0))
    for rank, track in enumerate(timeline.tracks):
        rows = [
            f"{one.action.op.value},{one.action.microbatch},{1e6 * one.start_seconds},1000000,{rank}"
            for one in timeline.spans(rank)
        ]
        assert len(rows) == len(track)
        text = "\n".join(["op,microbatch,start_us,duration_us,pp_rank", *rows])
        (folder / "traced" / f"rank{rank}.csv").write_text(text)
    entries = {one["name"]: one["kind"] for one in studio.get("/api/library").json()["entries"]}
    assert entries["traced"] == "folder"
    assert not any(name.startswith("traced/") for name in entries)
    found = studio.get("/api/open", params={"name": "traced"}).json()
    assert (found["schedule"], found["explanation"]["ranks"]) == ("1f1b", 2)
    assert studio.get("/report", params={"name": "traced"}).status_code == 200
    (folder / "ends.csv").write_text("op,microbatch,rank,begin_ms,end_ms\nF,0,0,0,1\nF,0,1,1,2\nB,0,1,2,3\nB,0,0,3,4\n")
    assert studio.get("/api/open", params={"name": "ends.csv"}).json()["kind"] == "run"


def test_no_message_says_where_the_folder_is(studio: TestClient, folder: Path) -> None:
    a_run(folder / "bad")
    (folder / "bad" / "run.json").write_text('{"format": "penstock run", "version": 99}')
    for address in ("/api/open", "/api/live", "/report"):
        error = studio.get(address, params={"name": "bad"}).json()["error"]
        assert "99" in error
        assert str(folder) not in error


def test_a_pipe_is_not_waited_for(studio: TestClient, folder: Path) -> None:
    os.mkfifo(folder / "pipe.json")
    (folder / "run").mkdir()
    os.mkfifo(folder / "run" / "run.json")
    for name in ("pipe.json", "run"):
        assert "neither a file nor a folder" in studio.get("/api/open", params={"name": name}).json()["error"]
    assert "pipe.json" not in studio.get("/api/library").text


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "penstock run"}', '{"choice": 1}', "[" * 100_000])
def test_files_of_something_else_get_one_clear_error(studio: TestClient, folder: Path, text: str) -> None:
    (folder / "odd.json").write_text(text)
    (folder / "odd.csv").write_text(text)
    for name in ("odd.json", "odd.csv"):
        refused = studio.get("/api/open", params={"name": name})
        assert refused.status_code == 400
        assert "\n" not in refused.json()["error"]


def test_big_files_are_read_by_a_process_of_their_own(
    studio: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is parsed, no other thread of the server's process would run."""
    (folder / "junk.json").write_text('{"choice": [1]}')
    asked = [("/api/open", name) for name in ("trace.json", "junk.json")] + [("/report", "trace.json")]
    usual = [studio.get(path, params={"name": name}) for path, name in asked]
    assert [one.status_code for one in usual] == [200, 400, 200]
    in_this_process = {"open_view": Mock(side_effect=ArgumentError("read in the server's process"))}
    monkeypatch.setattr(background, "_READERS", in_this_process)
    (folder / "packed.json").write_bytes(gzip.compress((folder / "trace.json").read_bytes()))
    for name, status in (("packed.json", 200), ("trace.json", 400)):
        assert studio.get("/api/open", params={"name": name}).status_code == status
    monkeypatch.setattr(background, "BIG_BYTES", 0)
    for (path, name), one in zip(asked, usual, strict=True):
        again = studio.get(path, params={"name": name})
        assert (again.status_code, again.text) == (one.status_code, one.text)
    monkeypatch.setattr(background, "MAX_SECONDS", 0.001)
    refused = studio.get("/api/open", params={"name": "trace.json"}).json()["error"]
    assert refused == "trace.json takes more than 0.001 s to read; use `penstock explain`"


def test_a_run_that_says_too_much_of_itself_is_not_read(studio: TestClient, folder: Path) -> None:
    (folder / "gpt").mkdir()
    (folder / "gpt" / "run.json").write_text('{"format": "penstock run", "name": "' + "x" * (3 << 20) + '"}')
    (entry,) = (one for one in studio.get("/api/library").json()["entries"] if one["name"] == "gpt")
    assert "is too large for the studio" in entry["damage"]
    for path in ("/api/open", "/api/live"):
        assert "is too large for the studio" in studio.get(path, params={"name": "gpt"}).json()["error"]


def test_a_packed_bomb_is_refused(studio: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the reader's own process: none of the server's unpacks anything."""
    monkeypatch.setattr(background, "_READERS", {})
    for name in ("bomb.json.gz", "bomb.json"):  # readers unpack what is packed, whatever it is called
        (folder / name).write_bytes(gzip.compress(b"[" + b" " * files.MAX_BYTES + b"]", 1))
        assert "unpacks to more than 128 MiB" in studio.get("/api/open", params={"name": name}).json()["error"]


DAMAGES = {
    "steps.jsonl": ['{"step": 1e999, "loss": 1}\n', "[" * 100_000 + "\n"],
    "ranks/0.json": ["[" * 100_000, '{"run": "abc", "at": "x", "heard": 5, "state": {"pid": "q", "ended": false}}'],
    "run.json": ["[" * 100_000, '{"format": "penstock run", "version": 1}', "", "{"],
    "timelines/2.json": ["{", "[" * 100_000, '{"ranks": 5}'],
}


@pytest.mark.parametrize(("file", "text"), [(file, text) for file, texts in DAMAGES.items() for text in texts])
def test_a_damaged_run_spoils_no_other(studio: TestClient, folder: Path, file: str, text: str) -> None:
    a_run(folder / "good")
    (a_run(folder / "bad") / file).write_text(text)
    entries = {one["name"]: one for one in studio.get("/api/library").json()["entries"]}
    assert entries["good"]["damage"] == ""
    assert entries["bad"]["kind"] == "run"
    for address in ("/api/open", "/api/live", "/report"):
        answer = studio.get(address, params={"name": "bad"})
        assert answer.status_code in (200, 400)
        assert answer.status_code == 200 or "\n" not in answer.json()["error"]
