"""Run a workload on hosts, through torch.distributed, and keep every sample.

spec.py         what to run, as a file that every host reads, and what a run would send
coordinate.py   starts and stops the hosts of one machine
host.py         the job of one host
rendezvous.py   how hosts find each other, the record of their run, and who is missing when it ends
probe.py        measures the links before the trials; clock.py: clock offsets between hosts
trials.py       runs the trials, which all hosts start at the same moment
collectives.py  the engine's own collectives, and step lists
payload.py      what is sent, and how results are checked
"""
