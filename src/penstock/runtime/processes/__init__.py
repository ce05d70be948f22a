"""How the processes find each other, exchange small values, and fail well."""
