"""Checks that diagnostics are right as often as they claim."""
