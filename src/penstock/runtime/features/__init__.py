"""What stages do besides their forward and backward: one feature per file, in the order of `registry.py`."""
