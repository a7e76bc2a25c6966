"""Estimators that tests of the code around an estimator put in its place."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from numpyro_kscore import ScoreEstimator
from numpyro_kscore.estimators import AtSamples
from numpyro_kscore.estimators._base.standardization import standardize_samples
from numpyro_kscore.kernels._pairwise import cancels, nearest_squared, squared_distances

# Beyond, all pairs would cost more than the rest of a test, and only the reported loss needs them.
MOST_PAIRED = 512


@dataclasses.dataclass(frozen=True)
class GaussianScore(ScoreEstimator):
    """The score of a Gaussian in the place of an estimate: exact for a guide that is one.

    Without a mean and sd, those of the samples: cheap to compile, for tests of what is around
    the estimator. With a context it is that of the Gaussian's conditional, fitted to the samples.
    Its coordinates are those of the default estimator of ``ImplicitELBO``.
    """

    standardize: str = "full"
    mean: object = None
    sd: object = None

    def at_samples(self, samples, base_scores=None, *, debias=None, context=None):
        if context is None:
            mean = samples.mean(0) if self.mean is None else self.mean
            sd = samples.std(0) if self.sd is None else self.sd
            scores = (mean - samples) / sd**2
            rest = samples
        else:
            given = jnp.column_stack([jnp.ones(len(context)), context])
            rest = samples - given @ _solve(given.T @ given, given.T @ samples)
            scores = -_solve(rest.T @ rest / len(rest), rest.T).T
        residual = scores if base_scores is None else scores - base_scores
        coordinates = standardize_samples(rest, self.standardize)
        distances = _distances(coordinates.to_kernel(rest))
        apart = None
        if context is not None:
            apart = _distances(standardize_samples(context, self.standardize).to_kernel(context))
            distances = distances + apart
            apart = nearest_squared(apart)
        return AtSamples(residual, scores, None, coordinates, nearest_squared(distances), apart)


def _solve(matrix, right):
    """Solve with a positive-definite matrix in a few operations, which compile faster than LU."""
    factor = lax.linalg.cholesky(matrix)
    half = lax.linalg.triangular_solve(factor, right, left_side=True, lower=True)
    return lax.linalg.triangular_solve(factor, half, left_side=True, lower=True, transpose_a=True)


def _distances(z):
    z = z[:MOST_PAIRED]
    return squared_distances(z, z, cancels(z))
