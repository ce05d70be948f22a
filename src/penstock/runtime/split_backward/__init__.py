"""A stage's backward in two parts: input gradients now, weight gradients later, with the same bits."""
