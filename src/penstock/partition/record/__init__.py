"""Runs a model's forward and records what it calls, in as many attempts as it takes."""
