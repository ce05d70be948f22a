"""Gradients of parameters that several stages, replicas or shards hold."""
