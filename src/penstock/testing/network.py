"""Bad networks on demand, for tests: real processes on hosts that are made of this machine, and real TCP between them.

    with bad_network(2, "100mbit delay 5ms loss 1%") as network:
        network.run(["train.py", "--steps", "3"], ranks=2).check()

What a test asserts about time holds on a quiet machine only; what it asserts about results holds everywhere.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from penstock.errors import ArgumentError
from penstock.network import nodes
from penstock.network.checks import why_not
from penstock.network.machines import Machines
from penstock.network.parse import parse_link
from penstock.network.scenario import Event, read_scenario
from penstock.network.shapers import AUTO, why_no_switch
from penstock.network.topology import Topology

TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Finished:
    """A job that has ended.

    Attributes:
        status: 0, the exit status of the first rank that failed, or 128 + n for one that was killed by signal n.
        said: what failed first, "rank 1 was killed by SIGKILL"; "" if nothing did.
        outputs: for each host, what its ranks printed on standard output and standard error, in order.
        seconds: what it took, torch's import included.
    """

    status: int
    said: str
    outputs: tuple[str, ...]
    seconds: float

    @property
    def output(self) -> str:
        """The output of all hosts, one after the other."""
        return "".join(self.outputs)

    def check(self) -> Self:
        """Returns itself if the job ended well.

        Raises:
            AssertionError: it did not; with what failed first and all that was printed.
        """
        if self.status:
            raise AssertionError(f"{self.said or f'exit status {self.status}'}\n{self.output}")
        return self


class BadNetwork:
    """Hosts that stand until the end of `bad_network`'s block. Jobs run over them one after the other.

    Attributes:
        machines: the hosts themselves, to start something else there: `machines.command(host, argv)`.
    """

    def __init__(self, machines: Machines, events: Sequence[Event] = ()) -> None:
        self.machines = machines
        self._events = tuple(events)

    def run(
        self,
        command: str | Path | Sequence[str],
        *,
        ranks: int | None = None,
        threads: int = 1,
        timeout: float = TIMEOUT_SECONDS,
    ) -> Finished:
        """Runs a script as `penstock run --hosts` would, and waits until all of it has ended.

        Ranks find each other by torch's variables, as under torchrun; the environment is this process's.

        Args:
            command: a Python file, or it (or `-m` and a module) with arguments.
            ranks: processes on all hosts together, as many on each; by default one on each.
            threads: of each rank. Bits depend on it, so compare with a run of as many.
            timeout: seconds it may take.

        Raises:
            ArgumentError: there is no such script, or ranks cannot be spread evenly.
            TimeoutError: it took longer; with all that was printed. No process of it is left.
        """
        argv = (os.fspath(command),) if isinstance(command, (str, Path)) else tuple(command)
        hosts = len(self.machines.hosts)
        job = nodes.Job(argv, hosts if ranks is None else ranks, hosts, threads)
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(hosts)]
            try:
                ended = nodes.run(
                    job, self.machines, events=self._events, outputs=files, seconds=timeout, forwards=False
                )
            except TimeoutError:
                printed = "".join(map(_text, files))
                raise TimeoutError(f"{' '.join(argv)} took more than {timeout:g} s\n{printed}") from None
            return Finished(ended.status, ended.said, tuple(map(_text, files)), time.monotonic() - began)

    def told(self) -> dict[str, Any]:
        """What the switch in user space has counted so far: `frames`; `links`, for each host `up` (from it) and `down`
        (to it), with `frames`, `lost`, `reordered`, `queue_full` and more; `late`, how late it was, in seconds. Empty
        where the kernel shapes the links.
        """
        return self.machines.told() or {}


@contextmanager
def bad_network(
    hosts: int,
    link: str | None,
    *,
    own: Mapping[int, str] | None = None,
    seed: int = 0,
    background: Sequence[str] = (),
    shaper: str = AUTO,
    scenario: str | Path | None = None,
) -> Iterator[BadNetwork]:
    """Hosts joined by links as bad as asked, for the duration of a `with` block.

    They reach each other and nothing else, and share this machine's files and processors. Nothing of them is left at
    the end, however it comes. It takes a second or two; the first of a machine some fifteen, to compile the switch.

    Args:
        hosts: how many.
        link: of each host to the others, in the words of `tc`, "100mbit delay 5ms jitter 1ms loss 1% stall 300ms every
            2s"; None: as fast as the machine can.
        own: links of single hosts.
        seed: of all that is drawn; the k-th frame on a link meets the same with the same seed.
        background: neighbours' traffic, "50mbit to 1".
        shaper: what shapes the links: "auto", "tbf" or "switch".
        scenario: a file of changes, played during each job, by its steps and its time.

    Raises:
        ArgumentError: a text cannot be read, a host is not there, or the links cannot be made at this rate.
        FabricError: this machine cannot make hosts; `why_no_bad_network` says so before.
    """
    if link is None and (own or shaper != AUTO or scenario):
        raise ArgumentError("own=, shaper= and scenario= are of links: give link= as well, what joins the other hosts")
    topology, events = None, tuple[Event, ...]()
    if link is not None:
        topology = Topology(parse_link(link), {host: parse_link(text) for host, text in (own or {}).items()}, seed)
        events = () if scenario is None else read_scenario(Path(scenario), topology, hosts)
    with Machines(hosts, topology, shaper=shaper, background=background, changes=bool(events)) as machines:
        yield BadNetwork(machines, events)


def why_no_bad_network() -> str | None:
    """What this machine lacks for hosts and bad links, and how to get it; None if it lacks nothing."""
    return why_not() or why_no_switch()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
