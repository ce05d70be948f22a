"""A link's text: what it means, and where it is wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ArgumentError
from penstock.fabric.network.link import BUFFER_BYTES, HOST_BYTES, Link, parse_link

RATES = {
    "100mbit": 12.5e6,
    "1gbit": 125e6,
    "1Gbit": 125e6,
    "2.5gbit": 312.5e6,
    "1tbit": 125e9,
    "64kbit": 8000,
    "9600bit": 1200,
    "8000": 1000,
    "1kibit": 128,
    "1Mibit": 131072,
    "12.5MBps": 12.5e6,
    "12.5mbps": 12.5e6,  # bytes, as tc has it, however it is spelt
    "1000bps": 1000,
    "1MiBps": 1048576,
    "1gbps": 1e9,
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
        ("100mbit BURST 1600", Link(12.5e6, burst_bytes=1600)),
        ("100mbit limit 2MiB mtu 9000", Link(12.5e6, limit_bytes=2 * 1024**2, mtu=9000)),
        ("100mbit burst 2000 latency 20ms", Link(12.5e6, burst_bytes=2000, limit_bytes=252_000)),
        ("100mbit latency 500us burst 2000", Link(12.5e6, burst_bytes=2000, limit_bytes=8250)),
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
        ("fast", "fast", "no rate"),
        ("100Mb/s", "100Mb/s", "100mbit"),
        ("-5mbit", "-5mbit", "no rate"),
        ("nanmbit", "nanmbit", "no rate"),
        ("100 mbit", "mbit", "no space"),
        ("100mbit bust 4k", "bust", "burst SIZE"),
        ("100mbit burst", "burst", "lacks its value"),
        ("100mbit burst 4q", "4q", "no size"),
        ("100mbit latency 4q", "4q", "no time"),
        ("100mbit mtu 1e3", "1e3", "no number"),
        ("100mbit burst 4k burst 8k", "burst 8k", "second time"),
        ("100mbit limit 1mb latency 2ms", "latency", "one of them"),
        ("100mbit delay 2ms", "delay", "not there yet"),
        ("delay 2ms", "delay", "not there yet"),
        ("1gbit loss 1%", "loss", "not there yet"),
        ("1gbit burst 4k jitter 1ms", "jitter", "not there yet"),
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
        ("100mbit mtu 9000 burst 4k", "9014"),
        ("100mbit limit 100", "limit is 100 bytes"),
        ("100mbit mtu 100", "576 to 65535"),
        ("100mbit mtu 70000", "576 to 65535"),
        ("100mbit limit 5gb", "below 4gb"),
    ],
)
def test_values_with_which_nothing_would_pass_are_refused(text: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        parse_link(text)


def test_a_message_costs_its_headers() -> None:
    link = parse_link("100mbit")
    assert link.wire_bytes(1448) == 1514
    assert link.wire_bytes(1449) == 1449 + 2 * 66
    assert link.goodput_ratio == pytest.approx(1448 / 1514)
    assert parse_link("100mbit mtu 9000").goodput_ratio > 0.99


@given(st.integers(1, 10**12), st.integers(576, 65535), st.none() | st.integers(65549, 2**31))
def test_every_link_lets_its_largest_frame_pass(bits: int, mtu: int, burst: int | None) -> None:
    text = f"{bits * 8}bit mtu {mtu}" + (f" burst {burst}" if burst else "")
    link = parse_link(text)
    assert link.frame_bytes <= link.burst <= link.port_burst
    assert f"rate {bits * 8}bit " in link.tbf()
    assert f"burst {link.burst}b " in link.tbf()
    assert f"limit {BUFFER_BYTES}b" in link.port_tbf()
    assert f"limit {HOST_BYTES}b" in link.tbf()


@given(st.text(max_size=30))
def test_any_text_is_a_link_or_an_argument_error(text: str) -> None:
    try:
        link = parse_link(text)
    except ArgumentError:
        return
    assert link.bytes_per_second >= 1
