"""Penstock in other libraries: one module each, with an extra of the same name; all logs of steps are in `loggers`.

None is imported unless you ask.
"""
