"""What every other package rests on: torch's private parts, nested values, files, words. Not for users."""
