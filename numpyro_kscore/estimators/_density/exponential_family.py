"""A density made from draws, as a NumPyro distribution."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import validate_sample

from numpyro_kscore._util.checks import as_points, check_count
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore._util.keys import check_key
from numpyro_kscore.estimators._base.base_scores import DistributionBase, EllipticalBase
from numpyro_kscore.estimators._base.mixture import MixtureBase
from numpyro_kscore.estimators._density.normalization import (
    Normalization,
    draw_proposal,
    importance_sampled,
)
from numpyro_kscore.estimators._fit.score import Score
from numpyro_kscore.estimators._fit.score_estimator import ScoreEstimator


class KernelExponentialFamily(Distribution):
    """A density made from draws: a Gaussian times the exponential of a kernel expansion.

    ``log p(x) = log N(x) + f(x) + constant`` with the Gaussian fitted to the draws and the
    potential f of a curl-free score estimate (Sriperumbudur et al. 2017, fitted by any filter of
    Zhou, Shi and Zhu 2020). Its use is to hand a posterior on as a prior, under NUTS as under SVI.

    The log density is known *up to a constant*: gradients, MCMC and the fit of a guide need no
    more. A model evidence or a comparison of two such priors does: :meth:`normalize` estimates the
    constant and returns a distribution with it. The gradient of the log density is exactly
    ``self.score``; it has none in the draws, which are data. Far from the draws f vanishes, so
    the tails are Gaussian whatever those of the draws: data that move a posterior well outside
    the draws meet the Gaussian approximation.

    Draws of constrained quantities are best taken to the real numbers first, and back in the
    model::

        to_rate = biject_to(constraints.positive)
        prior = KernelExponentialFamily(
            jnp.column_stack([draws["slope"], to_rate.inv(draws["rate"])])
        )

        def second_study(data):
            u = numpyro.sample("u", prior)
            slope = numpyro.deterministic("slope", u[0])
            rate = numpyro.deterministic("rate", to_rate(u[1]))

    No Jacobian is needed: the prior is the density of the transformed draws.

    The weights of distant modes, which score matching does not see, are the shares of the draws,
    as long as the default base finds the modes (docs/theory).

    Args:
        samples: the draws, shape (n, d), n ≥ 2. Every evaluation costs O(n d), so thin a long
            chain, but keep 1000 to 4000 draws that are nearly independent: from fewer, little is
            learned beyond the Gaussian.
        estimator: a :class:`~numpyro_kscore.ScoreEstimator` with a curl-free kernel and a base
            that has a density, by default ``ScoreEstimator()``, which leaves the Gaussian no
            further than held-out draws support; or a :class:`~numpyro_kscore.estimators.Score`
            it has fitted, which is used unchanged.

    Attributes:
        samples: the draws.
        score: the fitted score; ``score.info`` says how the fit went.
        normalization: the constant that :meth:`normalize` estimated, a
            :class:`~numpyro_kscore.estimators.Normalization` with its error; None before.

    Raises:
        TypeError: for integer samples, a kernel without a potential, or something that is no
            estimator.
        ValueError: for a wrong shape, samples that are not finite (outside ``jit``), or a base
            without a density; without a base the density would not fall off at all.

    Example::

        from numpyro_kscore import KernelExponentialFamily

        prior = KernelExponentialFamily(samples)  # for numpyro.sample("theta", prior)
        prior.log_prob(samples)  # (200,)
        normalized = prior.normalize(random.key(1))
        normalized.log_prob(jnp.zeros(2))  # -1.84
    """

    arg_constraints = {"samples": constraints.real_matrix}
    support = constraints.real_vector
    pytree_data_fields = ("samples", "score", "normalization")

    def __init__(
        self,
        samples: Any,
        estimator: ScoreEstimator | Score | None = None,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.samples = as_points("samples", samples, minimum=2)
        dim = self.samples.shape[1]
        if estimator is None:
            estimator = ScoreEstimator()
        if not isinstance(estimator, ScoreEstimator | Score):
            raise TypeError(
                f"estimator: expected a ScoreEstimator or a fitted Score; got {estimator!r}"
            )
        if not estimator.kernel.has_potential:
            raise TypeError(
                "estimator: expected a curl-free kernel, whose estimates have a density; got "
                f"{type(estimator.kernel).__name__}. Use kernel=CurlFree(...)"
            )
        base = estimator.base
        if not (
            isinstance(base, Distribution | EllipticalBase | MixtureBase | DistributionBase)
            or (isinstance(base, str) and base in ("auto", "student", "gaussian"))
        ):
            raise ValueError(
                "estimator: expected a base with a density, without which the tails do not fall "
                f"off; got base={base!r}. Leave base='auto', or give a NumPyro distribution"
            )
        score = estimator if isinstance(estimator, Score) else estimator.fit(self.samples)
        if score.coordinates.mean.shape[0] != dim:
            raise ValueError(
                f"estimator: expected a score in {dim} dimension(s), as the samples have; got "
                f"{score.coordinates.mean.shape[0]}"
            )
        self.score = score
        self.normalization: Normalization | None = None
        super().__init__((), (dim,), validate_args=validate_args)

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        """Some of the given draws, with replacement: exact."""
        check_key("key", key, "sample_shape")
        rows = jax.random.randint(key, sample_shape, 0, self.samples.shape[0])
        return self.samples[rows]

    @validate_sample
    def log_prob(self, value: Any, intermediates: Any = None) -> jax.Array:
        """The log density: (..., d) -> (...), up to a constant before :meth:`normalize`.

        Cost: O(n d) a point.
        """
        value = jnp.asarray(value, self.samples.dtype)
        if value.shape[-1:] != self.event_shape:
            raise ValueError(
                f"value: expected shape (..., {self.event_shape[0]}), as the samples have; got "
                f"{value.shape}"
            )
        log_density = _log_density(self.score, value.reshape(-1, *self.event_shape))
        if self.normalization is not None:
            log_density = log_density - self.normalization.log_constant
        return log_density.reshape(value.shape[:-1])

    def normalize(self, key: Any, num_draws: int = 4096) -> KernelExponentialFamily:
        """The same distribution with an estimate of its constant, by importance sampling.

        ``log_prob`` of the result is normalized up to the error of the constant, one number for all
        points: ``normalization.standard_error``. Draws are from the base and from a kernel density
        estimate of the samples, half of each. Up to ten dimensions that is nearly always enough;
        ``normalization.effective_sample_size`` says whether it was, and ``raise_if_failed`` raises
        if not.

        Args:
            key: random key.
            num_draws: number of draws, at least 4; an odd one is rounded down.

        Cost: O(n d) a draw, and the memory of two numbers for each.
        """
        check_key("key", key, "num_draws")
        check_count("num_draws", num_draws, minimum=4)
        normalized = copy.copy(self)
        normalized.normalization = _normalization(
            self.score, self.samples, key, num_draws=num_draws
        )
        return normalized

    @property
    def mean(self) -> jax.Array:
        """Mean of the draws, (d,)."""
        return jnp.mean(self.samples, axis=0)

    @property
    def variance(self) -> jax.Array:
        """Variances of the draws, (d,)."""
        return jnp.var(self.samples, axis=0)


@quick_jit
def _normalization(score: Score, samples: jax.Array, key: Any, *, num_draws: int) -> Normalization:
    score, samples = jax.lax.stop_gradient((score, samples))
    proposal = draw_proposal(score.base, samples, key, num_draws)
    return importance_sampled(_log_density(score, proposal.draws), proposal)


@jax.custom_jvp
@quick_jit
def _log_density(score: Score, x: jax.Array) -> jax.Array:
    near, inner = _near_samples(score, x)
    base = score.base.log_density(x)
    return jnp.where(near, base + score.residual_potential(inner), base)


@_log_density.defjvp
def _rule(primals: tuple[Score, jax.Array], tangents: tuple[Any, jax.Array]) -> Any:
    # The score in closed form: in float32 the derivative of the potential loses two digits more
    # (one dimension, 200 draws). The score's own tangent is left out on purpose: the derivative
    # in the draws would need that of the normalizing constant.
    score, x = primals
    near, inner = _near_samples(score, x)
    residual = jnp.where(near[:, None], score.residual(inner), 0.0)
    along = jnp.sum((score.base.score(x) + residual) * tangents[1], axis=1)
    return _log_density(score, x), along


def _near_samples(score: Score, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which points are within 1/eps bandwidths, (m,), and points with others replaced, (m, d).

    Beyond, the potential is far below rounding, but would be computed as 0 * inf: a sampler that
    flies away must see the base, and NaN only where the point itself is NaN.
    """
    z = score.coordinates.to_kernel(x)
    near = jnp.sqrt(jnp.sum(z * z, axis=1)) < 1.0 / jnp.finfo(x.dtype).eps
    return near, jnp.where(near[:, None], x, score.coordinates.mean)
