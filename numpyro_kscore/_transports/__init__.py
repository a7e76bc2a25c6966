"""Invertible maps from standard normal points to coordinates of latents."""
