"""Weights of guides that are mixtures over noise, against closed forms and brute force."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult, SVIState
from scipy import stats

from numpyro_kscore import AutoSemiImplicit, Implicit, ImplicitELBO, diagnose, fit, log_evidence
from numpyro_kscore._model.mixtures import NUM_NOISES
from numpyro_kscore._model.weights import draw_weighted
from numpyro_kscore.diagnostics._decide import judge
from numpyro_kscore.diagnostics._examine import by_weights
from numpyro_kscore.diagnostics._fitted import fitted_guide
from numpyro_kscore.diagnostics._weighing import weigh

KEY = random.key(0)
NUM_DRAWS = 2_000
# Prior N(0, 1) and noise of variance 1/4: the posterior is N(.8 y, 1/5), the data are N(0, 5/4).
SD = 0.2**0.5
# Part of the standard deviation of a guide that comes from its noise.
SHARE = 0.6
REST = (1 - SHARE**2) ** 0.5


def data_of(dim):
    return np.linspace(-1.0, 1.0, dim)


def truth(dim):
    return float(np.sum(stats.norm(0.0, 1.25**0.5).logpdf(data_of(dim))))


def model(dim):
    z = numpyro.sample("z", dist.Normal(jnp.zeros(dim), 1.0).to_event(1))
    numpyro.sample("y", dist.Normal(z, 0.5).to_event(1), obs=data_of(dim))


def noise(name="noise", dim=1):
    unit = dist.Normal(jnp.zeros(dim), 1.0).to_event(1)
    return numpyro.sample(name, unit, infer={"is_auxiliary": True})


def own(dim):
    """The posterior, shifted by standard deviations and of another width, as a mixture."""
    shift, width = (numpyro.param(name, jnp.zeros(())) for name in ("shift", "width"))
    mean = 0.8 * data_of(dim) + SD * (shift + width * SHARE * noise(dim=dim))
    numpyro.sample("z", dist.Normal(mean, SD * width * REST).to_event(1))


def at(shift=0.0, width=1.0):
    return {"shift": jnp.asarray(shift), "width": jnp.asarray(width)}


def finished(model, guide, params=None):
    """A fit as it returns, without its steps."""
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO())
    return svi, SVIRunResult(params or {}, SVIState(None, None, KEY), jnp.zeros(1))


def automatic(dim, shift=0.0, width=1.0, bend=0.0):
    """``AutoSemiImplicit`` at parameters that make it the posterior, but for a bend."""
    guide = AutoSemiImplicit(model, noise_dim=dim, hidden_dims=(8,), warm_start=False)
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO())
    guide.set_up(KEY, dim)
    # Weights and biases of a layer of 8 units, and of shifts and gates.
    layers = bend * random.normal(KEY, ((dim + 1) * 8 + 9 * 2 * dim,))
    params = {
        "auto_layers": layers,
        "auto_loc": jnp.asarray(0.8 * data_of(dim) + shift * SD),
        "auto_scale": jnp.full(dim, width * SD * REST),
        "auto_mixing": SHARE / REST * jnp.eye(dim),
    }
    return svi, SVIRunResult(params, SVIState(None, None, KEY), jnp.zeros(1))


def weighted(model, guide, *args, params=None, num_draws=NUM_DRAWS):
    svi, result = finished(model, guide, params)
    found = fitted_guide(svi, result, args, {}, KEY)
    return draw_weighted(KEY, found.program, found.layout, num_draws)


# --- Known evidence ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["own", "automatic"])
@pytest.mark.parametrize(
    "dim",
    [5, *(pytest.param(dim, marks=pytest.mark.thorough) for dim in (1, 20))],
)
def test_the_evidence_of_a_conjugate_model(kind, dim):
    wide = 1.1
    svi, result = (
        finished(model, own, at(0.1, wide))
        if kind == "own"
        else automatic(dim, 0.1, wide, bend=0.1)
    )
    found = log_evidence(svi, result, dim, num_samples=NUM_DRAWS)
    assert found.is_reliable
    assert abs(found.value - truth(dim)) < 4 * found.error
    assert found.error < 0.01 + 0.01 * dim
    # Of draws of a right guide 99 and 95 % are effective in 2 and 10 dimensions; width takes some.
    assert found.num_effective > {1: 0.9, 5: 0.6, 20: 0.1}[dim] * NUM_DRAWS


@pytest.mark.thorough
def test_double_precision(x64):
    svi, result = finished(model, own, at())
    found = log_evidence(svi, result, 2, num_samples=500)
    assert abs(found.value - truth(2)) < 4 * found.error
    assert found.num_effective > 490


# --- The density, by a hundred thousand values of the noise -----------------------------------


def positive():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    numpyro.sample("b", dist.LogNormal(a, 1.0))


def bent(e):
    return jnp.sin(2 * e[..., 0]) + 0.5 * e[..., 1], e[..., 0] ** 2 - e[..., 1]


def bent_guide():
    """Latents that depend on noise and on each other, one of them positive."""
    a_mean, b_mean = bent(noise(dim=2))
    a = numpyro.sample("a", dist.Normal(a_mean, 0.5))
    numpyro.sample("b", dist.LogNormal(b_mean + 0.3 * a, 0.6))


def line():
    numpyro.sample("z", dist.Normal(0.0, 1.0))


def key_guide():
    """Noise of a bare key."""
    e = random.normal(numpyro.prng_key(), (2,))
    numpyro.sample("z", dist.Normal(bent(e)[0], 0.4))


@pytest.mark.parametrize(
    "kind", ["two latents", pytest.param("bare key", marks=pytest.mark.thorough)]
)
def test_brute_force(kind):
    e = jnp.asarray(np.random.default_rng(0).normal(size=(100_000, 2)))
    first, second = (np.asarray(value)[:, None] for value in bent(e))
    if kind == "two latents":
        draws = weighted(positive, bent_guide)
        a, log_b = np.asarray(draws.samples, float).T[:, ::20]
        # The coordinate of a positive latent is its logarithm.
        given = stats.norm(first, 0.5).pdf(a) * stats.norm(second + 0.3 * a, 0.6).pdf(log_b)
    else:
        draws = weighted(line, key_guide)
        given = stats.norm(first, 0.4).pdf(np.asarray(draws.samples, float)[::20, 0])
    density, deviation = given.mean(0), given.std(0)
    error = deviation / NUM_NOISES**0.5
    apart = (np.exp(np.asarray(draws.log_q[::20], float)) - density) / error
    # A mean of squares of 100 numbers, which are correlated: they share the noise that is mixed.
    assert 0.5 < np.mean(apart**2) < 1.8


def bounded():
    numpyro.sample("z", dist.Normal(1.0, 0.3))


def moving_bounds():
    start = numpyro.sample("start", dist.Uniform(0.0, 1.0), infer={"is_auxiliary": True})
    numpyro.sample("z", dist.Uniform(start, start + 1.0))


@pytest.mark.thorough
def test_bounds_that_move_with_noise():
    """A triangle, which is 0 at 0 and 2: outside of its bounds a uniform draw has no density."""
    draws = weighted(bounded, moving_bounds)
    z = np.asarray(draws.samples, float)[:, 0]
    q = 1 - np.abs(z - 1)
    apart = (np.exp(np.asarray(draws.log_q, float)) - q) / np.sqrt(q * (1 - q) / NUM_NOISES)
    is_inside = (q > 0.05) & (q < 0.95)
    assert 0.6 < np.mean(apart[is_inside] ** 2) < 1.6


# --- Rows of plates, and latents that others depend on ----------------------------------------

ROWS = 40


def rows_model(y):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", ROWS):
        z = numpyro.sample("z", dist.Normal(level, 1.0))
        numpyro.sample("y", dist.Normal(z, 0.5), obs=y)


def rows_guide(y):
    """The posterior: level N(Σ y / 1.25 / p, 1/p), p = 1 + 40/1.25; rows N(.8 y + .2 level, .2)."""
    precision = 1 + ROWS / 1.25
    fn = dist.Normal(jnp.sum(y) / 1.25 / precision, precision**-0.5)
    level = numpyro.sample("level", fn)
    with numpyro.plate("rows", ROWS):
        unit = numpyro.sample("noise", dist.Normal(0.0, 1.0), infer={"is_auxiliary": True})
        mean = 0.8 * y + 0.2 * level + SD * SHARE * unit
        numpyro.sample("z", dist.Normal(mean, SD * REST))


@pytest.mark.thorough
def test_rows_have_a_mixture_each():
    y = np.linspace(-2.0, 3.0, ROWS)
    draws = weighted(rows_model, rows_guide, y)
    found = weigh(draws).evidence
    covariance = 1.25 * np.eye(ROWS) + 1.0
    expected = stats.multivariate_normal(np.zeros(ROWS), covariance).logpdf(y)
    assert abs(found.value - expected) < 4 * found.error
    # One mixture over the noise of all rows, of 40 dimensions, would leave next to no draw.
    assert found.num_effective > 0.9 * NUM_DRAWS


# --- What weights tell ------------------------------------------------------------------------


def test_khat_is_honest():
    right = weigh(weighted(model, own, 5, params=at())).evidence
    assert right.khat < 0.5
    # A normal of .3 of the width leaves weights a tail of shape 1 - .3² = .91.
    narrow = weigh(weighted(model, own, 5, params=at(width=0.3))).evidence
    assert narrow.khat > 0.7
    assert not narrow.is_reliable


@pytest.mark.parametrize(
    ("shift", "width", "verdict"),
    [(0.0, 1.0, "good"), (0.3, 1.0, "bad"), (0.0, 1.3, "bad"), (0.0, 0.85, "bad")],
)
def test_weights_judge_moments(shift, width, verdict):
    found = weigh(weighted(model, own, 5, params=at(shift, width), num_draws=5_000))
    assert np.all(found.is_known)
    assert judge(by_weights(found), [f"z[{k}]" for k in range(5)])[0] == verdict
    # KL(q || p) of the guide; that of a mixture of few values of the noise is larger.
    divergence = 2.5 * (shift**2 + width**2 - 1 - 2 * np.log(width))
    assert -0.02 < found.divergence - divergence < 0.04


@pytest.mark.thorough
def test_draws_by_weights_repair_a_shift():
    svi, result = automatic(2, shift=0.3)
    draw = svi.guide.sample_posterior
    draws = [
        np.asarray(draw(KEY, result.params, sample_shape=(4_000,), resample=chosen)["z"])
        for chosen in (False, True)
    ]
    off, right = ((z.mean(0) - 0.8 * data_of(2)) / SD for z in draws)
    # 4000 of 10 000 draws, of which 83 % are effective: an error of .016 + .011, added in squares.
    assert np.all(np.abs(off - 0.3) < 0.08)
    assert np.all(np.abs(right) < 4 * 0.02)
    assert np.all(np.abs(draws[1].std(0) / SD - 1) < 4 * 0.015)


def test_noise_that_depends_on_latents_leaves_no_density():
    """Noise of one draw is no noise of another there."""

    def guide(dim):
        first = numpyro.sample("z", dist.Normal(0.0, 1.0))
        unit = dist.Normal(first, 1.0)
        e = numpyro.sample("noise", unit, infer={"is_auxiliary": True})
        numpyro.sample("w", dist.Normal(e, 1.0))

    def pair(dim):
        numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("w", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="log_evidence: expected a guide whose density is known"):
        log_evidence(*finished(pair, guide), 1)


@pytest.mark.thorough
def test_a_density_that_is_known_given_noise_only():
    """``Implicit`` with the density of a point that is drawn given noise: no marginal density."""

    def guide(dim):
        e = noise(dim=dim)
        fn = dist.Normal(0.8 * data_of(dim) + SD * SHARE * e, SD * REST).to_event(1)
        x = numpyro.sample("x", fn, infer={"is_auxiliary": True})
        numpyro.sample("z", Implicit(x, 1, unconstrained=x, local_log_density=fn.log_prob(x)))

    svi, result = finished(model, guide)
    found = log_evidence(svi, result, 2, num_samples=NUM_DRAWS)
    assert abs(found.value - truth(2)) < 4 * found.error
    assert found.num_effective > 0.97 * NUM_DRAWS


# --- Fits -------------------------------------------------------------------------------------


def bimodal():
    z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 4.0).to_event(1))
    numpyro.factor("y", jnp.logaddexp(-8 * jnp.sum((z - 2) ** 2), -8 * jnp.sum((z + 2) ** 2)))


@pytest.mark.thorough
def test_a_start_at_two_modes():
    """Labels of modes are noise like other noise."""
    guide = AutoSemiImplicit(bimodal)
    svi = SVI(bimodal, guide, optax.adam(1e-2), ImplicitELBO())
    state = svi.init(KEY)
    assert len(guide.start.parts) == 2
    result = SVIRunResult(svi.get_params(state), state, jnp.zeros(1))
    found = log_evidence(svi, result, num_samples=NUM_DRAWS)
    # Each mode is a product of two normal densities: N(±2; 0, 16 + 1/16)², times its own volume.
    each = 2 * stats.norm(0.0, (16 + 1 / 16) ** 0.5).logpdf(2.0) + np.log(2 * np.pi / 16)
    assert abs(found.value - (each + np.log(2))) < 4 * found.error
    assert found.num_effective > 0.9 * NUM_DRAWS


def skewed(y):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("groups", 3):
        effect = numpyro.sample("effect", dist.Normal(0.0, scale))
        numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_diagnoses_of_fits(seed):
    y = np.array([2.0, -1.0, 0.5])
    guide = AutoSemiImplicit(skewed)
    svi = SVI(skewed, guide, optax.adam(1e-2), ImplicitELBO())
    result = fit(svi, random.key(seed), y, progress_bar=False)
    assert result.info.weights.evidence.is_reliable
    # The evidence by quadrature over the logarithm of the scale.
    logs = np.linspace(-9.0, 9.0, 20_001)
    given = stats.norm(0.0, np.sqrt(1 + np.exp(2 * logs))[:, None]).logpdf(y).sum(1)
    expected = np.log(np.trapezoid(np.exp(given) * stats.norm.pdf(logs), logs))
    evidence = log_evidence(svi, result, y)
    assert abs(evidence.value - expected) < 4 * evidence.error
    assert diagnose(svi, result, y).verdict == "good"
    for factor in (0.8, 1.3):
        scaled = {**result.params, "auto_scale": factor * result.params["auto_scale"]}
        scaled["auto_mixing"] = result.params["auto_mixing"]
        wrong = diagnose(svi, result._replace(params=scaled), y)
        assert wrong.verdict == "bad"
