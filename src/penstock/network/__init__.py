"""Emulated hosts to try a job on without more machines: network namespaces of one Linux machine, joined as asked.

What is requested
  link.py, impairment.py  a link: its rate and queue, and what happens to frames on it; quantities.py, parse.py  read it
  topology.py     which link affects a frame            background.py  neighbours' traffic
  holdback.py     hosts with slow processors            scenario.py  what changes when
  network.py      all of it together
What implements it
  shapers.py      chooses tbf or the switch, or refuses
  model.py        what happens to the k-th frame, from a seed       switch/  a user-space switch that does it
  machines.py     creates the hosts and joins them      subnets.py  their addresses
  keeper.py       removes everything, however its maker ends    checks.py  what a machine lacks for it
  director.py     plays a scenario                      duty.py  throttles processes without a cgroup
What runs on it
  nodes.py        a torchrun job across hosts, with an agent on each
  inside.py       runs work in a namespace, in a thread
  conditions.py   what a run's record says about a host and its network
"""
