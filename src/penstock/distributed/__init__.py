"""Processes: started, joined into a pipeline's world, connected by groups, and ended cleanly when one of them fails.

The input is torchrun's environment, or a DeviceMesh; the output a `World` (which process is which rank), its process
groups, and a `Watchdog`, to which every wait between ranks reports what it waits for. If a wait is in vain, each rank
names the same cause:

>>> from penstock.distributed.failure import OUTSIDE, Position, RankStatus, wait_chain
>>> waits, computes = Position("1RECV_F0", peers=(1,)), Position("1F0")
>>> wait_chain(2, [RankStatus(OUTSIDE), RankStatus(computes, seconds=40.0), RankStatus(waits, seconds=31.0)])
(1, 'rank 2 has waited 31 s for 1RECV_F0 from rank 1; rank 1 runs 1F0 (40 s so far)')

launch/         starts a job's processes, and reports how they ended; what to run; the step that they are at
world.py        which processes take part; joining.py: how they meet, and who is missing
groups.py       torch's process groups
watchdog.py     ends this rank when another one fails, as heartbeat_server.py on rank 0 reports
failure.py      what a rank does, and why a run ends, in words; failure_detector.py: who is lost, after which time
host_clock.py   one clock for several hosts
"""
