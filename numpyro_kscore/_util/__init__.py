"""Pytrees, checks, linear algebra, precision, sharding and random keys."""
