"""Which hosts are slow, and by how much: what texts and numbers mean, and where they are wrong."""

import pytest

from penstock._base.errors import ArgumentError
from penstock.network.cpu_limit import parse_slow
from penstock.network.machines import Machines


@pytest.mark.parametrize(
    ("slow", "said"),
    [
        ({2: 0.5}, "host 2 does not exist: the hosts are 0 to 1"),
        ({-1: 0.5}, "host -1"),
        ({0: 0.0}, r"host 0 is given 0 \(0%\) of a core: pass more than 0"),
        ({0: -0.1}, "more than 0"),
        ({0: 1.01}, r"1\.01 \(101%\).*at most 1 \(or 100%\)"),
        ({0: float("nan")}, "nan"),
        ({0: 0.0009}, r"0\.09%.*least.*0\.1%"),
    ],
)
def test_slow_hosts_that_are_none(slow: dict[int, float], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        Machines(2, slow=slow)


# -- texts ------------------------------------------------------------------------------------------------------------


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
        (["1=-5%"], "'-5%' is not a share of a core: pass one like 25% or 0.25"),
        (["1=nan"], "like 25%"),
        (["1:25%"], "like 2=25%"),
        (["\N{SUPERSCRIPT ONE}=25%"], "like 2=25%"),
        (["9" * 5000 + "=25%"], "like 2=25%"),
    ],
)
def test_texts_that_are_none(texts: list[str], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        parse_slow(texts, 4)
