"""Show a run's results to people and other tools: text.py, nccl.py, plots.py, page.py.

The results are the dictionary that `penstock.network.fabric.results` makes and --json prints.
"""
