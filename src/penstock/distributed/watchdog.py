"""Ends this rank when another one fails, and reports which rank waits for which when a run stalls.

A blocked gloo wait cannot be polled, canceled or timed out from inside. So a separate thread watches the other ranks
over its own connections; if the main thread waits in vain, it prints why and exits the process. The exit is what
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
from penstock._base.formatting import one_line
from penstock._base.process import Process
from penstock.distributed import heartbeat_server, host_clock
from penstock.distributed.failure import (
    OUTSIDE,
    DeviceLag,
    Failure,
    Position,
    RankStatus,
    long_action,
    name_ranks,
    notify,
    wait_chain,
)
from penstock.distributed.failure_detector import GONE, Timeouts, explain_silence
from penstock.distributed.heartbeat_server import Address, Connection, HeartbeatServer
from penstock.distributed.host_clock import HostOffset
from penstock.distributed.joining import Launcher, Meeting, MissingRanks, Store
from penstock.distributed.launch.endings import FAILURES, await_culprit, exit_status, note_failure

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
        device: returns where this rank's device is, if it has not caught up with the host. Called every beat.
        device_lag: what it returned last.
        offset: from this host's clock to that of rank 0's.
        statuses: each rank as its last beat showed it, a beat or two before; this one as it is. On other ranks than 0,
            all but rank 0's are outdated until a wait is about to be reported.
        partners: the ranks with which this one may meet within an action, in FSDP's collectives for example.
        on_raise: called with a failure of this rank, before the others are informed; with None if it is most likely the
            effect of another rank's failure.
        members: of each rank, its number in the whole job.
        before_exit: called before this process is ended because of a failure, on any thread, which waits three seconds
            for it: a run's last steps and files may take 2.5.
    """

    def __init__(
        self,
        rank: int = 0,
        ranks: int = 1,
        timeouts: Timeouts | None = None,
        address: Address | None = None,
        connection: Connection | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self.position: Position = OUTSIDE
        self.step = 0
        self.device: Callable[[], DeviceLag | None] = lambda: None
        self.device_lag: DeviceLag | None = None
        self.failure: Failure | None = None
        self.statuses: list[RankStatus] = [RankStatus()] * ranks
        self.partners: Sequence[int] = ()
        self.members: Sequence[int] = range(ranks)
        self.on_raise: Callable[[Failure | None], object] = lambda _: None
        self.before_exit: Callable[[], object] = lambda: None
        self._rank, self._timeouts = rank, timeouts or Timeouts()
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
        self._failure_known = threading.Event()
        self._raising = self._invalid_seen = False
        self._tell_seconds = _TELL_SECONDS
        self._exit_status = 1
        self._failed_at: float | None = None
        self._activity: tuple[int, Position, DeviceLag | None] = (0, OUTSIDE, None)
        self._ticked_at = self._activity_since = self._answered_at = clock()
        self._down_since: float | None = None
        self._awaiting_answer = False
        self._warned_seconds = 0.0
        self._launcher = Launcher()

    @classmethod
    def connect(cls, rank: int, ranks: int, store: Store, timeouts: Timeouts | None = None) -> Watchdog:
        """Connect the ranks of a pipeline and start to watch them. Every rank must call it, with the same timeouts.

        Until all have called it, those that have print every `warn_seconds` which ranks they wait for.

        Args:
            store: where these ranks meet, and no others.

        Raises RankFailedError if the ranks do not find each other, or if one of them ends meanwhile.
        """
        timeouts = timeouts or Timeouts()
        server = HeartbeatServer(ranks, timeouts) if rank == 0 else None
        try:
            with MissingRanks(rank, ranks, timeouts) as missing:
                address: Address = Meeting(store, rank, ranks).broadcast(server.address if server else None, missing)
                watchdog = cls.join(address, rank, ranks, timeouts, missing)
        except BaseException:
            if server:
                server.stop()
            raise
        watchdog._server = server
        atexit.register(watchdog._at_exit)
        return watchdog

    @classmethod
    def join(cls, address: Address, rank: int, ranks: int, timeouts: Timeouts, missing: MissingRanks) -> Watchdog:
        """Connect to rank 0's server, start to watch, and wait until all ranks have come. Raise as `connect`."""
        connection, return_address = heartbeat_server.first_connection(address, rank, timeouts.stall_seconds)
        watchdog = cls(rank, ranks, timeouts, return_address, connection)
        watchdog._all_here.clear()
        watchdog._thread = threading.Thread(target=watchdog._watch, name="penstock-watchdog", daemon=True)
        try:
            watchdog._thread.start()
            while not watchdog._all_here.wait(timeouts.beat_seconds):
                missing.ranks = watchdog._absent or missing.ranks
                missing.check()
                watchdog.check()
            watchdog.check()
        except BaseException:
            watchdog._end()  # without saying goodbye
            raise
        return watchdog

    def check(self) -> None:
        """Raise RankFailedError if the pipeline has failed, here or on another rank."""
        if self.failure is not None:
            raise self._error(self.failure)

    def report(self, action: str | None, error: BaseException) -> None:
        """Tell the other ranks that `error` ended `action` here. The first failure of all ranks is `failure` then."""
        self._raising = True
        if isinstance(error, KeyboardInterrupt):
            self._tell_seconds = _INTERRUPTED_SECONDS
        self._exit_status = exit_status(error) or 1
        failure = Failure.of(self._rank, action, error, self.device_lag)
        if self._send(failure=failure):
            self._failure_known.wait(self._tell_seconds)
            self._await_others()
        self._fail(failure)

    def cause(self, seconds: float | None = None) -> RankFailedError | None:
        """Return why a wait of this rank raised: wait for another rank's failure to become known.

        Leave `position` as it was in the wait.

        Args:
            seconds: how long to wait at most; by default as long as it takes to see that a rank does not answer.

        Returns:
            The error to raise; None if no failure became known, so that the error is this rank's own.
        """
        self._raising = True
        if self._thread and not self._failure_known.is_set():
            self._failure_known.wait(self._timeouts.stall_seconds + 2.0 if seconds is None else seconds)
        self._raising = self.failure is not None  # at no time False while it is
        return None if self.failure is None else self._error(self.failure)

    def _error(self, failure: Failure) -> RankFailedError:
        """Return what the main thread is about to raise."""
        self._raising = True
        self._await_others()
        return RankFailedError(self._message(failure))

    def close(self) -> None:
        """Say goodbye to the other ranks and end the thread.

        Rank 0 continues to serve ranks that have not left, and its process does not end before they have.
        """
        if self._closed.is_set():
            return
        self._send(beat=RankStatus(left=True))  # before the thread disconnects; the answer wakes it
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
        """Record what the main thread and its device are doing, and whether this process was suspended."""
        self.device_lag = self.device()
        now, activity = self._clock(), (self.step, self.position, self.device_lag)
        was_suspended = self._timeouts.was_suspended(now - self._ticked_at)
        self._ticked_at = now
        if was_suspended:
            self._answered_at = now
            self._down_since = None
        if was_suspended or activity != self._activity:
            self._activity, self._activity_since, self._warned_seconds = activity, now, 0.0

    def _talk(self) -> None:
        """Send a beat, unless the last one is still unanswered, and listen until the next is due."""
        deadline = self._clock() + self._timeouts.beat_seconds
        try:
            if self._connection is None:
                self._connection = heartbeat_server.connect(self._address, self._rank, self._timeouts.beat_seconds)
                self._awaiting_answer = False
            if not self._awaiting_answer:
                status, now = self._local_status(), host_clock.now_ns()
                self._awaiting_answer = self._send(beat=status, all=self._needs_all(status.seconds), asked=now)
            while (remaining := deadline - self._clock()) > 0 and not self._closed.is_set():
                self._connection.link.settimeout(remaining)
                for message in self._connection.receive():
                    self._handle(message)
        except TimeoutError:
            pass
        except Exception as error:  # whatever it sent ends the connection, never this thread
            was_connected, joining = self._connection is not None, not self._all_here.is_set()
            if self._connection:
                self._connection.close()
                self._connection = None
            if not (self._invalid_seen or isinstance(error, OSError)):
                self._invalid_seen = True
                if joining:
                    self._fail(Failure(0, None, f"it sent what no rank sends ({type(error).__name__})", "lost"))
                else:
                    notify(
                        f"rank {self._rank} received an invalid message from rank 0; reconnecting: {one_line(error)}"
                    )
            if self._down_since is None and isinstance(error, ConnectionError) and not (was_connected and joining):
                self._down_since = self._clock()  # the peer of a connection just made may be a stranger
            remaining = deadline - self._clock()
            self._closed.wait(max(0.0, min(remaining, self._timeouts.beat_seconds / 4) if was_connected else remaining))

    def _handle(self, message: dict[str, Any]) -> None:
        self._answered_at, self._down_since = self._clock(), None
        if "clock" in message:
            self.offset.add_exchange(*map(int, message["clock"]))
            if self.offset.needs_more:
                self._send(asked=host_clock.now_ns())
        if "sightings" in message:
            self._awaiting_answer = False
            statuses = [RankStatus.from_list(status) for status in message["sightings"]]
            ranks = len(self.statuses)
            if len(statuses) not in (1, ranks) or not all(status.fits(ranks) for status in statuses):
                raise ValueError("sightings of other ranks")
            self.statuses[: len(statuses)] = statuses
        if "absent" in message:
            self._absent = tuple(map(int, message["absent"]))
            if not self._absent:
                self._all_here.set()
        if "failure" in message:
            self._fail(Failure.from_list(message["failure"]))
            self._send(noted=True)

    def _decide(self) -> None:
        """Exit if the pipeline failed and the main thread cannot notice. Otherwise look for a reason to fail it."""
        now, waits = self._clock(), bool(self.position.peers)
        self.statuses[self._rank] = self._local_status()
        device_waits = self.device_lag is not None and bool(self.device_lag.position.peers)
        if self.failure is None and (reason := self._launcher.explain_exit()):
            self._record(Failure(self._rank, self._local_status().doing.action or None, reason, "lost"))
        if self.failure is None and (self.step, self.position) == self._activity[:2]:
            if waits or device_waits or not self._all_here.is_set():
                self._check_wait(now)
            elif self.position.action and self._warns(now):  # maybe an unseen wait: in FSDP, or of the user's own
                notify(long_action(self._rank, self.statuses, self.partners))
        if self.failure is not None and not self._closed.is_set():
            self._failed_at = now if self._failed_at is None else self._failed_at
            seconds = now - self._failed_at
            stops = waits or (device_waits and seconds >= self._timeouts.stall_seconds)  # the host may notice it first
            if (stops and not self._raising) or seconds >= self._timeouts.grace_seconds:
                self._stop(self.failure)

    def _local_status(self) -> RankStatus:
        """Return this rank as others may see it."""
        _, position, lag = self._activity
        return RankStatus(position, self._clock() - self._activity_since, device=lag)

    def _check_wait(self, now: float) -> None:
        """Check, while the main thread or its device waits or ranks have yet to come, whether rank 0, which would know
        of a lost rank, is lost itself, and whether the wait is too long.
        """
        if self._rank != 0:
            is_gone = self._down_since is not None and now - self._down_since >= self._timeouts.beat_seconds
            state, silence = Process(*self._address["process"]).state, now - self._answered_at
            if (reason := GONE if is_gone else explain_silence(silence, state, self._timeouts)) is not None:
                self._record(Failure(0, self.statuses[0].doing.action or None, reason, "lost"))
        if self.failure is not None or not self._all_here.is_set():
            return
        is_over = now - self._activity_since >= self._timeouts.timeout_seconds
        if is_over or self._warns(now):
            root, chain = wait_chain(self._rank, self.statuses)
            if is_over:
                self._record(Failure(root, self.statuses[root].doing.action or None, chain, "stalled"))
            else:
                notify(chain)

    def _needs_all(self, seconds: float) -> bool:
        """Whether this rank, which has not moved on for so long, needs the statuses of all: soon, for a report."""
        report_seconds = min(self._warned_seconds + self._timeouts.warn_seconds, self._timeouts.timeout_seconds)
        return self._rank == 0 or seconds + self._timeouts.stall_seconds >= report_seconds

    def _warns(self, now: float) -> bool:
        """Whether to warn now: every `warn_seconds` for which this rank does not move on."""
        seconds = now - self._activity_since
        if is_due := seconds >= self._warned_seconds + self._timeouts.warn_seconds:
            self._warned_seconds = seconds
        return is_due

    def _record(self, failure: Failure) -> None:
        self._fail(failure)
        self._send(failure=failure)  # rank 0 may be stopped, and will read this when it wakes up

    def _fail(self, failure: Failure) -> None:
        """Record the first failure that this rank learns of, and note it for its launcher."""
        if self.failure is None:
            self.failure = failure
            if self._all_here.is_set():  # otherwise the main thread raises it, and `members` may not be known
                note_failure(self.members[failure.rank], str(failure))
            self._failure_known.set()

    def _send(self, **message: Any) -> bool:
        if (connection := self._connection) is not None:
            with contextlib.suppress(OSError):
                connection.send(message)
                return True
        return False

    def _stop(self, failure: Failure) -> None:
        if FAILURES not in os.environ:  # otherwise the launcher will
            notify(self._message(failure))
        for function, seconds in ((_flush, _FLUSH_SECONDS), (self.before_exit, _LAST_WORDS_SECONDS)):
            thread = threading.Thread(target=function, daemon=True)
            thread.start()
            thread.join(seconds)  # a stuck reader of our output, or a disk, must not hold us up
        self._leave_last(failure)

    def _leave_last(self, failure: Failure) -> None:
        """End the process, after the others have been informed, and after the rank that raised."""
        self._await_others()
        if failure.kind == "raised":
            await_culprit(self.members[self._rank])
        self._leave(self._exit_status if failure.rank == self._rank else 1)

    def _await_others(self) -> None:
        """Wait for the other ranks before rank 0 exits, which takes the failure detector with it."""
        if self._server:
            self._server.await_acknowledged(self._tell_seconds)

    def _message(self, failure: Failure) -> str:
        message = f"rank {self._rank} stops: {failure}"
        if self.position.peers and failure.rank != self._rank:
            peers = name_ranks(self.position.peers)
            message += f"; rank {self._rank} was waiting for {self.position.action} from {peers}"
        return message if self.device_lag is None else f"{message}; {self.device_lag}"

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        if self.failure is not None:  # destructors of a broken process group may wait for ranks that are gone
            _flush()
            self.before_exit()
            self._leave_last(self.failure)
        self.close()
        if self._server:
            self._server.await_leaving()


def _flush() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
