"""What a forward passes on: nested values and objects, and where their tensors are in memory."""
