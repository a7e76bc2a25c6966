"""The log density of a guide that can only be sampled, up to a constant: its *energy*.

Score matching fits log q from draws alone. What is fitted is a sum of a few features with closed
form, and optionally a curl-free kernel estimate of what they leave::

    log q(z) ≈ α log p(z) + ½ zᵀA z + bᵀz + γ ρ(|z|²) + f(z)

in whitened coordinates, with log p the model's log density and ``ρ(r) = (d/2) log(1 + r/d)`` a
heavy tail. With α = 1 and the rest zero the guide is the posterior; with α = 0 and the kernel
alone left out it is Gaussian. The features matter more than the kernel: potentials of the kernel
are bounded, log weights are not, and k̂ is about their tail. A, b, α and γ minimise the
score-matching loss ``E[½|ŝ|² + div ŝ]`` exactly: a Lyapunov equation and a system of two.

Which features to take is decided by held-out loss, like the kernel's regularisation.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_kscore._pytree import with_jax_leaves
from numpyro_kscore.estimators import ScoreEstimator
from numpyro_kscore.iterations import NuMethod
from numpyro_kscore.kernels import CurlFree

__all__ = ["FAMILIES", "FOLDS", "CrossFit", "Family", "Target", "cross_fit", "energy_estimator"]

# Share of a feature's own square that its weight is shrunk with: decides between features that
# are the same but for rounding, such as the model's log density and a quadratic form.
RIDGE = 1e-3
# Energies are fitted to three quarters of the draws: the noise of a fit makes weights vary, and k̂
# larger.
FOLDS = 4
# Draws behind a kernel estimate, spaced evenly: it is most of the cost, and refines only.
KERNEL_DRAWS = 1024


class Family(NamedTuple):
    """Which features an energy may use.

    Attributes:
        name: in words.
        model: ``"fixed"`` (α = 1), ``"free"`` or ``"none"`` (α = 0).
        affine: whether A and b are fitted, or zero.
        radial: whether γ is.
        kernel: whether a kernel estimate of the rest is added.
    """

    name: str
    model: str
    affine: bool = True
    radial: bool = False
    kernel: bool = False


FAMILIES = (
    Family("model", "fixed", affine=False),
    Family("model, affine", "fixed"),
    Family("Gaussian", "none"),
    Family("tempered model", "free"),
    Family("heavy tails", "none", radial=True),
    Family("tempered model, heavy tails", "free", radial=True),
    Family("model, affine, kernel", "fixed", kernel=True),
    Family("Gaussian, kernel", "none", kernel=True),
    Family("tempered model, kernel", "free", kernel=True),
    Family("heavy tails, kernel", "none", radial=True, kernel=True),
)


class Target(NamedTuple):
    """Draws of a guide and the model at them, in whitened coordinates.

    Attributes:
        points: (n, d).
        log_density: the model's, (n,); any constant may be missing.
        scores: its gradient, (n, d).
        laplacian: its Laplacian, (n,); NaN where it is not known, which leaves the families with
            ``model="fixed"`` comparable among themselves only.
    """

    points: Array
    log_density: Array
    scores: Array
    laplacian: Array


class CrossFit(NamedTuple):
    """Energies at draws they were not fitted to.

    Attributes:
        log_weights: the model's log density less the energy, (n,), shifted so that every energy's
            mean over all draws is 0.
        loss: score-matching loss at every draw, (n,).
        fisher: ``-2 ×`` the loss of the field ``ŝ_q - s_p`` for the difference of the scores: in
            the mean a lower bound of the Fisher divergence ``E|s_q - s_p|²``, (n,).
    """

    log_weights: Array
    loss: Array
    fisher: Array


class _Fields(NamedTuple):
    """An energy at some draws: values (n,), gradients (n, d) and Laplacians (n,)."""

    value: Array
    gradient: Array
    laplacian: Array


def cross_fit(
    target: Target, order: Array, family: Family, estimator: ScoreEstimator | None = None
) -> CrossFit:
    """Energies of all draws, each fitted to the draws of the other folds.

    Args:
        target: the draws; their number a multiple of ``FOLDS``.
        order: permutation of them, (n,), whose consecutive quarters are the folds.
        family: which features.
        estimator: of what they leave, if the family has a kernel; the default is the curl-free
            ν-method with automatic step count.

    Raises:
        TypeError: for a kernel without potential.

    Cost: without a kernel O(n d² + d³), with one O(n d) for each of at most 1024 draws more.
    """
    estimator = energy_estimator(estimator)
    folds = jnp.reshape(order, (FOLDS, -1))
    found = []
    for k in range(FOLDS):
        fitted = jnp.concatenate([folds[j] for j in range(FOLDS) if j != k])
        found.append(
            _fit_and_evaluate(_take(target, fitted), _take(target, folds[k]), family, estimator)
        )
    return _put_back(found, jnp.argsort(order))


def energy_estimator(estimator: Any = None) -> ScoreEstimator:
    """The estimator behind the kernel part of an energy, checked.

    Raises:
        TypeError: for anything but a ``ScoreEstimator`` with a curl-free kernel.
    """
    if estimator is None:
        estimator = ScoreEstimator(regularizer=NuMethod("auto"))
    if not isinstance(estimator, ScoreEstimator):
        raise TypeError(
            f"estimator: expected a ScoreEstimator with a curl-free kernel; got {estimator!r}"
        )
    if not isinstance(estimator.kernel, CurlFree):
        raise TypeError(
            f"estimator: expected a curl-free kernel, whose fields have a potential; got "
            f"{type(estimator.kernel).__name__}, which gives no energy. Use CurlFree(), or leave "
            "estimator out"
        )
    # The points are whitened already, and the base is the closed form's.
    return with_jax_leaves(dataclasses.replace(estimator, standardize="none", base=None))


@jax.jit
def _take(target: Target, rows: Array) -> Target:
    return jax.tree.map(lambda a: a[rows], target)


@jax.jit
def _put_back(found: list[CrossFit], inverse: Array) -> CrossFit:
    return jax.tree.map(lambda *parts: jnp.concatenate(parts)[inverse], *found)


def _fit_and_evaluate(
    train: Target, test: Target, family: Family, estimator: ScoreEstimator
) -> CrossFit:
    at_train, at_test = _closed_form(train, test, family)
    if family.kernel:
        # By itself, so that it is compiled once and not for every family.
        stride = -(-train.points.shape[0] // KERNEL_DRAWS)
        some = (train.points[::stride], at_train.gradient[::stride])
        rest, potential = _kernel_rest(estimator, *some, test.points, train.points)
        at_train = at_train._replace(value=at_train.value + potential)
        at_test = jax.tree.map(jnp.add, at_test, rest)
    return _judge(test, at_test, jnp.mean(train.log_density - at_train.value))


@partial(jax.jit, static_argnames="family")
def _closed_form(train: Target, test: Target, family: Family) -> tuple[_Fields, _Fields]:
    # Features far apart in size cost digits; a constant of log p is none of them.
    shift = jnp.mean(train.log_density)
    centre = jnp.mean(train.points, axis=0)
    train, test = (
        t._replace(points=t.points - centre, log_density=t.log_density - shift)
        for t in (train, test)
    )
    known = _features(train, family)
    weights = _solve(train, known, family)
    return (
        _combine(train, known, weights, family),
        _combine(test, _features(test, family), weights, family),
    )


@jax.jit
def _kernel_rest(
    estimator: ScoreEstimator, points: Array, scores: Array, test: Array, train: Array
) -> tuple[_Fields, Array]:
    """What the closed form leaves, at the test draws; its potential at the train draws."""
    rest = estimator.fit(points, base_scores=scores)
    potential, field = rest.residual_potential(test), rest.residual(test)
    fields = _Fields(potential, field, rest.residual_divergence(test))
    return fields, rest.residual_potential(train)


@jax.jit
def _judge(test: Target, energy: _Fields, train_mean: Array) -> CrossFit:
    log_weights = test.log_density - energy.value
    # Constants are lost with the normalisation. Means over a fold alone would put the folds' noise
    # between them; over all draws only errors of the energies differ.
    constant = ((FOLDS - 1) * train_mean + jnp.mean(log_weights)) / FOLDS
    loss = 0.5 * jnp.sum(energy.gradient**2, axis=1) + energy.laplacian
    difference = energy.gradient - test.scores
    product = jnp.sum(difference * (difference + 2 * test.scores), axis=1)
    fisher = -product - 2 * (energy.laplacian - test.laplacian)
    return CrossFit(log_weights - constant, loss, fisher)


class _Weights(NamedTuple):
    """α and γ, as far as they are free, (k,), A and b."""

    theta: Array
    matrix: Array
    vector: Array


def _features(target: Target, family: Family) -> list[tuple[Array, Array, Array]]:
    found = []
    if family.model == "free":
        found.append((target.log_density, target.scores, target.laplacian))
    if family.radial:
        dim = target.points.shape[1]
        squared = jnp.sum(target.points**2, axis=1)
        first = 0.5 * dim / (dim + squared)
        second = -0.5 * dim / (dim + squared) ** 2
        found.append(
            (
                0.5 * dim * jnp.log1p(squared / dim),
                2 * first[:, None] * target.points,
                2 * dim * first + 4 * squared * second,
            )
        )
    return found


def _solve(target: Target, features: list[tuple[Array, Array, Array]], family: Family) -> _Weights:
    """Minimise the score-matching loss, which is quadratic in all weights."""
    x, dim = target.points, target.points.shape[1]
    zero = jnp.zeros((), x.dtype)
    if not family.affine:
        # `model="fixed"`: nothing is free.
        return _Weights(jnp.zeros(0, x.dtype), zero * jnp.eye(dim), zero * x[0])
    n = x.shape[0]
    sigma, basis = jnp.linalg.eigh(x.T @ x / n)
    sigma = jnp.maximum(sigma, 10 * dim * jnp.finfo(x.dtype).eps)
    pairs = 0.5 * (sigma[:, None] + sigma[None, :])

    def moment(gradient: Array) -> Array:
        product = gradient.T @ x / n
        return 0.5 * (product + product.T)

    def solve(matrix: Array) -> Array:
        # The symmetric A with ½(SA + AS) = matrix, S the covariance.
        return basis @ (basis.T @ matrix @ basis / pairs) @ basis.T

    eye = jnp.eye(dim, dtype=x.dtype)
    share = 1.0 if family.model == "fixed" else 0.0
    # What A and b must balance with α as it is given, and with each weight that is free.
    gradients = [target.scores * share, *(gradient for _, gradient, _ in features)]
    moments = [moment(gradient) for gradient in gradients]
    means = [jnp.mean(gradient, axis=0) for gradient in gradients]
    matrices = [solve(matrix) for matrix in moments]

    def inner(i: int, j: int) -> Array:
        """Product of two gradients, less what A and b explain of it."""
        product = jnp.sum(gradients[i] * gradients[j]) / n
        return product - jnp.sum(matrices[i] * moments[j]) - means[i] @ means[j]

    free = range(1, len(gradients))
    theta = jnp.zeros(len(features), x.dtype)
    if features:
        start = jnp.asarray([1.0 if family.model == "free" else 0.0, 0.0][: len(features)], x.dtype)
        size = jnp.stack([jnp.sum(gradients[i] ** 2) / n for i in free])
        system = jnp.stack([jnp.stack([inner(i, j) for j in free]) for i in free])
        right = jnp.stack(
            [jnp.trace(matrices[i]) - jnp.mean(features[i - 1][2]) - inner(i, 0) for i in free]
        )
        size = RIDGE * jnp.where(size > 0, size, 1.0)
        theta = jnp.linalg.solve(system + jnp.diag(size), right + size * start)
    matrix, vector = -solve(eye) - matrices[0], -means[0]
    for i in free:
        matrix = matrix - theta[i - 1] * matrices[i]
        vector = vector - theta[i - 1] * means[i]
    return _Weights(theta, matrix, vector)


def _combine(
    target: Target,
    features: list[tuple[Array, Array, Array]],
    weights: _Weights,
    family: Family,
) -> _Fields:
    x = target.points
    field = x @ weights.matrix
    value = 0.5 * jnp.sum(x * field, axis=1) + x @ weights.vector
    field = field + weights.vector
    laplacian = jnp.full_like(value, jnp.trace(weights.matrix))
    if family.model == "fixed":
        value, field = value + target.log_density, field + target.scores
        laplacian = laplacian + target.laplacian
    for weight, (feature, gradient, second) in zip(weights.theta, features, strict=True):
        value, field = value + weight * feature, field + weight * gradient
        laplacian = laplacian + weight * second
    return _Fields(value, field, laplacian)
