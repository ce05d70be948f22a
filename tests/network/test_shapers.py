"""What shapes a network is chosen, or refused before anything is made."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import wire
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ArgumentError, FabricError
from penstock.network import keeper, machines, shapers
from penstock.network.checks import why_not
from penstock.network.inside import within
from penstock.network.machines import Machines
from penstock.network.netem import netem, why_not_netem
from penstock.network.parse import parse_link
from penstock.network.shapers import Shaper, choose
from penstock.network.switch import tap
from penstock.network.topology import Topology, parse_own

_MISSING = why_not()
hosts_needed = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))
tc_needed = pytest.mark.skipif(keeper.tool("tc") is None or os.geteuid() != 0, reason="asks tc, as root")

PLAIN = Topology(parse_link("100mbit"))
FAR = Topology(parse_link("100mbit delay 5ms"))
HEADLINE = "1gbit delay 5ms jitter 1ms distribution pareto loss 0.1% reorder 0.01% stall 2s every 60s"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One that has everything but netem, and passes on 200,000 frames a second of 1500 bytes, 100,000 of 9000."""
    monkeypatch.setattr(shapers, "why_not", lambda: None)
    monkeypatch.setattr(shapers, "why_no_netem", lambda: "the kernel has no netem")
    monkeypatch.setattr(shapers, "why_no_switch", lambda: None)
    monkeypatch.setattr(shapers, "frames_per_second", lambda size: 200_000.0 if size < 2000 else 100_000.0)
    return monkeypatch


def test_rates_alone_are_tbfs_and_what_is_beyond_is_the_switchs(machine: pytest.MonkeyPatch) -> None:
    assert choose(PLAIN, 4) == Shaper("tbf", PLAIN)
    assert choose(FAR, 4) == Shaper("switch", FAR)
    assert choose(PLAIN, 4, "switch") == Shaper("switch", PLAIN)
    assert choose(PLAIN, 4, only_switch="a scenario").name == "switch"
    assert choose(Topology(parse_link("100mbit"), {1: parse_link("10mbit")}), 4).name == "switch"
    assert choose(Topology(parse_link("up 100mbit down 10mbit")), 4).name == "switch"


def test_netem_goes_before_the_switch_where_it_can(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(shapers, "why_no_netem", lambda: None)
    machine.setattr(shapers, "netem_keeps_seeds", lambda: True)
    seeded = Topology(parse_link("100mbit delay 5ms"), {}, 3)
    assert choose(seeded, 4) == Shaper("netem", seeded, seed=3)
    assert choose(seeded, 4, "switch").name == "switch"
    for text in ("100mbit delay 5ms stall 1s every 9s", "100mbit loss 1% 25%", "100mbit delay 5ms 1ms 25%"):
        assert choose(Topology(parse_link(text)), 4).name == "switch"
    assert choose(Topology(parse_link("100mbit delay 1ms"), {0: parse_link("100mbit delay 9ms")}), 4).name == "switch"
    assert choose(FAR, 4, only_switch="a scenario").name == "switch"
    machine.setattr(shapers, "netem_keeps_seeds", lambda: False)
    old = choose(seeded, 4)
    assert old.seed is None
    assert "differs from run to run" in old.remarks[0]


def test_whoever_chooses_jitter_is_told_what_becomes_of_it(machine: pytest.MonkeyPatch) -> None:
    def told(text: str) -> bool:
        return any("jitter turns into delay" in one for one in choose(Topology(parse_link(text)), 4).remarks)

    assert told("100mbit delay 5ms 1ms")
    assert told("up 100mbit down 100mbit delay 5ms 1ms")
    assert not told("100mbit delay 5ms")
    assert not told("100mbit delay 5ms 1ms overtaking")
    machine.setattr(shapers, "why_no_netem", lambda: None)
    machine.setattr(shapers, "netem_keeps_seeds", lambda: True)
    assert told("100mbit delay 5ms 1ms")
    assert choose(Topology(parse_link("100mbit delay 5ms 1ms overtaking")), 4).name == "switch", "netem keeps a rate"


@hosts_needed
@pytest.mark.parametrize("asked", ["tbf", "netem"])
def test_a_tc_that_does_nothing_is_noticed(asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "tc"
    program.write_text(f'#!/bin/sh\ncase "$*" in *batch*) cat > /dev/null;; *) exec {keeper.tool("tc")} "$@";; esac\n')
    program.chmod(0o755)
    find = keeper.tool
    monkeypatch.setattr(shapers, "why_no_netem", lambda: None)
    monkeypatch.setattr(keeper, "tool", lambda name: str(program) if name == "tc" else find(name))
    text = "100mbit" if asked == "tbf" else "100mbit delay 5ms"
    said = "was to put (tbf|netem) before .* but what is there is qdisc noqueue"
    with pytest.raises(FabricError, match=said), Machines(2, Topology(parse_link(text)), shaper=asked):
        pass


@pytest.mark.alone
@hosts_needed
@pytest.mark.skipif(_MISSING is None and shapers.why_no_netem() is not None, reason="the kernel has no netem")
def test_a_delay_by_netem_is_found_on_the_wire() -> None:
    """By the kernel's own netem: what a stand-in for tc cannot show."""
    with Machines(2, Topology(parse_link("100mbit delay 20ms")), shaper="netem") as made:
        trips = wire.ping(made, 0, 1, 20, 0.02)
        assert 40e-3 < min(trips) < 45e-3


@pytest.mark.parametrize(
    ("text", "own", "wanted", "only_switch", "said"),
    [
        ("100mbit delay 5ms", {}, "tbf", None, "tbf keeps a rate and nothing else: 100mbit delay 5ms; leave --shaper"),
        ("100mbit", {1: "10mbit"}, "tbf", None, "tbf keeps a rate"),
        ("up 100mbit down 10mbit", {}, "tbf", None, "tbf keeps a rate"),
        ("100mbit", {}, "tbf", "a scenario needs it", "a scenario needs it"),
        ("100mbit", {}, "netem", "a scenario needs it", "a scenario needs it"),
        ("100mbit delay 5ms stall 1s every 9s", {}, "netem", None, "netem has no stalls"),
        ("up 100mbit delay 5ms down 100mbit stall 1s every 9s", {}, "netem", None, "netem has no stalls"),
        ("100mbit delay 5ms loss 1% 25%", {}, "netem", None, "netem's correlation"),
        ("100mbit delay 5ms", {1: "10mbit"}, "netem", None, "netem does not tell whom"),
        ("100mbit delay 5ms 1ms overtaking", {}, "netem", None, "netem keeps the order of frames"),
        ("100mbit delay 5ms", {}, "netem", None, "the kernel has no netem"),
        ("100mbit delay 5ms", {}, "htb", None, "there is no shaper 'htb': give one of auto, tbf, netem, switch"),
    ],
)
def test_what_a_shaper_cannot_do_is_refused(
    text: str, own: dict[int, str], wanted: str, only_switch: str | None, said: str, machine: pytest.MonkeyPatch
) -> None:
    topology = Topology(parse_link(text), {host: parse_link(one) for host, one in own.items()})
    with pytest.raises(ArgumentError, match=re.escape(said)):
        choose(topology, 4, wanted, only_switch)


def test_frames_are_larger_where_there_would_be_too_many(machine: pytest.MonkeyPatch) -> None:
    found = choose(Topology(parse_link(HEADLINE)), 4)
    assert (found.name, found.topology.mtu) == ("switch", 9000)
    assert "frames carry 9000 bytes: with 1500 all hosts together could send 495,376" in found.remarks[0]
    assert choose(Topology(parse_link("100mbit delay 1ms")), 4).topology.mtu == 1500
    asked = Topology(parse_link("300mbit delay 1ms mtu 1500"))
    assert choose(asked, 4) == Shaper("switch", asked)
    own = Topology(parse_link("10mbit delay 1ms"), {0: parse_link("2gbit"), 1: parse_link("2gbit")})
    assert choose(own, 4).topology.mtu == 9000


@pytest.mark.parametrize(
    ("text", "hosts", "said"),
    [
        ("10gbit delay 1ms", 4, "832,039 frames of 9000 bytes .* about 100,000 here: give a rate of 1,202mbit at most, "
                                "fewer hosts$"),
        ("1gbit delay 1ms mtu 1500", 2, "247,688 frames of 1500 .* give a rate of 807mbit at most, or mtu 9000$"),
        ("10gbit delay 1ms mtu 1500", 2, "give a rate of 807mbit at most$"),
        ("up 10gbit delay 1ms down 8gbit", 4, "give 12% of it at most, fewer hosts$"),
    ],
)  # fmt: skip
def test_a_rate_that_the_switch_cannot_carry_is_refused(
    text: str, hosts: int, said: str, machine: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArgumentError, match=said):
        choose(Topology(parse_link(text)), hosts)


@settings(max_examples=50)
@given(rate=st.integers(1, 40_000), hosts=st.integers(1, 20), mtu=st.sampled_from(["", " mtu 1500", " mtu 9000"]))
def test_what_a_refusal_advises_is_accepted(rate: int, hosts: int, mtu: str) -> None:
    def chosen(mbit: int) -> Shaper:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shapers, "why_not", lambda: None)
            patch.setattr(shapers, "why_no_netem", lambda: "no")
            patch.setattr(shapers, "why_no_switch", lambda: None)
            patch.setattr(shapers, "frames_per_second", lambda size: 200_000.0 if size < 2000 else 100_000.0)
            return choose(Topology(parse_link(f"{mbit}mbit delay 1ms{mtu}")), hosts)

    try:
        found = chosen(rate)
    except ArgumentError as error:
        advised = re.search(r"a rate of ([\d,]+)mbit", str(error))
        assert advised is not None
        less = int(advised[1].replace(",", ""))
        assert less < rate
        found = chosen(less - 1)  # it was rounded
    assert shapers.needed_frames_per_second(found.topology, hosts) <= (200_000 if found.topology.mtu < 2000 else 1e5)


def test_where_nothing_can_do_it_all_that_is_missing_is_named(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(shapers, "why_no_switch", lambda: "the switch needs TAP devices")
    with pytest.raises(FabricError, match=r"needs TAP devices\. And without it: the kernel has no netem"):
        choose(FAR, 2)
    with pytest.raises(FabricError, match=r"needs TAP devices\. And without it: netem has no stalls"):
        choose(Topology(parse_link("100mbit stall 1s every 9s")), 2)
    assert choose(PLAIN, 2).name == "tbf"


@pytest.mark.parametrize("wanted", shapers.SHAPERS)
def test_without_root_nothing_is_chosen(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(FabricError, match="need root; this is user 1000"):
        choose(FAR if wanted == "switch" else PLAIN, 2, wanted)


def test_without_numba_the_switch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapers.importlib.util, "find_spec", lambda name: None)
    assert "needs numba: `pip install 'penstock[fabric]'`" in str(shapers.why_no_switch())


@hosts_needed
@pytest.mark.parametrize("device", ["/dev/penstock-none", "/dev/null"])
def test_without_tap_devices_the_switch_says_what_to_do(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    for module in (tap, shapers):
        monkeypatch.setattr(module, "DEVICE", Path(device))
    said = str(shapers.why_no_switch())
    assert f"needs TAP devices, but {device} cannot be used (" in said
    assert "`modprobe tun`" in said


@hosts_needed
@pytest.mark.parametrize(
    "make",
    [
        lambda: Machines(2, parse_link("100mbit delay 5ms"), shaper="tbf"),
        lambda: Machines(2, parse_link("100mbit stall 1s every 9s"), shaper="netem"),
        lambda: Machines(4, parse_link("900gbit delay 1ms")),
        lambda: Machines(2, parse_link("20gbit delay 1ms mtu 576")),
    ],
    ids=["tbf", "netem", "rate", "small frames"],
)
def test_nothing_is_made_where_it_is_refused(make: Callable[[], Machines], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: object) -> None:
        raise AssertionError(f"something is made: {given}")

    monkeypatch.setattr(machines, "_start_keeper", never)
    monkeypatch.setattr(Machines, "_run", never)
    monkeypatch.setattr(machines, "Switch", never)
    before = keeper.names_of()
    made = make()
    with pytest.raises((ArgumentError, FabricError)), made:
        pass
    assert keeper.names_of() == before
    assert made.id == ""


@pytest.mark.parametrize(
    ("common", "own", "said"),
    [
        ("100mbit", ["1=100mbit mtu 9000"], "the link of host 1 has an mtu of 9000 and the others one of 1500"),
        ("up 100mbit mtu 9000 down 10mbit", [], "down has an mtu of 1500 and up one of 9000"),
        ("100mbit", ["1=10mbit", "1=20mbit"], "host 1 is given two links, 10mbit and 20mbit"),
        ("100mbit", ["4=10mbit"], "host 4, but the hosts are 0 to 3"),
    ],
)
def test_links_that_contradict_each_other_are_refused(common: str, own: list[str], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        Topology(parse_link(common), parse_own(own, 4))


@hosts_needed
def test_the_headline_is_carried_here_and_ten_times_as_much_is_not() -> None:
    """On a slower machine than any that has run this so far it would rightly be refused."""
    missing = shapers.why_no_switch()
    if missing is not None:
        pytest.skip(missing)
    capacity = shapers.frames_per_second(9014)
    needed = shapers.needed_frames_per_second(Topology(parse_link(HEADLINE)).with_mtu(9000), 4)
    if capacity > 1.1 * needed:
        assert choose(Topology(parse_link(HEADLINE)), 4, "switch").topology.mtu == 9000
    with pytest.raises(ArgumentError, match="give a rate of"):
        choose(Topology(parse_link("100gbit delay 1ms")), 4, "switch")


# The words for netem.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100mbit delay 5ms", "delay 5000.000us rate 100000000bit"),
        ("1gbit delay 5ms 1ms", "delay 5000.000us 1000.000us rate 1000000000bit"),
        ("1gbit jitter 1ms distribution pareto", "delay 1.000us 1000.000us distribution pareto rate 1000000000bit"),
        ("8kbit loss 0.1%", "loss 0.1% rate 8000bit"),
        ("8kbit loss gemodel 1% 10% 70% 0.1%", "loss gemodel 1% 10% 70% 0.1% rate 8000bit"),
        ("8kbit duplicate 1% corrupt 2%", "duplicate 1% corrupt 2% rate 8000bit"),
        ("8kbit delay 1ms reorder 25% gap 5", "delay 1000.000us reorder 25% gap 5 rate 8000bit"),
    ],
)
def test_the_words_for_netem(text: str, expected: str) -> None:
    limit, words = re.fullmatch(r"netem limit (\d+) (.*)", netem(parse_link(text))).groups()
    assert words == expected
    assert int(limit) > 1000


def test_netem_has_room_for_what_is_under_way() -> None:
    """It counts frames: 10 Gbit/s over 100 ms are 82,563 of them, and its usual 1000 would be the limit of all."""
    (limit,) = re.search(r"limit (\d+)", netem(parse_link("10gbit delay 90ms 10ms"))).groups()
    assert int(limit) > 2 * 10e9 / 8 * 0.1 / 1514
    (heavy,) = re.search(r"limit (\d+)", netem(parse_link("10gbit delay 60ms 10ms distribution pareto"))).groups()
    assert int(heavy) == pytest.approx(int(limit), rel=0.01)  # four times the jitter
    (queue,) = re.search(r"limit (\d+)", netem(parse_link("100mbit loss 1% limit 10mb"))).groups()
    assert int(queue) > 10 * 1024**2 / 1514


def test_netem_draws_otherwise_for_each_direction_and_seed() -> None:
    link = parse_link("1gbit loss 1%")
    found = [netem(link, seed, direction) for seed in (-3, 0, 1, 2**40) for direction in range(8)]
    assert len({*found}) == len(found)
    seeds = [int(re.search(r"seed (\d+)$", words)[1]) for words in found]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert netem(link, 5, 2) == netem(link, 5, 2)


TEXTS = [
    "100mbit delay 5ms",
    "1gbit delay 5ms jitter 1ms distribution pareto loss 0.1% reorder 0.01%",
    "1gbit delay 5ms 1ms distribution normal duplicate 0.00001% corrupt 100%",
    "1gbit jitter 999us distribution paretonormal",
    "900gbit delay 10s 1ms loss gemodel 1% 10% 70% 0.1%",
    "8bit delay 1us reorder 50% gap 10",
    "10tbit loss 33.333333%",
]


@tc_needed
@pytest.mark.parametrize("text", TEXTS)
def test_tc_takes_the_words_and_only_a_kernel_without_netem_refuses(text: str) -> None:
    topology = Topology(parse_link(text))
    assert why_not_netem(topology) is None
    done = within(None, lambda: shapers._tc(f"qdisc add dev lo root handle 1: {netem(topology.link)}"))
    wrong = within(None, lambda: shapers._tc("qdisc add dev lo root handle 1: netem limit 5 delay 1m"))
    said = "Specified qdisc kind is unknown"
    assert said not in wrong.stderr  # of tc's own parser
    assert done.returncode == 0 or said in done.stderr, done.stderr


@tc_needed
def test_a_kernel_without_netem_is_told_apart_from_one_with_it() -> None:
    missing = shapers.why_no_netem()
    assert missing is None or "modprobe sch_netem" in missing


@pytest.mark.alone
@hosts_needed
@pytest.mark.parametrize("keeps_seeds", [True, False])
def test_a_network_by_netem(keeps_seeds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel has none a tc that says so stands in for it: all but the shaping is real."""
    lines = tmp_path / "lines"
    program = tmp_path / "tc"
    seed = "" if keeps_seeds else 'case "$all" in *seed*) echo "What is \\"seed\\"?" >&2; exit 1;; esac\n'
    program.write_text(
        f'#!/bin/sh\nall="$*"\ncase "$all" in *-batch*) all="$all $(cat)";; esac\n{seed}'
        f'case "$all" in *"qdisc show"*) echo "qdisc netem loss 1% seed 5"; exit;; esac\n'
        f'case "$all" in *netem*) echo "$all" >> {lines};; *) echo "$all" | {keeper.tool("tc")} -batch -;; esac\n'
    )
    program.chmod(0o755)
    find = keeper.tool
    for module in (keeper, shapers):
        monkeypatch.setattr(module, "tool", lambda name: str(program) if name == "tc" else find(name))
    if not keeps_seeds:  # the kernel's answer to a seed that tc does not know is nothing
        program.write_text(program.read_text().replace("loss 1% seed 5", "loss 1%"))
    topology = Topology(parse_link("up 100mbit delay 5ms loss 1% down 50mbit duplicate 1%"), {}, 7)
    with Machines(2, topology, shaper="netem") as made:
        assert made.shaper.name == "netem"
        assert bool(made.shaper.remarks) != keeps_seeds
        shown = subprocess.run(
            ["ip", "-d", "-n", made.hosts[0], "link", "show", "eth0"], check=True, capture_output=True, text=True
        ).stdout
        assert "gso_max_segs 1 " in shown
    written = [line for line in lines.read_text().splitlines() if "replace" in line]
    assert len(written) == 4
    assert sum("delay 5000.000us loss 1% rate 100000000bit" in line for line in written) == 2
    assert sum("duplicate 1% rate 50000000bit" in line for line in written) == 2
    seeds = {match[1] for line in written if (match := re.search(r"seed (\d+)", line))}
    assert len(seeds) == (4 if keeps_seeds else 0)
