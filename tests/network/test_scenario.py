"""Changes of a network over time: what a file may say, and which of its events hold when."""

import time
from itertools import groupby
from pathlib import Path

import pytest

from penstock._base.errors import ArgumentError
from penstock.network.parse import parse_link
from penstock.network.scenario import Event, Playback, play, read_scenario
from penstock.network.topology import State, Topology

BEFORE = Topology(parse_link("1gbit delay 1ms"), {3: parse_link("50mbit")}, seed=7)

WHOLE = """
[[event]]
at = "step 50"
host = 2
link = "10mbit delay 50ms loss 1%"
for = "30s"

[[event]]
at = "step 80"
host = 1
gone = true
for = "5s"

[[event]]
at = "20s"
background = ["300mbit to 1"]

[[event]]
at = "1500ms"
link = "100mbit"
"""


def _events(folder: Path, text: str) -> tuple[Event, ...]:
    path = folder / "changes.toml"
    path.write_text(text)
    return read_scenario(path, BEFORE, 4)


def test_a_file_is_read(tmp_path: Path) -> None:
    degrades, leaves, neighbor, all_links = _events(tmp_path, WHOLE)
    assert (degrades.step, degrades.host, degrades.for_seconds) == (50, 2, 30)
    assert degrades.link == parse_link("10mbit delay 50ms loss 1%")
    assert (leaves.step, leaves.host, leaves.is_gone, leaves.for_seconds) == (80, 1, True, 5)
    assert (neighbor.step, neighbor.at_seconds, neighbor.background) == (None, 20, ("300mbit to 1",))
    assert (all_links.at_seconds, all_links.host, all_links.for_seconds) == (pytest.approx(1.5), None, None)
    assert degrades.text == "host = 2, link = 10mbit delay 50ms loss 1%, for = 30s"


def _holds(play: Playback) -> tuple[str, str, tuple[int, ...], tuple[str, ...]]:
    topology = play.state.topology
    return str(topology.up(0)), str(topology.up(2)), play.state.gone, play.state.background


def test_events_come_with_steps_and_times_and_go_again(tmp_path: Path) -> None:
    play = Playback(_events(tmp_path, WHOLE), State(BEFORE, background=("5mbit",)))
    usual = ("1gbit delay 1ms", "1gbit delay 1ms", (), ("5mbit",))
    assert play.advance(0.0, -1) == []
    assert _holds(play) == usual
    assert play.advance(1.6, 3) == ["link = 100mbit"]
    assert _holds(play) == ("100mbit", "100mbit", (), ("5mbit",))
    assert len(play.advance(10.0, 50)) == 1
    assert _holds(play) == ("100mbit", "10mbit delay 50ms loss 1%", (), ("5mbit",))
    assert str(play.state.topology.up(3)) == "50mbit"
    assert play.advance(10.1, 50) == []  # each comes once
    assert len(play.advance(30.0, 85)) == 2  # one by its time and one by its step, at once
    assert _holds(play)[2:] == ((1,), ("5mbit", "300mbit to 1"))
    assert [said.partition(":")[0] for said in play.advance(41.0, 85)] == ["over", "over"]
    assert _holds(play) == ("100mbit", "100mbit", (), ("5mbit", "300mbit to 1"))
    assert play.state.topology.seed == 7


class Told:
    """Stands for hosts that a scenario changes: what their network was like, in order."""

    def __init__(self) -> None:
        self.topology, self.background = BEFORE, ("5mbit",)
        self.states = [State(BEFORE, background=self.background)]

    def change(self, state: State) -> None:
        self.states.append(state)


def test_what_changes_is_ordered_once_and_the_network_is_as_before_in_the_end() -> None:
    link = parse_link("1mbit")
    events = [
        Event(step=0, host=1, is_gone=True, for_seconds=0.02),
        Event(link=link),
        Event(background=("1mbit",)),
    ]
    told = Told()
    with play(told, events, lambda: 0) as happened:  # type: ignore[arg-type]
        deadline = time.monotonic() + 30
        while len(happened) < 4:
            assert time.monotonic() < deadline, "not within 30 s"
            time.sleep(0.005)
        time.sleep(0.05)
        assert [one for one, _ in groupby(state.gone for state in told.states)] == [(), (1,), ()]
        assert [one for one, _ in groupby(state.topology.link for state in told.states)] == [BEFORE.link, link]
        assert [one for one, _ in groupby(state.background for state in told.states)] == [
            ("5mbit",),
            ("5mbit", "1mbit"),
        ]
    assert told.states[-1] == told.states[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no events"),
        ("events = 3", "events is unknown"),
        ("[[event]", "not TOML"),
        ('[[event]]\nat = "5s"', "event 1: use exactly one of link, gone = true, or background"),
        ('[[event]]\nlink = "1mbit"', "at is None"),
        ('[[event]]\nat = 5\nlink = "1mbit"', "at is 5: use a string"),
        ('[[event]]\nat = "soon"\nlink = "1mbit"', "'soon' is not a time"),
        ('[[event]]\nat = "epoch 1"\nlink = "1mbit"', "'epoch 1' is not a time"),
        ('[[event]]\nat = "5s"\nlink = "1mbit"\nhost = 4', "host 4 does not exist: the hosts are 0 to 3"),
        ('[[event]]\nat = "5s"\nlink = "1mbit"\nhost = true', "host True does not exist"),
        ('[[event]]\nat = "5s"\nlink = "1mbit loss 5"', "not a percentage"),
        ('[[event]]\nat = "5s"\nlink = "1mbit mtu 9000"', "mtu cannot change from 1500"),
        ('[[event]]\nat = "5s"\nlink = "1mbit"\nfor = "0s"', "above 0"),
        ('[[event]]\nat = "5s"\ngone = true\nfor = "1s"', "needs a host and a time"),
        ('[[event]]\nat = "5s"\ngone = true\nhost = 1', "never reach a later step"),
        ('[[event]]\nat = "5s"\nbackground = ["1mbit to 9"]', "host 9 does not exist"),
        ('[[event]]\nat = "5s"\nbackground = "1mbit"', "list of strings"),
        ('[[event]]\nat = "5s"\nbackground = ["1mbit"]\nhost = 2', "put the target in the traffic itself"),
        ('[[event]]\nat = "5s"\nlink = "1mbit"\ndelay = "5ms"', "'delay' is unknown"),
        ('[[event]]\nat = "5s"\nlink = "1mbit"\n[[event]]\nat = "5s"\nlink = "x"', "event 2:"),
    ],
)
def test_what_a_file_cannot_say_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said) as error:
        _events(tmp_path, text)
    assert "changes.toml" in str(error.value)
