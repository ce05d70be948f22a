"""How processes find each other, exchange small values, and fail cleanly."""
