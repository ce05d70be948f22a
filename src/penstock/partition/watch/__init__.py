"""Watches what happens below a forward's calls: operators, writes, draws, what backward will need, how much work."""
