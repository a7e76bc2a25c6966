"""Gradients and products of Hessians at held scales, by automatic differentiation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.ode import odeint

from numpyro_kscore._starts.held_scales import batched_held, batched_products
from numpyro_kscore._transports.centering import of_degrees

RNG = np.random.default_rng(0)
DESIGN = RNG.normal(size=(6, 3))


def smooth(x):
    return jnp.sum(jnp.logaddexp(0.0, DESIGN @ x)) + 0.5 * jnp.sum(x**2)


def grouped(x):
    """Rows of groups: products are taken one by one, those of a design many at once."""
    return jnp.sum(jnp.logaddexp(0.0, DESIGN[:, 0] * x[jnp.array([0, 1, 1, 2, 0, 0])]))


def decay(x):
    """A linear equation, whose solver has a reverse mode alone; its solution is known."""
    path = odeint(lambda y, t: -jnp.exp(x[0]) * y, x[1], jnp.linspace(0.0, 1.0, 4), rtol=1e-10)
    return jnp.sum((path - x[2]) ** 2)


def decay_in_closed_form(x):
    path = x[1] * jnp.exp(-jnp.exp(x[0]) * jnp.linspace(0.0, 1.0, 4))
    return jnp.sum((path - x[2]) ** 2)


@pytest.mark.parametrize(
    ("energy", "same", "forward", "error"),
    [(smooth, smooth, False, 1e-12), (smooth, smooth, True, 1e-12),
     (grouped, grouped, False, 1e-12),
     pytest.param(decay, decay_in_closed_form, False, 1e-4, marks=pytest.mark.thorough)],
)  # fmt: skip
def test_products_are_of_the_mean_hessian(energy, same, forward, error):
    with jax.enable_x64(True):
        products = batched_products(lambda x, *rest: energy(x), forward, np.arange(3))
        points, vectors = 0.5 * RNG.normal(size=(3, 3)), RNG.normal(size=(70, 3))
        found = products(points, vectors, of_degrees(np.ones(3)))
        hessian = np.mean([jax.hessian(same)(point) for point in points], axis=0)
    # Differences of gradients, and the solver's own tolerance, leave most of the error.
    np.testing.assert_allclose(found, vectors @ hessian, atol=error * np.abs(hessian).max())


def test_what_is_held_has_no_products():
    def energy(free, point, centering):
        return smooth(jnp.array([free[0], point[1], free[1]]))

    with jax.enable_x64(True):
        products = batched_products(energy, False, np.array([0, 2]))
        point, vectors = 0.5 * RNG.normal(size=(1, 3)), RNG.normal(size=(5, 3))
        found = products(point, vectors, of_degrees(np.ones(3)))
        hessian = np.array(jax.hessian(smooth)(point[0]))
    hessian[1] = hessian[:, 1] = 0
    np.testing.assert_allclose(found, vectors @ hessian, atol=1e-12 * np.abs(hessian).max())


@pytest.mark.parametrize("forward", [False, True])
def test_gradients_at_points_that_share_their_scales(forward):
    """Gradients in the scales are the mean over all points; the second of two calls has few."""

    def energy(free, point, centering):
        return smooth(jnp.array([free[0], point[1], free[1]]))

    with jax.enable_x64(True):
        held = batched_held(energy, forward, np.array([0, 2]))
        points = 0.5 * RNG.normal(size=(70, 3))
        points[:, 1] = points[0, 1]
        form = of_degrees(np.ones(3))
        (energies, gradients), (_, mean) = held(points, False, form), held(points[:3], True, form)
        values, slopes = map(np.asarray, jax.vmap(jax.value_and_grad(smooth))(points))
    np.testing.assert_allclose(energies, values, rtol=1e-12)
    np.testing.assert_allclose(gradients[:, [0, 2]], slopes[:, [0, 2]], atol=1e-12)
    assert not gradients[:, 1].any()
    np.testing.assert_allclose(mean[:, [0, 2]], slopes[:3, [0, 2]], atol=1e-12)
    np.testing.assert_allclose(mean[:, 1], slopes[:3, 1].mean(), atol=1e-12)
