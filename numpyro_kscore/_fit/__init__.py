"""``fit``: stochastic variational inference with a stopping rule."""
