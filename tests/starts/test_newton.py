"""Newton's method with some coordinates held, against modes in closed form."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import special, stats

from numpyro_kscore import initial_gaussian
from numpyro_kscore._starts.newton import newton

# Units of the coordinates: raw ones.
UNITS = np.array([1e-5, 1.0, 1e4, 30.0, 1.0, 1e-2])
FREE = np.array([True, True, True, False, True, True])


def gaussian(seed=0):
    """Energies of a correlated Gaussian, its precision and its mean."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    precision = basis * np.logspace(0, 4, 6) @ basis.T / np.outer(UNITS, UNITS)
    mean = rng.normal(size=6) * UNITS

    def evaluate(points):
        moved = points - mean
        return 0.5 * np.sum(moved @ precision * moved, axis=1), moved @ precision

    return evaluate, precision, mean


@pytest.mark.parametrize("widths", [UNITS, 100 * UNITS, np.ones(6)])
def test_a_gaussian_takes_two_steps(widths):
    """The first may have differences over many standard deviations, which do no harm here."""
    evaluate, precision, mean = gaussian()
    held = 2 * UNITS[3]
    start = np.where(FREE, 0.0, held)
    calls = []

    def counted(points):
        calls.append(len(points))
        return evaluate(points)

    with jax.enable_x64(True):
        end = newton(counted, start, FREE, widths)
    block = precision[np.ix_(FREE, FREE)]
    conditional = mean[FREE] - np.linalg.solve(block, precision[FREE, 3]) * (held - mean[3])
    error = end.point[FREE] - conditional
    # It stops when a step would gain less than 1e-2 nats.
    assert error @ block @ error < 2e-2
    assert end.point[3] == held
    scaled = end.inverse_hessian[np.ix_(FREE, FREE)] / np.outer(UNITS[FREE], UNITS[FREE])
    truth = np.linalg.inv(block) / np.outer(UNITS[FREE], UNITS[FREE])
    np.testing.assert_allclose(scaled, truth, atol=1e-5 * np.max(truth))
    assert not np.any(end.inverse_hessian[3])
    assert not np.any(end.inverse_hessian[:, 3])
    # Each has a Hessian and a line; the last Hessian finds that it has arrived.
    assert sum(calls) <= 1 + 3 * (10 + 8)


def test_it_goes_down_where_the_curvature_is_negative():
    """Energy log(1 + |x|²) has negative curvature along x, beyond a distance of one."""

    def evaluate(points):
        squares = np.sum(points**2, axis=1)
        return np.log1p(squares), 2 * points / (1 + squares)[:, None]

    with jax.enable_x64(True):
        end = newton(evaluate, np.array([3.0, -4.0]), np.ones(2, bool), np.ones(2))
    np.testing.assert_allclose(end.point, 0, atol=0.1)
    assert np.all(np.linalg.eigvalsh(end.inverse_hessian) > 0)


def test_it_stays_where_the_energy_is_finite():
    """Minus the log density of a gamma variable: infinite below zero, where a step leads."""

    def evaluate(points):
        x = points[:, 0]
        inside = x > 0
        safe = np.where(inside, x, 1.0)
        return np.where(inside, safe - 3 * np.log(safe), np.inf), (1 - 3 / safe)[:, None]

    with jax.enable_x64(True):
        end = newton(evaluate, np.array([20.0]), np.ones(1, bool), np.ones(1))
    np.testing.assert_allclose(end.point, 3, rtol=0.05)
    np.testing.assert_allclose(end.inverse_hessian, 3, rtol=0.1)


def test_nothing_comes_of_an_energy_that_is_not_finite():
    def evaluate(points):
        return np.full(len(points), np.nan), np.full_like(points, np.nan)

    assert newton(evaluate, np.zeros(2), np.ones(2, bool), np.ones(2)) is None


def local_trend(count=30, seed=3):
    """A local linear trend by its innovations, and the logarithm of its evidence.

    Innovations can follow the data without any noise: the density has no bound. The evidence is
    a Gaussian integral at given scales, summed over a grid of their logarithms.
    """
    rng = np.random.default_rng(seed)
    sums = np.tril(np.ones((count, count)))
    slopes = np.cumsum(0.3 * rng.normal(size=count))
    data = 200 + np.cumsum(slopes + rng.normal(size=count)) + 3 * rng.normal(size=count)
    names, widths = ("move", "tilt", "noise"), (5.0, 2.0, 10.0)

    def model():
        move, tilt, noise = (
            numpyro.sample(name, dist.HalfNormal(width))
            for name, width in zip(names, widths, strict=True)
        )
        level = numpyro.sample("level", dist.Normal(200.0, 50.0))
        moves, tilts = (
            numpyro.sample(name, dist.Normal(0.0, 1.0).expand([count]).to_event(1))
            for name in ("moves", "tilts")
        )
        trend = level + sums @ (move * moves + sums @ (tilt * tilts))
        numpyro.sample("y", dist.Normal(trend, noise), obs=data)

    grid = np.linspace(-6.0, 3.5, 30)
    parts = [sums @ sums.T, sums @ sums @ sums.T @ sums.T, np.eye(count)]
    logs = np.stack(np.meshgrid(grid, grid, grid, indexing="ij"), axis=-1).reshape(-1, 3)
    covariances = np.tensordot(np.exp(2 * logs), parts, 1) + 2500.0
    factors = np.linalg.cholesky(covariances)
    white = np.linalg.solve(factors, np.broadcast_to((data - 200)[:, None], (len(logs), count, 1)))
    priors = stats.halfnorm.logpdf(np.exp(logs), scale=widths) + logs
    values = (
        np.sum(priors, axis=1)
        - 0.5 * np.sum(white[..., 0] ** 2, axis=1)
        - np.sum(np.log(np.diagonal(factors, axis1=1, axis2=2)), axis=1)
        - 0.5 * count * np.log(2 * np.pi)
    )
    return model, special.logsumexp(values) + 3 * np.log(grid[1] - grid[0])


@pytest.mark.slow
def test_a_trend_is_not_taken_for_noise():
    """The best bound is 3.3 nats below the evidence, and by quasi-Newton paths alone 17."""
    model, evidence = local_trend()
    start = initial_gaussian(jax.random.key(0), model)
    assert evidence - 6 < start.elbo < evidence + 0.5
