"""Runs a model's forward and writes down what it calls, as often as it takes."""
