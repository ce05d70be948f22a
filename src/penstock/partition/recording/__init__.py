"""What a recording holds, and how stages repeat its calls."""
