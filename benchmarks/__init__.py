"""Benchmarks: posteriors with trusted reference draws, and scripts that measure guides on them."""
