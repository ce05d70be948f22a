"""A local page to play with schedules, to open runs, plans and traces, and to watch a run: `penstock studio`.

The page computes nothing: `answers` has a function for each of its questions, which the command line answers alike.
`guard` checks requests, `library` finds the files that can be opened, `app` has the routes and the server.
"""
