"""What keeps a pipelined step equal to the unsplit one: rules, random streams, and tensors that must not change."""
