"""What a run has shown, for people and for other tools: text.py, nccl.py, plots.py, page.py.

The results are the dictionary that `penstock.fabric.results` makes, the same that --json prints.
"""
