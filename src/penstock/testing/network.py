"""Bad networks for tests: real processes on hosts emulated on this machine, with real TCP between them.

    with bad_network(2, "100mbit delay 5ms loss 1%") as network:
        network.run(["train.py", "--steps", "3"], ranks=2).check()

What a test asserts about time holds only on an idle machine; what it asserts about results holds anywhere.
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

from penstock._base.aliases import accept_aliases
from penstock._base.errors import ArgumentError
from penstock.network import nodes
from penstock.network.machines import Machines
from penstock.network.namespaces import why_not
from penstock.network.parse import parse_link
from penstock.network.scenario import Event, read_scenario
from penstock.network.shapers import AUTO, why_no_switch
from penstock.network.topology import Topology

TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job that has ended.

    Attributes:
        status: 0, or the exit status of the first rank that failed, or 128 + n if signal n killed that rank.
        said: what failed first, such as "rank 1 was killed by SIGKILL"; "" if nothing did.
        outputs: for each host, what its ranks printed to standard output and standard error, in order.
        seconds: how long it took, including the import of torch.
    """

    status: int
    said: str
    outputs: tuple[str, ...]
    seconds: float

    @property
    def output(self) -> str:
        """The output of all hosts, one host after another."""
        return "".join(self.outputs)

    def check(self) -> Self:
        """Return itself if the job succeeded.

        Raises:
            AssertionError: the job failed; the message has what failed first and everything that was printed.
        """
        if self.status:
            raise AssertionError(f"{self.said or f'exit status {self.status}'}\n{self.output}")
        return self


class BadNetwork:
    """Hosts that exist until the end of `bad_network`'s block. Jobs run on them one after another.

    Attributes:
        machines: the hosts themselves; to start something else there, use `machines.command(host, argv)`.
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
    ) -> JobResult:
        """Run a script as `penstock run --hosts` would, and wait until every process of it has ended.

        Ranks find each other through torch's environment variables, as under torchrun. Otherwise they inherit this
        process's environment.

        Args:
            command: a Python file, or a Python file (or `-m` and a module) with its arguments.
            ranks: the number of processes over all hosts, the same on each; by default one per host.
            threads: threads per rank. Results depend on it bit by bit, so compare runs with the same number.
            timeout: how long it may take, in seconds.

        Raises:
            ArgumentError: there is no such script, or the ranks cannot be spread evenly over the hosts.
            TimeoutError: it took longer; the message has everything that was printed. None of its processes is left.
        """
        argv = (os.fspath(command),) if isinstance(command, (str, Path)) else tuple(command)
        hosts = len(self.machines.hosts)
        job = nodes.Job(argv, hosts if ranks is None else ranks, hosts, threads)
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(hosts)]
            try:
                outcome = nodes.run(
                    job, self.machines, events=self._events, outputs=files, seconds=timeout, forwards=False
                )
            except TimeoutError:
                printed = "".join(map(_read_text, files))
                raise TimeoutError(f"{' '.join(argv)} took more than {timeout:g} s\n{printed}") from None
            return JobResult(outcome.status, outcome.message, tuple(map(_read_text, files)), time.monotonic() - start)

    def told(self) -> dict[str, Any]:
        """Return what the user-space switch has counted so far; empty if the kernel shapes the links.

        `frames`; `links`, which for each host has `up` (from it) and `down` (to it), each with `frames`, `lost`,
        `reordered`, `queue_full` and more; and `late`, how late the switch was, in seconds.
        """
        return self.machines.counters() or {}


@accept_aliases(own="host_links")
@contextmanager
def bad_network(
    hosts: int,
    link: str | None,
    *,
    host_links: Mapping[int, str] | None = None,
    seed: int = 0,
    background: Sequence[str] = (),
    shaper: str = AUTO,
    scenario: str | Path | None = None,
) -> Iterator[BadNetwork]:
    """Make hosts joined by links as bad as you ask for, for the duration of a `with` block.

    The hosts reach each other and nothing else, and share this machine's files and processors. Nothing of them remains
    at the end, however the block ends. Making them takes a second or two; about fifteen the first time on a machine,
    which compiles the switch.

    Args:
        hosts: how many.
        link: every host's link to the others, in the syntax of `tc`: "100mbit delay 5ms jitter 1ms loss 1% stall 300ms
            every 2s"; None: as fast as the machine can.
        host_links: links of single hosts, by host.
        seed: for all random draws: with the same seed, the k-th frame on a link meets the same fate.
        background: traffic from neighbors, such as "50mbit to 1".
        shaper: what shapes the links: "auto", "tbf" or "switch".
        scenario: a file of changes to play during each job, at its steps and times.

    Raises:
        ArgumentError: a text cannot be parsed, a host does not exist, or the links cannot be made at this rate.
        FabricError: this machine cannot make hosts; `bad_network_unavailable_reason` tells you beforehand.
    """
    if link is None and (host_links or shaper != AUTO or scenario):
        raise ArgumentError(
            "host_links=, shaper= and scenario= are of links: pass link= as well, what joins the other hosts"
        )
    topology, events = None, tuple[Event, ...]()
    if link is not None:
        topology = Topology(
            parse_link(link), {host: parse_link(text) for host, text in (host_links or {}).items()}, seed
        )
        events = () if scenario is None else read_scenario(Path(scenario), topology, hosts)
    with Machines(hosts, topology, shaper=shaper, background=background, changes=bool(events)) as machines:
        yield BadNetwork(machines, events)


def bad_network_unavailable_reason() -> str | None:
    """Return what this machine lacks to make hosts and bad links, and how to get it; None if it lacks nothing."""
    return why_not() or why_no_switch()


def _read_text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
