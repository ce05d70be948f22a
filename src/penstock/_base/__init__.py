"""What every other package rests on: torch's private parts, nested values, files, words. Not for users."""

__version__ = "0.1.0"
