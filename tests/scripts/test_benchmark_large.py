"""The large posteriors are what they say they are, and their fits are judged rightly."""

import json
import subprocess
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import log_density

from benchmarks.accuracy import large_models
from benchmarks.accuracy.large import LARGE, crossed, long_runs, series
from benchmarks.accuracy.large.long_runs import LongRun
from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.posteriors import POSTERIORS
from benchmarks.accuracy.rivals.linear_response import fit_linear_response
from benchmarks.accuracy.targets import Target

EMPTY = dict.fromkeys(large_models.COLUMNS, "")


def widened(target):
    real = jnp.floating
    return tuple(a.astype(float) if jnp.issubdtype(a.dtype, real) else a for a in target.args)


def values_of(model, args, seed, fixed):
    """Values of all sites that are not observed, at a random place near zero."""
    rng = np.random.default_rng(seed)

    def choose(site):
        if site["type"] != "sample" or site["is_observed"]:
            return None
        transform = biject_to(site["fn"].support)
        shape = transform.inverse_shape(site["fn"].shape())
        return fixed.get(site["name"], transform(jnp.asarray(0.3 * rng.normal(size=shape))))

    trace = handlers.trace(handlers.substitute(model, substitute_fn=choose)).get_trace(*args)
    kept = {"sample", "deterministic"}
    return {
        name: site["value"]
        for name, site in trace.items()
        if site["type"] in kept and not site.get("is_observed", False)
    }


def test_names_are_new():
    assert len(LARGE) == 14
    assert not set(LARGE) & set(POSTERIORS)


def check_coordinates(posterior):
    """Given scales the map is affine, so that the densities differ by a number."""
    args, target = widened(posterior.target), posterior.for_nuts().target
    model = target.nuts_model or target.model
    names = target.supports()

    @jax.jit
    def evaluate(sites):
        draws = target.from_nuts({name: value[None] for name, value in sites.items()})
        own = {name: draws[name][0] for name in names}
        other = {n: sites[n] for n in sites if n in ("white", "near", "z", *names)}
        density = log_density(model, args, {}, other)[0]
        return log_density(target.model, args, {}, own)[0], density, posterior.summarize(draws)

    first = values_of(model, args, 0, {})
    near = {"near": first["near"]} if "near" in first else {}
    found = [evaluate(sites) for sites in (first, values_of(model, args, 1, near))]
    assert all(np.all(np.isfinite(summary)) for *_, summary in found)
    assert found[0][2].shape[1] == posterior.num_scales + 50
    assert abs(found[0][0] - found[1][0]) > 0.01  # the places are different ones
    np.testing.assert_allclose(*(own - other for own, other, _ in found), atol=1e-6)


@pytest.mark.slow  # every model is compiled in two forms
@pytest.mark.parametrize("name", [n for n in LARGE if n not in ("trend", "crossed_5000")])
def test_coordinates_of_nuts_are_of_the_same_posterior(name, x64):
    check_coordinates(LARGE[name]())


@pytest.mark.thorough
def test_whitened_precision_is_the_identity(x64):
    """At the mode, in the coordinates of NUTS; and these are of the same posterior."""
    posterior = crossed.crossed("small", 50, 12, 400)
    check_coordinates(posterior)
    target, args = posterior.for_nuts().target, widened(posterior.target)

    def energy(white, near):
        return -log_density(target.nuts_model, args, {}, {"white": white, "near": near})[0]

    zeros = jnp.zeros(63), jnp.zeros(2)
    slope, precision = jax.jit(lambda *z: (jax.grad(energy)(*z), jax.hessian(energy, (0, 1))(*z)))(
        *zeros
    )
    np.testing.assert_allclose(slope, 0, atol=0.02)  # the search for the mode is not exact
    np.testing.assert_allclose(precision[0][0], np.eye(63), atol=1e-9)
    np.testing.assert_allclose(precision[0][1], 0, atol=1e-9)


@pytest.mark.thorough
def test_states_of_the_trend_are_drawn_given_the_rest(x64):
    """The moves given all else are Gaussian: density, means and covariance by linear algebra."""
    target, num_draws = series.trend(days=12).target, 4_000
    args = widened(target)
    known = {"level_scale": 0.3, "slope_scale": 0.2, "noise": 1.0, "weekday_scale": 0.8}
    rest = values_of(target.nuts_model, args, 0, {n: jnp.asarray(x) for n, x in known.items()})

    def joint(z):
        return log_density(target.model, args, {}, rest | {"level_z": z[:11], "slope_z": z[11:]})[0]

    @jax.jit
    def exact():
        zeros = jnp.zeros(22)
        precision = -jax.hessian(joint)(zeros)
        mean = jnp.linalg.solve(precision, jax.grad(joint)(zeros))
        return joint(mean), mean, jnp.linalg.inv(precision)

    @jax.jit
    def sampled():
        repeated = {name: jnp.broadcast_to(x, (num_draws, *x.shape)) for name, x in rest.items()}
        return target.from_nuts(repeated), log_density(target.nuts_model, args, {}, rest)[0]

    at_mean, mean, covariance = exact()
    draws, density = sampled()
    integral = at_mean + 11 * np.log(2 * np.pi) + np.linalg.slogdet(covariance)[1] / 2
    np.testing.assert_allclose(density, integral, rtol=1e-9)
    z = np.concatenate([draws["level_z"], draws["slope_z"]], 1)
    error = np.sqrt(np.diag(covariance) / num_draws)
    assert np.max(np.abs(z.mean(0) - mean) / error) < 4.5
    # An entry has a standard error of at most √(2 / 4000) = 0.022.
    np.testing.assert_allclose(np.cov(z.T), covariance, atol=0.1)


def reference_of(ess, num_effects=50):
    """Standard normal coordinates, two of them scales."""
    ones = np.ones(2 + num_effects)
    return LongRun(0 * ones, ones, ess * ones, ones, 2, 4, 10, 8.0, 20.0, 1e5)


def draws_with(means, sds):
    """Two draws of each coordinate, with exactly these moments."""
    return np.stack([means - sds, means + sds])


@pytest.mark.parametrize(
    ("where", "mean", "sd", "right"),
    [
        (slice(0), 0.0, 1.0, 1),
        # 2/√10000 = 0.02 is allowed besides, and exp(0.0141) of ratios.
        (0, 0.169, 1.0, 1),
        (0, 0.171, 1.0, 0),
        (1, 0.0, 0.9 / 1.014, 1),
        (1, 0.0, 0.9 / 1.015, 0),
        (1, 0.0, 1.1 * 1.014, 1),
        (1, 0.0, 1.1 * 1.015, 0),
        # Effects: the median of errors, and a tenth of the ratios.
        (slice(2, 26), 0.5, 1.0, 1),
        (slice(2, 28), 0.5, 1.0, 0),
        (slice(2, 7), 0.0, 0.5, 1),
        (slice(2, 8), 0.0, 1.2, 0),
    ],
)
def test_a_fit_is_right(where, mean, sd, right):
    means, sds = np.zeros(52), np.ones(52)
    means[where], sds[where] = mean, sd
    row = large_models.measure(draws_with(means, sds), reference_of(10_000))
    assert row["right"] == right
    if where in (0, 1):
        assert row["worst_scale"] == where
        assert row["scale_mean"] == pytest.approx(mean, abs=1e-4)
    if where == slice(2, 28):
        assert (row["effect_mean_median"], row["scale_mean"]) == (0.5, 0)


def test_draws_that_are_not_finite_are_wrong():
    row = large_models.measure(np.full((3, 52), np.nan), reference_of(1_000))
    assert row == {"right": 0, "error": "draws that are not finite"}


def test_seconds_of_nuts():
    """Warm-up of one of four chains, and of 20 s of draws the share for 400 of 1000."""
    assert reference_of(1_000).cpu_of_enough == pytest.approx(8 / 4 + 20 * 0.4)
    assert reference_of(1_000).is_trusted(1_000)
    assert not reference_of(999).is_trusted(1_000)


def test_moments_are_kept(monkeypatch, tmp_path):
    """With seven digits, and read again only by the same posterior and settings."""
    posterior = crossed.crossed("small", 5, 3, 20)
    run = reference_of(1_000)
    run.mean[:] = np.pi
    monkeypatch.setattr(long_runs, "_gather", lambda *_: run)
    monkeypatch.setattr(long_runs, "nuts_pieces", lambda *_: None)
    assert long_runs.draw_rival(posterior, long_runs.LONG, tmp_path, known=True) is None
    assert long_runs.draw_rival(posterior, long_runs.LONG, tmp_path) is run
    again = long_runs.draw_rival(posterior, long_runs.LONG, tmp_path, known=True)
    np.testing.assert_allclose(again.mean, np.pi, rtol=1e-6)
    assert again.describe() == run.describe()
    assert long_runs.draw_rival(posterior, long_runs.QUICK, tmp_path, known=True) is None


@pytest.mark.thorough
def test_linear_response_has_the_spreads_that_independent_gaussians_lack():
    """Two normal latents are correlated by .9: their spreads given each other are .44."""

    def model():
        x = numpyro.sample("x", dist.Normal(1.0, 1.0))
        numpyro.sample("y", dist.Normal(0.9 * x, 0.19**0.5))

    found = fit_linear_response(Posterior(Target("pair", model)), seed=0)
    assert found.converged
    # Thirty draws of noise have means and spreads with errors of 1/√30 and 1/√60.
    np.testing.assert_allclose(found.narrow_sd, 0.19**0.5, rtol=0.4)
    np.testing.assert_allclose(found.sd, 1.0, rtol=0.2)
    np.testing.assert_allclose(found.mean, [1.0, 0.9], atol=0.1)


def row_with(**values):
    said = {"steps": 9, "converged": 1, "doubt": "", "warned": "", "fit_cpu": 3.0, "nuts_cpu": 7.0}
    return EMPTY | {"target": "pupils", "seed": 0} | said | values


def test_report_counts_outcomes():
    rows = [
        row_with(right=1), row_with(right=0, seed=1), row_with(right=0, doubt="tail"),
        row_with(right=0, converged=0), row_with(), row_with(steps="", fit_cpu=""),
    ]  # fmt: skip
    kinds = ["right", "wrong and called good", *["wrong, says so"] * 2, "unknown", "no answer"]
    assert [large_models.classify(row) for row in rows] == kinds
    lines = list(large_models.report(rows))
    assert "wrong and called good: 1 of 6: pupils (1)" in lines
    assert lines[-1] == f"pupils: {', '.join(kinds)}; 3; 7.0 -"


def test_cells_that_do_not_answer(monkeypatch, tmp_path):
    given = {"memory": 1.0, "limit": 5.0, "quick": True, "linear_response": False}
    options = SimpleNamespace(cache=tmp_path, **given)
    bench = large_models.Bench(options)

    def late(command, **settings):
        raise subprocess.TimeoutExpired(command, settings["timeout"])

    def crashed(command, **settings):
        return SimpleNamespace(returncode=1, stderr="Traceback\nMemoryError: much\n")

    def answered(command, **settings):
        assert command[-4:] == ["--cell", "crossed_43", "3", "--quick"]
        return SimpleNamespace(returncode=0, stdout="words\n" + json.dumps({"steps": 80}))

    errors = []
    for run in (late, crashed, answered):
        monkeypatch.setattr(large_models.subprocess, "run", run)
        row = bench.compute("crossed_43", 3)
        errors.append(row["error"])
        assert row.keys() == EMPTY.keys()
        assert large_models.classify(row) == ("unknown" if run is answered else "no answer")
    assert errors == ["no answer in 5 s", "MemoryError: much", ""]
