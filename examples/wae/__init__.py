"""Wasserstein autoencoders with estimated scores."""
