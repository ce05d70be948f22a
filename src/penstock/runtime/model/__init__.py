"""What of the model this process holds, and what it must not touch of the rest."""
