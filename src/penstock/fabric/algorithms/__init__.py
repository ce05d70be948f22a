"""Each collective algorithm as a function of the number of ranks."""
