"""Kernel densities, densities made of draws, and the entropies that they give."""
