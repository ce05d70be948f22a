"""What a user holds: `pipeline()` makes a `Pipeline`, whose verbs run steps; options, results, groups, scaling."""
