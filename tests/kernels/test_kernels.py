"""Kernels as weights of pairs of points, against their definitions; which profiles they take."""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore import ScoreEstimator
from numpyro_kscore.kernels import IMQ, CurlFree, Diagonal, Matern, Profile
from numpyro_kscore.regularizers import Tikhonov
from numpyro_kscore.solvers import Dense
from support import oracle


def user_written(s):
    return jnp.exp(1 - jnp.sqrt(1 + s))


@pytest.mark.parametrize("curl_free", [True, False], ids=["curl-free", "diagonal"])
def test_weights_of_pairs_equal_the_reference(curl_free, x64):
    """Weights of the field, ζ, their potentials and divergences at one pair in 3 dimensions."""
    kernel = CurlFree() if curl_free else Diagonal()
    expected = oracle.Kernel(curl_free, oracle.imq())
    x, y, c = np.array([[0.3, -0.8, 0.1], [0.9, 0.4, -0.2], [1.5, -0.7, 0.6]])
    pair = x[None], y[None]
    r = x - y
    s = jnp.asarray(r @ r)

    field = kernel.field_weights(s, 3)
    value = field.inner * c + (0.0 if field.outer is None else field.outer * (r @ c) * r)
    np.testing.assert_allclose(value, expected.apply(*pair, c[None])[0], rtol=1e-12)
    np.testing.assert_allclose(field.zeta * r, expected.zeta(*pair)[0], rtol=1e-12)

    # tr(A J) for a symmetric A that is not a multiple of the identity.
    a = np.array([[2.0, 0.3, 0.1], [0.3, 1.0, -0.4], [0.1, -0.4, 0.5]])
    w = kernel.divergence_weights(s, 3)
    value = w.cross * (r @ a @ c)
    if curl_free:
        value += (r @ c) * (w.along * (r @ a @ r) + w.trace * np.trace(a))
    else:
        assert w.along is None
        assert w.trace is None
    jacobian = expected.apply_jacobian(*pair, c[None])[0]
    np.testing.assert_allclose(value, np.trace(a @ jacobian), rtol=1e-12)
    value = w.zeta_along * (r @ a @ r) + w.zeta * np.trace(a)
    np.testing.assert_allclose(value, np.trace(a @ expected.zeta_jacobian(*pair)[0]), rtol=1e-12)

    assert kernel.has_potential == curl_free
    assert kernel.is_scalar == (not curl_free)
    if curl_free:
        potential = kernel.potential_weights(s, 3)
        value = potential.field * (r @ c)
        np.testing.assert_allclose(value, expected.apply_potential(*pair, c[None])[0], rtol=1e-12)
        np.testing.assert_allclose(potential.zeta, expected.zeta_potential(*pair)[0], rtol=1e-12)
    else:
        with pytest.raises(TypeError, match="expected a curl-free kernel; got Diagonal"):
            kernel.potential_weights(s, 3)

    # With a context at squared distance 0.7 the profile of the field's own coordinates is shifted.
    shifted = type(kernel)(Profile(lambda u: IMQ()(u + 0.7)))
    for one, other in zip(
        kernel.field_weights(s + 0.7, 3, s), shifted.field_weights(s, 3), strict=True
    ):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-12)

    # In units of a bandwidth h, K is h^-p times K of the points over h.
    scaled = oracle.Kernel(curl_free, oracle.imq(), 2.0).matrix(*pair)[0, 0]
    value = 2.0 ** -kernel.scale_exponent() * kernel(jnp.asarray(x / 2), jnp.asarray(y / 2))
    np.testing.assert_allclose(value, scaled, rtol=1e-12, atol=1e-15)
    at_zero = expected.matrix(x[None], x[None])[0, 0]
    np.testing.assert_allclose(kernel.trace(3), np.trace(at_zero), rtol=1e-12)
    doubled = type(kernel)(2.0 * IMQ())
    np.testing.assert_allclose(doubled.trace(3), 2 * np.trace(at_zero), rtol=1e-12)


@pytest.mark.parametrize(
    "profile",
    [Matern(1.5), IMQ() + Matern(1.5), Profile(user_written, 2)],
    ids=["matern", "sum", "user-written"],
)
def test_rough_profiles_are_refused_by_the_curl_free_kernel_only(profile):
    message = r"expected at least 4 continuous derivatives for CurlFree; got .* with 2\."
    with pytest.raises(ValueError, match=message):
        CurlFree(profile).check()
    Diagonal(profile).check()
    CurlFree(Matern(2.5)).check()
    with pytest.raises(ValueError, match="expected at least 2.* Diagonal; got .* with 1"):
        Diagonal(Profile(user_written, 1)).check()


def test_kernels_are_checked_at_a_fit():
    samples = jnp.asarray([[0.0, 1.0], [1.0, 0.5], [0.3, -1.0]])
    with pytest.raises(ValueError, match=r"(?s)expected.*got"):
        ScoreEstimator(CurlFree(Matern(1.5))).fit(samples)
    estimator = ScoreEstimator(Diagonal(Matern(1.5)), Tikhonov(0.1), Dense(), base=None)
    assert bool(jnp.all(jnp.isfinite(estimator.at_samples(samples).scores)))
