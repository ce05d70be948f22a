"""What a forward reads or leaves by another way than its arguments and its result."""
