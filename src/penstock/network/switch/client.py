"""The maker's side of the switch: start it, change its network, ask for its counters, end it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any

from penstock._base.errors import FabricError
from penstock.network.topology import State

PROGRAM = ("-P", "-m", "penstock.network.switch.serve")
"""The program that is the switch, which imports nothing from the current folder; benchmarks replace it."""
START_SECONDS = 120.0
"""The very first start compiles the loop, which takes about ten seconds on a slow machine."""
ANSWER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a switch. Later ones are what the network is like from then on, or None to ask for the
    counters. The switch answers each.

    Attributes:
        namespaces: files of the hosts' namespaces, by host.
        interface: the name of the device in each.
        state: the network to start with.
    """

    namespaces: tuple[str, ...]
    interface: str
    state: State


class Switch:
    """A switch that runs until `close`, or until this process ends."""

    def __init__(self, setup: Setup, environment: Mapping[str, str]) -> None:
        """Start the switch, and wait until every host has its device. Raise FabricError: the switch cannot run here."""
        self._connection, child_end = Pipe()
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, *PROGRAM],
                stdin=child_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, **environment},
                text=True,
                start_new_session=True,  # so that the terminal's Ctrl-C does not reach it
            )
        try:
            answer = self._request(setup, START_SECONDS)
            if "error" in answer:
                raise FabricError(f"the switch cannot create the devices of the hosts: {answer['error']}")
        except BaseException:
            self.close()
            raise
        self.priority: str = answer["priority"]

    def change(self, state: State) -> None:
        """Change the network. Raise FabricError: the switch has ended."""
        self._request(state, ANSWER_SECONDS)

    def counters(self) -> dict[str, Any]:
        """Return the counters. Raise FabricError: the switch has ended."""
        return self._request(None, ANSWER_SECONDS)

    def check(self) -> None:
        """Raise FabricError if the switch has ended."""
        status = self._process.poll()
        if status is not None:
            raise FabricError(f"the switch has ended, with exit status {status}: the hosts' network is gone")

    def close(self) -> None:
        """End the switch. May be called again."""
        self._connection.close()
        try:
            self._process.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _request(self, message: Setup | State | None, seconds: float) -> dict[str, Any]:
        is_late = False
        try:
            self._connection.send(message)
            if not (is_late := not self._connection.poll(seconds)):
                answer: dict[str, Any] = self._connection.recv()
                return answer
        except (EOFError, OSError):
            pass  # it has ended
        self._process.kill()
        assert self._process.stderr is not None
        text = self._process.stderr.read().strip().rpartition("\n")[2]
        raise FabricError(f"the switch {'does not answer' if is_late else 'has ended'}: {text or 'no error output'}")
