"""What goes together with what: each cell of the support matrix, run for real or refused with a reason."""
