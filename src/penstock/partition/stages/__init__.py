"""Builds stages from a recording and the positions of its cuts, and a partition from the stages."""
