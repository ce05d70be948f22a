"""Hosts to try a job on, without more machines: network namespaces of one Linux machine, joined by shaped links.

link.py       a link's text, and what it says        checks.py   what a machine lacks for it
machines.py   makes the hosts and their switch        keeper.py   takes them down, whatever happens to their maker
holdback.py   hosts whose CPU is slow               duty.py       does that where the kernel does not
inside.py     work in a namespace, by a thread        offloads.py  what an interface's driver does
record.py     what a run's record says of a host and its network
nodes.py      a job of torchrun over hosts, an agent on each
"""
