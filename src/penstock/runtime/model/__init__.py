"""The part of the model that this process holds, and what it must not touch of the rest."""
