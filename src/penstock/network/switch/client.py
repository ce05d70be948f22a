"""The maker's side of the switch: start it, send orders, ask for its counters, end it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from penstock.errors import FabricError
from penstock.network.switch.protocol import Order, Setup

PROGRAM = ("-P", "-m", "penstock.network.switch.serve")
"""The program that is the switch, which imports nothing from the current folder; benchmarks replace it."""
START_SECONDS = 120.0
"""The very first start compiles the loop, which takes about ten seconds on a slow machine."""
ANSWER_SECONDS = 10.0


class Switch:
    """A switch that runs until `close`, or until this process ends."""

    def __init__(self, setup: Setup, environment: Mapping[str, str]) -> None:
        """Starts the switch, and waits until every host has its device. Raises FabricError: the switch cannot run
        here."""
        self._process = subprocess.Popen(
            [sys.executable, *PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            text=True,
            bufsize=1,
            start_new_session=True,  # so that the terminal's Ctrl-C does not reach it
        )
        try:
            answer = self._say(setup.line(), START_SECONDS)
            if "error" in answer:
                raise FabricError(f"the switch cannot make the hosts' devices: {answer['error']}")
        except BaseException:
            self.close()
            raise
        self.priority: str = answer["priority"]

    def order(self, order: Order) -> dict[str, Any]:
        """Sends an order and returns the answer. Raises FabricError: the switch has ended."""
        return self._say(order.line(), ANSWER_SECONDS)

    def check(self) -> None:
        """Raises FabricError if the switch has ended."""
        status = self._process.poll()
        if status is not None:
            raise FabricError(f"the switch has ended, with exit status {status}: the hosts' network is gone")

    def close(self) -> None:
        """Ends the switch. May be called again."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        process.stderr.close()

    def _say(self, text: str, seconds: float) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(text)
            process.stdin.flush()
        # Each order has one answer, so the pipe cannot hold anything else.
        ready, _, _ = select.select([process.stdout], [], [], seconds)
        line = process.stdout.readline() if ready else ""
        if not line:
            process.kill()
            said = process.stderr.read().strip().rpartition("\n")[2]
            raise FabricError(f"the switch {'has ended' if ready else 'does not answer'}: {said or 'it said nothing'}")
        answer: dict[str, Any] = json.loads(line)
        return answer
