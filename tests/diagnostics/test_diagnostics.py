"""k̂ from energies, tests of draws against a model, and what is said of a fit."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.importance import psis_diagnostic
from numpyro.infer.svi import SVIRunResult, SVIState
from scipy import stats

from numpyro_kscore import Implicit, ImplicitELBO, ScoreEstimator, diagnose, evaluate_guide, khat
from numpyro_kscore.diagnostics import (
    GuideDraws,
    JumpTest,
    KhatEstimate,
    SteinTest,
    fisher_divergence,
    importance_resample,
    ksd,
    mode_jump_test,
    pareto_smooth,
    spread_ratios,
    weight_ess,
)
from numpyro_kscore.diagnostics._closed_form import combine, features, solve
from numpyro_kscore.diagnostics._codes import Code, Doubt, Finding
from numpyro_kscore.diagnostics._decide import decide
from numpyro_kscore.diagnostics._energy import FAMILIES, cross_fit
from numpyro_kscore.diagnostics._khat import whitened_draws
from numpyro_kscore.diagnostics._messages import advise, describe, khat_reason
from numpyro_kscore.kernels import Diagonal

pytestmark = pytest.mark.quick_compilation

KEY = random.key(0)
FAMILY = {family.name: family for family in FAMILIES}


def gaussian_draws(scale, dim=3, n=1_000, seed=0, shift=0.0):
    """A Gaussian guide N(shift, scale²) of the model N(0, I)."""
    z = np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32)
    x = jnp.asarray(shift + scale * z)
    factor = np.cov(np.asarray(x).T, bias=True)
    return GuideDraws(
        x,
        -0.5 * jnp.sum(x**2, axis=1),
        -x,
        jnp.full(n, -np.trace(np.atleast_2d(factor)), jnp.float32),
        -0.5 * jnp.sum(jnp.asarray(z) ** 2, axis=1),
    )


def model(data, sd=0.5):
    z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    numpyro.sample("y", dist.Normal(z, sd).to_event(1), obs=data)


def implicit_guide(data, sd=0.5):
    noise = numpyro.sample(
        "noise", dist.Normal(jnp.zeros(2), 1.0).to_event(1), infer={"is_auxiliary": True}
    )
    loc, scale = numpyro.param("loc", jnp.zeros(2)), numpyro.param("scale", jnp.ones(2))
    numpyro.sample("z", Implicit(loc + scale * noise, 1))


def explicit_guide(data, sd=0.5):
    loc, scale = numpyro.param("loc", jnp.zeros(2)), numpyro.param("scale", jnp.ones(2))
    numpyro.sample("z", dist.Normal(loc, scale).to_event(1))


DATA = jnp.array([1.0, -1.0])
# The posterior is Gaussian: these are its mean and standard deviation.
MEAN, SD = 0.8 * DATA, 0.2**0.5


def fitted(guide, scale=SD, loss=None):
    params = {"loc": MEAN, "scale": scale * jnp.ones(2)}
    svi = SVI(model, guide, optax.adam(1e-2), loss or ImplicitELBO())
    return svi, SVIRunResult(params, SVIState(None, None, KEY), jnp.array([2.0, 1.0]))


# --- PSIS -------------------------------------------------------------------------------------


def test_pareto_shape_of_pareto_weights():
    """Weights u^-k have shape k; PSIS at 4000 draws knows it to about .06 (3 √n tail draws)."""
    u = np.random.default_rng(0).uniform(size=4_000)
    for k in (0.2, 0.5, 0.9):
        found = pareto_smooth(-k * np.log(u))[1]
        # sd of a shape from 190 exceedances is (1 + k)/√190; shrunk toward 1/2 by 10 in 200.
        assert abs(found - k) < 3 * (1 + k) / 190**0.5


def test_smoothed_weights_are_normalized_and_ordered():
    weights = np.random.default_rng(0).standard_t(2, size=500)
    smoothed, _ = pareto_smooth(weights)
    assert np.isclose(np.exp(smoothed).sum(), 1.0)
    # The order is that of the raw weights, whichever sign the library's argument has.
    assert stats.spearmanr(weights, smoothed).statistic > 0.999


def test_equal_weights_have_no_tail():
    smoothed, shape = pareto_smooth(np.full(100, 3.0))
    assert shape == -np.inf
    np.testing.assert_allclose(np.exp(smoothed), 0.01)
    assert weight_ess(np.zeros(100)) == pytest.approx(100)
    assert weight_ess(np.array([0.0, -1e9])) == pytest.approx(1)
    perfect = khat(gaussian_draws(1.0, dim=2, n=400))
    assert perfect.verdict == "good"
    assert str(perfect).startswith("k̂ = -inf (all weights are equal), 90 % interval")


def test_resampling_corrects_a_wide_guide():
    draws = gaussian_draws(1.3, dim=2, n=4_000)
    weights = draws.log_density - draws.log_q
    values = {"x": draws.samples, "index": jnp.arange(4_000)}
    found = importance_resample(KEY, values, weights)
    effective = weight_ess(pareto_smooth(weights)[0])
    # sd of a standard deviation from m draws is 1/√(2m).
    assert np.all(np.abs(np.std(found["x"], axis=0) - 1) < 4 / (2 * effective) ** 0.5)
    np.testing.assert_array_equal(found["x"], draws.samples[found["index"]])
    with pytest.raises(ValueError, match="values: expected 4000 draws"):
        importance_resample(KEY, draws.samples[:10], weights)


# --- Energies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Gaussian", "tempered model"])
def test_energy_of_a_gaussian_guide_is_its_log_density(x64, name):
    """Scale, shift and correlation are within these families: what is left is sampling error."""
    dim, n = 4, 4_000
    rng = np.random.default_rng(0)
    root = np.linalg.cholesky(0.5 * np.eye(dim) + 0.5)
    z = rng.normal(size=(n, dim))
    x = z @ root.T + 1.0
    precision = np.diag([1.0, 2.0, 0.5, 1.0])
    factor = np.linalg.cholesky(np.cov(x.T, bias=True))
    laplacian = np.full(n, -np.trace(factor.T @ precision @ factor))
    draws = GuideDraws(
        jnp.asarray(x),
        jnp.asarray(-0.5 * np.sum(x @ precision * x, axis=1)),
        jnp.asarray(-x @ precision),
        jnp.asarray(laplacian),
    )
    order = jnp.asarray(rng.permutation(n))
    fit = cross_fit(whitened_draws(draws), order, FAMILY[name])
    exact = np.asarray(draws.log_density) + 0.5 * np.sum(z**2, axis=1)
    error = np.asarray(fit.log_weights) - exact
    # Mean and covariance have d(d+3)/2 numbers, each worth 1/(3n/4) in the error's variance.
    expected = dim * (dim + 3) / 2 / (0.75 * n)
    assert np.var(error) < 2 * expected


def a_target(dim=3, n=400):
    """Heavy-tailed draws, and a quartic model."""
    x = jnp.asarray(np.random.default_rng(1).standard_t(5, size=(n, dim)))
    x = x - jnp.mean(x, axis=0)
    return GuideDraws(x, -jnp.sum(x**4, axis=1), -4 * x**3, -12 * jnp.sum(x**2, axis=1))


def test_features_are_the_formulas(x64):
    """Values by the formula of the module, gradients and Laplacians of it by differentiation."""
    target, dim = a_target(n=20), 3

    def formulas(z):
        root = jnp.sqrt(1 + z**2)
        heavy = 0.5 * dim * jnp.log(1 + jnp.sum(z**2) / dim)
        return jnp.concatenate([jnp.stack([-jnp.sum(z**4), heavy]), z * root, root])

    known = features(target)
    x = target.samples
    np.testing.assert_allclose(known.value.T, jax.vmap(formulas)(x), rtol=1e-12)
    np.testing.assert_allclose(
        jnp.swapaxes(known.gradient, 0, 1), jax.vmap(jax.jacobian(formulas))(x), atol=1e-12
    )
    laplacians = jax.vmap(lambda z: jnp.trace(jax.hessian(formulas)(z), axis1=1, axis2=2))(x)
    np.testing.assert_allclose(known.laplacian.T, laplacians, atol=1e-12)


@pytest.mark.parametrize("name", ["heavy tails", "tempered model, skewed", "model, affine"])
def test_closed_form_minimizes_the_loss(x64, name):
    """Its gradient in all weights vanishes, but for the ridge; what is not free is 0."""
    target, family = a_target(), FAMILY[name]
    known, switches = features(target), family.switches(jnp.float64)
    best = solve(target, known, switches)

    def loss(weights):
        energy = combine(target, known, weights, switches)
        return jnp.mean(0.5 * jnp.sum(energy.gradient**2, axis=1) + energy.laplacian)

    slope = jax.grad(loss)(best)
    np.testing.assert_allclose(slope.matrix + slope.matrix.T, 0.0, atol=1e-10)
    np.testing.assert_allclose(slope.vector, 0.0, atol=1e-10)
    is_free = np.array([family.model == "free", family.radial, *[family.skewed] * 6])
    assert np.all(np.asarray(best.theta)[~is_free] == 0)
    size = np.asarray(jnp.mean(jnp.sum(known.gradient**2, axis=2), axis=1))
    toward = np.asarray(best.theta) - np.eye(8)[0]
    np.testing.assert_allclose(
        np.asarray(slope.theta)[is_free], (-1e-3 * size * toward)[is_free], rtol=1e-6, atol=1e-9
    )


def test_skewed_guides_have_the_tail_of_their_weights(x64):
    """Gumbel draws for a Gaussian model: energies without skew say .2 where .8 is right."""

    def share_left(seed):
        x = np.random.default_rng(seed).gumbel(size=(1_000, 2))
        target = GuideDraws(
            jnp.asarray(x), jnp.asarray(-0.3 * np.sum(x**2, axis=1)), jnp.asarray(-0.6 * x),
            jnp.full(1_000, -1.2),
        )  # fmt: skip
        exact = np.asarray(target.log_density) + np.sum(x + np.exp(-x), axis=1)
        order = jnp.asarray(np.random.default_rng(seed).permutation(1_000))
        gaussian, skewed = (
            np.std(np.asarray(cross_fit(target, order, FAMILY[name]).log_weights) - exact)
            for name in ("Gaussian", "skewed")
        )
        return skewed / gaussian

    # The tail of e^-x is not within the family: of 24 sets of draws .18 to .38 of the error was
    # left, in means over six .25 to .28.
    assert np.mean([share_left(seed) for seed in range(6)]) < 0.3


@pytest.fixture(scope="module")
def hidden():
    """A narrow and shifted guide, whose density is hidden from the estimate, and its k̂."""
    draws = gaussian_draws(0.5, dim=2, n=600, shift=0.5)
    return draws, khat(draws._replace(log_q=None), num_bootstrap=20, num_repeats=2)


def test_khat_agrees_with_the_exact_one_where_the_density_is_hidden(hidden):
    draws, found = hidden
    exact = khat(draws, num_bootstrap=20)
    assert exact.energy == "exact"
    assert exact.energy_error == 0.0
    # The draws are the same, and the sampling error of the shape with them. What is left is the
    # energy's: 5 to 6 numbers from 450 draws, .11 nats, where log weights vary by .83. With these
    # draws .12; over twenty sets .02 to .26.
    assert abs(found.value - exact.value) < 0.25
    assert found.low <= found.value <= found.high
    assert found.verdict != {"good": "bad", "bad": "good"}.get(exact.verdict)
    truth = np.asarray(draws.log_density - draws.log_q)
    assert np.corrcoef(found.log_weights, truth)[0, 1] > 0.97


def narrow_in_one_direction(sd, dim, n):
    """A Gaussian guide that is right but for one direction, of a standard normal model."""
    draws = gaussian_draws(1.0, dim=dim, n=n)
    x = draws.samples.at[:, 0].multiply(sd)
    laplacian = jnp.full(n, -np.trace(np.cov(np.asarray(x).T, bias=True)), jnp.float32)
    log_density = -0.5 * jnp.sum(x**2, axis=1)
    return GuideDraws(x, log_density, -x, laplacian, log_density - 0.5 * x[:, 0] ** 2 / sd**2)


def test_one_direction_in_many_dimensions():
    """A whole quadratic form is all noise here: 300 numbers from 450 draws."""
    draws = narrow_in_one_direction(0.4, dim=24, n=600)
    found = khat(draws._replace(log_q=None), num_bootstrap=20, num_repeats=2)
    assert found.energy == "model, affine in few directions"
    exact = 0.5 * (0.4**-2 - 1) * np.asarray(draws.samples[:, 0]) ** 2
    # The weight of one direction from 450 draws is known to 7 %; the 24 numbers of b add noise of
    # (24/450)^½ = .23 nats, where log weights vary by .59.
    assert np.corrcoef(found.log_weights, exact)[0, 1] > 0.85
    assert found.verdict != "good"  # exactly k̂ is 1 - .4² = .84


def test_a_right_guide_in_many_dimensions_has_equal_weights():
    draws = gaussian_draws(1.0, dim=24, n=600)._replace(log_q=None)
    found = khat(draws, num_bootstrap=20, num_repeats=2)
    assert found.verdict == "good"
    assert found.value == -np.inf


def test_few_draws_cannot_tell():
    draws = gaussian_draws(0.9, dim=20, n=160)._replace(log_q=None, laplacian=None)
    found = khat(draws, num_bootstrap=20, num_repeats=2)
    assert found.verdict == "cannot tell"
    assert found.doubt == "few draws"
    assert found.reason == "160 draws in 20 dimensions are too few for an energy"


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_draws_in_a_plane_cannot_tell(spread, monkeypatch):
    """Equal weights speak for a guide, but not where all draws are one, or lie on a line."""
    closed = tuple(family for family in FAMILIES if not family.kernel)
    monkeypatch.setattr("numpyro_kscore.diagnostics._khat.FAMILIES", closed)
    line = spread * np.random.default_rng(0).normal(size=(200, 1))
    x = jnp.asarray(line * np.ones(2), jnp.float32)
    draws = GuideDraws(x, -0.5 * jnp.sum(x**2, axis=1), -x, jnp.full(200, -2.0))
    found = khat(draws, num_bootstrap=20, num_repeats=2)
    assert found.verdict == "cannot tell"
    assert found.doubt == "flat draws"
    assert "do not vary in some direction" in found.reason


def test_fisher_divergence_is_a_lower_bound(hidden):
    """N(½, ¼) against N(0, 1): s_q - s_p = -4(x - ½) + x, whitened by the guide's sd of ½."""
    draws, found = hidden
    bound = fisher_divergence(draws, found)
    # ¼ E(½ - 3 (x - ½))² = ¼ (¼ + 9/4). The sample sd in the unit is off by 1/√1200 of itself.
    expected = 0.625
    assert abs(float(bound.value) - expected) < 3 * float(bound.standard_error) + 0.1 * expected
    with pytest.raises(ValueError, match="Laplacian"):
        fisher_divergence(draws._replace(laplacian=None))


def test_diagonal_kernels_have_no_energy():
    with pytest.raises(TypeError, match="curl-free kernel.*Diagonal.*no energy"):
        khat(gaussian_draws(1.0), estimator=ScoreEstimator(kernel=Diagonal()))
    with pytest.raises(TypeError, match="draws: expected GuideDraws"):
        khat(np.zeros((100, 2)))
    with pytest.raises(ValueError, match="exact: expected a guide with a density"):
        khat(gaussian_draws(1.0)._replace(log_q=None), exact=True)
    with pytest.raises(ValueError, match=r"log_density: expected shape \(1000,\)"):
        khat(gaussian_draws(1.0)._replace(log_density=jnp.zeros(3)))


# --- Draws of a guide -------------------------------------------------------------------------


def test_evaluated_guide_against_closed_form():
    svi, result = fitted(implicit_guide)
    found = evaluate_guide(svi, result, DATA, num_samples=300)
    x = np.asarray(found.samples)
    np.testing.assert_allclose(found.scores, -(x - MEAN) / SD**2, atol=1e-4)
    density = -0.5 * np.sum((x - MEAN) ** 2, axis=1) / SD**2
    np.testing.assert_allclose(np.ptp(np.asarray(found.log_density) - density), 0.0, atol=1e-4)
    # The Hessian is -I/SD²: in whitened coordinates the trace of the draws' covariance over SD².
    np.testing.assert_allclose(
        found.laplacian, -np.trace(np.cov(x.T, bias=True)) / SD**2, rtol=1e-4
    )
    assert found.log_q is None
    assert found.num_lost == 0


def test_explicit_guide_has_exact_weights():
    """The same k̂ as NumPyro's own, but for the draws: a scale of .6 has shape 1 - .36."""
    svi, result = fitted(explicit_guide, scale=0.6 * SD, loss=Trace_ELBO())
    draws = evaluate_guide(svi, result, DATA, num_samples=2_000)
    z = (np.asarray(draws.samples) - MEAN) / (0.6 * SD)
    exact = -0.5 * np.sum(z**2, axis=1) - 2 * np.log(0.6 * SD) - np.log(2 * np.pi)
    np.testing.assert_allclose(draws.log_q, exact, atol=1e-4)
    found = khat(draws, num_bootstrap=20)
    theirs = psis_diagnostic(KEY, result.params, model, explicit_guide, DATA, num_particles=2_000)
    # Each has an error of (1 + k)/√134.
    assert abs(found.value - theirs) < 3 * 2**0.5 * 1.6 / 134**0.5


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((), TypeError, "args: expected the arguments the guide was fitted with"),
        ((None,), ValueError, "model: expected at least one observed site.*got none"),
    ],
)
def test_missing_data_is_named(args, error, message):
    svi, result = fitted(implicit_guide)
    with pytest.raises(error, match=message):
        evaluate_guide(svi, result, *args)


def test_missing_data_is_named_beside_a_factor():
    """Which is observed, at any arguments."""

    def penalized(data):
        model(data)
        numpyro.factor("penalty", 0.0)

    svi, result = fitted(implicit_guide)
    svi = SVI(penalized, implicit_guide, svi.optim, svi.loss)
    with pytest.raises(ValueError, match=r"model: expected data at \['y'\].*Pass the data"):
        evaluate_guide(svi, result, None)


def test_wrong_objects_are_named():
    svi, result = fitted(implicit_guide)
    with pytest.raises(ValueError, match="num_samples: expected an integer of at least 100; got 9"):
        diagnose(svi, result, DATA, num_samples=9)
    with pytest.raises(TypeError, match="svi: expected an SVI"):
        evaluate_guide(model, result, DATA)
    with pytest.raises(TypeError, match="result: expected what svi.run or fit returns"):
        evaluate_guide(svi, result.params, DATA)

    def subsampled(data, sd=0.5):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        with numpyro.plate("rows", 2, subsample_size=1):
            numpyro.sample("y", dist.Normal(z[0], sd), obs=data[:1])

    part = SVI(subsampled, implicit_guide, optax.adam(1e-2), ImplicitELBO())
    with pytest.raises(ValueError, match="expected whole plates; got 'rows', which draws 1 of 2"):
        evaluate_guide(part, result, DATA)


# --- Tests ------------------------------------------------------------------------------------


def test_stein_statistics_are_their_definitions():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 2)).astype(np.float32)
    found = ksd(x, -x, num_bootstrap=99)
    from numpyro_kscore.diagnostics import stein_discrepancy

    assert found.u_statistic == pytest.approx(float(stein_discrepancy(x, -x).value), rel=1e-5)
    # V = ((n-1) U + mean of the diagonal)/n, whose diagonal is u(x, x) = |s|² + 2 d |φ'(0)|/h².
    assert found.v_statistic > found.u_statistic
    assert found.v_statistic > 0


def test_level_and_power_of_the_stein_test():
    """Level 5 %: of 60 tests at most 8 are beyond it with probability .99 (binomial)."""
    rng = np.random.default_rng(0)
    rejected = 0
    for k in range(60):
        x = rng.normal(size=(100, 2)).astype(np.float32)
        rejected += float(ksd(x, -x, rng_key=random.key(k), num_bootstrap=199).p_value) <= 0.05
    assert rejected <= 8
    narrow = 0.5 * rng.normal(size=(100, 2)).astype(np.float32)
    assert float(ksd(narrow, -narrow).p_value) < 0.01


def mixture(x):
    return jnp.logaddexp(-0.5 * jnp.sum((x - 4.0) ** 2), -0.5 * jnp.sum((x + 4.0) ** 2))


def test_jumps_find_a_dropped_mode_and_ksd_does_not():
    rng = np.random.default_rng(0)
    x = (4.0 + rng.normal(size=(200, 2))).astype(np.float32)
    scores = jax.vmap(jax.grad(mixture))(jnp.asarray(x))
    assert float(ksd(x, scores).p_value) > 0.01
    found = mode_jump_test(mixture, x, num_bootstrap=199)
    assert float(found.p_value) < 0.01
    assert int(found.num_modes) == 2
    both = (x * np.where(rng.random((200, 1)) < 0.5, 1, -1)).astype(np.float32)
    assert float(mode_jump_test(mixture, both, num_bootstrap=199).p_value) > 0.01


def test_spread_ratios_of_a_gaussian_guide():
    draws = gaussian_draws(jnp.array([0.5, 1.0, 2.0]), n=4_000)
    # Each has an error of √(2/n)/2 of itself at most; rotation of near-equal ones cannot occur.
    np.testing.assert_allclose(spread_ratios(draws.samples, draws.scores), [0.5, 1, 2], rtol=0.05)


# --- Verdicts ---------------------------------------------------------------------------------


def a_khat(kind):
    verdict = "good" if kind == "equal" else kind
    values = {
        "good": (0.2, 0.1, 0.3),
        "bad": (1.0, 0.9, 1.1),
        "cannot tell": (0.7, 0.4, 0.9),
        "equal": (-np.inf, -np.inf, -np.inf),
    }
    nothing = np.zeros(4)
    missing = (np.nan, np.nan)
    return KhatEstimate(*values[kind], verdict, "why", nothing, nothing, "x", 0.1, {}, missing)


@pytest.mark.parametrize(
    ("khat_verdict", "stein_p", "jump_p", "num_modes", "spread", "verdict", "codes"),
    [
        ("good", 0.5, 0.5, 1, (0.95, 1.05), "good", ["nothing found"]),
        (
            "good", 0.001, 0.5, 1, (0.95, 1.4), "good",
            ["too wide", "shape differs", "correctable"],
        ),
        ("equal", 0.5, 0.5, 1, (0.95, 1.05), "good", ["nothing found"]),
        ("equal", 0.5, 0.5, 1, (0.7, 1.05), "cannot tell", ["too narrow", "correction unknown"]),
        ("good", 0.5, 0.001, 2, (0.95, 1.05), "bad", ["mode missed"]),
        ("good", 0.5, 0.001, 1, (0.95, 1.05), "bad", ["far draws missed"]),
        ("cannot tell", 0.001, 0.5, 1, (0.3, 0.9), "bad", ["collapsed", "shape differs"]),
        ("cannot tell", 0.5, 0.5, 1, (0.95, 1.05), "cannot tell", ["khat unknown"]),
        (
            "cannot tell", 0.001, 0.5, 1, (0.95, 1.05), "cannot tell",
            ["shape differs", "khat unknown"],
        ),
        (
            "bad", 0.001, 0.5, 1, (0.7, 0.9), "bad",
            ["too narrow", "shape differs", "not correctable"],
        ),
        (
            "bad", 0.001, 0.001, 1, (0.7, 0.9), "bad",
            ["far draws missed", "too narrow", "shape differs", "not correctable"],
        ),
    ],
)  # fmt: skip
def test_decisions(khat_verdict, stein_p, jump_p, num_modes, spread, verdict, codes):
    stein = SteinTest(jnp.asarray(0.1), jnp.asarray(0.1), jnp.asarray(0.01), jnp.asarray(stein_p))
    jumps = JumpTest(
        jnp.asarray(0.1), jnp.asarray(jump_p), jnp.asarray(0.5), jnp.asarray(num_modes)
    )
    found = decide(a_khat(khat_verdict), stein, jumps, spread, num_lost=0)
    assert found[0] == verdict
    assert [finding.code for finding in found[1]] == codes
    lost = decide(a_khat(khat_verdict), stein, jumps, spread, num_lost=7)
    assert lost == (verdict, (Finding("draws lost", 7), *found[1]))


def test_findings_in_words():
    findings = [Finding("draws lost", 7), Finding("too narrow", 0.678)]
    findings.append(Finding("khat unknown", 0.6))
    words = describe(findings, "a reason")
    assert words[0].startswith("7 draws were not finite")
    assert words[1] == "the guide is too narrow: sd down to 0.68 of the model's"
    assert words[2] == "whether k̂ is below 0.7 is not known: a reason"
    # Two findings may ask for the same.
    assert len(advise([*findings, Finding("far draws missed", 0.001)])) == 3
    # Whether the shape alone is wrong is known before k̂ is.
    alone = advise([Finding("shape differs", 0.2), Finding("khat unknown", 0.6)])
    assert alone[0].startswith("a more flexible guide")
    assert len(alone) == 2


def test_every_code_has_words():
    for code in get_args(Code):
        assert "{" not in "".join(describe([Finding(code, 0.5)], "why"))
        assert code in ("shape differs", "nothing found") or advise([Finding(code, 0.5)])
    for doubt in get_args(Doubt):
        assert "{" not in khat_reason(doubt, "Gaussian", 100, 20, 0.6)
