"""What tests in several folders share: models, batches, references by hand, ranks, and the choice of long tests."""
