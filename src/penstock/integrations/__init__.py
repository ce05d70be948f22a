"""Penstock inside of other people's programs. A module each, with an extra of its name; none is imported unasked."""
