"""The demonstration: a small GPT learns Python's own source text in a pipeline. `model` and `train` are made to be copied."""
