"""Where to cut: by name, for balance, and where not."""
