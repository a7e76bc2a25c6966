"""Estimates of the log density of a guide that can only be sampled, up to a constant.

Such an estimate is called an *energy* E here, by its name in the field: ``log q = -E + constant``.
All values are those of ``-E``, the log density, and need no change of sign. Score matching fits it
to draws alone, as a sum of a few features in closed form and optionally a curl-free kernel estimate
f of the rest::

    -E(z) = α log p(z) + ½ zᵀA z + bᵀz + γ ρ(|z|²) + Σ_i [c_i t(z_i) + e_i u(z_i)] + f(z)

in whitened coordinates, with log p the model's log density, a heavy tail
``ρ(r) = (d/2) log(1 + r/d)`` and, for each coordinate, ``u(x) = √(1 + x²)`` and ``t(x) = x u(x)``:
added to a quadratic form they make the two tails of a coordinate as different as those of a
Gaussian and an exponential distribution. With α = 1 and the rest zero the guide is the posterior;
with A and b alone it is Gaussian. The features matter more than the kernel: potentials of the
kernel are bounded, log weights are not, and k̂ is about their tail.

The free weights minimize the score-matching loss ``E[½|ŝ|² + div ŝ]`` exactly: a Lyapunov equation
for A, and a linear system. Numbers, not structure, say which weights are free, so that one compiled
program serves every family of energies. Held-out loss decides which features to use, as it decides
the kernel's regularization.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_kscore._model.draws import GuideDraws
from numpyro_kscore._util.compiling import quick_jit

# Every energy is fitted to three quarters of the draws: with fewer, the noise of the fit makes
# weights vary more, and k̂ larger.
FOLDS = 4
# Most draws for a kernel estimate, evenly spaced: it is most of the cost, and only a refinement.
KERNEL_DRAWS = 1024
# Above this d²/n the noise of a full quadratic form may hide a direction or two: the noise costs
# about 2d²/n in the loss, one direction half as wide as it should be costs .3.
NOISY = 0.25
# Ridge on a weight, as a fraction of its feature's mean square: it decides between features that
# are equal up to rounding, such as the model's log density and a quadratic form.
RIDGE = 1e-3
# Most dimensions in which coordinates have tails of their own, which take n d² numbers a fit.
LARGEST_SKEWED = 32
# Cap on √(d/n), so that the band of noise is bounded where n < d.
LARGEST_EDGE = 0.9


class Fields(NamedTuple):
    """A log density or a feature at draws: values (n,), gradients (n, d), Laplacians (n,)."""

    value: Array
    gradient: Array
    laplacian: Array


# The terms of the closed form that are used, 0 or 1 each: whether α is 1, to which a fitted one is
# added; whether α is fitted; A and b; whether A keeps only directions that exceed sampling noise;
# whether γ is fitted; c and e.
Switches = Array


class Weights(NamedTuple):
    """Weights of the closed form: α, γ, c and e in ``theta``, (k,), A, (d, d), and b, (d,)."""

    theta: Array
    matrix: Array
    vector: Array


def _known_laplacian(target: GuideDraws) -> Array:
    """The model's Laplacian, (n,), or zeros if it is not known.

    Losses without it are comparable only among families with a fixed α.
    """
    if target.laplacian is None:
        return jnp.zeros_like(target.log_density)
    return target.laplacian


def take_rows(draws: GuideDraws, rows: Any) -> GuideDraws:
    """The draws of some rows: a slice, or indices or a mask, (m,) or (n,)."""
    # Two numbers are of all draws together.
    alone: dict[str, Any] = {"num_lost": None, "folded": None}
    chosen: GuideDraws = jax.tree.map(lambda a: a[rows], draws._replace(**alone))
    return chosen._replace(num_lost=draws.num_lost, folded=draws.folded)


def energy_features(target: GuideDraws) -> Fields:
    """The features that α, γ, c and e weight, with a leading axis k."""
    x = target.samples
    dim = x.shape[1]
    squared = jnp.sum(x**2, axis=1)
    first = 0.5 * dim / (dim + squared)
    second = -0.5 * dim / (dim + squared) ** 2
    parts = [
        Fields(target.log_density[None], target.scores[None], _known_laplacian(target)[None]),
        Fields(
            0.5 * dim * jnp.log1p(squared / dim)[None],
            2 * first[:, None] * x[None],
            (2 * dim * first + 4 * squared * second)[None],
        ),
    ]
    if dim <= LARGEST_SKEWED:
        root = jnp.sqrt(1 + x**2)
        # Values, slopes and second derivatives of t and of u.
        sides = (x * root, root + x**2 / root, x / root * (2 + 1 / root**2))
        ends = (root, x / root, 1 / root**3)
        eye = jnp.eye(dim, dtype=x.dtype)[:, None, :]
        for value, slope, curvature in (sides, ends):
            parts.append(Fields(value.T, eye * slope, curvature.T))
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def solve(target: GuideDraws, known: Fields, switches: Switches) -> Weights:
    """Minimize the score-matching loss of centered draws, which is quadratic in all weights.

    Of the weights in use α is shrunk toward 1, others toward 0, by ``RIDGE``.

    Cost: O(n d³) with weights for single coordinates.
    """
    fixed, free_model, affine, few, radial, skewed = switches
    x = target.samples
    n, dim = x.shape
    sigma, basis = jnp.linalg.eigh(x.T @ x / n)
    sigma = jnp.maximum(sigma, 10 * dim * jnp.finfo(x.dtype).eps)
    pairs = 0.5 * (sigma[:, None] + sigma[None, :])

    def lyapunov(matrix: Array) -> Array:
        # The symmetric A with ½(SA + AS) = matrix, S the covariance.
        return basis @ (basis.T @ matrix @ basis / pairs) @ basis.T

    # Gradients that A and b must balance: first that of the fixed part, then those of all features.
    gradients = jnp.concatenate([fixed * target.scores[None], known.gradient])
    moments = jnp.einsum("knd,ne->kde", gradients, x) / n
    moments = 0.5 * (moments + jnp.swapaxes(moments, 1, 2))
    means = jnp.mean(gradients, axis=1)
    matrices = lyapunov(moments)

    flat = gradients.reshape(gradients.shape[0], -1)
    count = gradients.shape[0]
    # Products of gradients, less what A and b explain of them.
    products = flat @ flat.T / n - means @ means.T
    products = products - matrices.reshape(count, -1) @ moments.reshape(count, -1).T

    free = jnp.stack([free_model, radial, *[skewed] * (count - 3)])
    start = jnp.zeros(count - 1, x.dtype).at[0].set(1.0)
    size = jnp.mean(jnp.sum(known.gradient**2, axis=2), axis=1)
    size = RIDGE * jnp.where(size > 0, size, 1.0)
    traces = jnp.trace(matrices[1:], axis1=1, axis2=2)
    right = traces - jnp.mean(known.laplacian, axis=1) - products[1:, 0]
    # The equation of a weight that is not free sets it to 0.
    system = jnp.where(free[:, None] * free > 0, products[1:, 1:], 0.0) + jnp.diag(size)
    theta = jnp.linalg.solve(system, jnp.where(free > 0, right + size * start, 0.0))
    every = jnp.concatenate([jnp.ones(1, x.dtype), theta])
    matrix = lyapunov(-jnp.eye(dim, dtype=x.dtype)) - jnp.tensordot(every, matrices, 1)
    # A branch, since one family alone needs the spectrum.
    matrix = lax.cond(few > 0, lambda a: _beyond_noise(a, n), lambda a: a, matrix)
    return Weights(theta, affine * matrix, -affine * (every @ means))


def _beyond_noise(matrix: Array, n: int) -> Array:
    """A without the eigenvalues inside the band of sampling noise.

    For a Gaussian guide that equals the model A is ``I - S⁻¹`` with S the covariance of n draws,
    whose spectrum lies within ``(1 ± √(d/n))²`` (Marchenko and Pastur 1967).
    """
    values, vectors = jnp.linalg.eigh(matrix)
    edge = min((matrix.shape[0] / n) ** 0.5, LARGEST_EDGE)
    is_noise = (values > 1 - (1 - edge) ** -2) & (values < 1 - (1 + edge) ** -2)
    return (vectors * jnp.where(is_noise, 0.0, values)) @ vectors.T


def combine(target: GuideDraws, known: Fields, weights: Weights, switches: Switches) -> Fields:
    """The log density estimate with these weights, at the draws."""
    x = target.samples
    theta = weights.theta.at[0].add(switches[0])
    field = x @ weights.matrix
    value = 0.5 * jnp.sum(x * field, axis=1) + x @ weights.vector
    return Fields(
        value + theta @ known.value,
        field + weights.vector + jnp.tensordot(theta, known.gradient, 1),
        jnp.trace(weights.matrix) + theta @ known.laplacian,
    )


class Family(NamedTuple):
    """A family of energies: the features they use.

    Attributes:
        name: the features in words.
        fixed: whether α is 1.
        free: whether α is fitted; it is 0 if neither holds.
        affine: whether A and b are fitted; otherwise they are zero.
        few: whether A keeps only directions that exceed sampling noise.
        radial: whether γ is fitted.
        skewed: whether the c_i and e_i are fitted; ignored beyond 32 dimensions.
        kernel: whether a kernel estimate of the rest is added.
    """

    name: str
    fixed: bool = False
    free: bool = False
    affine: bool = True
    few: bool = False
    radial: bool = False
    skewed: bool = False
    kernel: bool = False

    def switches(self, dtype: Any) -> Switches:
        """The same settings as numbers, without name and kernel."""
        return jnp.asarray(self[1:-1], dtype)

    def serves(self, num_samples: int, dim: int) -> bool:
        """Whether to try this family for n draws in d dimensions."""
        return not self.few or dim**2 > NOISY * num_samples


FAMILIES = (
    Family("model", fixed=True, affine=False),
    Family("model, affine", fixed=True),
    Family("model, affine in few directions", fixed=True, few=True),
    Family("Gaussian"),
    Family("tempered model", free=True),
    Family("heavy tails", radial=True),
    Family("tempered model, heavy tails", free=True, radial=True),
    Family("skewed", skewed=True),
    Family("tempered model, skewed", free=True, skewed=True),
    Family("model, affine, kernel", fixed=True, kernel=True),
    Family("Gaussian, kernel", kernel=True),
    Family("tempered model, kernel", free=True, kernel=True),
    Family("heavy tails, kernel", radial=True, kernel=True),
    Family("skewed, kernel", skewed=True, kernel=True),
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

    The draws are whitened, a multiple of ``FOLDS``; consecutive quarters of ``order``, a
    permutation, are the folds. A family with a kernel needs an estimator of the rest.

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
        known = energy_features(near_train)
        weights = solve(near_train, known, switches)
        return _Fold(
            train,
            test,
            combine(near_train, known, weights, switches),
            combine(near_test, energy_features(near_test), weights, switches),
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
        -product - 2 * (energy.laplacian - _known_laplacian(test)),
    )
    # Back in the order of the draws.
    inverse = jnp.argsort(order)
    return jax.tree.map(lambda a: jnp.ravel(a)[inverse], held_out)
