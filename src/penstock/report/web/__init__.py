"""Pages: the timeline that reports and the studio show, the data that it draws, and the report of a run.

`static/` holds plain modules of JavaScript and style sheets, which need no build; Python makes all numbers that they
show.
"""
