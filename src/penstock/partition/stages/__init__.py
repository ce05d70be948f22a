"""A recording and the positions of its cuts -> stages, and a partition made of them."""
