"""Cutting a batch into microbatches, and putting outputs together again."""
