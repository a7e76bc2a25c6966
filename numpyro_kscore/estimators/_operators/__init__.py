"""Operators an estimate can be made with: landmarks, subsets and random features."""
