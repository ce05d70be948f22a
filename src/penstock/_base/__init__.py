"""What every other package rests on, and no user imports: torch's private parts, nested values, files, words."""
