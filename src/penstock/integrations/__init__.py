"""Penstock in other libraries: one module each, with an extra of the same name. None is imported unless you ask."""
