"""Runs calls while they are recorded: on fake tensors, for real, and once more to see what else they read or leave."""
