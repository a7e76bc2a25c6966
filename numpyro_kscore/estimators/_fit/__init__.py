"""Fits of scores: the estimator, its problem, the selection of its settings, the fitted score."""
