"""One set of samples, and what the oracle makes of it by the library's conventions."""

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_kscore.kernels import IMQ, Gaussian, Matern, Mixture, Profile, RationalQuadratic
from numpyro_kscore.regularizers import LandweberIteration, NuMethod, Tikhonov
from support import oracle
from support.samples import base_function, make_data

# One set of shapes for nearly everything: n, d and m differ, so that a transposed axis cannot pass,
# and n >= 2 d leaves the covariance unshrunk.
N, D, M = 8, 3, 5
SAMPLES, POINTS = make_data(N, D, M)
REFERENCE_PROFILES = {
    "imq": oracle.imq(0.5),
    "imq-1.5": oracle.imq(1.5),
    "gaussian": oracle.gaussian(),
    "rational-quadratic": oracle.rational_quadratic(0.7),
    "matern-2.5": oracle.matern(2.5),
    "matern-3.5": oracle.matern(3.5),
    "user-written": oracle.shifted_exponential(),
    "mixture": oracle.mixture(
        (oracle.imq(0.5), oracle.gaussian(), oracle.matern(3.5)), (1.0, 0.5, 2.0), (0.7, 1.0, 1.6)
    ),
}


def user_written(s):
    return jnp.exp(1 - jnp.sqrt(1 + s))


PROFILES = {
    "imq": IMQ(),
    "imq-1.5": IMQ(1.5),
    "gaussian": Gaussian(),
    "rational-quadratic": RationalQuadratic(0.7),
    "matern-2.5": Matern(2.5),
    "matern-3.5": Matern(3.5),
    "user-written": Profile(user_written),
    "mixture": Mixture((IMQ(), Gaussian(), Matern(3.5)), (1.0, 0.5, 2.0), (0.7, 1.0, 1.6)),
}
TOLERANCE = {True: 1e-9, False: 1e-4}  # relative, in norm; by whether 64-bit mode is on
SHARE = 0.9
FULL = N * D  # a Krylov space of this size is the whole space
TIKHONOV = Tikhonov(1e-2), oracle.tikhonov(1e-2)
LANDWEBER = LandweberIteration(40, 0.9), oracle.landweber(40, 0.9)
NU = NuMethod(20), oracle.nu_method(20)
BASES = {None: None, "values": None, "function": base_function, "gaussian": "gaussian"}


def base_values(base, x, samples=SAMPLES):
    """A base score at x, whether the estimator evaluates it or is given its values."""
    if base is None:
        return np.zeros_like(x)
    return oracle.gaussian_score(x, samples) if base == "gaussian" else base_function(x)


def reference_fit(
    curl_free,
    profile,
    make_filter,
    base=None,
    standardize="full",
    normalize=True,
    bandwidth="median",
    samples=SAMPLES,
    **kwargs,
):
    """The oracle's estimate with the library's conventions: covariances with 1/n, median rule."""
    whitener = oracle.whitener(samples, standardize)
    if base == "gaussian" and standardize == "full":
        whitener = oracle.held_out_gaussian(samples)
    if bandwidth == "median":
        bandwidth = oracle.median_distance(samples @ whitener.T)
    kernel = oracle.Kernel(curl_free, profile, bandwidth)
    scores = base_values(base, samples, samples)
    return oracle.estimate(kernel, samples, make_filter, scores, whitener, normalize, **kwargs)


def jackknife_reference(curl_free, make_filter, samples, base):
    """f_n + m/(n-m) (f_n - f_m) with f_m from two halves, in the coordinates of the whole."""
    whitener = oracle.whitener(samples, "full")
    bandwidth = oracle.median_distance(samples @ whitener.T)
    kernel = oracle.Kernel(curl_free, oracle.imq(), bandwidth)

    def residual(rows):
        return oracle.estimate(
            kernel, samples[rows], make_filter, base[rows], whitener, normalize=True
        ).in_sample

    # Halves of equal size: of an odd number they share the middle one.
    size = len(samples)
    half = (size + 1) // 2
    first, second = residual(slice(0, half)), residual(slice(size - half, size))
    parts = np.concatenate([first, second[2 * half - size :]])
    whole = residual(slice(None))
    return whole + half / (size - half) * (whole - parts)


def bases_with_density():
    return {
        "none": None,
        "gaussian": "gaussian",
        "student-t": dist.StudentT(4.0, jnp.zeros(D), 2.0).to_event(1),
    }
