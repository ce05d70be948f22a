"""Emulate hosts on one Linux machine, so that a job can be tried out without more machines: namespaces joined by links.

>>> from penstock.network.parse import parse_link
>>> parse_link("40gbit delay 30us").bytes_per_second
5000000000.0

What is requested
  link.py         a link: its rate and queue, and what happens to its frames; quantities.py, parse.py  parse it
  topology.py     which link affects a frame            background.py  neighbors' traffic
  cpu_limit.py    hosts with slow processors            scenario.py  changes over time
What implements it
  shapers.py      chooses tbf or the switch, or refuses
  frame_fates.py  what happens to the k-th frame, from a seed       switch/  a user-space switch that applies it
  machines.py     creates the hosts and joins them
  reaper.py       removes everything, however its maker ends
What runs on it
  fabric/         a training job's collectives: how long each takes
  nodes.py        a torchrun job across hosts, with an agent on each
  namespaces.py   runs work in a namespace, in a thread; IPv6 and TCP settings; what a machine lacks for it
  conditions.py   what a run's record says about a host and its network
"""

from penstock._base.lazy import lazy_exports

MAX_HOSTS = 200
"""The most hosts in one emulation: a network like theirs has addresses for 254."""

__all__, __getattr__, __dir__ = lazy_exports(__name__, {}, {"fabric"})
