"""One step seen by all ranks: which bound schedule runs a batch, a loss tried in advance, outputs for whoever asks."""
