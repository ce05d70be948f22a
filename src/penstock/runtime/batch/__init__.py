"""Cuts a batch into microbatches, and puts outputs back together."""
