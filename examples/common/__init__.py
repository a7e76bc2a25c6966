"""Helpers that examples and benchmarks share."""
