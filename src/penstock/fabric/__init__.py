"""Emulates what a training job says over its network, and tells how long each collective takes, its tail included.

workload.py, presets.py   what a job sends in one step; units.py: sizes as people write them
steps.py                  a collective as rounds of messages; algorithms/: ring, trees, halving and doubling, ...
emulation/                runs them on hosts, through torch.distributed
samples.py                every sample of a run, on disk; times.py: its times, trial by trial
statistics.py             percentiles and what bounds them
terms.py, models.py       closed forms, and fits of alpha and beta; forecast.py: a run's, on more hosts
results.py                what a run has shown; compare.py, differences.py: whether two of them differ
views/, chakra.py         as text, tables, plots and a page; as traces for other simulators
"""
