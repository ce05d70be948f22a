"""The demonstration: a small GPT learns Python's own source text in a pipeline. `train` is made to be copied."""
