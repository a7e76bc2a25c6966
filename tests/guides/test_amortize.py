"""Rows of plates whose latents are drawn from one network for all of them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from numpyro import handlers
from numpyro.infer import SVI
from scipy import stats

from numpyro_kscore import AutoImplicit, ImplicitELBO
from numpyro_kscore._guides.marginal import Marginal, normal_noise
from numpyro_kscore._guides.row_modes import find_row_modes, gaussians_at
from numpyro_kscore._guides.rows import Amortized
from numpyro_kscore._model import subsampling
from numpyro_kscore._model.joint import evaluate_particles
from numpyro_kscore._model.program import inspect_program, objective_program
from numpyro_kscore._model.target import Target
from support.compiling import quick_jit

KEY = random.key(0)
SIGMA, NUM_ROWS, NUM_SEEN = 0.7, 12, 3
RNG = np.random.default_rng(0)
SEEN = jnp.asarray(RNG.normal(0.5, 1.2, (NUM_ROWS, NUM_SEEN)), jnp.float32)
GROUP = jnp.asarray(np.repeat(np.arange(NUM_ROWS), NUM_SEEN))


def dense(seen, batch=None):
    """Observations (rows, n), in a plate within that of the rows."""
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    spread = numpyro.sample("spread", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("rows", len(seen), subsample_size=batch, dim=-2) as rows:
        effect = numpyro.sample("effect", dist.Normal(level, spread))
        numpyro.deterministic("double", 2 * effect)
        with numpyro.plate("seen", seen.shape[1], dim=-1):
            numpyro.sample("y", dist.Normal(effect, SIGMA), obs=seen[rows])


def long(seen, group):
    """Observations in a plate of their own, with the rows they belong to."""
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    spread = numpyro.sample("spread", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("rows", NUM_ROWS):
        effect = numpyro.sample("effect", dist.Normal(level, spread))
    with numpyro.plate("seen", len(seen)):
        numpyro.sample("y", dist.Normal(effect[group], SIGMA), obs=seen)


def exact_log_density(level, log_spread):
    """log p(data, level, log spread) with the effects integrated out, by the normal marginal."""
    spread = jnp.exp(log_spread)
    cov = SIGMA**2 * jnp.eye(NUM_SEEN) + spread**2
    rows = dist.MultivariateNormal(level * jnp.ones(NUM_SEEN), cov).log_prob(SEEN)
    return dist.Normal(0, 2).log_prob(level) + dist.Normal(0, 1).log_prob(log_spread) + rows.sum()


exact = quick_jit(lambda u: exact_log_density(*u))


def marginal_density(model, args, noise=None):
    marginal = Marginal(Amortized(model, ("rows",), "auto"), noise)

    def density(u):
        seeded = handlers.seed(marginal, random.key(3))
        return Target(seeded, args, {}).log_density({"level": u[0], "spread": u[1]})

    return density


@pytest.mark.thorough
def test_rows_are_integrated_out_exactly_where_their_posteriors_are_normal():
    """Whatever the noise: the network starts as no change of the posterior of a row."""
    u = jnp.array([0.3, -0.4])

    @jax.jit
    def derivatives(u):
        closed = lambda u: exact_log_density(*u)  # noqa: E731
        noisy, plain = (marginal_density(dense, (SEEN,), noise) for noise in (normal_noise, None))
        return (
            [jax.value_and_grad(density)(u) for density in (closed, noisy)],
            [jax.hessian(density)(u) for density in (closed, plain)],
        )

    (expected, found), (curvature, found_curvature) = derivatives(u)
    # Rounding in float32, of sums over 36 observations.
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    np.testing.assert_allclose(found[1], expected[1], rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(found_curvature, curvature, rtol=2e-3, atol=2e-2)


@pytest.mark.thorough
def test_observations_may_belong_to_rows_by_an_index():
    u = jnp.array([-0.2, 0.1])
    found = jax.jit(marginal_density(long, (SEEN.ravel(), GROUP), normal_noise))(u)
    np.testing.assert_allclose(found, exact(u), rtol=1e-4)


@pytest.mark.thorough
def test_a_minibatch_stands_for_all_rows():
    """The mean over many minibatches is the density of all rows; so is its gradient."""
    u = jnp.array([0.3, -0.4])
    marginal = Marginal(Amortized(dense, ("rows",), "auto"), normal_noise)

    def density(key):
        seeded = handlers.seed(marginal, key)
        return Target(seeded, (SEEN, 3), {}).log_density({"level": u[0], "spread": u[1]})

    found = np.asarray(quick_jit(jax.vmap(density))(random.split(KEY, 4000)))
    error = found.std() / len(found) ** 0.5
    assert abs(found.mean() - exact(u)) < 4 * error
    assert error < 0.2


@pytest.mark.parametrize("size", [12, 11])
def test_blocks_of_rows_make_the_density_of_all(monkeypatch, size):
    """Blocks of four; and of three, with two rows left."""
    monkeypatch.setattr(subsampling, "ROWS_AT_ONCE", 4)
    y = SEEN[:size, 0]

    def model():
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        with numpyro.plate("rows", size, subsample_size=2) as rows:
            numpyro.sample("y", dist.Normal(level, 1.0), obs=y[rows])

    def at(model):
        return Target(model, (), {}, key=KEY).log_density({"level": jnp.asarray(0.4)})

    found = quick_jit(lambda: subsampling.mean_over_rows(at, model, size))()
    expected = stats.norm.logpdf(0.4, 0, 2) + stats.norm.logpdf(y, 0.4).sum()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def poisson(rows):
    counts = jnp.array([0.0, 3.0, 400.0, 20.0])
    return jnp.sum(counts * rows[:, 0] - jnp.exp(rows[:, 0]) - 0.5 * rows[:, 0] ** 2 / 4)


def test_modes_are_found_from_afar():
    """A full step from 0 would go to 320, where the rate overflows."""
    found = np.asarray(jax.jit(lambda u: find_row_modes(poisson, u).mean)(jnp.zeros((4, 1))))[:, 0]
    counts = np.array([0.0, 3.0, 400.0, 20.0])
    slopes = counts - np.exp(found) - found / 4
    assert np.all(np.abs(slopes) < 0.05 * np.sqrt(np.exp(found) + 0.25))


def binomial(counts):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", len(counts)):
        effect = numpyro.sample("effect", dist.Normal(level, 1.0))
        numpyro.sample("y", dist.Binomial(10, logits=effect), obs=counts)


@pytest.mark.thorough
def test_modes_are_found_where_logits_start_at_zero():
    """NumPyro's log density of a binomial has a wrong derivative at logits of exactly zero."""
    counts, level = np.array([1.0, 4.0, 5.0, 9.0]), 0.5
    found = jax.jit(
        lambda: Target(
            Marginal(Amortized(binomial, ("rows",), "auto")), (jnp.asarray(counts),), {}
        ).log_density({"level": jnp.asarray(level)})
    )()
    # The rule of five nodes, which a start takes, at the modes. If they are .3 off it is .0005 off.
    z = np.linspace(-8.0, 9.0, 170_001)

    def log_terms(z):
        return counts * z - 10 * np.logaddexp(0, z) - 0.5 * (z - level) ** 2

    modes = z[log_terms(z[:, None]).argmax(0)]
    chances = 1 / (1 + np.exp(-modes))
    widths = 1 / np.sqrt(1 + 10 * chances * (1 - chances))
    nodes, weights = np.polynomial.hermite_e.hermegauss(5)
    sums = sum(
        weight * np.exp(log_terms(modes + widths * node) + 0.5 * node**2)
        for node, weight in zip(nodes, weights, strict=True)
    )
    choices = np.log([math.comb(10, int(count)) for count in counts])
    rows = np.log(sums * widths / (2 * np.pi) ** 0.5) + choices
    expected = rows.sum() + dist.Normal(0.0, 2.0).log_prob(level)
    assert abs(found - expected) < 2e-4


def test_gaussians_of_rows_have_the_inverse_hessian_for_covariance():
    roots = RNG.normal(size=(5, 3, 3))
    precisions = roots @ roots.swapaxes(1, 2) + 0.3 * np.eye(3)
    matrices = jnp.asarray(precisions, jnp.float32)

    def density(rows):
        return -0.5 * jnp.einsum("ei,eij,ej->", rows - 1, matrices, rows - 1)

    @quick_jit
    def evaluate(rows):
        slopes, gaussians = gaussians_at(density, rows)
        columns = [gaussians.push(jnp.tile(row, (5, 1))) for row in jnp.eye(3)]
        return jnp.stack(columns, axis=2), gaussians.solve(slopes), gaussians.log_volume

    factor, solved, log_volume = map(np.asarray, evaluate(jnp.zeros((5, 3))))
    np.testing.assert_allclose(
        factor @ factor.swapaxes(1, 2), np.linalg.inv(precisions), rtol=1e-3, atol=1e-3
    )
    np.testing.assert_allclose(solved, np.ones((5, 3)), rtol=1e-3)
    volumes = np.log(np.linalg.det(precisions))
    np.testing.assert_allclose(log_volume, -0.5 * volumes, rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def fitted():
    """A guide with initial parameters, in minibatches of four rows."""
    guide = AutoImplicit(dense, amortize="rows", warm_start=False)
    svi = SVI(dense, guide, optax.adam(1e-2), ImplicitELBO(num_particles=16))
    guide.set_up(KEY, SEEN, 4)
    state = quick_jit(lambda key: svi.init(key, SEEN, 4))(KEY)
    return guide, svi, state, svi.get_params(state)


@pytest.mark.thorough
def test_a_guide_draws_the_rows_of_a_minibatch_and_all_rows(fitted):
    guide, _, _, params = fitted
    scales = []

    @quick_jit
    def call(key):
        seeded = handlers.seed(handlers.substitute(guide, params), key)
        trace = handlers.trace(seeded).get_trace(SEEN, 4)
        scales.append(trace["effect"]["scale"])
        return trace["effect"]["value"], trace["rows"]["value"]

    effect, rows = call(KEY)
    assert effect.shape == (4, 1)
    assert scales == [NUM_ROWS / 4]
    assert len(set(rows.tolist())) == 4
    draws = guide.sample_posterior(KEY, params, sample_shape=(2, 3))
    shapes = {name: value.shape for name, value in draws.items()}
    assert shapes == {
        "level": (2, 3), "spread": (2, 3), "effect": (2, 3, 12, 1), "double": (2, 3, 12, 1),
    }  # fmt: skip
    np.testing.assert_allclose(draws["double"], 2 * draws["effect"])


@pytest.mark.thorough
def test_new_rows_are_drawn_from_their_posterior(fitted):
    """Given the global latents that of an effect is normal."""
    guide, _, _, params = fitted
    new = jnp.array([[1.0, 2.0, 0.5], [-3.0, -2.0, -1.0]])
    draws = guide.sample_posterior(random.key(5), params, new, sample_shape=(4000,))
    level, spread = (np.asarray(draws[name])[:, None] for name in ("level", "spread"))
    precision = NUM_SEEN / SIGMA**2 + spread**-2
    mean = (np.asarray(new).sum(1) / SIGMA**2 + level * spread**-2) / precision
    unit = (np.asarray(draws["effect"])[..., 0] - mean) * np.sqrt(precision)
    # 4000 standard normal numbers: four standard errors of mean and standard deviation.
    np.testing.assert_allclose(unit.mean(0), 0, atol=4 / 4000**0.5)
    np.testing.assert_allclose(unit.std(0), 1, atol=4 / 8000**0.5)


@pytest.mark.thorough
def test_new_data_that_are_no_call_of_the_model_are_an_error(fitted):
    guide, _, _, params = fitted
    with pytest.raises(
        ValueError, match=r"args: expected data of at least one row; got .*\(0, 3\)"
    ):
        guide.sample_posterior(KEY, params, SEEN[:0])
    with pytest.raises(TypeError, match=r"(?s)'seen'.*after params are those of the model, all"):
        guide.sample_posterior(KEY, params, batch=4)


@pytest.mark.thorough
def test_median_is_in_the_middle(fitted):
    guide, _, _, params = fitted
    middle = guide.median(params)
    draws = guide.sample_posterior(random.key(7), params, sample_shape=(2000,))
    for name in ("level", "spread", "effect"):
        # The median of n normal draws has an error of 1.25 sd/√n.
        error = 5 * 1.25 * draws[name].std(0) / 2000**0.5
        assert np.all(np.abs(middle[name] - np.median(draws[name], axis=0)) < error), name


@pytest.mark.slow
def test_a_step_moves_the_parameters_of_rows_and_globals(fitted):
    _, svi, state, params = fitted
    state, loss = quick_jit(lambda state: svi.update(state, SEEN, 4))(state)
    moved = svi.get_params(state)
    assert np.isfinite(loss)
    for name in ("auto_layers", "auto_loc", "auto_rows_layers"):
        assert not np.allclose(moved[name], params[name]), name


def vector_rows(seen, batch=None):
    """A positive vector and a number for each row, and a latent in a plate within the rows."""
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", len(seen), subsample_size=batch, dim=-2) as rows:
        weights = numpyro.sample("weights", dist.LogNormal(jnp.zeros(2), 0.3).to_event(1))
        shift = numpyro.sample("shift", dist.Normal(level, 1.0))
        with numpyro.plate("inner", NUM_SEEN, dim=-1):
            inner = numpyro.sample("inner_shift", dist.Normal(shift, 0.5))
            loc = inner * weights[..., 0] + weights[..., 1]
            numpyro.sample("y", dist.StudentT(4.0, loc, SIGMA), obs=seen[rows])


@pytest.mark.thorough
def test_a_row_may_have_several_latents_and_plates_within():
    """Importance weights of rows are the check: log p / q has the mean log p(data | level)."""
    amortized = Amortized(vector_rows, ("rows",), "auto")

    def draw(key):
        marginal = handlers.seed(Marginal(amortized, normal_noise), key)
        return Target(marginal, (SEEN[:2],), {}).log_density({"level": jnp.zeros(())})

    found = np.asarray(quick_jit(jax.vmap(draw))(random.split(KEY, 2000)), np.float64)

    rng = np.random.default_rng(1)
    count = 400_000
    exact, error = dist.Normal(0, 2).log_prob(0.0), 0.0
    for row in np.asarray(SEEN[:2]):
        weights, shift = np.exp(0.3 * rng.normal(size=(count, 2))), rng.normal(size=(count, 1))
        inner = shift + 0.5 * rng.normal(size=(count, NUM_SEEN))
        loc = inner * weights[:, :1] + weights[:, 1:]
        z = (row - loc) / SIGMA
        likelihood = np.prod((1 + z**2 / 4) ** -2.5 * 0.375 / SIGMA, axis=1)
        exact += np.log(likelihood.mean())
        error += (likelihood.std() / likelihood.mean()) ** 2 / count
    ratios = np.exp(found - exact)
    error += (ratios.std() / ratios.mean()) ** 2 / len(ratios)
    assert error**0.5 < 0.1
    assert abs(np.log(ratios.mean())) < 4 * error**0.5
    assert found.mean() < exact


def walk(seen):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", len(seen)):
        z = numpyro.sample("z", dist.Normal(level, 1.0))
    numpyro.factor("smooth", -0.5 * jnp.sum(jnp.diff(z) ** 2))
    with numpyro.plate("seen", len(seen)):
        numpyro.sample("y", dist.Normal(z, 1.0), obs=seen)


def discrete(seen):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", len(seen)):
        kind = numpyro.sample("kind", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(level * kind, 1.0), obs=seen)


def crossed(seen):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", len(seen), dim=-2):
        effect = numpyro.sample("effect", dist.Normal(level, 1.0))
    with numpyro.plate("columns", NUM_SEEN, dim=-1):
        other = numpyro.sample("other", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(effect + other, SIGMA).to_event(2), obs=seen)


def nothing_shared(seen):
    with numpyro.plate("rows", len(seen)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=seen)


def observations_drawn(seen):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", NUM_ROWS):
        effect = numpyro.sample("effect", dist.Normal(level, 1.0))
    with numpyro.plate("seen", len(seen), subsample_size=5) as index:
        numpyro.sample("y", dist.Normal(effect[GROUP[index]], 1.0), obs=seen[index])


def long_in_batches(seen):
    """A table of all observations, with the latents of some rows."""
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", NUM_ROWS, subsample_size=4):
        effect = numpyro.sample("effect", dist.Normal(level, 1.0))
    with numpyro.plate("seen", len(seen)):
        numpyro.sample("y", dist.Normal(effect[GROUP], 1.0), obs=seen)


def nested(seen):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("g", len(seen), dim=-2):
        a = numpyro.sample("a", dist.Normal(level, 1.0))
        with numpyro.plate("h", seen.shape[1], dim=-1):
            b = numpyro.sample("b", dist.Normal(a, 1.0))
            numpyro.sample("y", dist.Normal(b, SIGMA), obs=seen)


@pytest.mark.parametrize(
    ("model", "amortize", "message"),
    [
        (dense, "groups", r"amortize: expected plates of the model \['rows', 'seen'\].*'groups'"),
        (dense, "seen", r"amortize: expected plates.*that have latents in them; got 'seen'"),
        (
            nested,
            ("g", "h"),
            r"amortize: expected.*of their own; got 'h', whose latents \['b'\] belong to 'g' "
            r"already.*Say amortize='g'\n",
        ),
        (walk, "rows", r"amortize: expected rows of 'rows' that are independent.*depend on each"),
        (crossed, ("rows", "columns"), r"amortize: expected rows of 'rows' that are independent"),
        (discrete, "rows", r"amortize: expected a model without discrete latents; got \['kind'\]"),
        (nothing_shared, "rows", r"amortize: expected latents outside of the amortized plates"),
        (
            long_in_batches,
            "rows",
            r"amortize: expected.*'rows' to be inside.*\['y'\] outside. Give",
        ),
        (observations_drawn, "rows", r"amortize: expected all data of a row.*\['seen'\]"),
    ],
)
@pytest.mark.thorough
def test_what_cannot_be_amortized_is_an_error(model, amortize, message):
    long = dict.fromkeys([observations_drawn, long_in_batches], SEEN.ravel())
    flat = long | dict.fromkeys([dense, crossed, nested], SEEN)
    seen = flat.get(model, SEEN[:, 0])
    guide = AutoImplicit(model, amortize=amortize, warm_start=False)
    with pytest.raises(ValueError, match=message):
        guide.set_up(KEY, seen)


def test_settings():
    with pytest.raises(TypeError, match=r"amortize: expected the name of a plate or a sequence"):
        AutoImplicit(dense, amortize=3)
    with pytest.raises(ValueError, match=r"amortize: expected every plate once; got \['rows'"):
        AutoImplicit(dense, amortize=["rows", "rows"])
    assert AutoImplicit(dense, amortize=["rows"]).amortize == ("rows",)
    with pytest.raises(ValueError, match=r"Say amortize='rows'"):
        AutoImplicit(dense, warm_start=False).set_up(KEY, SEEN, 4)


@pytest.mark.slow
def test_an_expansion_of_all_rows_takes_their_noise_out_of_minibatches(fitted):
    """The particles are narrow, so that little noise is left; parameters of rows go with it."""
    guide, svi, _, params = fitted
    narrow = {**params, "auto_scale": jnp.full(2, 0.01)}

    changed = {**narrow, "auto_rows_layers": params["auto_rows_layers"] + 0.05}
    program = objective_program(changed, dense, guide, (SEEN, 4), {})
    layout = inspect_program(KEY, program)

    @quick_jit
    def densities(keys, params):
        control_variate = svi.loss.expand(KEY, params, dense, guide, SEEN, 4, num_steps=100)

        def means(control_variate, params):
            here = program._replace(control_variate=control_variate, params=params)
            draws = jax.vmap(lambda key: evaluate_particles(key, here, layout, 4, 4)[0])(keys)
            return jnp.mean(draws.log_density, axis=1)

        # One program at both sets of parameters.
        both = jax.tree.map(lambda *leaves: jnp.stack(leaves), narrow, changed)
        exact, expanded = lax.map(lambda params: means(control_variate, params), both)
        return control_variate.params, exact, means(None, changed), expanded

    kept, exact, plain, expanded = densities(random.split(KEY, 100), narrow)
    np.testing.assert_array_equal(kept["auto_rows_layers"], params["auto_rows_layers"])
    # Where the guide of the rows is their posterior, no noise of rows or of draws is left.
    assert exact.std() < 0.1 * plain.std()
    error = (plain.var() / 100 + expanded.var() / 100) ** 0.5
    assert abs(expanded.mean() - plain.mean()) < 4 * error
