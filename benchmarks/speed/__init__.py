"""Costs of fits: time, memory, compilation, growth."""
