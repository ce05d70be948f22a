"""Runs a workload on hosts, through torch.distributed, and keeps every sample.

spec.py         what is to be run, as a file that every host reads
host.py         the job of one host                 coordinate.py   starts the hosts of one machine, and ends them
collectives.py  the engine's own, and step lists    wires.py        messages between two hosts, as they are or delayed
payload.py      what is sent, and whether it arrived
clock.py        offsets between the hosts' clocks   probe.py        what a link does, before the trials
"""
