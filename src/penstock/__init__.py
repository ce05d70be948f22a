"""Pipeline parallelism for PyTorch."""
