"""Forwards that branch by chance: what they draw while they are recorded, and what a stage makes of the outcomes."""
