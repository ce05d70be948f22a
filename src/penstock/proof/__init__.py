"""The proof that a split model trains as the unsplit one does: two models that share nothing, compared to the bit."""
