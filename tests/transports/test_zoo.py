"""Every transport against automatic differentiation: volume, gradients, scores, both namespaces."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore._transports.affine import (
    Affine,
    Diagonal,
    GaussianMixture,
    OfFirst,
    with_moments,
)
from numpyro_kscore._transports.arrow import Arrow, dense
from numpyro_kscore._transports.centering import Centered, Centering, LocationScale, centered
from numpyro_kscore._transports.conditional import Conditional, StretchedGaussian
from numpyro_kscore._transports.features import exponents
from numpyro_kscore._transports.network import Perceptron, ResidualNetwork
from numpyro_kscore._transports.sizes import Sizes
from numpyro_kscore._transports.skewed import NUM_SHAPES, Skewed
from numpyro_kscore._transports.stretch import KNOTS, Marginals
from numpyro_kscore._transports.transport import Chain, pulled_back
from support.compiling import quick_jit

POINTS = 4
# The length of a difference, where rounding and third derivatives add errors of some 1e-9.
STEP = 2e-6


def triangle(rng, dim, size=0.3):
    return np.diag(np.exp(size * rng.normal(size=dim))) + np.tril(
        size * rng.normal(size=(dim, dim)), -1
    )


def affine(dim=5, seed=0, width=1.0):
    rng = np.random.default_rng(seed)
    return Affine(width * rng.normal(size=dim), width * triangle(rng, dim))


def sizes(dim=6):
    rates = np.zeros((dim, dim))
    rates[3:, 0] = [0.9, 0.5, -0.7]
    rates[4, 1] = 0.3
    return Sizes(rates, np.linspace(-0.5, 0.5, dim))


def sizes_of_functions():
    """The causes of sizes are functions of coordinates; what varies is not."""
    functions, plain = marginals(6), sizes()
    is_cause = np.arange(6) < 2
    shift = np.where(is_cause, functions.shift, 0.0)
    return Sizes(
        plain.rates,
        plain.center,
        Marginals(shift, np.where(is_cause[:, None], functions.slopes, 1.0)),
    )


def stretched_gaussian(count):
    rng = np.random.default_rng(5)
    slopes = np.exp(0.5 * rng.normal(size=(count, len(KNOTS) + 1)))
    return StretchedGaussian(Affine(rng.normal(size=count), triangle(rng, count)), slopes)


def conditional(count, arrow=None):
    """Latents that change with up to three others, in an order of their own."""
    rng, powers = np.random.default_rng(0), len(exponents(count))
    base, rests = arrow or (dense(triangle(rng, 4)), dense(rests_of(rng, 2, 4)))
    rest = len(base.places)
    return Conditional(
        stretched_gaussian(count),
        rng.normal(size=rest),
        base,
        0.2 * rng.normal(size=(powers, rest)),
        0.1 * rng.normal(size=(powers, rest)),
        rng.normal(size=(powers, 2)),
        rests,
        tuple(rng.permutation(count + rest).tolist()),
    )


def marginals(dim=4):
    rng = np.random.default_rng(4)
    return Marginals(rng.normal(size=dim), np.exp(rng.normal(size=(dim, len(KNOTS) + 1))))


def skewed(count):
    """Shapes of three coordinates that change with others."""
    rng, powers = np.random.default_rng(0), len(exponents(count))
    base, changes = rng.normal(size=(NUM_SHAPES, 3)), rng.normal(size=(2, NUM_SHAPES, 3))
    return Skewed(0.5 * base, rng.normal(size=(powers, 2)), 0.2 * changes, count)


def rests_of(rng, *shape):
    return np.tril(0.1 * rng.normal(size=(*shape, shape[-1])), -1)


def arrows():
    """Three leaves of at most two numbers, of which one has an empty place, and a core of two."""
    rng, places = np.random.default_rng(1), (0, 6, 1, 2, 3, 4, 7)
    base = Arrow(
        np.stack([triangle(rng, 2) for _ in range(3)]),
        0.3 * rng.normal(size=(3, 2, 2)),
        triangle(rng, 2),
        places,
    )
    borders = 0.1 * rng.normal(size=(2, 3, 2, 2))
    return base, Arrow(rests_of(rng, 2, 3, 2), borders, rests_of(rng, 2, 2), places)


def network(width, num_labels=0, dim=5):
    rng = np.random.default_rng(width)
    widths = (dim + num_labels, 6, width, 2 * dim)
    count = sum((fan_in + 1) * fan_out for fan_in, fan_out in itertools.pairwise(widths))
    loc, log_scale = rng.normal(size=(2, dim))
    mixing = np.eye(dim) + 0.2 * rng.normal(size=(dim, dim)) / dim**0.5
    layers = 0.2 * rng.normal(size=count)
    labels = tuple(rng.normal(size=(num_labels, 1)))
    return ResidualNetwork(Perceptron(layers, widths), loc, np.exp(0.3 * log_scale), mixing, labels)


def recentered(is_matrix):
    rng = np.random.default_rng(2)
    loc, kind = rng.normal(size=4), np.array([[0, 0.3, 0.8, 1], [0, -1.5, 0.4, 0], [0, 2.0, 1, 0]])
    scale = triangle(rng, 4) if is_matrix else np.exp(rng.normal(size=4))
    return centered(LocationScale(loc, scale, is_matrix), Centering(*kind))


# A transport, its dimensions, and whether it also runs with arrays of NumPy.
ZOO = {
    "affine": lambda: (affine(), 5, True),
    "diagonal": lambda: (Diagonal(np.arange(3.0), np.array([0.5, 2.0, 3.0])), 3, True),
    "sizes": lambda: (sizes(), 6, True),
    "sizes of functions": lambda: (sizes_of_functions(), 6, True),
    "one scale": lambda: (conditional(1), 5, True),
    "two scales": lambda: (conditional(2), 6, True),
    "three scales": lambda: (conditional(3), 7, True),
    "scales of groups": lambda: (conditional(2, arrows()), 9, True),
    "the first": lambda: (OfFirst(Chain((affine(4), marginals())), 4), 6, True),
    "shapes": lambda: (skewed(2), 5, True),
    "one by one": lambda: (marginals(), 4, True),
    "stretched": lambda: (stretched_gaussian(3), 3, True),
    "shapes without scales": lambda: (skewed(0), 3, True),
    "centering": lambda: (recentered(False), 4, False),
    "centering of a vector": lambda: (recentered(True), 4, False),
    "wide network": lambda: (network(5), 5, False),
    "narrow network with labels": lambda: (network(3, num_labels=2), 5, False),
    "nothing": lambda: (Chain(), 3, True),
    "chain": lambda: (Chain((affine(6, seed=3, width=0.3), conditional(2), sizes())), 6, True),
}


def energy(y):
    """An energy that is not quadratic; its gradient is ``tanh(y / scales) / scales``."""
    scales = np.linspace(0.5, 2, y.shape[-1])
    return jnp.sum(jnp.log(jnp.cosh(y / scales)), axis=-1)


@pytest.fixture(scope="module", params=ZOO)
def found(request):
    """What a transport says at some points, and the derivative of its map there and nearby.

    The slope of the volume is a central difference: to differentiate the derivative once more would
    take most of the compiler's time.
    """
    with jax.enable_x64(True):
        host, dim, on_host = ZOO[request.param]()
        points = np.random.default_rng(5).normal(size=(POINTS, dim))
        transport = jax.tree.map(jnp.asarray, host)

        def at(x):
            y, jacobian = transport.push(x), jax.jacfwd(transport.push)(x)
            of_energy = jax.grad(energy)(y)
            return {
                "y": y,
                "jacobian": jacobian,
                "of_energy": of_energy,
                "log_volume": transport.log_volume(x),
                "pull": transport.pull(x, of_energy),
                "push_score": transport.push_score(x, -x),
            }

        moves = STEP * np.concatenate([np.zeros((1, dim)), np.eye(dim), -np.eye(dim)])
        every = (points[:, None] + moves).reshape(-1, dim)
        everywhere = jax.tree.map(np.asarray, quick_jit(lambda x: jax.lax.map(at, x))(every))
        volumes = np.linalg.slogdet(everywhere["jacobian"])[1].reshape(POINTS, -1)
        found = {name: a[:: len(moves)] for name, a in everywhere.items()}
        found["volume"] = volumes[:, 0]
        found["slope"] = (volumes[:, 1 : dim + 1] - volumes[:, dim + 1 :]) / (2 * STEP)
    return (host if on_host else None), points, found


def test_the_volume_is_the_determinant_of_the_derivative(found):
    _, _, at = found
    np.testing.assert_allclose(at["log_volume"], at["volume"], rtol=1e-9, atol=1e-9)


def test_pull_is_the_gradient_of_an_energy_less_the_volume(found):
    _, _, at = found
    through = np.einsum("mij,mi->mj", at["jacobian"], at["of_energy"])
    np.testing.assert_allclose(at["pull"], through - at["slope"], rtol=1e-7, atol=1e-8)


def test_scores_solve_the_equation_of_the_change_of_variables(found):
    """The score s of the image solves ``Jᵀ s = s_x - d log |J| / dx``, here of standard normals."""
    _, points, at = found
    left = np.einsum("mij,mi->mj", at["jacobian"], at["push_score"])
    np.testing.assert_allclose(left, -points - at["slope"], rtol=1e-7, atol=1e-8)


def test_arrays_of_numpy_give_the_same(found):
    host, points, at = found
    if host is None:
        return
    np.testing.assert_allclose(host.push(points), at["y"], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(host.log_volume(points), at["log_volume"], rtol=1e-10, atol=1e-12)
    of_energy = np.tanh(at["y"] / np.linspace(0.5, 2, at["y"].shape[1]))
    of_energy /= np.linspace(0.5, 2, at["y"].shape[1])
    np.testing.assert_allclose(host.pull(points, of_energy), at["pull"], rtol=1e-8, atol=1e-10)
    scores = host.push_score(points, -points)
    np.testing.assert_allclose(scores, at["push_score"], rtol=1e-8, atol=1e-10)
    for array in (host.push(points), host.log_volume(points), scores):
        assert isinstance(array, np.ndarray)

    def evaluate(y):
        return np.asarray(energy(y), float), of_energy

    energies, gradients = pulled_back(evaluate, host)(points)
    np.testing.assert_allclose(
        energies, evaluate(at["y"])[0] - at["log_volume"], rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(gradients, at["pull"], rtol=1e-8, atol=1e-10)


def test_a_centered_value_and_its_coordinate_go_both_ways():
    for is_matrix in (False, True):
        with jax.enable_x64(True):
            one = recentered(is_matrix)
            x = np.random.default_rng(0).normal(size=(3, 4))
            np.testing.assert_allclose(one.invert(one.push(x)), x, rtol=1e-10)
    assert isinstance(one, Centered)


def test_a_component_of_a_mixture_is_its_gaussian():
    with jax.enable_x64(True):
        parts, weights = [affine(3, seed) for seed in (0, 1)], np.array([0.3, 0.7])
        means, factors = (np.stack([getattr(p, n) for p in parts]) for n in ("mean", "factor"))
        mixture = jax.tree.map(jnp.asarray, GaussianMixture(weights, means, factors))
        x = np.array([0.3, -1.2, 0.8])
        for k, part in enumerate(parts):
            np.testing.assert_allclose(mixture.component(k).push(x), part.push(x), rtol=1e-12)


def test_the_gaussian_with_the_moments_of_a_mixture():
    """The reference is 200 000 draws of the mixture, so that errors of moments are some .005."""
    parts, weights = [affine(2, seed) for seed in (0, 1)], np.array([0.3, 0.7])
    rng = np.random.default_rng(0)
    labels = rng.random(200_000) < weights[1]
    noise = rng.normal(size=(200_000, 2))
    draws = np.where(labels[:, None], parts[1].push(noise), parts[0].push(noise))
    whole = with_moments(parts, weights)
    np.testing.assert_allclose(whole.mean, draws.mean(0), atol=0.02)
    np.testing.assert_allclose(whole.factor @ whole.factor.T, np.cov(draws.T), atol=0.05)
