"""Forwards that branch at random: what they draw while they are recorded, and what a stage does with the outcomes."""
