"""Ends this rank when another one fails, and says who waits for whom when a run stalls.

A blocked gloo wait cannot be polled, canceled or timed out from inside. So a separate thread watches the other ranks
over its own connections; if the main thread waits in vain, the thread says why and exits the process. The exit is what
frees the neighbors.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock._base.errors import RankFailedError
from penstock._base.process import Process
from penstock._base.words import in_a_line
from penstock.distributed import heartbeat_server, host_clock
from penstock.distributed.failure import (
    OUTSIDE,
    Behind,
    Failure,
    Position,
    Sighting,
    long_action,
    name_ranks,
    say,
    wait_chain,
)
from penstock.distributed.failure_detector import GONE, Patience, silence
from penstock.distributed.heartbeat_server import Address, Connection, HeartbeatServer
from penstock.distributed.host_clock import HostOffset
from penstock.distributed.joining import Launcher, Meeting, Missing, Store
from penstock.distributed.launch.endings import FAILURES, await_culprit, exit_status, note

_TELL_SECONDS = 2.0
_FLUSH_SECONDS, _LAST_WORDS_SECONDS = 1.0, 3.0
_INTERRUPTED_SECONDS = 0.3  # instead of `_TELL_SECONDS`, if Ctrl-C ends this rank: it most likely ends the others too


class Watchdog:
    """One rank's view of the others, made by `connect`; made without arguments it watches nothing, and has no thread.

    The main thread reports what it does:

        watchdog.step += 1                    # at the start of a step, so that a repeated position counts as a new one
        watchdog.check()                      # raises RankFailedError if another rank failed
        watchdog.position = positions[i]      # a `Position` made beforehand: one assignment, nothing else
        ...                                   # the wait, or the work
        watchdog.position = OUTSIDE           # at the end of the step

    Set the position before each blocking wait, with the ranks that it waits for, and before each computation.

    Attributes:
        failure: why the pipeline failed, once known; a cheap test before `check`.
        device: tells where this rank's device is, if it has not caught up with the host. Asked every beat.
        behind: what it said last.
        offset: from this host's clock to that of rank 0's.
        sightings: each rank as its last beat showed it, at most a beat or two old; this one as it is.
        partners: the ranks with which this one may meet within an action, in FSDP's collectives for example.
        raised: called if something raised here, before the others are told: with that; None if it is most likely the
            effect of another rank's failure.
        members: of each rank, its number in the whole job.
        last_words: called before this process is ended because of a failure, on any thread, which waits three seconds
            for it: a run's last steps and files may take 2.5.
    """

    def __init__(
        self,
        rank: int = 0,
        ranks: int = 1,
        patience: Patience | None = None,
        address: Address | None = None,
        connection: Connection | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self.position: Position = OUTSIDE
        self.step = 0
        self.device: Callable[[], Behind | None] = _nothing
        self.behind: Behind | None = None
        self.failure: Failure | None = None
        self.sightings: list[Sighting] = [Sighting()] * ranks
        self.partners: Sequence[int] = ()
        self.members: Sequence[int] = range(ranks)
        self.raised: Callable[[Failure | None], object] = _nothing
        self.last_words: Callable[[], object] = _nothing
        self._rank, self._patience = rank, patience or Patience()
        self._address, self._connection = address or {}, connection
        self.offset = HostOffset(self._address.get("clock", ""))
        self._clock, self._leave = clock, leave
        self._pid = os.getpid()
        self._server: HeartbeatServer | None = None
        self._thread: threading.Thread | None = None
        self._absent: tuple[int, ...] = ()
        self._all_here = threading.Event()
        self._all_here.set()
        self._closed = threading.Event()
        self._known = threading.Event()
        self._raising = self._odd = False
        self._tell_seconds = _TELL_SECONDS
        self._status = 1
        self._failed: float | None = None
        self._held: tuple[int, Position, Behind | None] = (0, OUTSIDE, None)
        self._ticked = self._since = self._answered = clock()
        self._down: float | None = None
        self._asked = False
        self._warned_seconds = 0.0
        self._launcher = Launcher()

    @classmethod
    def connect(cls, rank: int, ranks: int, store: Store, patience: Patience | None = None) -> Watchdog:
        """Connect the ranks of a pipeline and start to watch them. Every rank must call it, with the same patience.

        Until all have called it, those that have say every `warn_seconds` which ranks they wait for.

        Args:
            store: where these ranks meet, and no others.

        Raises RankFailedError if the ranks do not find each other, or if one of them ends meanwhile.
        """
        patience = patience or Patience()
        server = HeartbeatServer(ranks, patience) if rank == 0 else None
        try:
            with Missing(rank, ranks, patience) as missing:
                address: Address = Meeting(store, rank, ranks).give(server.address if server else None, missing)
                watchdog = cls.join(address, rank, ranks, patience, missing)
        except BaseException:
            if server:
                server.stop()
            raise
        watchdog._server = server
        atexit.register(watchdog._at_exit)
        return watchdog

    @classmethod
    def join(cls, address: Address, rank: int, ranks: int, patience: Patience, missing: Missing) -> Watchdog:
        """Connect to rank 0's server, start to watch, and wait until all ranks have come. Raise as `connect`."""
        try:
            connection = heartbeat_server.connect(address, rank, patience.stall_seconds)
        except OSError as error:
            where = f"{' or '.join(address['hosts'])}, port {address['port']}"
            raise RankFailedError(
                f"rank {rank} cannot reach rank 0 at {where} ({error}), where ranks report failures to each other. "
                f"Allow TCP connections between the machines of this run, and set MASTER_ADDR to rank 0's host."
            ) from error
        there = {**address, "hosts": [connection.host]}  # to return there takes no look-up of names
        watchdog = cls(rank, ranks, patience, there, connection)
        watchdog._all_here.clear()
        watchdog._thread = threading.Thread(target=watchdog._watch, name="penstock-watchdog", daemon=True)
        try:
            watchdog._thread.start()
            while not watchdog._all_here.wait(patience.beat_seconds):
                missing.ranks = watchdog._absent or missing.ranks
                missing.check()
                watchdog.check()
            watchdog.check()
        except BaseException:
            watchdog._end()  # without a goodbye
            raise
        return watchdog

    def check(self) -> None:
        """Raise RankFailedError if the pipeline has failed, here or on another rank."""
        if self.failure is not None:
            self._raising = True
            self._await_others()
            raise RankFailedError(self._words(self.failure))

    def report(self, action: str | None, error: BaseException) -> None:
        """Tell the other ranks that `error` ended `action` here. The first failure of all ranks is `failure` then."""
        self._raising = True
        if isinstance(error, KeyboardInterrupt):
            self._tell_seconds = _INTERRUPTED_SECONDS
        self._status = exit_status(error) or 1
        mine = Failure.of(self._rank, action, error, self.behind)
        if self._send(failure=mine):
            self._known.wait(self._tell_seconds)
            self._await_others()
        self._fail(mine)

    def cause(self, seconds: float | None = None) -> Failure | None:
        """Find out why a wait of this rank raised: wait for another rank's failure to become known.

        Leave `position` as it was in the wait.

        Args:
            seconds: how long to wait at most; by default as long as it takes to see that a rank does not answer.

        Returns:
            The failure; None if none became known, so that the error is this rank's own.
        """
        self._raising = True
        if self._thread and not self._known.is_set():
            self._known.wait(self._patience.stall_seconds + 2.0 if seconds is None else seconds)
        self._raising = self.failure is not None
        return self.failure

    def close(self) -> None:
        """Say goodbye to the other ranks and end the thread.

        Rank 0 continues to serve ranks that have not left, and its process does not end before they have.
        """
        if self._closed.is_set():
            return
        self._send(beat=Sighting(left=True))  # before the thread disconnects; the answer wakes it
        self._end()
        if self._server is None and self.failure is None:
            atexit.unregister(self._at_exit)

    def _end(self) -> None:
        self._closed.set()
        if self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._tick()
            self._talk()
            self._decide()
        if self._connection:
            self._connection.close()

    def _tick(self) -> None:
        """Note what the main thread and its device are doing, and whether this process was asleep."""
        self.behind = self.device()
        now, held = self._clock(), (self.step, self.position, self.behind)
        asleep = self._patience.overslept(now - self._ticked)
        self._ticked = now
        if asleep:
            self._answered = now
            self._down = None
        if asleep or held != self._held:
            self._held, self._since, self._warned_seconds = held, now, 0.0

    def _talk(self) -> None:
        """Send a beat, unless the last one is still unanswered, and listen until the next is due."""
        until = self._clock() + self._patience.beat_seconds
        try:
            if self._connection is None:
                self._connection = heartbeat_server.connect(self._address, self._rank, self._patience.beat_seconds)
                self._asked = False
            if not self._asked:
                self._asked = self._send(beat=self._sighting(), asked=host_clock.now_ns())
            while (left := until - self._clock()) > 0 and not self._closed.is_set():
                self._connection.link.settimeout(left)
                for message in self._connection.receive():
                    self._take(message)
        except TimeoutError:
            pass
        except Exception as error:  # whatever it sent ends the connection, never this thread
            broke, joining = self._connection is not None, not self._all_here.is_set()
            if self._connection:
                self._connection.close()
                self._connection = None
            if not (self._odd or isinstance(error, OSError)):
                self._odd = True
                if joining:
                    self._fail(Failure(0, None, f"it sent what no rank sends ({type(error).__name__})", "lost"))
                else:
                    say(f"rank {self._rank} received an invalid message from rank 0; reconnecting: {in_a_line(error)}")
            if self._down is None and isinstance(error, ConnectionError) and not (broke and joining):
                self._down = self._clock()  # strangers may have taken the place of a connection that had just been made
            left = until - self._clock()
            self._closed.wait(max(0.0, min(left, self._patience.beat_seconds / 4) if broke else left))

    def _take(self, message: dict[str, Any]) -> None:
        self._answered, self._down = self._clock(), None
        if "clock" in message:
            self.offset.note(*map(int, message["clock"]))
            if self.offset.wants_more:
                self._send(asked=host_clock.now_ns())
        if "sightings" in message:
            self._asked = False
            sightings = [Sighting.from_list(sighting) for sighting in message["sightings"]]
            ranks = len(self.sightings)
            if len(sightings) != ranks or not all(sighting.fits(ranks) for sighting in sightings):
                raise ValueError("sightings of other ranks")
            self.sightings = sightings
        if "absent" in message:
            self._absent = tuple(map(int, message["absent"]))
            if not self._absent:
                self._all_here.set()
        if "failure" in message:
            self._fail(Failure.from_list(message["failure"]))
            self._send(noted=True)

    def _decide(self) -> None:
        """Exit if the pipeline failed and the main thread cannot notice. Otherwise looks for a reason to fail it."""
        now, waits = self._clock(), bool(self.position.peers)
        self.sightings[self._rank] = self._sighting()
        device_waits = self.behind is not None and bool(self.behind.position.peers)
        if self.failure is None and (without := self._launcher.gone()):
            self._record(Failure(self._rank, self._sighting().doing.action or None, without, "lost"))
        if self.failure is None and (self.step, self.position) == self._held[:2]:
            if waits or device_waits or not self._all_here.is_set():
                self._suspect(now)
            elif self.position.action:  # it may wait, unseen: in a collective of FSDP, or of the user's own
                self._mention(now, long_action(self._rank, self.sightings, self.partners))
        if self.failure is not None and not self._closed.is_set():
            self._failed = now if self._failed is None else self._failed
            seconds = now - self._failed
            stops = waits or (device_waits and seconds >= self._patience.stall_seconds)  # the host may notice it first
            if (stops and not self._raising) or seconds >= self._patience.grace_seconds:
                self._stop(self.failure)

    def _sighting(self) -> Sighting:
        """Return this rank as others may see it."""
        _, position, behind = self._held
        return Sighting(position, self._clock() - self._since, device=behind)

    def _suspect(self, now: float) -> None:
        """Check, while the main thread or its device waits or ranks have yet to come, whether rank 0, which would know
        of a lost rank, is lost itself, and whether the wait is too long.
        """
        action, lost = self.sightings[0].doing.action or None, None
        if self._down is not None and now - self._down >= self._patience.beat_seconds:
            lost = GONE
        elif now - self._answered >= self._patience.stall_seconds:
            lost = silence(now - self._answered, Process(*self._address["process"]).state(), self._patience)
        if lost is not None and self._rank != 0:
            self._record(Failure(0, action, lost, "lost"))
        if self.failure is not None or not self._all_here.is_set():
            return
        root, chain = wait_chain(self._rank, self.sightings)
        if now - self._since >= self._patience.timeout_seconds:
            self._record(Failure(root, self.sightings[root].doing.action or None, chain, "stalled"))
        else:
            self._mention(now, chain)

    def _mention(self, now: float, words: str) -> None:
        """Say it every `warn_seconds` for which this rank does not move on."""
        seconds = now - self._since
        if seconds >= self._warned_seconds + self._patience.warn_seconds:
            self._warned_seconds = seconds
            say(words)

    def _record(self, failure: Failure) -> None:
        self._fail(failure)
        self._send(failure=failure)  # rank 0 may be stopped, and will read this when it wakes up

    def _fail(self, failure: Failure) -> None:
        """Record the first failure that this rank learns of, for whoever launched it, too."""
        if self.failure is None:
            self.failure = failure
            if self._all_here.is_set():  # otherwise the main thread raises it, and `members` may not be known
                note(self.members[failure.rank], str(failure))
            self._known.set()

    def _send(self, **message: Any) -> bool:
        connection = self._connection
        try:
            if connection is not None:
                connection.send(message)
        except OSError:
            return False
        return connection is not None

    def _stop(self, failure: Failure) -> None:
        if FAILURES not in os.environ:  # otherwise the launcher will
            say(self._words(failure))
        for act, seconds in ((_flush, _FLUSH_SECONDS), (self.last_words, _LAST_WORDS_SECONDS)):
            thread = threading.Thread(target=act, daemon=True)
            thread.start()
            thread.join(seconds)  # a stuck reader of our output, or a disk, must not hold us up
        self._leave_last(failure)

    def _leave_last(self, failure: Failure) -> None:
        """End the process, after the others know why, and after the rank that raised."""
        self._await_others()
        if failure.kind == "raised":
            await_culprit(self.members[self._rank])
        self._leave(self._status if failure.rank == self._rank else 1)

    def _await_others(self) -> None:
        """Wait for the other ranks before rank 0 exits, which takes the failure detector with it."""
        if self._server:
            self._server.await_noted(self._tell_seconds)

    def _words(self, failure: Failure) -> str:
        words = f"rank {self._rank} stops: {failure}"
        if self.position.peers and failure.rank != self._rank:
            peers = name_ranks(self.position.peers)
            words += f"; rank {self._rank} was waiting for {self.position.action} from {peers}"
        return words if self.behind is None else f"{words}; {self.behind}"

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        if self.failure is not None:  # destructors of a broken process group may wait for ranks that are gone
            _flush()
            self.last_words()
            self._leave_last(self.failure)
        self.close()
        if self._server:
            self._server.await_leaving()


def _nothing(*_: object) -> None:
    """Nobody records the run; the device is the host, and never falls behind."""


def _flush() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
