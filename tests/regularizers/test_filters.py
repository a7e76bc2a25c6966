"""Every regularizer as a function on the spectrum: values, slopes, paths of selections."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore.regularizers import (
    LandweberIteration,
    NuMethod,
    SpectralCutoff,
    Tikhonov,
    TruncatedTikhonov,
)
from support import oracle
from support.compiling import quick_jit

EPS = np.finfo(np.float32).eps
evaluate = quick_jit(lambda regularizer, sigma: regularizer.evaluate(sigma))


# ------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "lam: expected a positive finite number; got 0.0", lambda: Tikhonov(0.0)),
        (ValueError, "lam: expected a positive.*; got -0.001", lambda: Tikhonov(-1e-3)),
        (ValueError, "lam: expected a positive.*; got 0.0", lambda: TruncatedTikhonov(0.0)),
        (ValueError, "lam: expected a non-negative.*got -1.0", lambda: SpectralCutoff(lam=-1.0)),
        (ValueError, r"fraction: expected.*\(0, 1\]; got 1.5", lambda:
        SpectralCutoff(fraction=1.5)), (ValueError, "fraction: expected a positive.*; got 0",
        lambda: SpectralCutoff(fraction=0)), (ValueError, "one of lam and fraction; got both",
        lambda: SpectralCutoff(0.1, 0.5)), (ValueError, "one of lam and fraction; got neither",
        SpectralCutoff), (ValueError, "num_steps: expected.*; got 0", lambda:
        LandweberIteration(0)), (ValueError, "step_size: expected a positive.*; got -1.0", lambda:
        LandweberIteration(10, -1.0)), (ValueError, "num_steps: expected.*; got 0", lambda:
        NuMethod(0)), (ValueError, "nu: expected a positive.*; got 0.0", lambda: NuMethod(10,
        nu=0.0)), (TypeError, "num_steps: expected an integer; got 10.0", lambda: NuMethod(10.0)),
    ],
)  # fmt: skip
def test_impossible_filters_are_refused(error, message, call):
    with pytest.raises(error, match=f"(?s){message}"):
        call()


def test_the_ends_of_what_is_allowed():
    assert SpectralCutoff(fraction=1.0).fraction == 1.0
    assert SpectralCutoff(lam=0.0).lam == 0.0
    assert Tikhonov().lam == TruncatedTikhonov().lam == 1e-3
    assert LandweberIteration().num_steps == NuMethod().num_steps == 100
    assert LandweberIteration().step_size == NuMethod().nu == 1.0


# ----------------------------------------------------------------------- automatic choices


def test_what_an_automatic_choice_tries():
    """λ halves from 16 times the bound, or covers seven decades without a bound."""
    halving = 16 * 0.5 ** np.arange(16)
    decades = 10.0 ** (-np.arange(15) / 2)
    for bound, lams in ((0.1, 0.1 * halving), (1.0, halving), (None, decades)):
        tried = [member.strength() for member in Tikhonov("auto").path(bound)]
        np.testing.assert_allclose(tried, lams, rtol=1e-12)
        # t steps of the ν-method act like λ = t⁻², of Landweber like 1/t; none below one step.
        for family, steps in (
            (NuMethod("auto"), np.minimum(lams**-0.5, 512)),
            (LandweberIteration("auto"), 1 / lams),
        ):
            expected = sorted({max(1, round(t)) for t in steps})
            assert [member.strength() for member in family.path(bound)] == expected
    # Options other than the strength stay.
    assert {member.nu for member in NuMethod("auto", 2.0).path(0.1)} == {2.0}


def test_fixed_strengths_are_their_own_path():
    for regularizer, strength, bound, is_smooth in (
        (Tikhonov(0.3), 0.3, None, True),
        (NuMethod(7), 7, 1.0, True),
        (LandweberIteration(7, 0.5), 7, 2.0, True),
        (TruncatedTikhonov(0.3), np.nan, None, False),
        (SpectralCutoff(lam=0.3), np.nan, None, False),
    ):
        assert regularizer.path(0.1) == (regularizer,)
        assert not regularizer.is_auto
        np.testing.assert_equal(regularizer.strength(), strength)
        assert regularizer.spectral_bound == bound
        assert regularizer.is_smooth == is_smooth
    assert TruncatedTikhonov(0.3).on_range() == Tikhonov(0.3)
    assert SpectralCutoff(lam=0.3).on_range() == SpectralCutoff(lam=0.3)


def test_dimensions_of_krylov_spaces():
    """It grows with the steps, up to what the polynomial's degree needs and to 32."""
    assert [NuMethod(t).krylov_steps(None) for t in (1, 2, 20, 45, 500)] == [1, 2, 11, 21, 32]
    assert NuMethod(45).krylov_steps(1.0) == NuMethod(45).krylov_steps(7.0) == 21
    # A polynomial of degree t on [0, b] is like one of degree t sqrt(b) on [0, 1].
    assert NuMethod(40).krylov_steps(0.25) == NuMethod(20).krylov_steps(None)
    for family in (Tikhonov, NuMethod, LandweberIteration):
        assert family("auto").krylov_steps(0.1) == 20
    for fixed in (Tikhonov(0.1), LandweberIteration(100), TruncatedTikhonov(0.1)):
        assert fixed.krylov_steps(0.1) == 32


# ----------------------------------------------------------------------------- values, slopes


@pytest.mark.parametrize(
    ("regularizer", "reference"),
    [
        (Tikhonov(1e-3), oracle.tikhonov(1e-3)),
        (TruncatedTikhonov(1e-3), oracle.truncated_tikhonov(1e-3)),
        (SpectralCutoff(lam=0.05), oracle.spectral_cutoff(0.05)),
        (LandweberIteration(100, 0.9), oracle.landweber(100, 0.9)),
        (LandweberIteration(3), oracle.landweber(3)),
        (LandweberIteration(2, 0.5), oracle.landweber(2, 0.5)),
        (NuMethod(100), oracle.nu_method(100)),
        (NuMethod(100, 0.5), oracle.nu_method(100, 0.5)),
        (NuMethod(1), oracle.nu_method(1)),
    ],
    ids=lambda value: "" if isinstance(value, oracle.Filter) else str(value),
)
def test_filters_equal_the_reference(regularizer, reference):
    """Eigenvalues reach far below rounding, where g - g(0) would cancel, and zero."""
    for enabled, tolerance in ((True, 1e-10), (False, 2e-5)):
        # Which eigenvalues count as zero depends on the largest.
        smallest = (-12 if enabled else -4) if isinstance(regularizer, TruncatedTikhonov) else -18
        sigma = np.concatenate([[0.0], np.logspace(smallest, 0, 73), [0.03, 0.3, 0.999]])
        with jax.enable_x64(enabled):
            value = jax.device_get(evaluate(regularizer, jnp.asarray(sigma)))
            sigma = np.asarray(jnp.asarray(sigma), np.float64)
        g, r = reference.g(sigma), reference.r(sigma)
        # Polynomials change sign: their errors count against |g| <= min(g(0), 1/sigma) and
        # |r| <= max(|r(0)|, g(0)/sigma), the most that filters of their kind reach.
        inverse = np.divide(1.0, sigma, out=np.full(len(sigma), 1e30), where=sigma > 0)
        g_bound = np.maximum(np.abs(g), np.minimum(reference.g0, inverse))
        r_bound = np.maximum(np.abs(r), np.minimum(abs(r[0]), reference.g0 * inverse))
        assert np.all(np.abs(value.g - g) <= tolerance * g_bound)
        assert np.all(np.abs(value.r - r) <= tolerance * r_bound)
        assert float(value.g0) == pytest.approx(reference.g0, rel=tolerance)


@pytest.mark.parametrize(
    ("regularizer", "reference"),
    [
        *((NuMethod(t), oracle.nu_method(t)) for t in (1, 2, 30)),
        *((LandweberIteration(t), oracle.landweber(t)) for t in (1, 2, 30)),
        (SpectralCutoff(lam=0.05), oracle.spectral_cutoff(0.05)),
    ],
    ids=lambda value: "" if isinstance(value, oracle.Filter) else str(value),
)
def test_slopes_are_those_of_the_filter(regularizer, reference, x64):
    """Slopes exist at both ends too, where arc cosines and the logarithm of 1 - σ have none."""
    sigma = np.array([0.0, 1e-3, 0.3, 1.0])

    @quick_jit
    def slopes(sigma):
        # Reverse mode: there a branch that is not taken can spoil one that is.
        value = lambda s, name: jnp.sum(getattr(regularizer.evaluate(s), name))  # noqa: E731
        return {name: jax.grad(value)(sigma, name) for name in ("g", "r")}

    # The filters continue beyond both ends, so that central differences exist there.
    h = 1e-5
    for name, found in slopes(jnp.asarray(sigma)).items():
        function = getattr(reference, name)
        expected = (function(sigma + h) - function(sigma - h)) / (2 * h)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_landweber_beyond_its_bound_is_finite():
    """Rounding may leave eigenvalues that solvers rescale to the bound just above it."""
    found = LandweberIteration(20).evaluate(jnp.asarray([1.0 + 2 * EPS], jnp.float32))
    np.testing.assert_allclose(found.g, 1.0, rtol=1e-6)


@pytest.mark.parametrize("make", [lambda: TruncatedTikhonov(0.5), lambda: SpectralCutoff(lam=0.0)])
def test_eigenvalues_below_rounding_count_as_zero(make):
    """``k eps max(σ)``: two of four are above it, the others below or zero."""
    sigma = np.array([2.0, 2 * 4 * EPS * 1.25, 2 * 4 * EPS * 0.8, 0.0], np.float32)
    found = make().evaluate(jnp.asarray(sigma))
    assert np.all(np.asarray(found.g[:2]) > 0)
    np.testing.assert_array_equal(found.g[2:], 0.0)
    np.testing.assert_array_equal(found.r[2:], 0.0)
    np.testing.assert_allclose(found.r[:2], found.g[:2] / sigma[:2], rtol=1e-6)
    assert float(found.g0) == 0.0
    # Every eigenvalue counts as zero where all are.
    for value in make().evaluate(jnp.zeros(2)):
        np.testing.assert_array_equal(value, 0.0)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"lam": 2.0}, [8, 4]),
        ({"lam": 1.9}, [8, 4, 2]),
        ({"fraction": 0.01}, [8]),
        ({"fraction": 0.75}, [8, 4]),
        ({"fraction": 0.76}, [8, 4, 2]),
        # Equal eigenvalues are kept together.
        ({"fraction": 0.9}, [8, 4, 2, 1, 1]),
        ({"fraction": 1.0}, [8, 4, 2, 1, 1]),
    ],
)
def test_which_eigenvalues_a_cutoff_keeps(options, kept):
    """Eigenvalues are 8, 4, 2, 1 and 1 in no order; their sum is 16."""
    sigma = np.array([1.0, 4.0, 8.0, 1.0, 2.0], np.float32)
    found = SpectralCutoff(**options).evaluate(jnp.asarray(sigma))
    expected = np.where(np.isin(sigma, kept), 1 / sigma, 0.0)
    np.testing.assert_allclose(found.g, expected, rtol=1e-6)
    np.testing.assert_allclose(found.r, expected / sigma, rtol=1e-6)


@pytest.mark.parametrize(
    "regularizer", [Tikhonov(0.3), LandweberIteration(7, 0.8), NuMethod(5), TruncatedTikhonov(0.3)]
)
def test_a_rescaled_filter_is_the_filter_of_a_rescaled_operator(regularizer, x64):
    """The filter is ``g(σ/ρ)/ρ``; its g(0) and r obey g = g(0) + σ r."""
    sigma, rho = np.array([0.2, 1.7, 3.0]), 4.0
    g, g0, r = regularizer.rescaled(jnp.asarray(sigma), jnp.asarray(rho))
    plain = regularizer.evaluate(jnp.asarray(sigma / rho))
    np.testing.assert_allclose(rho * g, plain.g, rtol=1e-12)
    np.testing.assert_allclose(rho * g0, plain.g0, rtol=1e-12)
    np.testing.assert_allclose(g, g0 + sigma * r, rtol=1e-12)


@pytest.mark.parametrize("family", [Tikhonov("auto"), NuMethod("auto")])
def test_all_members_of_a_path_at_once(family):
    sigma = jnp.asarray([0.0, 1e-3, 0.07])
    rows = quick_jit(lambda sigma: family.evaluate_path(sigma, 0.1))(sigma)
    members = family.path(0.1)
    assert rows.g.shape == rows.r.shape == (len(members), 3)
    for k in (0, 7, len(members) - 1):
        one = members[k].evaluate(sigma)
        np.testing.assert_allclose(rows.g[k], one.g, rtol=2e-5)
        np.testing.assert_allclose(rows.r[k], one.r, rtol=2e-4)
        np.testing.assert_allclose(rows.g0[k], one.g0, rtol=1e-6)
