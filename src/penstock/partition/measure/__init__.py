"""What each unit of a recorded model costs, measured by running it."""
