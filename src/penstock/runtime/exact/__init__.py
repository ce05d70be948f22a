"""What keeps a pipelined step equal to the unsplit one: its rules, its random streams, tensors that must not change."""
