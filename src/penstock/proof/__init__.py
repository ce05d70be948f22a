"""The proof that a split model trains like the unsplit one: two models that share nothing, compared bit by bit."""
