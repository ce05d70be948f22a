"""One step seen by all ranks: which job runs this batch, a loss tried in advance, outputs brought to who asks."""
