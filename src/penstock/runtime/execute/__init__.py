"""A schedule's actions bound to functions, and the one executor that runs them on this process's ranks."""
