"""A step as all ranks see it: which bound schedule runs a batch, a loss tried in advance, outputs where requested."""
