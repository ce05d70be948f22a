"""The part of the model that this process holds, and protection against use of the rest."""
