"""``fit`` over a loader: it is about all data, and goes on to the last bit."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO

from numpyro_kscore import AutoImplicit, ImplicitELBO, fit
from numpyro_kscore._fit.expansion import make_expander
from numpyro_kscore._fit.svi import inspect_svi
from numpyro_kscore._model.joint import evaluate_particles
from numpyro_kscore._util import batches as batches_module
from numpyro_kscore._util.batches import Batches
from support.fits import DATA, KEY, QUICK, make_svi, quiet_fit

ROWS, BATCH = 2_000, 50
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 2)).astype(np.float32)
Y = (RNG.random(ROWS) < 1 / (1 + np.exp(-X @ [1.0, -0.5]))).astype(np.float32)
LOADER = [(X[k : k + BATCH], Y[k : k + BATCH]) for k in range(0, ROWS, BATCH)]
SHORT = {**QUICK, "max_steps": 100}


def model(x, y):
    weights = numpyro.sample("weights", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    with numpyro.plate("rows", ROWS, subsample_size=len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def scaled_model(x, y):
    weights = numpyro.sample("weights", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    with handlers.scale(scale=ROWS / len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights).to_event(1), obs=y)


def guide(x, y):
    loc = numpyro.param("loc", jnp.array([0.9, -0.4]))
    sd = numpyro.param("sd", jnp.full(2, 0.1), constraint=constraints.softplus_positive)
    numpyro.sample("weights", dist.Normal(loc, sd).to_event(1))


def plain_svi(model=model, guide=guide):
    return SVI(model, guide, optax.adam(1e-2), ImplicitELBO(16))


def derivatives(weights, x=X, y=Y):
    """Gradient and Hessian of the log posterior of rows that stand for all."""
    scale = ROWS / len(y)
    p = 1 / (1 + np.exp(-x @ weights))
    slope = scale * x.T.astype(float) @ (y - p) - weights
    return slope, -scale * (x * (p * (1 - p))[:, None]).T.astype(float) @ x - np.eye(2)


def same(a, b):
    """Assert that two results are equal, to the last bit."""
    kept = [jax.tree.leaves((r.params, r.losses, r.state.optim_state)) for r in (a, b)]
    for left, right in zip(*kept, strict=True):
        np.testing.assert_array_equal(left, right)
    assert repr(a.info) == repr(b.info)


@pytest.mark.thorough
def test_a_fit_is_at_the_posterior_of_all_data(monkeypatch):
    """The data are 2000 rows in batches of 50; the start looks closely at 200 to 400 of them."""
    monkeypatch.setattr(batches_module, "SAMPLE_ROWS", 200)
    runs = []

    def counted(x, y):
        runs.append(None)
        return model(x, y)

    svi = SVI(counted, AutoImplicit(counted), optax.adam(1e-2), ImplicitELBO(64))
    mode = np.zeros(2)
    for _ in range(8):
        slope, bend = derivatives(mode)
        mode = mode - np.linalg.solve(bend, slope)
    covariance = -np.linalg.inv(bend)
    sd = np.sqrt(np.diag(covariance))
    traced = []

    def callback(step, state, metrics):
        traced.append(len(runs))

    result = fit(svi, KEY, loader=lambda: iter(LOADER), callback=callback, progress_bar=False)
    assert result.info.converged
    # The posterior's skewness moves its mean by 2 % of a standard deviation from the mode.
    start = svi.guide.start.gaussian
    np.testing.assert_allclose(start.mean, mode, atol=0.1 * sd.min())
    np.testing.assert_allclose(start.factor @ start.factor.T / covariance, 1.0, atol=0.1)
    draws = svi.guide.sample_posterior(random.key(1), result.params, sample_shape=(4_000,))
    # Errors of the draws are .016; what is left of the fit's own noise is less than .05.
    np.testing.assert_allclose(draws["weights"].mean(0), mode, atol=0.15 * sd.min())
    np.testing.assert_allclose(draws["weights"].std(0) / sd, 1.0, atol=0.1)
    # The expansions after the first chunk are programs that are there already.
    assert traced[0] == traced[-1]


@pytest.mark.parametrize("of", [model, scaled_model])
@pytest.mark.thorough
def test_expansions_are_of_all_data(of):
    svi, batches = plain_svi(of), Batches(LOADER, (), {})
    given = batches.arguments(batches.first)
    state = svi.init(KEY, *given[0])
    inference = inspect_svi(svi, state, given, batches)
    control_variate = make_expander(inference, 1).expand(state)
    slope, bend = derivatives(np.asarray(control_variate.point, float))
    np.testing.assert_allclose(control_variate.of_all.slope, slope, rtol=1e-3, atol=1e-2)
    np.testing.assert_allclose(control_variate.of_all.curvature, bend, rtol=1e-4, atol=1e-2)


@pytest.mark.thorough
def test_static_arguments_of_the_svi_come_with_every_batch():
    def tempered(x, y, *, power):
        with handlers.scale(scale=power):
            model(x, y)

    def with_power(x, y, *, power):
        guide(x, y)

    svi = SVI(tempered, with_power, optax.adam(1e-2), ImplicitELBO(16), power=1.0)
    result = quiet_fit(svi, KEY, loader=LOADER, **SHORT)
    assert np.all(np.isfinite(result.info.discrepancy))


@pytest.mark.thorough
def test_groups_of_draws_have_batches_of_their_own():
    svi = plain_svi()
    state = svi.init(KEY, *LOADER[0])
    inference = inspect_svi(svi, state, (LOADER[0], {}))
    program, layout = inference.program, inference.layout._replace(row_counts=())
    stack = [jnp.stack(leaves) for leaves in zip(*LOADER[:2], strict=True)]

    def data(number):
        return tuple(leaf[number] for leaf in stack), {}

    found = jax.jit(lambda: evaluate_particles(KEY, program, layout, 4, 2, False, data)[0])()
    for k, (x, score) in enumerate(zip(found.samples, found.scores, strict=True)):
        slope, _ = derivatives(np.asarray(x, float), *LOADER[k // 2])
        np.testing.assert_allclose(score, slope, rtol=1e-3)


@pytest.fixture(scope="module")
def whole():
    return quiet_fit(plain_svi(), KEY, loader=LOADER, **SHORT)


@pytest.mark.thorough
def test_a_fit_that_was_killed_goes_on_to_the_last_bit(tmp_path, whole):
    """The loader breaks in the fourth chunk, which lives on an expansion made before the third."""
    path, reads = tmp_path / "fit.npz", []

    class Broken:
        def __len__(self):
            return len(LOADER)

        def __iter__(self):
            for item in LOADER:
                # Four passes of 40 batches come before: shapes, and expansions before the first,
                # second and third chunk; a chunk takes 36.
                if len(reads) == 160 + 3 * 36 + 10:
                    raise OSError("disk gone")
                reads.append(None)
                yield item

    with pytest.raises(OSError, match="disk gone"):
        fit(plain_svi(), KEY, loader=Broken(), checkpoint=path, **SHORT)
    done = []
    resumed = quiet_fit(
        plain_svi(),
        KEY,
        loader=LOADER,
        checkpoint=path,
        callback=lambda step, state, metrics: done.append(step),
        **SHORT,
    )
    assert done == [80, 100]
    same(resumed, whole)


@pytest.mark.thorough
def test_a_callback_sees_the_fit_and_ends_it(tmp_path, whole):
    seen, path = [], tmp_path / "fit.npz"

    def callback(step, state, metrics):
        seen.append((step, plain_svi().optim.get_params(state.optim_state), metrics))
        return step == 40

    result = fit(plain_svi(), KEY, loader=LOADER, checkpoint=path, callback=callback, **SHORT)
    assert (result.info.cause, result.info.converged) == ("callback", False)
    assert result.info.reason == "ended by its callback after 40 steps"
    assert [step for step, _, _ in seen] == [20, 40]
    metrics = seen[0][2]
    assert set(map(type, metrics.values())) == {float}
    assert metrics["loss"] == whole.info.trace[0].loss
    assert metrics["step_size"] == 1
    assert metrics["epoch"] == 0
    assert seen[1][2]["epoch"] == 1
    assert 0 < metrics["seconds"] < seen[1][2]["seconds"]
    # Moments are not judged in minibatches.
    assert np.isnan(metrics["shift"])
    same(quiet_fit(plain_svi(), KEY, loader=LOADER, checkpoint=path, **SHORT), whole)


@pytest.mark.thorough
def test_callbacks_do_without_a_loader():
    steps = []
    settings = {**SHORT, "criterion": "loss", "max_steps": 40}
    result = quiet_fit(
        make_svi(), KEY, DATA, callback=lambda step, state, metrics: steps.append(step), **settings
    )
    assert steps == [20, 40]
    assert result.info.cause == "budget"
    with pytest.raises(TypeError, match="callback: expected it to return None, or True.*got 3"):
        fit(make_svi(), KEY, DATA, callback=lambda *given: 3, **settings)
    with pytest.raises(TypeError, match=r"callback: expected a function of \(step, state, metr"):
        fit(make_svi(), KEY, DATA, callback=3, **settings)


def test_items_and_arguments_that_are_no_call_of_the_model():
    with pytest.raises(TypeError, match=r"loader: expected items that are arguments of the model"):
        fit(plain_svi(), KEY, Y, loader=LOADER)
    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        fit(plain_svi(), KEY, loader=[X])


def sized(y, size):
    z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", size, subsample_size=len(y)):
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


def shaped(y, size):
    sized(y, jnp.zeros(size).shape[0])


def of_sized(y, size):
    numpyro.sample("z", dist.Normal(numpyro.param("loc", 0.0), 1.0))


@pytest.mark.parametrize("of", [sized, shaped])
def test_sizes_in_batches_are_traced(of):
    with pytest.raises(TypeError, match=r"(?s)loader: .*its numbers, argument 1\. Give sizes"):
        fit(plain_svi(of, of_sized), KEY, loader=[(Y[:50], 400), (Y[50:100], 400)])


def test_other_traced_values_are_none_of_the_numbers_in_batches():
    def branched(x, y):
        if y.sum() > 0:
            model(x, y)

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        fit(plain_svi(branched), KEY, loader=LOADER)
    assert not any("loader:" in note for note in getattr(caught.value, "__notes__", ()))


@pytest.mark.thorough
def test_fixed_arguments_follow_those_of_a_batch(tmp_path):
    def scaled(y, width, *, center):
        z = numpyro.sample("z", dist.Normal(center, 1.0))
        with numpyro.plate("rows", 6, subsample_size=3):
            numpyro.sample("y", dist.Normal(z, width), obs=y)

    def of_scaled(y, width, *, center):
        numpyro.sample("z", dist.Normal(numpyro.param("loc", center), 0.5))

    loader = [np.full(3, 1.0), np.full(3, 2.0)]
    svi = SVI(scaled, of_scaled, optax.adam(0.1), Trace_ELBO(8))
    settings = {**QUICK, "criterion": "loss", "max_steps": 200, "checkpoint": tmp_path / "a.npz"}
    result = quiet_fit(svi, KEY, 2.0, loader=loader, center=1.0, **settings)
    # Precision 1 + 6/4; rows add 6 · .5 / 4. Of 200 steps the last come to rest.
    assert result.params["loc"] == pytest.approx(1 + 0.75 / 2.5, abs=0.1)
    with pytest.raises(ValueError, match="expected a fit with loader = False; got one with True"):
        fit(svi, KEY, loader[0], 2.0, center=1.0, **settings)


@pytest.mark.thorough
def test_numbers_that_are_not_finite_are_named_with_their_batch():
    broken = [(x.copy(), y) for x, y in LOADER]
    broken[3][0][2, 0] = np.nan
    with pytest.raises(ValueError, match=r"argument 0 of batch 3 \(the first is 0\)\. Leave such"):
        fit(plain_svi(), KEY, loader=broken, **SHORT)


@pytest.mark.thorough
def test_numbers_that_the_model_masks_do_no_harm():
    def with_gaps(x, y):
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        with numpyro.plate("rows", ROWS, subsample_size=len(y)):
            fn = dist.Bernoulli(logits=x @ weights).mask(jnp.isfinite(y))
            numpyro.sample("y", fn, obs=jnp.where(jnp.isfinite(y), y, 0.0))

    gaps = [(x, np.where(np.arange(BATCH) == 1, np.nan, y).astype(np.float32)) for x, y in LOADER]
    result = quiet_fit(plain_svi(with_gaps), KEY, loader=gaps, **SHORT)
    assert result.info.skipped == 0


def test_a_model_that_looks_up_rows_by_indices_of_all_data_is_refused():
    def indexed(x, y):
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        with numpyro.plate("rows", ROWS, subsample_size=len(y)) as index:
            numpyro.sample("y", dist.Bernoulli(logits=x[index] @ weights), obs=y[index])

    with pytest.raises(ValueError, match=r"indices of the plate \['rows'\].*obs=batch"):
        fit(plain_svi(indexed), KEY, loader=LOADER, **SHORT)
