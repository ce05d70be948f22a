"""What happens below the calls of a forward: operators, writes, draws, what backward will need, how much work it is."""
