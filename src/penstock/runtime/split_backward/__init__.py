"""A stage's backward in two: input gradients now, weight gradients later, with the same bits."""
