"""Errors say in one line what the user typed, options and not the library's arguments, and what was expected."""

from __future__ import annotations

import shlex
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
    assert in_options("stages=0: expected 1", {"--stages"}) == "--stages 0: expected 1", "where there is one"


REFUSED = dict(
    line.split(" | ")
    for line in r"""
simulate --schedule gpipe --ranks 4 --forward 5ms | --forward 5ms: expected a number, such as 1.5
fabric --hosts four | --hosts four: expected an integer, such as 4
run --ranks two x.py | --ranks two: expected an integer, such as 4
verify a:b --balance weight | --balance weight: expected one of time, flops, memory, parameters, layers, type:
simulate --schedule 1f2b --ranks 4 | --schedule 1f2b is not a known schedule; did you mean '1f1b'? expected
simulate --schedule 1f1b --ranks 4 --stages-per-rank 3 | --stages-per-rank 3: 1f1b works with exactly 1 stage per
simulat | penstock has no command 'simulat': did you mean 'simulate'? it has run, demo,
frobnicate | penstock has no command 'frobnicate': it has run, demo,
simulate --pp-size 4 | simulate has no option --pp-size; pass --ranks
verify a:b --micro-batch-size=4 | has no option --micro-batch-size; pass --microbatches, samples per batch / samples
simulate --batch-size 8 | has no option --batch-size; omit it: batches have their size; pass --microbatches, the
verify | penstock verify: Missing argument 'TARGET'; see penstock verify --help
fabric show | penstock fabric show: Missing argument 'FOLDER'; see penstock fabric show --help
top --bogus | penstock top: No such option: --bogus; see penstock top --help
devices a b | penstock devices: Got unexpected extra argument(s) (b); see penstock devices --help
# limits, before any work
plan no:file --devices 4xold,99999999999xnew --global-batch-size 8 | --devices 99999999999: expected at most 20,000;
plan no:file --devices 2 --global-batch-size 99999999999 | --global-batch-size 99999999999: expected at most 100,000
verify no:file --microbatches 99999999999 | --microbatches 99999999999: expected at most 10,000; pass a smaller number
plan --transformer gpt2,layers=9999 --device h100 -n 8 --global-batch-size 8 | layers=9999: expected an integer from 1
verify no:file --ranks 10000 --microbatches 10000 | that makes 200,000,000 actions; at most 20,000,000 can be timed
simulate --schedule gpipe --ranks 10000 --microbatches 10000 | --ranks 10000 --microbatches 10000: that makes
simulate --schedule all --ranks 10000 --microbatches 10000 | at most 20,000,000 can be timed; pass fewer ranks
search --ranks 10000 --microbatches 10000 | that makes 300,000,000 actions; at most 1,000,000 can be searched
simulate --schedule gpipe --ranks 20000 --microbatches 1 | 20,000 stages; the limit is 10,000; use fewer
# each command's own
profile no:file --threads 0 | --threads 0: expected an integer >= 1
plan no:file --devices 2 --global-batch-size 8 --search-time nan | --search-time nan: expected seconds, 0 or more
plan no:file --devices 4 --global-batch-size 8 --link '1gbit loss 1%' | expected a rate and a delay only
plan no:file --devices 4 --global-batch-size 8 --inter-host-link 1gbit | '1gbit' requires --devices-per-host
plan no:file --devices 4 --global-batch-size 8 --schedule 1f2b | did you mean '1f1b'
plan no:file --devices 4 --global-batch-size 8 --memory many | 'many' is not a size
plan --transformer gpt2 --device h100 --global-batch-size 64 -n 61 --tensor-parallel 4 | 61 is not a multiple of
plan --transformer gpt2 --device h100 --global-batch-size 64 -n 64 --link 100gbit | as --device sets the links
plan --transformer gpt2 --device h1000 --global-batch-size 64 -n 64 | did you mean
plan --transformer gpt2 --device h100 --global-batch-size 64 -n 64 --profile p.json | pass only one of the three
plan --transformer gpt2 --global-batch-size 64 -n 64 | --transformer requires --device
plan no:file -n 2 --global-batch-size 8 --out no/such/folder.json | --out no/such/folder.json cannot be written: No such
profile no:file --out no/such/folder.json | --out no/such/folder.json cannot be written: No such file or directory
studio --port 70000 | expected a number from 0 to 65535
studio --host 203.0.113.7 --port 0 | pass an address of this machine
verify no:file --schedule 1f1 | did you mean '1f1b'
verify no:file --replicas 2 --transport local | replicas need one process per rank; omit --transport local
verify no:file --schedule all --replicas 2 | --schedule all: one process drives all ranks; omit --transport and
verify no:file --schedule gpipe,chimera --ranks 3 | chimera works with an even number of ranks
verify no:file --transport shm | --transport shm: expected local, auto, distributed, staged, or a factory
verify no:file --transport show.py:nothing | --transport 'show.py:nothing': show.py has no function 'nothing'
demo --ranks 0 | --ranks 0: the demo's model has 4 blocks, at least one for each rank; pass 1 to 4
demo --microbatches 33 | a batch of the demo has 32 rows
demo --out show.py | this is a file; pass a folder
# simulate, draw, search
simulate --schedule zb-v --ranks 8 --stages-per-rank 3 | zb-v works with exactly 2 stages per rank
simulate --schedule all --microbatches 8 | --schedule all needs --ranks
simulate --ranks 8 | pass --schedule with a name (`penstock schedules` lists them), or --csv
simulate --csv mine.csv --ranks 8 | --csv mine.csv: the file already sets what --ranks would
simulate --csv no-such-file | --csv no-such-file cannot be read: No such file
simulate --schedule 1f1b --ranks 8 --costs c.json --link-latency 1 | already sets what --link-latency would; pass only
simulate --schedule 1f1b --ranks 8 --backward-input -1 | --backward-input -1: expected a cost of 0 or
simulate --schedule 1f1b --ranks 8 --output-bytes 1 --bandwidth 1e-300 | expected a bandwidth above 1e-100; pass sizes
simulate --schedule 1f1b --ranks 8 --bandwidth 2 | --bandwidth has no effect without --output-bytes
simulate --schedule all --ranks 8 --perfetto x.json | --perfetto: a trace shows one schedule
simulate --schedule 1f1b --ranks 8 --perfetto no/such/folder | no/such/folder cannot be written: No such
simulate --schedule 1f1b --ranks 2 --memory-unsharded 1 | schedule '1f1b' has no UNSHARD, so it is unknown when
simulate --schedule 1f1b --ranks 1,x | --ranks 1,x: expected comma-separated integers, as in 1,2,4
simulate --schedule 1f1b --microbatches 1,2 | --schedule 1f1b needs --ranks
simulate --schedule 1f1b --ranks 1,2 --perfetto x | --perfetto: a trace shows one schedule; pass one number
draw --schedule 1f1b --ranks 1,2 | --ranks 1,2: this command takes one number; `penstock simulate` takes several
draw --schedule all --ranks 4 --text | --schedule all: this command takes one schedule
draw --schedule 1f1b --ranks 4 --width 10 | --width 10: pass at least 16
draw --schedule 1f1b --ranks 4 --text --forward 3 | --text: the text has no times and no width
draw --schedule 1f1b --ranks 4 --svg x --json | --svg: a file shows the figure; omit
draw --schedule 1f1b --ranks 4 --svg no/such/file | --svg no/such/file cannot be written: No such file or directory
draw --schedule 1f1b --ranks 4 --background dark | --background has no effect without --svg or --png
search --ranks 4 --activation-limit 0.5 | --activation-limit 0.5: a single microbatch needs 1
search --ranks 4 --placement v --stages-per-rank 1 | --stages-per-rank 1: a V has exactly 2 stages per rank
search --ranks 4 --memory-unsharded 1 | --memory-unsharded: the search places no gathers of sharded stages
search --ranks 4 --out no/such/folder.csv | --out no/such/folder.csv cannot be written: No such file
# run
run show.py | the number of ranks is missing; pass --ranks 4, for example, or --plan
run --plan nowhere.json show.py | plan 'nowhere.json' cannot be read
run --ranks 0 show.py | --ranks 0: expected an integer >= 1
run --nnodes 2 --ranks 4 show.py | run has no option --nnodes; run `torchrun --nnodes ...` on each machine
run --ranks 2 shwo.py | no script 'shwo.py' in
run --ranks 2 /dev/zero | '/dev/zero' is no regular file
run --ranks 2 . | '.' is a folder without a __main__.py: name the script in it, or -m and a module
run --ranks 2 -m shwo.py | no module 'shwo.py': it is neither in
run --ranks 4 --link 100mbit show.py | --link needs --hosts: without it ranks are processes of this machine, without
run --ranks 4 --user nobody show.py | --user needs --hosts:
run --ranks 4 --hosts 2 --link-for 1=100mbit show.py | --link-for needs --link: without it links are not limited
run --ranks 4 --hosts 3 show.py | 4 ranks cannot be spread evenly over 3 hosts: pass as many ranks as hosts, or twice,
run --ranks 4 --hosts 0 show.py | 0 hosts requested: pass 1 to 200
run --ranks 4 --hosts 2 --link 1mbit --link-for 2=1mbit show.py | '2=1mbit': host 2 does not exist: the
""".splitlines()
    if " | " in line
)
"""What is typed, and what is said: in one line, before any work begins."""


@pytest.mark.parametrize("command", REFUSED)
def test_one_line_has_what_was_given_and_expected(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "show.py").touch()
    assert REFUSED[command] in refusal(*shlex.split(command))


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
