"""What shapes a network is chosen, or refused before anything is made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock._base.errors import ArgumentError, FabricError
from penstock.network import shapers
from penstock.network.namespaces import why_not
from penstock.network.parse import parse_link
from penstock.network.shapers import Shaper, choose
from penstock.network.switch import tap
from penstock.network.topology import Topology, parse_host_links

_MISSING = why_not()
hosts_needed = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))

PLAIN = Topology(parse_link("100mbit"))
FAR = Topology(parse_link("100mbit delay 5ms"))
HEADLINE = "1gbit delay 5ms jitter 1ms distribution pareto loss 0.1% reorder 0.01% stall 2s every 60s"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One that has everything, and passes on 200,000 frames a second of 1500 bytes, 100,000 of 9000."""
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


def test_whoever_chooses_jitter_is_told_what_becomes_of_it(machine: pytest.MonkeyPatch) -> None:
    def told(text: str) -> bool:
        return any("jitter turns into delay" in one for one in choose(Topology(parse_link(text)), 4).remarks)

    assert told("100mbit delay 5ms 1ms")
    assert told("up 100mbit down 100mbit delay 5ms 1ms")
    assert not told("100mbit delay 5ms")
    assert not told("100mbit delay 5ms 1ms overtaking")


@pytest.mark.parametrize(
    ("text", "own", "wanted", "only_switch", "said"),
    [
        ("100mbit delay 5ms", {}, "tbf", None, "tbf limits only the rate: 100mbit delay 5ms; omit --shaper"),
        ("100mbit", {1: "10mbit"}, "tbf", None, "tbf limits only the rate"),
        ("up 100mbit down 10mbit", {}, "tbf", None, "tbf limits only the rate"),
        ("100mbit", {}, "tbf", "a scenario needs it", "a scenario needs it"),
        ("100mbit delay 5ms", {}, "netem", None, "there is no shaper 'netem': pass one of auto, tbf, switch"),
    ],
)
def test_what_a_shaper_cannot_do_is_refused(
    text: str, own: dict[int, str], wanted: str, only_switch: str | None, said: str, machine: pytest.MonkeyPatch
) -> None:
    topology = Topology(parse_link(text), {host: parse_link(one) for host, one in own.items()})
    with pytest.raises(ArgumentError, match=re.escape(said)):
        choose(topology, 4, wanted, only_switch)


@pytest.mark.parametrize(
    ("text", "hosts", "said"),
    [
        ("10gbit delay 1ms", 4, "832,039 frames of 9000 bytes .* about 100,000 here: pass a rate of at most 1,201mbit, "
                                "fewer hosts$"),
        ("1gbit delay 1ms mtu 1500", 2, "247,688 frames of 1500 .* pass a rate of at most 807mbit, or mtu 9000$"),
        ("10gbit delay 1ms mtu 1500", 2, "pass a rate of at most 807mbit$"),
        ("up 10gbit delay 1ms down 8gbit", 4, "pass at most 12% of it, fewer hosts$"),
    ],
)  # fmt: skip
def test_a_rate_that_the_switch_cannot_carry_is_refused(
    text: str, hosts: int, said: str, machine: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArgumentError, match=said):
        choose(Topology(parse_link(text)), hosts)


@settings(max_examples=50)
@example(rate=81, hosts=20, mtu=" mtu 1500")  # 0.3% above what the switch forwards
@given(rate=st.integers(1, 40_000), hosts=st.integers(1, 20), mtu=st.sampled_from(["", " mtu 1500", " mtu 9000"]))
def test_what_a_refusal_advises_is_accepted(rate: int, hosts: int, mtu: str) -> None:
    def chosen(mbit: int) -> Shaper:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shapers, "why_no_switch", lambda: None)
            patch.setattr(shapers, "frames_per_second", lambda size: 200_000.0 if size < 2000 else 100_000.0)
            return choose(Topology(parse_link(f"{mbit}mbit delay 1ms{mtu}")), hosts)

    try:
        found = chosen(rate)
    except ArgumentError as error:
        advised = re.search(r"a rate of at most ([\d,]+)mbit", str(error))
        assert advised is not None
        less = int(advised[1].replace(",", ""))
        assert less < rate
        found = chosen(less - 1)  # it was rounded
    assert shapers.needed_frames_per_second(found.topology, hosts) <= (200_000 if found.topology.mtu < 2000 else 1e5)


def test_where_there_is_no_switch_what_it_needs_is_named(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(shapers, "why_no_switch", lambda: "the switch needs TAP devices")
    with pytest.raises(FabricError, match="needs TAP devices"):
        choose(FAR, 2)
    assert choose(PLAIN, 2).name == "tbf"


@pytest.mark.parametrize("missing", ["numba", "scipy"])
def test_without_its_packages_the_switch_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapers.importlib.util, "find_spec", lambda name: None if name == missing else object())
    assert f"needs {missing}: `pip install 'penstock[fabric]'`" in str(shapers.why_no_switch())


@hosts_needed
@pytest.mark.parametrize("device", ["/dev/penstock-none", "/dev/null"])
def test_without_tap_devices_the_switch_says_what_to_do(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    for module in (tap, shapers):
        monkeypatch.setattr(module, "DEVICE", Path(device))
    said = str(shapers.why_no_switch())
    assert f"needs TAP devices, but {device} cannot be used (" in said
    assert "`modprobe tun`" in said


@pytest.mark.parametrize(
    ("common", "own", "said"),
    [
        ("100mbit", ["1=100mbit mtu 9000"], "the link of host 1 has an mtu of 9000 and the others have one of 1500"),
        ("up 100mbit mtu 9000 down 10mbit", [], "down has an mtu of 1500 and up one of 9000"),
        ("100mbit", ["1=10mbit", "1=20mbit"], "host 1 is given twice"),
        ("100mbit", ["4=10mbit"], "host 4 does not exist: the hosts are 0 to 3"),
    ],
)
def test_links_that_contradict_each_other_are_refused(common: str, own: list[str], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        Topology(parse_link(common), parse_host_links(own, 4))


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
    with pytest.raises(ArgumentError, match="pass a rate of"):
        choose(Topology(parse_link("100gbit delay 1ms")), 4, "switch")
