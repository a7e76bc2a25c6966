"""Automatic guides."""
