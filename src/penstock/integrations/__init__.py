"""Penstock inside other programs: one module each, with an extra of the same name; none is imported unasked."""
