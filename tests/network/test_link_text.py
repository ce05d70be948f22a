"""Texts of links and of slow hosts: what they mean, and where they are wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock._base.errors import ArgumentError
from penstock.network.cpu_limit import parse_slow
from penstock.network.link import BUFFER_BYTES, HOST_BYTES, Bursts, Chance, Impairment, Link
from penstock.network.parse import parse_link
from penstock.network.quantities import parse_size

RATES = {
    "100mbit": 12.5e6,
    "1gbit": 125e6,
    "2.5gbit": 312.5e6,
    "1tbit": 125e9,
    "8000": 1000,
    "1kibit": 128,
    "1Mibit": 131072,
    "12.5mbps": 12.5e6,  # bytes, as tc has it, however it is spelt
    "1MiBps": 1048576,
}


@pytest.mark.parametrize(("text", "bytes_per_second"), RATES.items())
def test_rates_are_tcs(text: str, bytes_per_second: float) -> None:
    assert parse_link(text).bytes_per_second == pytest.approx(bytes_per_second, rel=1e-12)
    assert parse_link(f"  rate {text} ").bytes_per_second == parse_link(text).bytes_per_second


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100mbit", Link(12.5e6)),
        ("100mbit burst 16kb", Link(12.5e6, burst_bytes=16384)),
        ("100mbit burst 32kbit", Link(12.5e6, burst_bytes=4096)),
        ("100mbit limit 2MiB mtu 9000", Link(12.5e6, limit_bytes=2 * 1024**2, mtu=9000)),
        ("100mbit burst 2000 latency 20ms", Link(12.5e6, burst_bytes=2000, limit_bytes=252_000)),
        ("mtu 1400 rate 1gbit", Link(125e6, mtu=1400)),
    ],
)
def test_words_after_the_rate(text: str, expected: Link) -> None:
    link = parse_link(text)
    values = ("bytes_per_second", "burst_bytes", "limit_bytes", "mtu")
    assert [getattr(link, value) for value in values] == [getattr(expected, value) for value in values]
    assert str(link) == text


@pytest.mark.parametrize(
    ("text", "word", "said"),
    [
        ("fast", "fast", "not a rate"),
        ("100 mbit", "mbit", "no space"),
        ("100mbit bust 4k", "bust", "burst SIZE"),
        ("100mbit mtu 1e3", "1e3", "not an integer"),
        ("100mbit burst 4k burst 8k", "burst 8k", "sets the burst again"),
        ("100mbit limit 1mb latency 2ms", "latency", "one of them"),
        ("100mbit delay 2km", "2km", "not a time"),
        ("100mbit delay 2ms 1ms 10ms", "10ms", "not a percentage"),
        ("100mbit loss 0.1", "0.1", "not a percentage"),
        ("100mbit loss 101%", "101%", "more than 100%"),
        ("100mbit delay 1ms distribution normal", "distribution", "applies to jitter"),
        ("100mbit jitter 1ms distribution cauchy", "cauchy", "paretonormal"),
        ("100mbit gap 5", "gap", "reorder 1%"),
        ("100mbit stall 2s", "stall", "needs its period"),
        ("100mbit slot 1ms", "slot", "is not a word of a link"),
        ("netem delay 5ms", "netem", "'netem' is not a rate: pass one like 100mbit"),
        ("1gbit up 5mbit down 1gbit", "up", "no direction"),
        ("up 5mbit", "up", "sets only one direction"),
        ("up 5mbit down", "down", "nothing follows"),
        ("up 5mbit up 6mbit", "up 6mbit", "given twice"),
        ("up 5mbit mtu 9000 down 6mbit", "6mbit", "use the same for both"),
    ],
)
def test_an_error_points_to_the_word(text: str, word: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said) as error:
        parse_link(text)
    message, shown, carets = str(error.value).split("\n")
    assert shown.strip() == text
    start = text.index(word)
    assert carets.index("^") - 4 == start
    assert text[start:].startswith(text[start : start + carets.count("^")])
    assert text[start : start + carets.count("^")] == word.split()[0]
    assert f"position {start + 1}:" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("burst 4k", "no rate is given"),
        ("0mbit", "at least"),
        ("100mbit burst 1513", "1514"),
        ("100mbit limit 100", "limit is 100 bytes"),
        ("100mbit mtu 100", "576 to 65535"),
        ("100mbit limit 5gb", "below 4gb"),
        ("1gbit reorder 5%", "without a delay"),
        ("1gbit stall 5s every 5s", "never ends"),
        ("1gbit delay 1ms reorder 5% gap 0", "gap is 0"),
        ("100mbit delay 99999999999s", "'99999999999s' is too large a time: pass at most 86400s, one day"),
        ("99999999999999gbit", "'99999999999999gbit' is too large a rate: pass at most 10tbit"),
        ("\uff11\uff10mbit", "is not a rate: pass one like 100mbit"),
    ],
)
def test_values_with_which_nothing_would_pass_are_refused(text: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        parse_link(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("delay 5ms", Impairment(delay_seconds=5e-3)),
        ("delay 100", Impairment(delay_seconds=100e-6)),
        ("delay 5ms 1ms 25%", Impairment(5e-3, 1e-3, 0.25)),
        ("delay 5ms jitter 1ms 25% distribution Pareto", Impairment(5e-3, 1e-3, 0.25, "pareto")),
        ("delay 5ms 1ms distribution normal", Impairment(5e-3, 1e-3, distribution="normal")),
        ("loss 0.1%", Impairment(loss=Chance(0.001))),
        ("loss random 1% 50%", Impairment(loss=Chance(0.01, 0.5))),
        ("loss gemodel 1%", Impairment(loss=Bursts(0.01, 0.99))),
        ("loss gemodel 1% 10%", Impairment(loss=Bursts(0.01, 0.1))),
        ("loss gemodel 1% 10% 70% 0.1%", Impairment(loss=Bursts(0.01, 0.1, 0.7, 0.001))),
        ("duplicate 2% corrupt 3% 10%", Impairment(duplicate=Chance(0.02), corrupt=Chance(0.03, 0.1))),
        ("delay 1ms reorder 25% 50% gap 5", Impairment(1e-3, reorder=Chance(0.25, 0.5), gap=5)),
        ("stall 2s every 60s", Impairment(stall_seconds=2, stall_every_seconds=60)),
    ],
)
def test_words_of_netem(text: str, expected: Impairment) -> None:
    link = parse_link(f"1gbit {text}")
    found = link.impairment
    assert (found.distribution, found.loss, found.gap) == (expected.distribution, expected.loss, expected.gap)
    for name in ("duplicate", "corrupt", "reorder"):
        assert getattr(found, name) == getattr(expected, name)
    for name in ("delay_seconds", "jitter_seconds", "correlation", "stall_seconds", "stall_every_seconds"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name))
    assert link.bytes_per_second == 125e6
    assert bool(found)
    assert not parse_link("1gbit").impairment


def test_the_two_directions_may_differ() -> None:
    link = parse_link("up 10mbit delay 20ms  down 100mbit loss 1%")
    assert link.down is not None
    assert (link.bytes_per_second, link.down.bytes_per_second) == (1.25e6, 12.5e6)
    assert (link.impairment.delay_seconds, link.down.impairment.delay_seconds) == (pytest.approx(0.02), 0)
    assert str(link) == "up 10mbit delay 20ms down 100mbit loss 1%"


@given(st.integers(1, 10**12), st.integers(576, 65535), st.none() | st.integers(65549, 2**31))
def test_every_link_lets_its_largest_frame_pass(bits: int, mtu: int, burst: int | None) -> None:
    text = f"{bits * 8}bit mtu {mtu}" + (f" burst {burst}" if burst else "")
    link = parse_link(text)
    assert link.frame_bytes <= link.burst <= link.port_burst
    host = link.host_tbf(exact=False)
    assert f"rate {bits * 8}bit burst {link.burst}b " in host
    assert f"limit {BUFFER_BYTES}b" in link.port_tbf()
    behind_switch = link.host_tbf(exact=True)
    assert f"burst {link.port_burst}b " in behind_switch, "the switch keeps the rate to the frame: TCP gets room"
    assert f"limit {HOST_BYTES}b" in host


@given(st.text(max_size=30))
def test_any_text_is_a_link_or_an_argument_error(text: str) -> None:
    try:
        link = parse_link(text)
    except ArgumentError:
        return
    assert link.bytes_per_second >= 1


def test_a_size_means_the_same_everywhere() -> None:
    for unit in ("k", "kb", "KiB", "mb", "m", "MiB"):
        assert parse_size(f"64{unit}") == parse_link(f"1gbit limit 64{unit}").limit_bytes


# -- slow hosts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["4=25%"], "host 4 does not exist: the hosts are 0 to 3"),
        (["1=25%", "2=25%,1=50%"], "'1=50%': host 1 is given twice"),
        (["1=0"], "more than 0"),
        (["1=100.1%"], r"100\.1%.*at most"),
        (["1=25"], r"25 \(2500%\) of a core: .*1=25% or 1=0\.25"),
        (["1=0.05%"], "least that can be enforced is 0.1%"),
        ([""], r"'' is not a host with its share of one core: pass one like 2=25% or 2=0\.25"),
        (["1:25%"], "like 2=25%"),
        (["\N{SUPERSCRIPT ONE}=25%"], "like 2=25%"),
    ],
)
def test_texts_that_are_none(texts: list[str], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        parse_slow(texts, 4)
