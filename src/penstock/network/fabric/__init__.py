"""Emulate the network traffic of a training job, and measure how long each collective takes, tail latency included.

>>> from penstock.network.fabric.algorithms import closed_form
>>> closed_form("all_reduce", "ring", ranks=4).bytes_factor
1.5

workload.py               what a job sends in one step
steps.py                  a collective as rounds of messages; algorithms/: ring, trees, halving and doubling, ...
emulation/                runs workloads on hosts, through torch.distributed
samples.py                every sample of a run, on disk, and the times of its trials
statistics.py             percentiles with confidence intervals
alpha_beta.py             fits of costs by closed form, and predictions for more hosts; ports.py  lower bounds
results.py                the results of a run; compare.py: whether two runs differ
views/, chakra.py         text, tables, plots and a page; traces for other simulators
"""
