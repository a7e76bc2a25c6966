"""Gaussians that change with scales, against posteriors that are normal given them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import SVI
from numpyro.optim import Adam
from scipy import special

from numpyro_kscore import AutoImplicit, ImplicitELBO
from numpyro_kscore._starts import structure_search
from numpyro_kscore._starts.interpolation import Scales
from numpyro_kscore._starts.laplace import NUM_POINTS, make_others
from numpyro_kscore._starts.scale_rounds import find_scales
from numpyro_kscore._starts.start import FAR_FOR_EACH
from numpyro_kscore._transports.affine import Affine
from numpyro_kscore._transports.conditional import Conditional
from numpyro_kscore._transports.stretch import unstretched
from support.autoguides import first_state
from support.compiling import quick_jit

STEPS, NOISE, SPAN = 10, 0.5, 1e-5
# Where a scale's logarithm is integrated.
LINE = np.linspace(-9.0, 5.0, 2801)


class Walks:
    """``y = Σ_k exp(s_k) A_k z_k + noise`` with standard normal s and z, k up to ``count``.

    A_k sums up k + 1 times: a random walk, a trend that wanders, and its own trend. Given s, all of
    z is normal.
    """

    def __init__(self, count):
        rng = np.random.default_rng(3)
        once = np.tril(np.ones((STEPS, STEPS))) / np.sqrt(STEPS)
        self.maps = [np.linalg.matrix_power(once, k + 1) for k in range(count)]
        self.count, self.dim = count, count * (STEPS + 1)
        draws = rng.normal(size=(count, STEPS))
        self.data = sum(a @ z for a, z in zip(self.maps, draws, strict=True))
        self.data = self.data + NOISE * rng.normal(size=STEPS)

    def evaluate(self, points):
        scales = np.exp(points[:, : self.count])
        z = points[:, self.count :].reshape(-1, self.count, STEPS)
        parts = np.stack([z[:, k] @ a.T for k, a in enumerate(self.maps)], axis=1)
        parts = scales[:, :, None] * parts
        rest = (parts.sum(1) - self.data) / NOISE**2
        energies = 0.5 * np.sum(points**2, axis=1) + 0.5 * NOISE**2 * np.sum(rest**2, axis=1)
        of_z = [scales[:, k, None] * (rest @ a) for k, a in enumerate(self.maps)]
        moved = np.concatenate([np.einsum("mkt,mt->mk", parts, rest), *of_z], axis=1)
        constant = -STEPS * np.log(NOISE) - 0.5 * (self.dim + STEPS) * np.log(2 * np.pi)
        return energies - constant, points + moved

    def given(self, scales):
        """Mean and covariance of z at logarithms of scales, (k,), and the log density of those."""
        joint = np.concatenate(
            [np.exp(s) * a for s, a in zip(scales, self.maps, strict=True)], axis=1
        )
        covariance = np.linalg.inv(np.eye(joint.shape[1]) + joint.T @ joint / NOISE**2)
        of_data = joint @ joint.T + NOISE**2 * np.eye(STEPS)
        fit = -0.5 * self.data @ np.linalg.solve(of_data, self.data)
        log_density = fit - 0.5 * np.linalg.slogdet(2 * np.pi * of_data)[1]
        log_density += -0.5 * np.sum(scales**2) - 0.5 * self.count * np.log(2 * np.pi)
        return covariance @ joint.T @ self.data / NOISE**2, covariance, log_density

    def products(self, points, vectors):
        """Central differences of gradients, which for these energies have errors of 1e-8."""
        moved = [
            (self.evaluate(point + SPAN * vectors)[1] - self.evaluate(point - SPAN * vectors)[1])
            / (2 * SPAN)
            for point in points
        ]
        return np.mean(moved, axis=0)

    def find(self, evaluate=None):
        """The Gaussian that changes with scales, from one that is far too narrow."""
        rng = np.random.default_rng(5)
        points = 0.1 * rng.normal(size=(NUM_POINTS, self.dim))
        scales, rest = np.split(np.arange(self.dim), [self.count])
        evaluate = evaluate or self.evaluate
        others = make_others(evaluate, self.products, points, rest, rng)
        narrow = Affine(np.zeros(self.count), 0.1 * np.eye(self.count))
        moves = np.zeros((self.count, len(rest)))
        now = Scales(narrow, unstretched(self.count), np.zeros(len(rest)), moves)
        return find_scales(others, now, scales, is_small=True)


@pytest.fixture(scope="module", params=[1, 2, 3])
def found(request):
    """Some scales, and what is found of their model."""
    walks = Walks(request.param)
    return walks, walks.find().transport


def test_between_the_values_looked_at_it_is_the_conditional_posterior(found):
    """The divergence of the interpolated Gaussian from the exact one, where the scales are."""
    walks, given = found
    rng = np.random.default_rng(6)
    of_scales = np.clip(rng.normal(size=(50, walks.count)), -2.5, 2.5)
    rest = walks.dim - walks.count
    divergences, without = [], []
    middle = given.push(np.zeros((1, walks.dim)))[0]
    at_center = walks.given(middle[: walks.count])
    for point in of_scales:
        ends = np.concatenate([np.zeros((1, rest)), np.eye(rest)])
        pushed = given.push(np.concatenate([np.tile(point, (rest + 1, 1)), ends], axis=1))
        mean, covariance, _ = walks.given(pushed[0, : walks.count])
        columns = pushed[1:, walks.count :] - pushed[0, walks.count :]
        divergences.append(divergence(pushed[0, walks.count :], columns.T, mean, covariance))
        without.append(divergence(at_center[0], np.linalg.cholesky(at_center[1]), mean, covariance))
    # What a Gaussian that does not change leaves; far out in three scales more is left.
    assert np.median(divergences) < 0.02 * np.median(without)
    assert np.mean(divergences) < 0.2 * np.mean(without)


def divergence(mean, factor, other, covariance):
    """KL(N(mean, factor factorᵀ) || N(other, covariance))."""
    inverse = np.linalg.inv(covariance)
    volume = np.linalg.slogdet(covariance)[1] - 2 * np.linalg.slogdet(factor)[1]
    spread = np.sum(inverse * (factor @ factor.T)) - len(mean)
    return 0.5 * (spread + (mean - other) @ inverse @ (mean - other) + volume)


@pytest.mark.parametrize("found", [1], indirect=True)
def test_where_the_scales_are_is_found(found):
    """The mean and width of one scale, which no mode tells, agree with quadrature."""
    walks, given = found
    masses = np.exp([walks.given(np.array([s]))[2] for s in LINE])
    masses /= masses.sum()
    mean = masses @ LINE
    width = np.sqrt(masses @ (LINE - mean) ** 2)
    points = np.zeros((2001, walks.dim))
    points[:, 0] = np.linspace(-5, 5, 2001)
    weights = np.exp(-0.5 * points[:, 0] ** 2)
    weights /= weights.sum()
    scales = given.push(points)[:, 0]
    assert weights @ scales == pytest.approx(mean, abs=0.05 * width)
    own = np.sqrt(weights @ (scales - weights @ scales) ** 2)
    assert own == pytest.approx(width, rel=0.05)


def test_its_bound_is_near_the_evidence(found):
    """Quadrature checks it for one scale; to most draws it leaves what a start may leave to them.

    Few draws far out have wild weights, and do not count for that.
    """
    walks, given = found
    noise = np.random.default_rng(7).normal(size=(2000, walks.dim))
    gaps = 0.5 * np.sum(noise**2, axis=1) + 0.5 * walks.dim * np.log(2 * np.pi)
    gaps = gaps + given.log_volume(noise) - walks.evaluate(given.push(noise))[0]
    low, high = np.quantile(gaps, [0.16, 0.84])
    assert 0.5 * (0.5 * (high - low)) ** 2 < FAR_FOR_EACH * walks.dim
    if walks.count == 1:
        densities = np.array([walks.given(np.array([s]))[2] for s in LINE])
        evidence = np.log(np.sum(np.exp(densities)) * (LINE[1] - LINE[0]))
        error = 4 * np.std(gaps) / len(gaps) ** 0.5
        assert evidence - 0.1 - error < np.mean(gaps) < evidence + error


def test_where_a_mode_has_no_finite_density_there_is_none():
    walks = Walks(1)

    def broken(points):
        energies, gradients = walks.evaluate(points)
        return np.where(np.abs(points[:, 0]) > 0.05, np.nan, energies), gradients

    assert walks.find(broken) is None


@pytest.mark.thorough
def test_a_guide_starts_at_the_posterior_of_a_curve(monkeypatch):
    """A Gaussian process with unknown scale, length and noise, written with standardized values.

    The guide before any step, against importance sampling of the three from their prior, with the
    curve integrated out.
    """
    # Its draws need weights, so that other searches would follow.
    monkeypatch.setattr(structure_search, "_are_good", lambda gaps, dim: True)
    x = jnp.linspace(0, 1, 15)
    rng = np.random.default_rng(10)
    data = jnp.asarray(np.sin(6 * np.asarray(x)) + 0.3 * rng.normal(size=15))

    def model():
        scale = numpyro.sample("scale", dist.LogNormal(0, 1))
        length = numpyro.sample("length", dist.LogNormal(-1, 0.5))
        noise = numpyro.sample("noise", dist.LogNormal(-1, 0.5))
        z = numpyro.sample("z", dist.Normal(0, 1).expand([15]).to_event(1))
        kernel = jnp.exp(-0.5 * ((x[:, None] - x) / length) ** 2) + 1e-4 * jnp.eye(15)
        curve = scale * jnp.linalg.cholesky(kernel) @ z
        numpyro.sample("y", dist.Normal(curve, noise), obs=data)

    guide = AutoImplicit(model)
    svi = SVI(model, guide, Adam(1e-2), ImplicitELBO())
    state = first_state(svi)
    assert any(isinstance(step, Conditional) for step in guide.start.transports.steps)
    draws = guide.sample_posterior(random.key(1), svi.get_params(state), sample_shape=(4000,))

    def log_likelihood(scale, length, noise):
        kernel = jnp.exp(-0.5 * ((x[:, None] - x) / length) ** 2) + 1e-4 * jnp.eye(15)
        covariance = scale**2 * kernel + noise**2 * jnp.eye(15)
        return dist.MultivariateNormal(jnp.zeros(15), covariance).log_prob(data)

    normal = rng.normal(size=(200_000, 3))
    prior = np.exp(normal * np.array([1, 0.5, 0.5]) - np.array([0.0, 1.0, 1.0]))
    with jax.enable_x64(True):
        of_all = quick_jit(lambda p: jax.lax.map(lambda p: log_likelihood(*p), p, batch_size=1000))
        weights = special.softmax(np.asarray(of_all(prior)))
    prior = np.log(prior)
    size = 1 / np.sum(weights**2)
    for column, name in enumerate(("scale", "length", "noise")):
        mean = weights @ prior[:, column]
        width = np.sqrt(weights @ (prior[:, column] - mean) ** 2)
        own = np.log(np.asarray(draws[name]))
        # Four errors of both, and what the interpolation leaves.
        error = 4 * np.sqrt(1 / size + 1 / 4000)
        assert abs(own.mean() - mean) < (0.1 + error) * width
        assert own.std() == pytest.approx(width, rel=0.1 + error)
