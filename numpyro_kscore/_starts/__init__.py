"""The start of a fit: a Gaussian near the posterior, found by quasi-Newton paths.

Some arguments are the same everywhere. ``evaluate`` takes points (m, d) to energies (m,), minus log
densities, and their gradients (m, d), in the coordinates of the Gaussians at hand. ``model`` is
that in any form of coordinates, and ``centering`` names the form. ``noise`` is standard normal,
(m, d), its second half minus the first, for bounds; ``rng`` makes all other draws. ``latents`` is
what is known of the model's latents before a search.
"""
