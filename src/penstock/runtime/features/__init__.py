"""What stages do beside their forward and backward, a feature a file; `assembly.py` says in which order they apply."""
