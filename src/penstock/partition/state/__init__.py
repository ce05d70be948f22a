"""What a forward reads or leaves besides its arguments and its result."""
