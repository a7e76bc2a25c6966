"""NumPyro models and guides: what they draw, what depends on what, and their densities."""
