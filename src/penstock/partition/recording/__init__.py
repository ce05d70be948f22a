"""What a recording holds, and what its calls do when a stage repeats them."""
