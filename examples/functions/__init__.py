"""Functional Bayesian neural networks: priors over functions."""
