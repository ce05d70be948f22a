"""Whatever happens to a rank, the others end soon and name it; and a rank that is only slow is left alone."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import torch.distributed as dist

from penstock._base.errors import RankFailedError
from penstock._base.process import Process, ProcessState
from penstock.distributed.failure import OUTSIDE, DeviceLag, Failure, Position, RankStatus, wait_chain
from penstock.distributed.failure_detector import FailureDetector, Timeouts
from penstock.distributed.heartbeat_server import Connection
from penstock.distributed.joining import Launcher, Meeting, MissingRanks, meeting_store
from penstock.distributed.watchdog import Watchdog

RECEIVE = Position("1RECV_F0", (0,))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class World:
    """A detector whose ranks beat every half second, but for those named as silent."""

    def __init__(self, positions: list[Position], state: ProcessState = "unknown", away_seconds: float = 5.0) -> None:
        self.clock = Clock()
        self.detector = FailureDetector(
            len(positions), Timeouts(away_seconds=away_seconds), self.clock, lambda process: state
        )
        self.positions = positions
        self.since = [100.0] * len(positions)
        for rank in range(len(positions)):
            self.detector.join(rank, Process("m", rank, "1"))
        self.pass_time(1)

    def pass_time(self, seconds: float, silent: tuple[int, ...] = ()) -> Failure | None:
        for _ in range(int(seconds * 2)):
            self.clock.now += 0.5
            for rank, position in enumerate(self.positions):
                if rank not in silent:
                    self.detector.beat(rank, RankStatus(position, self.clock.now - self.since[rank]))
            self.detector.judge()
        return self.detector.failure


def test_wait_chain_names_those_that_have_not_come() -> None:
    gather = RankStatus(Position("gather", tuple(range(1, 8))), 31)
    working = RankStatus(Position("2F0"), 3)
    assert wait_chain(0, [gather, gather, working, RankStatus(left=True), gather, working, working, working]) == (
        2,
        "rank 0 has waited 31 s for gather from ranks 1, 2, 3, 4, 5, 6, 7; rank 2 runs 2F0 (3 s so far); rank 3 has "
        "exited; rank 5 runs 2F0 (3 s so far); rank 6 runs 2F0 (3 s so far); and 1 more that do not wait",
    )
    assert wait_chain(1, [RankStatus(Position("0RECV_B0", (1,)), 1800), RankStatus(RECEIVE, 1800)]) == (
        1,
        "rank 1 has waited 1800 s for 1RECV_F0 from rank 0; rank 0 has waited 1800 s for 0RECV_B0 from rank 1",
    )


def test_who_is_silent_without_harm_is_left_alone() -> None:
    assert World([OUTSIDE, OUTSIDE]).pass_time(60, silent=(0,)) is None, "nobody waits"
    world = World([Position("0F0"), RECEIVE], state="running")
    assert world.pass_time(60, silent=(0,)) is None
    world = World([Position("0F0"), RECEIVE])
    world.clock.now += 3600  # it was the detector that slept
    world.detector.judge()
    assert world.pass_time(3) is None
    world.detector.record_disconnect(0)
    world.detector.join(0, Process("m", 0, "1"))
    assert world.pass_time(60) is None, "it came back"


def test_goodbye_is_no_loss_unless_someone_still_waits() -> None:
    world = World([OUTSIDE, OUTSIDE])
    world.detector.beat(0, RankStatus(left=True))
    world.detector.record_disconnect(0)
    assert world.pass_time(60, silent=(0,)) is None
    world.positions[1], world.since[1] = RECEIVE, world.clock.now
    assert world.pass_time(4, silent=(0,)) is None
    failure = world.pass_time(2, silent=(0,))
    assert failure == Failure(0, None, "its program ended while rank 1 waits for 1RECV_F0 from rank 0", "left")


def test_rank_that_ends_before_all_have_come_is_lost_at_once() -> None:
    """Though nobody waits for it in particular: the pipeline can't start without it."""
    detector = FailureDetector(3, Timeouts(), clock := Clock(), lambda process: "unknown")
    for rank in range(2):
        detector.join(rank, Process("m", rank, "1"))
    detector.record_disconnect(1)
    clock.now += 0.5
    detector.judge()
    assert detector.failure == Failure(1, None, "its process is gone", "lost")


def test_of_several_that_are_gone_the_first_is_named() -> None:
    """As when torchrun ends the ranks of a machine on which one was killed: nobody is left there who waits for it."""
    world = World([Position("0RECV_B0", (1,)), Position("1RECV_B0", (2,)), Position("2F0")])
    world.detector.record_disconnect(2)
    world.detector.judge()
    assert world.detector.failure is None, "what rank 2 sent last may still be under way"
    world.clock.now += 0.1
    world.detector.record_disconnect(1)
    assert world.pass_time(1, silent=(1, 2)) == Failure(2, "2F0", "its process is gone", "lost")


def test_a_rank_of_another_machine_has_a_minute() -> None:
    """The network may be silent for that long. One of this machine is looked up after some seconds."""
    away = Timeouts().away_seconds
    assert away >= 60 > 10 > Timeouts().stall_seconds
    world = World([Position("0F0"), RECEIVE], "unknown", away)
    assert world.pass_time(away - 2, silent=(0,)) is None
    assert world.pass_time(3, silent=(0,)) == Failure(0, "0F0", "no sign of life for 60 s", "lost")
    assert World([OUTSIDE, RECEIVE], "stopped", away).pass_time(6, silent=(0,)) is not None


def test_own_process_runs_and_a_reused_id_is_another_process() -> None:
    here = Process.here()
    if not here.started:
        pytest.skip("no /proc on this system")
    assert here.state() == "running"
    assert Process(here.machine, here.pid, "0").state() == "gone"
    assert Process("elsewhere", here.pid, here.started).state() == "unknown"


@dataclass
class Bench:
    """A watchdog without its thread: the test holds rank 0's end and turns the clock.

    Attributes:
        others: what rank 0 says of all ranks.
    """

    dog: Watchdog
    rank0: Connection
    clock: Clock
    statuses: list[int]
    others: list[RankStatus]

    def beats(self, seconds: float, answered: bool = True) -> None:
        for _ in range(int(seconds * 2)):
            self.dog._tick()
            self.clock.now += 0.5
            if answered:
                self.dog._handle({"sightings": self.others})
            self.dog._decide()


@contextmanager
def benched(rank: int, ranks: int) -> Iterator[Bench]:
    ours, theirs = socket.socketpair()
    clock, statuses = Clock(), list[int]()
    address = {"token": "t", "process": ["elsewhere", 1, ""]}
    with ours, theirs:
        dog = Watchdog(rank, ranks, Timeouts(), address, Connection(ours), clock=clock, leave=statuses.append)
        yield Bench(dog, Connection(theirs), clock, statuses, [RankStatus()] * ranks)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with benched(1, 2) as bench:
        yield bench


BOOM = Failure(0, "0B3", "ValueError: boom")
STOPS = "rank 1 stops: rank 0 failed at 0B3: ValueError: boom"


def test_computing_rank_notices_by_itself(bench: Bench) -> None:
    bench.dog.position = Position("1F0")
    bench.dog.check()
    bench.dog._handle({"failure": BOOM})
    bench.beats(10)
    assert bench.statuses == []
    with pytest.raises(RankFailedError, match=STOPS):
        bench.dog.check()
    bench.dog.position = RECEIVE
    bench.beats(1)
    assert bench.statuses == [], "the main thread is raising"


def test_rank_that_does_not_notice_is_stopped_after_the_grace(bench: Bench) -> None:
    bench.dog._handle({"failure": BOOM})
    bench.beats(59)
    assert bench.statuses == []
    bench.beats(2)
    assert bench.statuses[0] == 1


def test_silence_of_rank_0_is_its_loss_for_a_rank_that_waits(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.beats(60, answered=False)
    assert bench.dog.failure is None
    bench.dog.position = RECEIVE
    bench.beats(2, answered=False)
    assert bench.dog.failure == Failure(0, None, "no sign of life for 60 s", "lost")
    assert bench.statuses[0] == 1
    assert "s; rank 1 was waiting for 1RECV_F0 from rank 0\n" in capsys.readouterr().err
    assert "failure" in bench.rank0.receive()[0], "rank 0 reads why the others are gone when it wakes up"


def test_rank_that_slept_accuses_nobody_and_a_wait_in_the_next_step_is_a_new_one(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.dog.position = RECEIVE
    for _ in range(100):
        bench.dog.step += 1
        bench.beats(5)
    assert capsys.readouterr().err == ""
    bench.clock.now += 7200
    bench.beats(3, answered=False)
    assert bench.dog.failure is None


def test_long_wait_warns_every_half_minute_and_ends_after_half_an_hour(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.dog.position = RECEIVE
    bench.beats(65)
    warnings = capsys.readouterr().err.splitlines()
    assert warnings[0] == (
        "penstock: rank 1 has waited 30 s for 1RECV_F0 from rank 0; rank 0 is not running a step (0 s so far)"
    )
    assert len(warnings) == 2
    bench.beats(1740)
    assert bench.dog.failure is not None
    assert (bench.dog.failure.rank, bench.dog.failure.kind) == (0, "stalled")
    assert bench.statuses[0] == 1


def test_all_ranks_statuses_are_asked_for_only_before_a_report(bench: Bench) -> None:
    """All of them, to each rank, in each beat, would be 117 MB/s with 1024 ranks."""
    bench.dog.position = RECEIVE
    asked = []
    for seconds in (1, 23, 2, 5, 20, 4):
        bench.beats(seconds)
        bench.dog._talk()
        asked.append((int(bench.clock.now), bench.rank0.receive()[-1]["all"]))
    start = asked[0][0] - 1
    assert [(now - start, every) for now, every in asked] == [
        (1, False), (24, False), (26, True), (31, False), (51, False), (55, True)
    ]  # fmt: skip


def test_long_action_is_told_every_half_minute_and_is_no_failure(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may wait where nobody sees it: in FSDP's collectives, or the user's."""
    bench.dog.position = Position("1F0")
    bench.beats(40)
    assert capsys.readouterr().err == "penstock: rank 1 runs 1F0 (30 s so far)\n"
    bench.dog.partners = (0,)
    bench.beats(2000)
    assert capsys.readouterr().err.splitlines()[0] == (
        "penstock: rank 1 runs 1F0 (60 s so far); rank 0 is not running a step (0 s so far), with the same stages"
    )
    assert bench.dog.failure is None
    bench.dog.position = OUTSIDE
    bench.beats(100)
    assert capsys.readouterr().err == "", "the caller's code may take its time"


def test_rank_whose_agent_is_gone_ends_and_tells_the_others(
    monkeypatch: pytest.MonkeyPatch, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    bench.dog._launcher = Launcher()
    bench.dog.position = RECEIVE
    bench.beats(2)
    assert bench.dog.failure is None
    started = os.getppid()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    bench.beats(1)
    error = f"its torchrun agent (process {started}) is gone"
    assert bench.dog.failure == Failure(1, "1RECV_F0", error, "lost")
    assert bench.statuses[0] == 1
    assert "failure" in bench.rank0.receive()[-1]
    missing = MissingRanks(0, 2, Timeouts())
    missing._launcher = bench.dog._launcher
    with pytest.raises(RankFailedError, match="rank 0 stops: its torchrun agent"):
        missing.check()


def test_a_stall_is_blamed_on_the_rank_that_all_wait_for_and_not_on_the_peer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rank 2 waits for rank 1, which waits for rank 0, which computes without end."""
    with benched(2, 3) as bench:
        bench.dog.position = Position("2RECV_F0", (1,))
        bench.others = [RankStatus(Position("0F0"), 3.0), RankStatus(RECEIVE, 2.0), RankStatus()]
        while not bench.statuses:
            bench.beats(0.5)
    assert capsys.readouterr().err.count("stops") == 1
    assert str(bench.dog.failure) == (
        "rank 0 stalled at 0F0: rank 2 has waited 1800 s for 2RECV_F0 from rank 1; rank 1 has waited 2 s for 1RECV_F0 "
        "from rank 0; rank 0 runs 0F0 (3 s so far)"
    )


def test_own_failure_is_reported_and_a_cause_known_before_wins(bench: Bench) -> None:
    bench.dog._handle({"failure": BOOM})
    bench.dog.report("1F2", KeyError("x"))
    assert bench.dog.failure == BOOM
    noted, reported = bench.rank0.receive()
    assert noted["noted"]
    assert "KeyError" in reported["failure"][2]


class GivenUp(socket.socket):
    """A connection whose packets nobody acknowledges: its kernel gives it up, and tells so once."""

    told = False

    def recv(self, size: int, flags: int = 0) -> bytes:
        self._tell()
        return b""

    def sendall(self, data: object, flags: int = 0) -> None:
        self._tell()
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    def _tell(self) -> None:
        if not self.told:
            self.told = True
            raise OSError(errno.ETIMEDOUT, "Connection timed out")


@pytest.mark.parametrize("sends", [0, 1, 2])
def test_connection_that_the_kernel_gave_up_is_neither_silent_nor_closed_by_the_other_side(sends: int) -> None:
    """As where the cable is cut."""
    with GivenUp() as link:
        connection = Connection(link)
        tries = [*[partial(connection.send, {})] * sends, connection.receive, connection.receive]
        for call in tries:
            with pytest.raises(OSError, match="timed out") as caught:
                call()
            assert not isinstance(caught.value, ConnectionError | TimeoutError)


def test_a_restarted_job_does_not_read_what_the_one_before_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first attempt only rank 0 came, which left its address; in the second, rank 1 comes first."""
    store, missing = dist.HashStore(), MissingRanks(1, 2, Timeouts(join_seconds=0.05))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    Meeting(meeting_store(store, (0, 1)), 0, 2).broadcast("the old address", missing)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = Meeting(meeting_store(store, (0, 1)), 1, 2)
    assert again.absent() == (0,)
    with pytest.raises(RankFailedError, match=r"rank 1 waited \d+ s for rank 0, which has not called"):
        again.broadcast(None, missing)
    Meeting(meeting_store(store, (0, 1)), 0, 2).broadcast("the new address", missing)
    assert again.broadcast(None, missing) == "the new address"
    store = dist.HashStore()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # two nodes, one of which lost a rank and counts its restart
    Meeting(meeting_store(store, (0, 1)), 0, 2).broadcast("an address", missing)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert Meeting(meeting_store(store, (0, 1)), 1, 2).broadcast(None, missing) == "an address"


def test_unreachable_rank_0_is_reported_at_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    address = {"hosts": ["127.0.0.1"], "port": port, "token": "t", "process": ["elsewhere", 1, ""]}
    with pytest.raises(RankFailedError, match=f"rank 1 cannot reach rank 0 at 127.0.0.1, port {port}"):
        Watchdog.join(address, 1, 2, Timeouts(), MissingRanks(1, 2, Timeouts()))


def test_what_a_device_waits_for_can_be_lost() -> None:
    """Its host may be far ahead, and wait for no one."""
    detector = FailureDetector(2, Timeouts(), clock := Clock(), lambda process: "gone")
    for rank in range(2):
        detector.join(rank, Process("m", rank, "1"))
    detector.beat(1, RankStatus(Position("1B0"), device=DeviceLag(Position("1F0"), "")))
    detector.record_disconnect(1)
    for _ in range(4):
        clock.now += 0.5
        detector.beat(0, RankStatus(Position("0F3"), 3.0, device=DeviceLag(Position("0RECV_B0", (1,)), "0F1")))
        detector.judge()
    assert detector.failure == Failure(1, "1F0", "its process is gone", "lost")


def test_a_device_that_waits_is_spoken_for(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.dog.device = lambda: DeviceLag(Position("1RECV_F0", (0,)), "1F3")
    bench.beats(31)
    assert "penstock: the device of rank 1 has waited 30 s for 1RECV_F0 from rank 0" in capsys.readouterr().err
    bench.dog._handle({"failure": BOOM})
    bench.beats(4.5)
    assert bench.statuses == [], "the host may notice by itself"
    bench.beats(1)
    assert bench.statuses[0] == 1
    assert f"{STOPS}; its device waits for 1RECV_F0 from rank 0, after 1F3" in capsys.readouterr().err


def test_a_device_that_moves_on_is_not_stuck(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    steps = iter(range(1000))
    bench.dog.device = lambda: DeviceLag(Position(f"1F{next(steps)}"))
    bench.dog.position = RECEIVE
    bench.beats(100)
    assert capsys.readouterr().err == ""
