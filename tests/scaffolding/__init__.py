"""What tests of several folders are made of: models, batches, references by hand, ranks, and which tests are long."""
