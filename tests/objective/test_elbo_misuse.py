"""Guides and models that ``ImplicitELBO`` refuses, and objectives that refuse implicit guides."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoGuideList

from numpyro_kscore import AutoImplicit, Implicit, ImplicitELBO
from support.affine import FEW, KEY, affine_guide, draw_noise, standard_model
from support.doubles import GaussianScore


def first_loss(model, guide):
    return ImplicitELBO(FEW, estimator=GaussianScore()).loss(KEY, {}, model, guide)


def test_discrete_latents_alone_are_refused():
    def model():
        numpyro.sample("kind", dist.Bernoulli(0.5))

    with pytest.raises(ValueError, match="expected at least one continuous latent.*got none"):
        first_loss(model, model)


def test_latents_the_guide_lacks_are_named():
    def guide():
        draw_noise(1)

    with pytest.raises(ValueError, match=r"(?s)expected a sample site.*got none for \['z'\]"):
        first_loss(standard_model(), guide)


def test_deterministic_sites_are_no_draws():
    def guide():
        numpyro.deterministic("z", draw_noise(1))

    with pytest.raises(ValueError, match=r"(?s)expected.*got.*'z'.*use Implicit"):
        first_loss(standard_model(), guide)


def test_unmarked_noise_is_named():
    def guide():
        noise = numpyro.sample("noise", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        numpyro.sample("z", Implicit(noise, event_dim=1))

    with pytest.raises(ValueError, match=r"(?s)expected only.*got \['noise'\].*Mark.*is_auxiliary"):
        first_loss(standard_model(), guide)


def test_wrong_shapes_are_refused():
    def guide():
        numpyro.sample("z", Implicit(draw_noise(2), event_dim=1))

    with pytest.raises(ValueError, match=r"expected shape \(1,\) at site 'z'.*got \(2,\)"):
        first_loss(standard_model(), guide)


def test_unconstrained_values_of_a_wrong_shape_are_refused():
    """They would be taken for several copies of the latent, and give a wrong posterior."""

    def model():
        numpyro.sample("z", dist.Gamma(2.0, 1.0))

    def guide():
        noise = draw_noise(3)
        numpyro.sample("z", Implicit(jnp.exp(noise[0]), unconstrained=noise))

    with pytest.raises(ValueError, match=r"(?s)expected.*shape \(\).*got \(3,\)"):
        first_loss(model, guide)


def rows_model(size=10, subsample_size=3):
    with numpyro.plate("rows", size, subsample_size=subsample_size):
        numpyro.sample("z", dist.Normal(0.0, 1.0))


def test_subsampled_rows_with_noise_outside_the_plate_are_refused():
    """The entropy of rows that are not drawn is known only if rows are independent."""

    def guide():
        noise = draw_noise(3)
        with numpyro.plate("rows", 10, subsample_size=3):
            numpyro.sample("z", Implicit(noise))

    with pytest.raises(ValueError, match=r"(?s)expected.*own.*got 'z' in plate 'rows'.*3 of 10"):
        first_loss(rows_model, guide)


def test_plates_of_the_guide_are_those_of_the_model():
    def without_plate():
        numpyro.sample("z", dist.Normal(jnp.zeros(3), 1.0))

    def other_size():
        rows_model(size=20)

    def only_in_the_guide():
        numpyro.sample("z", dist.Normal(jnp.zeros(3), 1.0))

    with pytest.raises(ValueError, match=r"(?s)expected 'z' in plate 'rows'.*3 of 10.*outside"):
        first_loss(rows_model, without_plate)
    with pytest.raises(ValueError, match=r"(?s)expected 'z' in plate 'rows'.*3 of 10.*3 of 20"):
        first_loss(rows_model, other_size)
    with pytest.raises(ValueError, match=r"(?s)expected 'z' outside.*plate 'rows'.*3 of 10"):
        first_loss(only_in_the_guide, rows_model)


def test_global_sites_computed_from_drawn_rows_are_refused():
    def model():
        rows_model()
        numpyro.sample("g", dist.Normal(0.0, 1.0))

    def guide():
        with numpyro.plate("rows", 10, subsample_size=3):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("g", Implicit(jnp.sum(z) + draw_noise(1)[0]))

    with pytest.raises(ValueError, match=r"(?s)expected.*not to depend.*got \['g'\].*'z'.*'rows'"):
        first_loss(model, guide)


def test_explicit_sites_without_differentiable_draws_are_refused():
    def model():
        numpyro.sample("z", dist.VonMises(0.0, 1.0))

    with pytest.raises(ValueError, match=r"(?s)expected draws that are diff.*'z' from VonMises"):
        first_loss(model, model)


def test_models_without_latents_are_refused():
    def model():
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=1.0)

    with pytest.raises(ValueError, match=r"(?s)expected at least one continuous latent.*got none"):
        first_loss(model, lambda: None)


def constant_guide():
    numpyro.sample("z", dist.Delta(numpyro.param("z_value", jnp.zeros(1)), event_dim=1))


def constant_implicit_guide():
    numpyro.sample("z", Implicit(numpyro.param("z_value", jnp.zeros(1)), event_dim=1))


@pytest.mark.parametrize(
    "guide", [constant_guide, constant_implicit_guide, AutoDelta(standard_model())]
)
def test_guides_without_noise_are_refused(guide):
    """A point has no entropy: the fit would be the posterior's mode, without a warning."""
    svi = SVI(standard_model(), guide, optax.adam(1e-2), ImplicitELBO(FEW))
    state = svi.init(KEY)
    with pytest.raises(ValueError, match=r"(?s)expected.*got.*'z'"):
        svi.update(state)


def test_a_point_beside_an_implicit_guide_is_refused():
    """Draws on a line in the plane have no density there: the other site's fit would be wrong."""

    def model():
        numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("b", dist.Normal(0.0, 1.0))

    guide = AutoGuideList(model)
    guide.append(AutoImplicit(handlers.block(model, hide=["b"]), warm_start=False))
    guide.append(AutoDelta(handlers.block(model, hide=["a"]), prefix="point"))
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO(FEW, estimator=GaussianScore()))
    state = svi.init(KEY)
    with pytest.raises(ValueError, match=r"(?s)expected.*got.*'b'"):
        svi.update(state)


def test_scaled_guide_sites_are_refused():
    """A scale on a guide's site weights its entropy, which this objective does not do."""

    def guide():
        with handlers.scale(scale=0.1):
            affine_guide()()

    with pytest.raises(ValueError, match=r"(?s)expected.*got.*'z'.*scale"):
        first_loss(standard_model(), guide)


@pytest.mark.parametrize(
    "elbo",
    [Trace_ELBO(), TraceMeanField_ELBO(), TraceGraph_ELBO(), RenyiELBO(num_particles=2)],
    ids=lambda elbo: type(elbo).__name__,
)
def test_other_objectives_refuse_implicit_guides(elbo):
    svi = SVI(standard_model(), affine_guide(), optax.adam(1e-2), elbo)
    state = svi.init(KEY)
    with pytest.raises(NotImplementedError, match=r"(?s)expected.*got.*ImplicitELBO"):
        svi.update(state)
