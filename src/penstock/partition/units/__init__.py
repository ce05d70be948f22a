"""Which modules of a model run as a whole, and which are opened."""
