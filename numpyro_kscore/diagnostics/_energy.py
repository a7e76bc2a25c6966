"""Estimates of the log density of a guide that can only be sampled, up to a constant.

Such an estimate is called an *energy* E here, by its name in the field: ``log q = -E + constant``.
All values are those of ``-E``, the log density, and need no change of sign. Score matching fits it
to draws alone, as a sum of a few features in closed form
(:mod:`numpyro_kscore.diagnostics._closed_form`) and optionally a curl-free kernel estimate f of the
rest::

    -E(z) = α log p(z) + ½ zᵀA z + bᵀz + γ ρ(|z|²) + Σ_i [c_i t(z_i) + e_i u(z_i)] + f(z)

in whitened coordinates, with log p the model's log density, ρ a heavy tail, and t and u functions
that make the two tails of a coordinate different. With α = 1 and the rest zero the guide is the
posterior; with A and b alone it is Gaussian. The features matter more than the kernel: potentials
of the kernel are bounded, log weights are not, and k̂ is about their tail.

Held-out loss decides which features to use, as it decides the kernel's regularization.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_kscore._tracing.draws import GuideDraws
from numpyro_kscore._util.compiling import quick_jit
from numpyro_kscore.diagnostics._closed_form import (
    Fields,
    Switches,
    combine,
    features,
    known_laplacian,
    solve,
    take_rows,
)

__all__ = ["FAMILIES", "FOLDS", "CrossFit", "Family", "cross_fit"]

# Every energy is fitted to three quarters of the draws: with fewer, the noise of the fit makes
# weights vary more, and k̂ larger.
FOLDS = 4
# Most draws for a kernel estimate, evenly spaced: it is most of the cost, and only a refinement.
KERNEL_DRAWS = 1024
# Above this d²/n the noise of a full quadratic form may hide a direction or two: the noise costs
# about 2d²/n in the loss, one direction half as wide as it should be costs .3.
NOISY = 0.25


class Family(NamedTuple):
    """A family of energies: the features they use.

    Attributes:
        name: the features in words.
        model: ``"fixed"`` (α = 1), ``"free"`` or ``"none"`` (α = 0).
        affine: whether A and b are fitted; otherwise they are zero.
        few: whether A keeps only directions that exceed sampling noise.
        radial: whether γ is fitted.
        skewed: whether the c_i and e_i are fitted; ignored beyond 32 dimensions.
        kernel: whether a kernel estimate of the rest is added.
    """

    name: str
    model: str
    affine: bool = True
    few: bool = False
    radial: bool = False
    skewed: bool = False
    kernel: bool = False

    def switches(self, dtype: Any) -> Switches:
        """The same settings as numbers."""
        free = jnp.asarray([self.model == "free", self.radial, self.skewed], dtype)
        return Switches(
            jnp.asarray(self.model == "fixed", dtype),
            free,
            jnp.asarray(self.affine, dtype),
            jnp.asarray(self.few, dtype),
        )

    def serves(self, num_samples: int, dim: int) -> bool:
        """Whether to try this family for n draws in d dimensions."""
        return not self.few or dim**2 > NOISY * num_samples


FAMILIES = (
    Family("model", "fixed", affine=False),
    Family("model, affine", "fixed"),
    Family("model, affine in few directions", "fixed", few=True),
    Family("Gaussian", "none"),
    Family("tempered model", "free"),
    Family("heavy tails", "none", radial=True),
    Family("tempered model, heavy tails", "free", radial=True),
    Family("skewed", "none", skewed=True),
    Family("tempered model, skewed", "free", skewed=True),
    Family("model, affine, kernel", "fixed", kernel=True),
    Family("Gaussian, kernel", "none", kernel=True),
    Family("tempered model, kernel", "free", kernel=True),
    Family("heavy tails, kernel", "none", radial=True, kernel=True),
    Family("skewed, kernel", "none", skewed=True, kernel=True),
)


class CrossFit(NamedTuple):
    """Energies, evaluated at draws that they were not fitted to.

    Attributes:
        log_weights: the model's log density less the estimate of the guide's, (n,), shifted so that
            every energy's mean over all draws is 0.
        loss: score-matching loss at every draw, (n,).
        fisher: ``-2 ×`` the loss of the field ``ŝ_q - s_p`` for the difference of the scores, (n,);
            its mean is a lower bound of the Fisher divergence ``E|s_q - s_p|²``.
    """

    log_weights: Array
    loss: Array
    fisher: Array


class _Fold(NamedTuple):
    """Draws that an energy is fitted to, held-out draws, and the log density estimate at both."""

    train: GuideDraws
    test: GuideDraws
    at_train: Fields
    at_test: Fields


def cross_fit(target: GuideDraws, order: Array, family: Family, estimator: Any = None) -> CrossFit:
    """Evaluate energies at all draws, each fitted to the draws of the other folds.

    Args:
        target: the draws in whitened coordinates; their number n is a multiple of ``FOLDS``.
        order: a permutation of the draws, (n,), whose consecutive quarters are the folds.
        family: the features to use.
        estimator: the :class:`~numpyro_kscore.ScoreEstimator` of the rest, of points that are
            whitened already; only for a family with a kernel.

    Cost: O(n d³); with a kernel O(n d) more for each of at most 1024 draws.
    """
    folds = _closed_forms(target, order, family.switches(target.samples.dtype))
    if family.kernel:
        # A program of its own, compiled once: most of the time is compilation.
        folds = _add_kernel(estimator, folds)
    return _judge(folds, order)


@quick_jit
def _closed_forms(target: GuideDraws, order: Array, switches: Switches) -> _Fold:
    """The closed form of every fold: leaves with a leading axis ``FOLDS``."""
    folds = jnp.reshape(order, (FOLDS, -1))

    def one(k: Array) -> _Fold:
        others = jnp.arange(FOLDS - 1)
        others = jnp.ravel(folds[others + (others >= k)])
        train = take_rows(target, others)
        test = take_rows(target, folds[k])
        # Centered: features far apart in size cost digits, and a constant of log p means nothing.
        shift, center = jnp.mean(train.log_density), jnp.mean(train.samples, axis=0)
        near_train, near_test = (
            t._replace(samples=t.samples - center, log_density=t.log_density - shift)
            for t in (train, test)
        )
        known = features(near_train)
        weights = solve(near_train, known, switches)
        return _Fold(
            train,
            test,
            combine(near_train, known, weights, switches),
            combine(near_test, features(near_test), weights, switches),
        )

    return jax.vmap(one)(jnp.arange(FOLDS))


@quick_jit
def _add_kernel(estimator: Any, folds: _Fold) -> _Fold:
    """The folds with a kernel estimate of the rest added to the closed form."""

    def one(fold: _Fold) -> _Fold:
        train, test = fold.train.samples, fold.test.samples
        stride = -(-train.shape[0] // KERNEL_DRAWS)
        rest = estimator.fit(train[::stride], base_scores=fold.at_train.gradient[::stride])
        potential = rest.residual_potential(jnp.concatenate([test, train]))
        at_test, at_train = jnp.split(potential, [test.shape[0]])
        added = Fields(at_test, rest.residual(test), rest.residual_divergence(test))
        return fold._replace(
            at_train=fold.at_train._replace(value=fold.at_train.value + at_train),
            at_test=jax.tree.map(jnp.add, fold.at_test, added),
        )

    return lax.map(one, folds)


@quick_jit
def _judge(folds: _Fold, order: Array) -> CrossFit:
    test, energy = folds.test, folds.at_test
    log_weights = test.log_density - energy.value
    # Every energy lacks a constant of its own, so each gets mean 0 over all draws. Means over its
    # own fold would add the sampling noise of the folds.
    train_mean = jnp.mean(folds.train.log_density - folds.at_train.value, axis=1)
    constant = ((FOLDS - 1) * train_mean + jnp.mean(log_weights, axis=1)) / FOLDS
    difference = energy.gradient - test.scores
    product = jnp.sum(difference * (difference + 2 * test.scores), axis=2)
    held_out = CrossFit(
        log_weights - constant[:, None],
        0.5 * jnp.sum(energy.gradient**2, axis=2) + energy.laplacian,
        -product - 2 * (energy.laplacian - known_laplacian(test)),
    )
    # Back in the order of the draws.
    inverse = jnp.argsort(order)
    return jax.tree.map(lambda a: jnp.ravel(a)[inverse], held_out)
