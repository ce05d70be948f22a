"""The known devices: their figures are whole, found by any of their names, and a device of one's own is a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import ArgumentError
from penstock.costs.hardware import DTYPES, device, device_by_reported_name, devices


def test_each_has_peaks_memory_and_sources() -> None:
    names = [name for each in devices().values() for name in (each.key, *each.aliases)]
    assert len(names) == len({*names})
    for each in devices().values():
        assert each.sources
        assert all("https://" in source for source in each.sources)
        assert each.flops_per_second.keys() <= {*DTYPES}
        peaks = [each.flops_per_second[dtype] for dtype in DTYPES if dtype in each.flops_per_second]
        assert peaks == sorted(peaks), f"{each.key}: a smaller dtype is slower"
        assert 1e9 < each.memory_bytes < 1e12
        assert 1e11 < each.bytes_per_second < 1e13
        assert each.link is None or each.link.devices > 1


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("h100", "bfloat16", 989.4),  # dense: half of the datasheet's 1,979
        ("A100", "float16", 312),
        ("a100_sxm_40gb", "float32", 19.5),
        ("h200", "float8_e4m3fn", 1978.9),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("v100", "tf32", 15.7),  # without tf32 a product is in float32
    ],
)
def test_peaks_by_any_name(name: str, dtype: str, teraflops: float) -> None:
    assert device(name).peak(dtype) == pytest.approx(1e12 * teraflops)


@pytest.mark.parametrize(
    ("name", "key"), [("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"), ("NVIDIA GB200", "gb200"), ("Some CPU", None)]
)
def test_the_longest_reported_name_decides(name: str, key: str | None) -> None:
    assert getattr(device_by_reported_name(name), "key", None) == key


def test_an_unknown_name_says_which_are_near() -> None:
    with pytest.raises(ArgumentError, match=r"'h10': not known; did you mean .*'h100'"):
        device("h10")
    with pytest.raises(ArgumentError, match=r"not known. `penstock devices` lists"):
        device("quantum")


MINE = """[mine]
tflops = { float32 = 0.1 }
memory_gb = 24
bandwidth_gbps = 20
link = { name = "loopback", gbps = 2, latency_us = 30 }
"""


def test_a_file_describes_another(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(MINE)
    found = device(file)
    assert (found.key, found.peak("float32"), found.memory_bytes) == ("mine", 1e11, 24e9)
    assert found.link is not None
    assert (found.link.bytes_per_second, found.link.latency_seconds) == (2e9, pytest.approx(30e-6))
    assert found.network is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MINE.replace("memory_gb = 24", ""), "mine: 'memory_gb' is missing"),
        (MINE.replace("0.1", "-1"), "'mine': peak for float32: -1.*; expected a number above 0"),
        (MINE.replace("float32", "int4"), "'mine': unknown dtype 'int4'; expected float32, tf32"),
        (MINE.replace("memory_gb = 24", "memory_gb = 24\nwatts = 3"), "mine: 'watts' is unknown; expected name, "),
        (MINE.replace("bandwidth_gbps = 20", 'bandwidth_gbps = "20"'), "mine: a value has the wrong type"),
        (MINE + MINE.replace("mine", "two"), "expected one device, with a table for it, not 2"),
        ("[mine", "mine.toml is not TOML: "),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ArgumentError, match=words):
        device(file)
