"""The ν-method as a filter, against its recursion in extended precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore.regularizers import NuMethod

SIGMA = np.concatenate([[0.0, 1e-12, 1e-8], np.logspace(-6, 0, 200)]).astype(np.float32)


def recursion(steps, nu, sigma):
    """g, g(0) and (g - g(0))/σ by the three-term recursion of Engl, Hanke and Neubauer."""
    sigma = np.append(np.asarray(sigma, np.longdouble), 0.0)
    g, g_old = np.zeros_like(sigma), np.zeros_like(sigma)
    r, r_old = np.zeros_like(sigma), np.zeros_like(sigma)
    for t in range(1, steps + 1):
        ends = (t + 2 * nu - 1) * (2 * t + 4 * nu - 1)
        w = 4 * (2 * t + 2 * nu - 1) * (t + nu - 1) / ends
        u = 0.0
        if t > 1:
            u = (t - 1) * (2 * t - 3) * (2 * t + 2 * nu - 1) / (ends * (2 * t + 2 * nu - 3))
        r, r_old = r + u * (r - r_old) - w * g, r
        g, g_old = g + u * (g - g_old) + w * (1 - sigma * g), g
    return g[:-1], g[-1], r[:-1]


def relative(found, truth):
    truth = np.asarray(truth, float)
    return np.max(np.abs(np.asarray(found, float) - truth) / np.maximum(np.abs(truth), 1e-30))


@pytest.mark.parametrize("nu", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 2, 45, 100, 512])
@pytest.mark.thorough
def test_the_filter_is_exact_to_rounding(steps, nu):
    """The recursion itself is off by 5e-6 in float32 after 100 steps and 1e-4 after 512."""
    g, g0, r = recursion(steps, nu, SIGMA)
    single = NuMethod(steps, nu).evaluate(jnp.asarray(SIGMA))
    # An angle t θ is off by t π eps/2 at most, 1e-4 for the last terms, whose coefficients are
    # small; measured 3e-6. r is g less a constant, so it has lost a digit where g is small.
    assert relative(single.g, g) < 6e-6
    assert relative(single.r, r) < 6e-5
    np.testing.assert_allclose(single.g0, g0, rtol=2e-7)
    with jax.enable_x64(True):
        double = NuMethod(steps, nu).evaluate(jnp.asarray(SIGMA, jnp.float64))
        assert relative(double.g, g) < 1e-11
        assert relative(double.r, r) < 1e-11
