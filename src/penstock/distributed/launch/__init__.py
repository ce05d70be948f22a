"""What to run, in which processes, and the number of the step that they are at. Starting and ending loads no torch."""
