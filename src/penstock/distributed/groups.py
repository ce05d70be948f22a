"""The process groups of a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from penstock._base.compat import binding_to, is_bound, set_limit
from penstock._base.errors import ArgumentError, PipelineClosedError
from penstock.distributed.world import World

RankPair = tuple[int, int]
"""From one rank of the pipeline to another."""

Role = Literal["pipeline", "everyone", "weights", "losses", "up", "down", "replicas", "column"]
"""What a group is for. Over gloo: all of a pipeline's ranks (pipeline); the whole mesh (everyone); those that hold the
same stages and train on other data, if there are any (weights); those that share a loss (losses). For tensors: a
pipeline's ranks, each way (up, down); those with the same stages, on other data (replicas), or with a share of each
layer, too (column)."""

GROUP_SECONDS = 3600.0
"""How long an operation of a group may take, unless the user says otherwise.

The watchdog, which tracks all waits, ends a wait after half of it (`Timeouts.timeout_seconds`), and one for a
lost rank within seconds. This limit is for what it does not see, such as a device that hangs. Torch's own of ten
minutes for NCCL would end a first step in which another rank compiles.
"""


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The options of each torch group.

    Attributes:
        seconds: how long one of its operations may take.
        backend_options: torch's `pg_options`, for groups that exchange a device's tensors.
    """

    seconds: float = GROUP_SECONDS
    backend_options: Any = None

    def check(self, backend: str) -> None:
        """Raise ArgumentError if groups of this backend cannot have these options."""
        if self.backend_options is None:
            return
        kind = type(self.backend_options)
        if backend == "gloo":
            raise ArgumentError(
                f"pg_options: given {kind.__name__}, but these ranks exchange tensors over gloo, for which torch uses "
                "none; leave it out where ranks compute on the CPU, or the transport is staged"
            )
        expected = dist.ProcessGroupNCCL.Options
        if not isinstance(self.backend_options, expected):
            raise ArgumentError(
                f"pg_options: given {kind.__name__}, expected torch.distributed.ProcessGroupNCCL.Options, as for "
                "torch.distributed.new_group"
            )

    def arguments(self, backend: str) -> dict[str, Any]:
        """Return these options as arguments of `torch.distributed.new_group`."""
        arguments: dict[str, Any] = {"timeout": timedelta(seconds=self.seconds)}
        if self.backend_options is not None and backend != "gloo":
            options = copy.deepcopy(self.backend_options)  # torch writes each group's name and ranks into it
            set_limit(options, arguments["timeout"])
            arguments["pg_options"] = options
        return arguments


class Groups:
    """The process groups of one pipeline. All processes of its mesh create them together.

    NCCL runs what two ranks exchange within a group one after the other, in both directions, so each direction has its
    own group (`way`). Control values (the loss) travel over gloo.

    If the mesh is the whole job, all processes take part in making every group, as torch requires, and `close` destroys
    the groups. If it is part of the job (`is_part_of_job`), only a group's members make it, every rank of a pipeline
    makes equally many, and `close` leaves them to torch until the process ends.

    A gloo group has threads that wake up a hundred times a second until the last reference to the group is gone. So
    nothing else keeps one: code that uses a group asks for it here each time. After `close` this raises
    PipelineClosedError.

    Attributes:
        members: the global rank of each of the pipeline's ranks.
        paired: whether each pair of ranks, by direction, gets its own group (`pair`).
    """

    def __init__(self, world: World, backend: str, options: GroupOptions | None = None) -> None:
        assert world.rank is not None
        self._options = options or GroupOptions()
        self._rank = world.rank
        self._world = world
        self.members = world.members
        self.backend = backend
        self._lines = world.lines
        self._is_part = is_part_of_job(world.everyone)
        self.paired = self._is_part or is_bound()
        self._groups: list[dist.ProcessGroup] = []
        self._pair_groups: dict[RankPair, dist.ProcessGroup | None] = {}  # None: of two other ranks
        self._roles: dict[Role | tuple[int, ...], dist.ProcessGroup] = {}
        self._created: set[tuple[int, ...]] = set()
        roles = self._roles
        roles["pipeline"] = self._create_own(world.lines, "gloo")
        is_single = world.everyone == world.members
        roles["everyone"] = roles["pipeline"] if is_single else self._create_own([world.everyone], "gloo")
        if len(world.replicas) > 1:
            roles["weights"] = self._create_own(world.replica_sets, "gloo")

    def open(self, *, late: bool) -> None:
        """Create the groups that carry tensors. Call it once the ranks have agreed on the backend: with another on one
        of them, they would wait for each other. `late`: losses are sent while the main threads exchange other values,
        so they have a group of their own."""
        roles, world = self._roles, self._world
        roles["losses"] = roles["everyone"]
        if late:
            is_single = len(world.replicas) == 1
            roles["losses"] = self._create_own(world.lines if is_single else [world.everyone], "gloo")
        roles["up"] = self._create_own(world.lines, self.backend)
        roles["down"] = self._create_own(world.lines, self.backend)
        if len(world.replicas) > 1:
            roles["replicas"] = roles["column"] = self._create_own(world.replica_sets, self.backend)
        if len(world.column) > len(world.replicas):
            roles["column"] = self._create_own(world.columns, self.backend)

    def way(self, source_rank: int, target_rank: int) -> dist.ProcessGroup:
        """Return the group in which one rank of the pipeline sends to another. It carries no other messages of the
        two."""
        pair = self._pair_groups.get((source_rank, target_rank))
        return self["up" if source_rank < target_rank else "down"] if pair is None else pair

    def pair(self, pairs: Iterable[RankPair]) -> None:
        """Give each of these pairs that has no group yet a group of its two ranks.

        Then nothing else is on that group's communicator, even if the whole group has only one. The ranks of all
        pipelines of the mesh call it together.
        """
        for matching in matchings(set(pairs) - self._pair_groups.keys()):
            self._pair_groups.update(dict.fromkeys(matching))
            parts = [[line[rank] for rank in ranks] for line in self._lines for ranks in matching]
            local_pair = next((ranks for ranks in matching if self._rank in ranks), None)
            if local_pair is None:
                self._skip(parts)
            else:
                self._pair_groups[local_pair] = self._create_own(parts, self.backend)

    def make(self, holders: Sequence[int]) -> None:
        """Make the group of some of the pipeline's ranks. All ranks of the pipeline call it in the same order."""
        key = tuple(sorted(holders))
        if key in self._created:
            return
        self._created.add(key)
        parts = [[line[rank] for rank in key] for line in self._lines]
        if self._rank in key:
            self._roles[key] = self._create_own(parts, self.backend)
        else:
            self._skip(parts)

    def close(self) -> None:
        """End the use of the groups. If the mesh is the whole job, they are destroyed, and their threads end."""
        self._roles.clear()
        self._pair_groups.clear()
        while self._groups:
            group = self._groups.pop()
            if not self._is_part:
                dist.destroy_process_group(group)

    def __getitem__(self, role: Role | tuple[int, ...]) -> dist.ProcessGroup:
        """Return the group in a role, or one of these holders of a parameter, made by `make`."""
        if not self._groups:
            raise PipelineClosedError("this pipeline was closed; make a new one")
        return self._roles[role]

    def _create_own(self, parts: Sequence[Sequence[int]], backend: str) -> dist.ProcessGroup:
        """Make a group of each of these sets of global ranks if this process takes part. Return its own."""
        result: dist.ProcessGroup | None = None
        for members in parts:
            is_member = dist.get_rank() in members
            if is_member or not self._is_part:
                group = new_group(members, backend, self._options, members_only=self._is_part)
                result = group if is_member else result
        assert result is not None
        self._groups.append(result)
        return result

    def _skip(self, parts: Sequence[Sequence[int]]) -> None:
        """Take part in making groups of others, or make one of its own so that all ranks have equally many."""
        if self._is_part:
            self._create_own([[dist.get_rank()]], "gloo")
        else:
            for members in parts:
                new_group(members, self.backend, self._options, members_only=False)


def is_part_of_job(members: Sequence[int]) -> bool:
    """Whether the job has other processes than these global ranks, which then make groups without the others.

    Torch derives the name of such a group from its ranks and the number of groups there are. If one were destroyed, a
    later group could get its name, and would find its addresses. So such groups are never destroyed.
    """
    return len(members) < dist.get_world_size()


def new_group(
    members: Sequence[int], backend: str, options: GroupOptions = GroupOptions(), *, members_only: bool
) -> dist.ProcessGroup:
    """Make a process group that shares nothing with the default group.

    If the user gave the default group a device (`init_process_group(device_id=...)`), torch splits groups from it. All
    processes of the job must then take part in making each group, or they wait forever: those that are no members even
    if the group is gloo's, which its members do not split.

    Args:
        members: global ranks.
        members_only: no others call this.
    """
    with binding_to(None):
        group: dist.ProcessGroup = dist.new_group(
            list(members), backend=backend, use_local_synchronization=members_only, **options.arguments(backend)
        )
    return group


def matchings(pairs: Iterable[RankPair]) -> list[list[RankPair]]:
    """Divide pairs into sets in each of which no rank occurs twice, so that their groups can be made at once."""
    result: list[list[RankPair]] = []
    for pair in sorted(pairs):
        for matching in result:
            if not any(rank in matched for rank in pair for matched in matching):
                matching.append(pair)
                break
        else:
            result.append([pair])
    return result
