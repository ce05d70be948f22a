"""How a call runs while it is recorded: on fake tensors, for real, and again, to see what else it reads or leaves."""
