"""What a forward hands on: nested values and objects, and where their tensors lie in memory."""
