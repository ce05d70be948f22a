"""What a model's training step sends, as a workload for `penstock.fabric`: from its stages and its schedule."""
