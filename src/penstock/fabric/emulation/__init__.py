"""Runs a workload on hosts, through torch.distributed, and keeps every sample.

spec.py         what is to be run, as a file that every host reads
coordinate.py   starts the hosts of one machine, and ends them
host.py         the job of one host
joining.py      how hosts find each other, and who is missing; record.py: what is known of a run, and how it ended
probe.py        what a link can do, before the trials; clock.py: offsets between the hosts' clocks
trials.py       a trial after the other; signals.py: how all begin one at the same moment
collectives.py  the engine's own, and step lists; wires.py: messages between two hosts
payload.py      what is sent, and whether it arrived
watch.py        who looks on
"""
