"""What several benchmarks share. Each puts the folder `benchmarks` on `sys.path` before it imports this."""
