"""What stages do beside their forward and backward, a feature a file, in the order of `execute/assembly.py`."""
