"""Where a fit starts: a Gaussian near the posterior, found by quasi-Newton paths."""
