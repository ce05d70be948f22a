"""Where to cut: by name or for balance, and where not to."""
