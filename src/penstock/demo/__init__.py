"""The demo: a pipeline trains a small GPT on Python's own source code. Copy `train` as a starting point."""
