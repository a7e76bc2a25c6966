"""k̂ and the Fisher divergence by an energy, against guides whose density is known and hidden."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore import ScoreEstimator, khat
from numpyro_kscore.diagnostics import GuideDraws, fisher_divergence
from numpyro_kscore.diagnostics._energy import FAMILIES
from numpyro_kscore.kernels import Diagonal
from support.gaussian_guides import gaussian_draws


@pytest.fixture
def closed_forms(monkeypatch):
    """Energies without a kernel, which compile fast."""
    closed = tuple(family for family in FAMILIES if not family.kernel)
    monkeypatch.setattr("numpyro_kscore.diagnostics._khat.FAMILIES", closed)


@pytest.fixture(scope="module")
def hidden():
    """A narrow and shifted guide, and its k̂ by an energy, to which the density is not shown."""
    draws = gaussian_draws(0.5, dim=2, n=600, shift=0.5)
    return draws, khat(draws._replace(log_q=None), num_bootstrap=20, num_repeats=2)


@pytest.mark.thorough
def test_khat_agrees_with_the_exact_one_where_the_density_is_hidden(hidden):
    draws, found = hidden
    exact = khat(draws, num_bootstrap=20)
    assert exact.energy == "exact"
    assert exact.energy_error == 0.0
    # Both have the same draws and the same sampling error of the shape. The rest is the error of
    # the energy: 5 or 6 numbers from 450 draws, .11 nats, where log weights vary by .83. The
    # difference is .12 with these draws, .02 to .26 over twenty sets.
    assert abs(found.value - exact.value) < 0.25
    assert found.low <= found.value <= found.high
    assert found.verdict != {"good": "bad", "bad": "good"}.get(exact.verdict)
    truth = np.asarray(draws.log_density - draws.log_q)
    assert np.corrcoef(found.log_weights, truth)[0, 1] > 0.97


def narrow_in_one_direction(sd, dim, n):
    """A Gaussian guide of a standard normal model, with a wrong sd in one direction."""
    draws = gaussian_draws(1.0, dim=dim, n=n)
    x = draws.samples.at[:, 0].multiply(sd)
    laplacian = jnp.full(n, -np.trace(np.cov(np.asarray(x).T, bias=True)), jnp.float32)
    log_density = -0.5 * jnp.sum(x**2, axis=1)
    return GuideDraws(x, log_density, -x, laplacian, log_density - 0.5 * x[:, 0] ** 2 / sd**2)


@pytest.mark.usefixtures("closed_forms")
@pytest.mark.thorough
def test_one_direction_in_many_dimensions():
    """A full quadratic form would be noise here: 300 numbers from 450 draws."""
    draws = narrow_in_one_direction(0.4, dim=24, n=600)
    found = khat(draws._replace(log_q=None), num_bootstrap=20, num_repeats=2)
    assert found.energy == "model, affine in few directions"
    exact = 0.5 * (0.4**-2 - 1) * np.asarray(draws.samples[:, 0]) ** 2
    # 450 draws give the weight of one direction to 7 %; the 24 numbers of b add noise of
    # (24/450)^½ = .23 nats, where log weights vary by .59.
    assert np.corrcoef(found.log_weights, exact)[0, 1] > 0.85
    assert found.verdict != "good"  # exactly k̂ is 1 - .4² = .84


@pytest.mark.usefixtures("closed_forms")
@pytest.mark.thorough
def test_a_right_guide_in_many_dimensions_has_equal_weights():
    draws = gaussian_draws(1.0, dim=24, n=600)._replace(log_q=None)
    found = khat(draws, num_bootstrap=20, num_repeats=2)
    assert found.verdict == "good"
    assert found.value == -np.inf


@pytest.mark.usefixtures("closed_forms")
@pytest.mark.thorough
def test_other_energies_whose_weights_hardly_vary_do_not_raise_the_interval(monkeypatch):
    """The guide is 5 % too wide. The tail of an energy's noise has any shape, here 1.75."""
    draws = gaussian_draws(1.05, dim=1, n=1_000)._replace(log_q=None)
    found = khat(draws, num_bootstrap=20, num_repeats=2)
    assert found.verdict == "good"
    assert max(found.alternatives.values()) <= found.value
    monkeypatch.setattr("numpyro_kscore._util.pareto.SMALLEST_VARIATION", 0.0)
    noisy = khat(draws, num_bootstrap=20, num_repeats=2)
    assert noisy.value == found.value
    assert noisy.high > 1.0


def with_wide_tails(seed, share=0.01, sd=5.0):
    """Draws of N(0, 1) for a model a hundredth of which is five times as wide."""
    x = np.random.default_rng(seed).normal(size=(1_000, 1)).astype(np.float32)

    def log_density(x):
        narrow = jnp.log1p(-share) - 0.5 * x[0] ** 2
        return jnp.logaddexp(narrow, jnp.log(share / sd) - 0.5 * (x[0] / sd) ** 2)

    scores = jax.vmap(jax.grad(log_density))(x)
    curvature = jax.vmap(jax.hessian(log_density))(x)[:, 0, 0]
    laplacian = np.var(x) * curvature
    return GuideDraws(
        jnp.asarray(x), jax.vmap(log_density)(x), scores, laplacian, -0.5 * x[:, 0] ** 2
    )


@pytest.mark.usefixtures("closed_forms")
@pytest.mark.thorough
def test_heavy_tails_are_flagged_however_little_weights_vary():
    """Exactly k̂ is 1 - 1/5² = .96, where weights vary by 1 to 6 %; for a narrow guide 1 - .3²."""
    exact = khat(with_wide_tails(0), num_bootstrap=20)
    assert exact.verdict == "bad"
    assert np.std(exact.log_weights) < 0.1
    # Where densities are hidden, a hundredth of the model is too little for an energy to see.
    for seed in range(3):
        hidden = with_wide_tails(seed, share=0.1)._replace(log_q=None)
        assert khat(hidden, num_bootstrap=20, num_repeats=2).verdict != "good"
    narrow = gaussian_draws(0.3, dim=1, n=1_000)._replace(log_q=None)
    assert khat(narrow, num_bootstrap=20, num_repeats=2).verdict != "good"


@pytest.mark.thorough
def test_few_draws_cannot_tell():
    draws = gaussian_draws(0.9, dim=20, n=160)._replace(log_q=None, laplacian=None)
    found = khat(draws, num_bootstrap=20, num_repeats=2)
    assert found.verdict == "cannot tell"
    assert found.doubt == "few draws"
    assert found.reason == "160 draws in 20 dimensions are too few for an energy"


@pytest.mark.parametrize("spread", [0.0, 1.0])
@pytest.mark.usefixtures("closed_forms")
def test_draws_in_a_plane_cannot_tell(spread):
    """Equal weights speak for a guide, unless all draws coincide or lie on a line."""
    line = spread * np.random.default_rng(0).normal(size=(200, 1))
    x = jnp.asarray(line * np.ones(2), jnp.float32)
    draws = GuideDraws(x, -0.5 * jnp.sum(x**2, axis=1), -x, jnp.full(200, -2.0))
    found = khat(draws, num_bootstrap=20, num_repeats=2)
    assert found.verdict == "cannot tell"
    assert found.doubt == "flat draws"
    assert "do not vary in some direction" in found.reason


@pytest.mark.thorough
@pytest.mark.usefixtures("closed_forms")
def test_fisher_divergence_is_a_lower_bound():
    """N(½, ¼) against N(0, 1): s_q - s_p = -4(x - ½) + x, whitened by the guide's sd of ½."""
    draws = gaussian_draws(0.5, dim=2, n=600, shift=0.5)
    found = khat(draws._replace(log_q=None), num_bootstrap=20, num_repeats=2)
    bound = fisher_divergence(draws, found)
    # ¼ E(½ - 3 (x - ½))² = ¼ (¼ + 9/4). The sample sd in the unit is off by 1/√1200 of itself.
    expected = 0.625
    assert abs(float(bound.value) - expected) < 3 * float(bound.standard_error) + 0.1 * expected
    with pytest.raises(ValueError, match="Laplacian"):
        fisher_divergence(draws._replace(laplacian=None))


def test_wrong_input_is_named():
    with pytest.raises(TypeError, match="curl-free kernel.*Diagonal.*no energy"):
        khat(gaussian_draws(1.0), estimator=ScoreEstimator(kernel=Diagonal()))
    with pytest.raises(TypeError, match="draws: expected GuideDraws"):
        khat(np.zeros((100, 2)))
    with pytest.raises(ValueError, match="exact: expected a guide with a density"):
        khat(gaussian_draws(1.0)._replace(log_q=None), exact=True)
    with pytest.raises(ValueError, match=r"log_density: expected shape \(1000,\)"):
        khat(gaussian_draws(1.0)._replace(log_density=jnp.zeros(3)))
