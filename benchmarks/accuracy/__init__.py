"""Errors of fitted guides and of estimated scores against the truth."""
