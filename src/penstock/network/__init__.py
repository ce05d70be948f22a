"""Hosts to try a job on, without more machines: network namespaces of one Linux machine, on the network asked for.

What is asked for
  link.py, impairment.py  a link: its rate and queue, and what frames meet on it; quantities.py, parse.py  from a text
  topology.py     which link a frame meets              background.py  traffic of neighbours
  holdback.py     hosts whose processors are slow       scenario.py  what changes when
  network.py      all of it together
What makes it so
  shapers.py      tbf or the switch: chosen, or refused
  model.py        what happens to the k-th frame, from a seed       switch/  a switch in user space that does it
  machines.py     makes the hosts and what joins them    subnets.py  their addresses
  keeper.py       takes all down, whatever happens to its maker     checks.py  what a machine lacks for it
  director.py     plays a scenario                      duty.py  holds processes back without a cgroup
What runs on it
  nodes.py        a job of torchrun over hosts, an agent on each
  inside.py       work in a namespace, by a thread
  conditions.py   what a run's record says of a host and its network
"""
