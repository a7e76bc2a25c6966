"""Figures of Wasserstein autoencoders: likelihoods, bounds, information in codes."""
