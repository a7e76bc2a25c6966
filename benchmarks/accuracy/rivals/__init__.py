"""Rivals of the head to head, each written from its paper, one module a method."""
