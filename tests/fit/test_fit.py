"""``fit`` from end to end: where it stops, what it returns, how it goes on when interrupted."""

import contextlib
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO

from numpyro_kscore import AutoImplicit, Implicit, ImplicitELBO, fit
from numpyro_kscore._fit import last_look, loop
from numpyro_kscore._fit.checkpoint import save_checkpoint
from numpyro_kscore._fit.fit_options import FitOptions
from numpyro_kscore._fit.loop import Bar
from numpyro_kscore._fit.progress import Look, Progress, Rule
from numpyro_kscore._fit.svi import initial_state, parameter_slots
from support.doubles import GaussianScore
from support.fits import DATA, KEY, MEAN, QUICK, SD, guide, make_svi, model, quiet_fit


@pytest.fixture(scope="module")
def whole():
    """One uninterrupted fit, for several tests to look at."""
    return fit(make_svi(), KEY, DATA, **QUICK)


def same(a, b):
    """Assert that two results are equal, to the last bit."""

    def bits(x):
        typed = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(random.key_data(x) if typed else x)

    left, right = (jax.tree.map(bits, (r.params, r.state, r.losses)) for r in (a, b))
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)
    assert repr(a.info) == repr(b.info)


@pytest.mark.thorough
def test_nothing_piles_up_over_the_chunks():
    """No array of a chunk outlives it, its losses included, which are kept."""
    alive = []

    def callback(step, state, metrics):
        alive.append(len(jax.live_arrays()))

    quiet_fit(make_svi(), KEY, DATA, callback=callback, **{**QUICK, "patience": 600, "tol": 1e-9})
    assert len(alive) == 30
    # The best state is a second one where it is not the last, and so may come and go.
    one_state = len(jax.tree.leaves(make_svi().init(KEY, DATA)))
    assert max(alive[10:]) <= min(alive[:10]) + one_state


@pytest.mark.thorough
def test_a_chunk_moves_nothing_between_host_and_device(monkeypatch):
    """Steps and look are one program on the device; its step sizes are sent before."""
    take_chunks, count = loop.run_chunks, 0

    def run_chunks(take_chunk, *args):
        def guarded(*given):
            nonlocal count
            count += 1
            if count == 1:  # constants of the program are moved when it is compiled
                return take_chunk(*given)
            with jax.transfer_guard("disallow"):
                return jax.block_until_ready(take_chunk(*given))

        return take_chunks(guarded, *args)

    monkeypatch.setattr("numpyro_kscore._fit.fit.run_chunks", run_chunks)
    quiet_fit(make_svi(), KEY, DATA, **QUICK)
    assert count > 1


def test_fit_stops_early_at_the_posterior(whole):
    info = whole.info
    assert info.converged
    assert info.steps < QUICK["max_steps"]
    assert info.steps == len(whole.losses) == info.trace_steps[-1]
    assert info.skipped == info.recoveries == 0
    # 8 particles a step, averaged by the settling: over 16 keys the root mean square error is .055
    # standard deviations for means and .04 for log standard deviations.
    np.testing.assert_allclose(whole.params["loc"], MEAN, atol=3 * 0.055 * SD)
    np.testing.assert_allclose(whole.params["sd"], SD, rtol=3 * 0.04)
    np.testing.assert_array_less(info.discrepancy[-1], 5 * info.discrepancy_error[-1])
    assert info.discrepancy[0] > 5 * info.discrepancy_error[0]
    info.raise_if_failed()


@pytest.mark.thorough
def test_old_style_keys_are_taken(whole):
    """Most NumPyro programs have keys that are arrays of words."""
    result = fit(make_svi(), random.PRNGKey(0), DATA, **QUICK)
    np.testing.assert_array_equal(result.losses, whole.losses)
    assert repr(result.info) == repr(whole.info)


def test_the_state_holds_the_parameters_and_goes_on(whole):
    svi = make_svi()
    result = quiet_fit(svi, KEY, DATA, init_state=whole.state, **{**QUICK, "max_steps": 20})
    # Both are off by .055 standard deviations, and at the start by 1.8.
    np.testing.assert_allclose(result.params["loc"], whole.params["loc"], atol=3 * 0.08 * SD)
    held = svi.get_params(whole.state)
    jax.tree.map(np.testing.assert_array_equal, held, whole.params)


def test_the_search_takes_the_steps_of_svi_run(whole):
    """Until the step size falls, and up to rounding, since the compiled program is another."""
    plain = make_svi().run(KEY, 60, DATA, progress_bar=False, stable_update=True)
    np.testing.assert_allclose(whole.losses[:60], plain.losses, rtol=1e-5)


def test_results_can_be_pickled(whole):
    restored = pickle.loads(pickle.dumps(whole))
    same(restored, whole)
    assert restored.info.reason == whole.info.reason
    assert type(restored) is type(whole)


def interrupt_after(monkeypatch, count):
    """Interrupt from the keyboard right after this number of checkpoints."""
    calls = []

    def save(*args):
        save_checkpoint(*args)
        calls.append(None)
        if len(calls) == count:
            raise KeyboardInterrupt

    monkeypatch.setattr(loop, "save_checkpoint", save)


def test_an_interrupted_fit_goes_on_to_the_last_bit(monkeypatch, tmp_path, whole):
    path = tmp_path / "fit.npz"
    chunks = whole.info.steps // QUICK["chunk_size"]
    stops = [1, chunks // 2 + 1, chunks - 1]  # the first chunk, after the search, before the last
    done = 0
    for stop in stops:
        interrupt_after(monkeypatch, stop - done)
        partial = fit(make_svi(), KEY, DATA, checkpoint=path, **QUICK)
        assert partial.info.reason == f"interrupted after {20 * stop} steps"
        np.testing.assert_array_equal(partial.losses, whole.losses[: 20 * stop])
        done = stop
    monkeypatch.setattr(loop, "save_checkpoint", save_checkpoint)
    same(fit(make_svi(), KEY, DATA, checkpoint=path, **QUICK), whole)
    # A fit that has ended takes no further step.
    monkeypatch.setattr(loop, "save_checkpoint", None)
    same(fit(make_svi(), KEY, DATA, checkpoint=path, **QUICK), whole)
    assert [p.name for p in tmp_path.iterdir()] == ["fit.npz"]
    with np.load(path, allow_pickle=False) as kept:
        assert json.loads(kept["header"].tobytes())["record"]["progress"]["phase"] == "done"


def test_a_fit_that_is_out_of_time_goes_on_from_its_checkpoint(tmp_path, whole):
    """One chunk is taken in any case."""
    path = tmp_path / "fit.npz"
    with pytest.warns(UserWarning, match="out of time after 20 steps"):
        short = fit(make_svi(), KEY, DATA, max_seconds=1e-6, checkpoint=path, **QUICK)
    assert (short.info.steps, short.info.cause, short.info.converged) == (20, "time", False)
    same(fit(make_svi(), KEY, DATA, max_seconds=1e6, checkpoint=path, **QUICK), whole)
    with pytest.raises(ValueError, match="max_seconds: expected"):
        fit(make_svi(), KEY, DATA, max_seconds=0, **QUICK)


@pytest.mark.thorough
def test_minibatches_go_on_to_the_last_bit(monkeypatch, tmp_path):
    """The fit stops after its third chunk, whose expansion was made after the second."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(300, 2)), jnp.float32)
    path, settings = tmp_path / "fit.npz", {**QUICK, "max_steps": 100}

    def tall(batch):
        weights = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        with numpyro.plate("rows", len(x), subsample_size=batch) as rows:
            numpyro.sample("y", dist.Bernoulli(logits=x[rows] @ weights), obs=jnp.ones(batch))

    def take(**kwargs):
        svi = SVI(tall, guide_of_batch, optax.adam(5e-2), ImplicitELBO(16))
        return quiet_fit(svi, KEY, 20, **settings, **kwargs)

    def guide_of_batch(batch):
        guide(None)

    uninterrupted = take()
    interrupt_after(monkeypatch, 3)
    assert take(checkpoint=path).info.steps == 60
    monkeypatch.setattr(loop, "save_checkpoint", save_checkpoint)
    same(take(checkpoint=path), uninterrupted)
    # Moments are not known.
    assert np.isnan(uninterrupted.info.trace[-1].shift)


def test_all_chunks_are_one_program(monkeypatch):
    runs = []

    def counted(data):
        runs.append(None)
        return model(data)

    result = quiet_fit(make_svi(model=counted), KEY, DATA, criterion="loss", **QUICK)
    assert len(result.info.trace) > 10
    assert len(runs) == 4  # to look for data, to initialize, to count latents, and to compile


class SeenError(Exception):
    """Ends a fit at what a test wants to see of it."""


def rule_of(monkeypatch, *args, **kwargs):
    """The stopping rule of a fit, which ends there."""

    def see(*settings, **more):
        raise SeenError(Rule(*settings, **more))

    with monkeypatch.context() as patch:
        patch.setattr("numpyro_kscore._fit.fit_options.Rule", see)
        with pytest.raises(SeenError) as caught:
            fit(*args, **kwargs)
    return caught.value.args[0]


@pytest.mark.parametrize("criterion", ["stein", "loss"])
def test_the_tolerance_of_the_loss_grows_with_the_latents(monkeypatch, criterion):
    """It is ½ √d tol² nats for either criterion."""
    rule = rule_of(monkeypatch, make_svi(), KEY, DATA, criterion=criterion, tol=0.2)
    assert rule.least_loss == pytest.approx(0.5 * 2**0.5 * 0.2**2)


@pytest.mark.parametrize(
    ("num_latents", "batch", "is_known"), [(4, None, True), (3, None, False), (4, 1, False)]
)
@pytest.mark.thorough
def test_the_start_is_looked_at_with_local_scores_and_all_rows(
    monkeypatch, num_latents, batch, is_known
):
    def rows(y):
        x = numpyro.sample("x", dist.Normal(jnp.zeros(num_latents), 1.0).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch) as index:
            numpyro.sample("y", dist.Normal(x.sum(), 1.0), obs=y[index])

    def see(take_chunk, first_looks, *rest):
        raise SeenError(len(first_looks))

    monkeypatch.setattr("numpyro_kscore._fit.fit.run_chunks", see)
    svi = SVI(rows, AutoImplicit(rows, warm_start=False), optax.adam(1e-2), ImplicitELBO(16))
    with pytest.raises(SeenError) as caught:
        fit(svi, KEY, DATA, progress_bar=False)
    assert caught.value.args[0] == is_known


def test_double_precision(x64):
    quick = {**QUICK, "max_steps": 100, "criterion": "loss"}
    result = quiet_fit(make_svi(), KEY, DATA.astype(float), **quick)
    assert result.params["loc"].dtype == result.losses.dtype == jnp.float64
    assert np.all(np.isfinite(result.losses))


@pytest.mark.parametrize("fails", [False, True])
def test_implicit_elbo(monkeypatch, fails):
    """Noise with a mean and sd, and the score of a Gaussian for it, which compiles quickly.

    Whatever fails in the last look, the fit is done.
    """
    if fails:
        monkeypatch.setattr(last_look, "move_along_rays", lambda *args: 1 / 0)

    def implicit_guide(data):
        loc = numpyro.param("loc", jnp.zeros(1))
        sd = numpyro.param("sd", jnp.full(1, 0.1), constraint=constraints.softplus_positive)
        normal = dist.Normal(jnp.zeros(1), 1.0).to_event(1)
        noise = numpyro.sample("noise", normal, infer={"is_auxiliary": True})
        numpyro.sample("z", Implicit(loc + sd * noise, 1))

    elbo = ImplicitELBO(16, estimator=GaussianScore(), debias=None)
    svi = SVI(model, implicit_guide, optax.adam(5e-2), elbo)
    warned = pytest.warns(UserWarning, match="beyond the guide's draws could not be computed")
    with warned if fails else contextlib.nullcontext():
        result = fit(svi, KEY, DATA[:1], **QUICK)
    assert result.info.converged
    np.testing.assert_allclose(result.params["loc"], MEAN[:1], atol=0.1 * SD)
    np.testing.assert_allclose(result.params["sd"], SD, rtol=0.1)


def test_a_fit_that_is_cut_short_says_so():
    with pytest.warns(UserWarning, match="not converged: still improving.*Try a larger max_steps"):
        result = fit(make_svi(1e-3), KEY, DATA, criterion="loss", **QUICK)
    assert not result.info.converged
    with pytest.raises(FloatingPointError, match="expected convergence; got none"):
        result.info.raise_if_failed()


def test_the_progress_bar_shows_loss_and_discrepancy(capsys):
    quiet_fit(make_svi(), KEY, DATA, **{**QUICK, "max_steps": 40, "progress_bar": True})
    shown = capsys.readouterr().err
    assert shown.index("finding a start") < shown.index("compiling") < shown.index("40/40")
    assert "loss" in shown
    assert "discrepancy²" in shown


def test_the_bar_of_a_resumed_fit_starts_where_it_was(capsys):
    rule = Rule(chunk_size=20, num_chunks=30, tol=0.1, patience=3, dim=2)
    look = Look(0.1, 0.1, 1.0, 0.1, -1.0, 0.1, 0.0, 0)
    with Bar(FitOptions(605, None, 0.1, 3, 20, "stein", None, True, None)) as bar:
        bar.begin(Progress(looks=(look,) * 6), rule)
    assert "120/600" in capsys.readouterr().err


@pytest.mark.parametrize(
    "optimizer", [numpyro.optim.ClippedAdam(1e-2), optax.chain(optax.clip(1.0), optax.adam(0.1))]
)
def test_parameters_are_found_in_any_optimizer(optimizer):
    svi = SVI(model, guide, optimizer, Trace_ELBO())
    state = svi.init(KEY, DATA)
    leaves = jax.tree.leaves(state.optim_state)
    wanted = jax.tree.leaves(svi.optim.get_params(state.optim_state))
    slots = parameter_slots(svi, state.optim_state)
    for slot, value in zip(slots, wanted, strict=True):
        assert leaves[slot] is value


@pytest.mark.thorough
def test_constraints_that_the_model_computes():
    """The start of an automatic guide is compiled, and must leave values in the SVI."""

    def bounded(data):
        low = 2 * jnp.min(data)
        bound = constraints.greater_than(low)
        numpyro.param("shift", low + 3.0, constraint=bound)
        model(data)

    svi = SVI(bounded, AutoImplicit(bounded), optax.adam(1e-2), ImplicitELBO(8))
    result = quiet_fit(svi, KEY, DATA, **{**QUICK, "max_steps": 20})
    np.testing.assert_allclose(result.params["shift"], 1.0, rtol=1e-5)


@pytest.mark.thorough
def test_the_start_is_that_of_svi_init():
    def made():
        return SVI(model, AutoImplicit(model), optax.adam(1e-2), ImplicitELBO(8))

    ours, theirs = made(), made()
    compiled, _ = initial_state(ours, KEY, ((DATA,), {}))
    plain = theirs.init(KEY, DATA)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        ours.get_params(compiled),
        theirs.get_params(plain),
    )
    assert jnp.all(compiled.rng_key == plain.rng_key)
