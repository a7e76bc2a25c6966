"""``KernelExponentialFamily``: a density from draws, and a posterior handed on as a prior."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density
from scipy import stats

from numpyro_kscore import AutoImplicit, ImplicitELBO, KernelExponentialFamily, ScoreEstimator
from numpyro_kscore.kernels import CurlFree, Diagonal, Gaussian
from numpyro_kscore.regularizers import NuMethod, Tikhonov
from numpyro_kscore.solvers import ConjugateGradient, Dense
from support import oracle
from support.compiling import quick_jit

KEY = random.key(0)
RNG = np.random.default_rng(0)
MIXING = np.array([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [-0.3, 0.5, 0.4]])
N, D = 24, 3


def skewed_draws(n, rng):
    z = rng.normal(size=(n, D))
    return (z + 0.3 * z**2) @ MIXING.T + np.array([5.0, -2.0, 0.5])


SAMPLES, POINTS = skewed_draws(N, RNG), skewed_draws(7, RNG)


fit = quick_jit(KernelExponentialFamily)
FIFTY_STEPS = ScoreEstimator(regularizer=NuMethod(50), base="gaussian")
log_prob = quick_jit(lambda density, x: density.log_prob(x))
gradients = quick_jit(lambda density, x: jax.vmap(jax.value_and_grad(density.log_prob))(x))


@functools.cache
def family():
    # In single precision throughout, whichever test asks first.
    with jax.enable_x64(False):
        return fit(jnp.asarray(SAMPLES, jnp.float32), FIFTY_STEPS)


# ------------------------------------------------------------------------------------ the density


def gaussian_score(x):
    """The score of the Gaussian with the samples' moments, without shrinkage."""
    covariance = np.cov(SAMPLES.T, ddof=0)
    return -np.linalg.solve(covariance, (x - SAMPLES.mean(axis=0)).T).T


def dense_reference(num_steps=50):
    """The estimator's definition by ``eigh``, with the Gaussian of the samples' moments as base."""
    whitener = np.diag(1 / SAMPLES.std(axis=0))
    whitened = (SAMPLES - SAMPLES.mean(axis=0)) @ whitener.T
    kernel = oracle.Kernel(True, oracle.imq(0.5), oracle.median_distance(whitened))
    base = gaussian_score(SAMPLES)
    return oracle.estimate(
        kernel, SAMPLES, oracle.nu_method(num_steps), base, whitener, normalize=True
    )


@pytest.mark.thorough
def test_gradient_and_differences_are_those_of_the_definition(x64):
    reference = dense_reference()
    normal = stats.multivariate_normal(SAMPLES.mean(axis=0), np.cov(SAMPLES.T, ddof=0))

    @quick_jit
    def evaluate(samples, mean, covariance, points):
        estimator = ScoreEstimator(
            regularizer=NuMethod(50),
            solver=Dense(),
            standardize="diagonal",
            base=dist.MultivariateNormal(mean, covariance),
        )
        density = KernelExponentialFamily(samples, estimator)
        return jax.vmap(jax.value_and_grad(density.log_prob))(points)

    values, gradient = evaluate(SAMPLES, normal.mean, normal.cov, POINTS)
    score = reference.residual(POINTS) + gaussian_score(POINTS)
    assert oracle.relative_error(gradient, score) < 1e-9
    expected = reference.residual_potential(POINTS) + normal.logpdf(POINTS)
    assert oracle.relative_error(values - values[0], expected - expected[0]) < 1e-9


@pytest.mark.thorough
def test_gradient_is_the_score_in_float32():
    """The derivative of the potential would miss it by 4e-5 of the largest score here."""
    rng = np.random.default_rng(5)
    draws = np.float32(rng.normal(size=(200, 1)))
    points = np.concatenate([draws[:20], np.float32(2 * rng.normal(size=(20, 1)))])

    @quick_jit
    def fit_to(draws):
        base = dist.Normal(jnp.zeros(1), 1.1).to_event(1)
        estimator = ScoreEstimator(
            regularizer=NuMethod(50), bandwidth=0.7, standardize="none", base=base
        )
        return KernelExponentialFamily(draws, estimator)

    # In programs of their own: within one, XLA may round the same sums in two ways.
    density = fit_to(draws)
    gradient = jax.grad(lambda x: jnp.sum(density.log_prob(x)))(points)
    _, along = jax.jvp(density.log_prob, (points,), (np.full_like(points, 2.0),))
    score = density.score(points)
    assert np.max(np.abs(gradient - score)) < 1e-6 * np.max(np.abs(score))
    np.testing.assert_allclose(along, 2 * score[:, 0], rtol=1e-6, atol=1e-5)


@pytest.mark.thorough
def test_second_derivatives_are_symmetric_and_sum_to_the_divergence(x64):
    # Both are derivatives of one function, whatever fit its numbers come from.
    leaves, structure = jax.tree.flatten(family())
    leaves = [np.float64(a) if np.asarray(a).dtype == np.float32 else a for a in leaves]

    @quick_jit
    def evaluate(density, x):
        return jax.vmap(jax.hessian(density.log_prob))(x), density.score.divergence(x)

    hessian, divergence = jax.device_get(evaluate(jax.tree.unflatten(structure, leaves), POINTS))
    np.testing.assert_allclose(hessian, np.swapaxes(hessian, 1, 2), rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(np.trace(hessian, axis1=1, axis2=2), divergence, rtol=1e-9)


@pytest.mark.slow
def test_error_on_gaussian_draws_shrinks_with_their_number():
    """The spread of log p̂ - log p at fresh points, which the exact density would have at 0."""
    mean, covariance = np.array([3.0, -1.0, 0.0]), MIXING @ MIXING.T
    exact = stats.multivariate_normal(mean, covariance)
    rng = np.random.default_rng(1)
    fresh = rng.multivariate_normal(mean, covariance, size=500)
    spreads = []
    for n in (100, 1600):
        draws = rng.multivariate_normal(mean, covariance, size=n)
        density = fit(jnp.asarray(draws, jnp.float32), FIFTY_STEPS)
        values = log_prob(density, jnp.asarray(fresh, jnp.float32))
        spreads.append(np.std(np.asarray(values) - exact.logpdf(fresh)))
    assert spreads[0] > 3 * spreads[1]
    # Over five sets of draws .23 to .30.
    assert spreads[1] < 0.4


@pytest.mark.slow
def test_skewed_prior_beats_the_gaussian_one(x64):
    """Posteriors by quadrature: total variation from the exact ones, mean of three observations."""
    draws = np.log(np.random.default_rng(2).gamma(1.5, size=(2000, 1)))
    density = fit(draws, FIFTY_STEPS)
    grid = np.linspace(-8.0, 4.0, 2401)
    exact = 1.5 * grid - np.exp(grid)
    kernel = np.asarray(log_prob(density, jnp.asarray(grid[:, None])))
    normal = stats.norm(draws.mean(), draws.std()).logpdf(grid)

    def posterior(log_prior, observed):
        log_joint = log_prior - 0.5 * (grid - observed) ** 2
        weights = np.exp(log_joint - log_joint.max())
        return weights / weights.sum()

    def distance(log_prior):
        differences = (posterior(log_prior, y) - posterior(exact, y) for y in (-2.0, 0.0, 2.0))
        return np.mean([0.5 * np.abs(difference).sum() for difference in differences])

    # Over sixteen sets of draws .02 to .05 and .10 to .11.
    assert distance(kernel) < 0.06
    assert distance(normal) > 0.09


def test_tails_are_gaussian():
    """Along a ray the log density bends as the Gaussian of the draws does, shrunk as that is."""
    ray = np.array([1.0, 1.0, -1.0])
    far = SAMPLES.mean(axis=0) + np.outer(np.resize([0.0, 300.0, 600.0], len(POINTS)), ray)
    values, _ = gradients(family(), np.float32(far))
    bend = (values[2] - 2 * values[1] + values[0]) / 300.0**2
    slopes = oracle.gaussian_score(np.stack([ray, 0 * ray]), SAMPLES) @ ray
    assert bend == pytest.approx(slopes[0] - slopes[1], rel=0.02)


def test_far_points_are_finite_or_impossible_but_never_nan():
    sizes = np.resize([1e10, 1e19, 1e30], len(POINTS))
    values, slopes = gradients(family(), np.float32(np.outer(sizes, [1.0, -1.0, 0.0])))
    assert np.all((values == -np.inf) | np.isfinite(values))
    assert np.all(values < -1e15)
    assert np.all(np.isfinite(slopes))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_points_that_are_not_finite(bad):
    points = np.zeros_like(POINTS, np.float32)
    points[:, 0] = bad
    with numpyro.validation_enabled(False):
        values, _ = gradients(family(), points)
    assert np.all(np.isnan(values) if np.isnan(bad) else values == -np.inf)


# ------------------------------------------------------------------------ NumPyro's own contract


@pytest.mark.parametrize("sample_shape", [(), (5,), (2, 3)])
def test_shapes(sample_shape):
    density = family()
    assert (density.batch_shape, density.event_shape, density.event_dim) == ((), (D,), 1)
    draws = density.sample(KEY, sample_shape)
    assert draws.shape == (*sample_shape, D) == density.shape(sample_shape)
    values = density.log_prob(draws)
    assert values.shape == sample_shape
    flat = [density.log_prob(draw) for draw in draws.reshape(-1, D)]
    np.testing.assert_allclose(values.ravel(), flat, rtol=1e-5)


def test_draws_are_the_samples_each_as_often():
    draws = np.asarray(family().sample(KEY, (24_000,)))
    samples, counts = np.unique(draws, axis=0, return_counts=True)
    np.testing.assert_array_equal(samples, np.unique(SAMPLES.astype(np.float32), axis=0))
    # 1000 expected of each; five standard deviations of a Poisson count.
    assert np.all(np.abs(counts - 1000) < 160)
    assert not family().has_rsample


def test_moments_are_those_of_the_samples():
    np.testing.assert_allclose(family().mean, SAMPLES.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(family().variance, SAMPLES.var(axis=0), rtol=1e-5)


@pytest.mark.thorough
def test_expand_to_event_and_mask():
    density = family()
    expanded = density.expand((4, 2))
    assert expanded.shape((6,)) == expanded.sample(KEY, (6,)).shape == (6, 4, 2, D)
    # Rows of a plate are drawn independently, not copied.
    assert np.unique(np.asarray(expanded.sample(KEY)).reshape(8, D), axis=0).shape[0] > 4
    points = jnp.broadcast_to(jnp.asarray(POINTS[:2], jnp.float32), (4, 2, D))
    single = density.log_prob(points[0])
    # Products of eight rows are rounded otherwise than those of two: 6e-7 of the sum was seen.
    expected = jnp.broadcast_to(single, (4, 2))
    np.testing.assert_allclose(expanded.log_prob(points), expected, rtol=2e-6)
    total = expanded.to_event(2).log_prob(points)
    np.testing.assert_allclose(total, 4 * single.sum(), rtol=1e-6)
    assert density.mask(False).log_prob(points[0, 0]) == 0.0


def test_pytree_jit_vmap_and_one_trace():
    density = family()
    again = jax.tree.unflatten(*jax.tree.flatten(density)[::-1])
    point = jnp.asarray(POINTS[0], jnp.float32)
    assert (again.batch_shape, again.event_shape) == ((), (D,))
    np.testing.assert_array_equal(again.log_prob(point), density.log_prob(point))
    jax.tree.map(lambda _: object(), density)

    traces = []

    @quick_jit
    def fit_and_evaluate(samples, lam):
        traces.append(1)
        base = dist.Normal(jnp.zeros(D), 3.0).to_event(1)
        estimator = ScoreEstimator(
            CurlFree(Gaussian()), Tikhonov(lam), ConjugateGradient(), standardize="none", base=base
        )
        return KernelExponentialFamily(samples, estimator).log_prob(point)

    batch = np.float32([SAMPLES, 2 * SAMPLES])
    single = [
        fit_and_evaluate(samples, lam) for samples, lam in zip(batch, (0.1, 0.2), strict=True)
    ]
    assert len(traces) == 1
    mapped = jax.vmap(fit_and_evaluate)(batch, np.float32([0.1, 0.2]))
    np.testing.assert_allclose(mapped, single, rtol=1e-4)


@pytest.mark.thorough
def test_dtypes_follow_the_samples(x64):
    def evaluate(samples):
        density = KernelExponentialFamily(samples)
        return density.log_prob(jnp.asarray(POINTS)), density.sample(KEY), density.mean

    for dtype in (jnp.float32, jnp.float64):
        outputs = jax.eval_shape(evaluate, jax.ShapeDtypeStruct((N, D), dtype))
        assert [out.dtype for out in outputs] == [dtype] * 3


def test_draws_are_data():
    """No derivative in the draws: that of the unknown constant would be missing."""
    point, base = np.float32(POINTS[0]), dist.Normal(np.zeros(D, np.float32), 3.0).to_event(1)
    estimator = ScoreEstimator(regularizer=NuMethod(5), standardize="none", base=base)
    gradient = quick_jit(
        jax.grad(lambda samples: KernelExponentialFamily(samples, estimator).log_prob(point))
    )(np.float32(SAMPLES))
    np.testing.assert_array_equal(gradient, np.zeros_like(SAMPLES))


def test_accepts_a_fitted_score():
    samples, score = jnp.asarray(SAMPLES[:5], jnp.float32), family().score
    given = KernelExponentialFamily(samples, score)
    assert given.score is score
    np.testing.assert_array_equal(given.samples, samples)
    points = jnp.asarray(POINTS, jnp.float32)
    np.testing.assert_array_equal(given.log_prob(points), family().log_prob(points))


def test_tails_are_those_of_another_base():
    @quick_jit
    def evaluate(samples, x):
        heavy = dist.StudentT(3.0, jnp.zeros(D), 10.0).to_event(1)
        estimator = ScoreEstimator(regularizer=NuMethod(50), standardize="diagonal", base=heavy)
        return KernelExponentialFamily(samples, estimator).log_prob(x), heavy.log_prob(x)

    value, expected = evaluate(np.float32(SAMPLES), np.full((1, D), 1e12, np.float32))
    np.testing.assert_allclose(value, expected, rtol=1e-6)


# --------------------------------------------------------------------------- a posterior as prior


class TwoStudies:
    """Linear regression with known noise in two studies: every posterior is known exactly."""

    rng = np.random.default_rng(3)
    first = rng.normal(size=(15, 2)) @ np.array([[1.0, 0.7], [0.0, 0.7]])
    second = 0.8 * rng.normal(size=(10, 2))
    truth = np.array([1.0, -0.5])
    first_y = first @ truth + rng.normal(size=15)
    second_y = second @ truth + rng.normal(size=10)

    first_precision = np.eye(2) + first.T @ first
    first_mean = np.linalg.solve(first_precision, first.T @ first_y)
    precision = first_precision + second.T @ second
    mean = np.linalg.solve(precision, first.T @ first_y + second.T @ second_y)
    covariance = np.linalg.inv(precision)
    sd = np.sqrt(np.diag(covariance))

    @classmethod
    @functools.cache
    def model(cls):
        draws = np.random.default_rng(4).multivariate_normal(
            cls.first_mean, np.linalg.inv(cls.first_precision), size=1000
        )
        prior = fit(jnp.asarray(draws, jnp.float32))

        def model():
            theta = numpyro.sample("theta", prior)
            mean = jnp.asarray(cls.second, jnp.float32) @ theta
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=jnp.asarray(cls.second_y, jnp.float32))

        return model

    @classmethod
    def check(cls, mean, sd):
        """Moments are exact: in six sets means were off by at most 0.15 sd, sds by 4 % on average.

        The first study alone is off by 0.8 sd and 25 %, the second alone by 1.6 sd and 70 %.
        """
        # Over five keys and sets of draws, of all three fits: means within .14, sds within .11.
        np.testing.assert_allclose((np.asarray(mean) - cls.mean) / cls.sd, 0.0, atol=0.3)
        np.testing.assert_allclose(np.asarray(sd) / cls.sd, 1.0, atol=0.17)


def test_reference_can_tell_the_studies_apart():
    first_sd = np.sqrt(np.diag(np.linalg.inv(TwoStudies.first_precision)))
    with pytest.raises(AssertionError):
        TwoStudies.check(TwoStudies.first_mean, first_sd)


@pytest.mark.slow
def test_nuts_reproduces_the_joint_posterior():
    mcmc = MCMC(NUTS(TwoStudies.model()), num_warmup=200, num_samples=800, progress_bar=False)
    mcmc.run(KEY)
    draws = np.asarray(mcmc.get_samples()["theta"])
    TwoStudies.check(draws.mean(axis=0), draws.std(axis=0))
    correlation = np.corrcoef(draws.T)[0, 1]
    exact = TwoStudies.covariance[0, 1] / TwoStudies.sd.prod()
    # 800 independent draws would scatter it by .03; over five keys and sets of draws within .071.
    assert abs(correlation - exact) < 0.2


def test_a_model_with_the_density_as_prior_has_its_gradient():
    """The gradient that SVI and NUTS follow: the prior's score, and that of the second study."""
    matrix, data = np.array([[1.0, 0.5, 0.0], [0.2, -1.0, 0.3]]), np.array([0.7, -1.1])

    def model():
        theta = numpyro.sample("theta", family())
        mean = jnp.asarray(matrix, jnp.float32) @ theta
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=jnp.asarray(data, jnp.float32))

    @quick_jit
    def gradient(theta):
        return jax.grad(lambda x: log_density(model, (), {}, {"theta": x})[0])(theta)

    theta = np.float32(POINTS)
    found = gradient(theta[0])
    scores = gradients(family(), theta)[1]
    expected = scores[0] + matrix.T @ (data - matrix @ POINTS[0])
    assert oracle.relative_error(found, expected) < 1e-5


@pytest.mark.slow
def test_svi_with_a_gaussian_guide():
    guide = AutoNormal(model := TwoStudies.model())
    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, 300))
    result = SVI(model, guide, optimizer, Trace_ELBO(8)).run(KEY, 300, progress_bar=False)
    # A mean-field guide takes the conditional deviations, the inverse roots of the precisions.
    conditional = result.params["theta_auto_scale"] * np.sqrt(np.diag(TwoStudies.precision))
    TwoStudies.check(result.params["theta_auto_loc"], conditional * TwoStudies.sd)


@pytest.mark.slow
def test_svi_with_an_implicit_guide():
    guide = AutoImplicit(model := TwoStudies.model(), hidden_dims=(8,))
    optimizer = optax.adam(optax.cosine_decay_schedule(0.02, 300))
    result = SVI(model, guide, optimizer, ImplicitELBO(64, debias=None)).run(
        KEY, 300, progress_bar=False
    )
    draws = guide.sample_posterior(random.key(1), result.params, sample_shape=(4000,))["theta"]
    TwoStudies.check(draws.mean(axis=0), draws.std(axis=0))


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("error", "samples", "estimator", "message"),
    [
        (ValueError, SAMPLES[0], None, r"samples: expected shape \(n, d\).*got shape \(3,\)"),
        (ValueError, SAMPLES[:1], None, r"samples: expected at least 2 rows.*got.*\(1, 3\)"),
        (TypeError, np.arange(6).reshape(3, 2), None, "samples: expected an array of float32.*int"),
        (ValueError, SAMPLES * np.nan, None, "samples: expected finite values; got"),
        (TypeError, SAMPLES, "gaussian", "estimator: expected a ScoreEstimator.*got 'gaussian'"),
        (
            TypeError,
            SAMPLES,
            ScoreEstimator(Diagonal(), base="gaussian"),
            "estimator: expected a curl-free kernel.*got Diagonal",
        ),
        (
            ValueError,
            SAMPLES,
            ScoreEstimator(base=None),
            "estimator: expected a base.*got base=None",
        ),
        (ValueError, SAMPLES, ScoreEstimator(base=jnp.tanh), "estimator: expected a base with"),
    ],
)
def test_bad_input_is_refused(error, samples, estimator, message):
    with pytest.raises(error, match=rf"(?s){message}"):
        KernelExponentialFamily(samples, estimator)


def test_scores_that_do_not_fit_are_refused():
    samples = jnp.asarray(SAMPLES, jnp.float32)
    baseless = ScoreEstimator(regularizer=NuMethod(5), base=None)
    with pytest.raises(ValueError, match=r"expected a base with a density"):
        jax.eval_shape(lambda x: KernelExponentialFamily(x, baseless.fit(x)), samples)
    with pytest.raises(ValueError, match=r"expected a score in 2 dimension.*got 3"):
        KernelExponentialFamily(samples[:, :2], family().score)


def test_points_of_another_dimension_are_refused():
    with pytest.raises(ValueError, match=r"value: expected shape \(\.\.\., 3\).*got \(2,\)"):
        family().log_prob(jnp.zeros(2))


def test_with_numpyro_validation():
    density = KernelExponentialFamily(
        jnp.asarray(SAMPLES, jnp.float32), family().score, validate_args=True
    )
    assert jnp.isfinite(density.log_prob(jnp.asarray(POINTS[0], jnp.float32)))
    with pytest.warns(UserWarning, match="Out-of-support"):
        density.log_prob(jnp.array([np.nan, 0.0, 0.0]))
