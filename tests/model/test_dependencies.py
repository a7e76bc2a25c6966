"""The blocks of guides of every kind, against a description in words."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer.autoguide import AutoGuideList, AutoMultivariateNormal, AutoNormal

from numpyro_kscore import AutoImplicit, Implicit
from numpyro_kscore._model.blocks import find_blocks
from numpyro_kscore._model.dependencies import trace_guide
from numpyro_kscore._model.program import Program, inspect_program

AUXILIARY = {"is_auxiliary": True}
N = 4


def noise(name="noise", shape=()):
    return numpyro.sample(name, dist.Normal(jnp.zeros(shape), 1.0).to_event(), infer=AUXILIARY)


def normal(name, loc=0.0, **infer):
    return numpyro.sample(name, dist.Normal(loc, 1.0), infer=infer)


def implicit(name, value):
    return numpyro.sample(name, Implicit(value))


# One guide for each way noise can reach latents, and its blocks: sites | parents [plates], with a
# star where the density is unknown.


def explicit_sites():
    normal("a")
    normal("b")


def explicit_chain():
    normal("b", loc=2.0 * normal("a"))


def one_network():
    e = noise(shape=(2,))
    implicit("a", e[0] + e[1])
    implicit("b", e[0] * e[1])


def two_networks():
    implicit("a", noise("e1"))
    implicit("b", noise("e2"))


def semi_implicit():
    e = noise(shape=(2,))
    normal("a", loc=e[0])
    normal("b", loc=e[1])


def mixed_sites():
    normal("a")
    implicit("b", jnp.sin(noise()))


def implicit_given_explicit():
    implicit("b", normal("a") + jnp.exp(noise()))


def explicit_given_implicit():
    normal("b", loc=implicit("a", jnp.exp(noise())))


def implicit_chain():
    a = implicit("a", jnp.exp(noise("e1")))
    implicit("b", a * noise("e2"))


def chain_that_shares_noise():
    e = noise()
    a = implicit("a", jnp.exp(e))
    implicit("b", a + e * noise("e2"))


def noise_behind_noise():
    e1 = noise("e1")
    e2 = numpyro.sample("e2", dist.Normal(e1, 1.0), infer=AUXILIARY)
    implicit("a", e1)
    implicit("b", e2)


def noise_given_a_latent():
    a = normal("a")
    e = numpyro.sample("e", dist.Normal(a, 1.0), infer=AUXILIARY)
    implicit("b", e**3)


def bare_keys():
    implicit("a", random.normal(numpyro.prng_key()))
    implicit("b", random.normal(numpyro.prng_key()))


def circle_through_an_explicit_site():
    e = noise(shape=(2,))
    a = implicit("a", e[0])
    b = normal("b", loc=a)
    implicit("c", b + e[1] * e[0])


def overridden():
    normal("a", implicit=True)
    normal("b")


def transformed():
    e = noise()
    numpyro.sample("a", dist.TransformedDistribution(Implicit(e), dist.transforms.ExpTransform()))
    numpyro.sample("b", Implicit(noise("e2", (2,))[:1], event_dim=0).to_event(1))


def global_and_local():
    g = implicit("g", jnp.exp(noise("e")))
    with numpyro.plate("rows", N):
        e = numpyro.sample("e_rows", dist.Normal(), infer=AUXILIARY)
        implicit("z", g * e)


def global_noise_behind_local_sites():
    e = noise(shape=(N,))
    with numpyro.plate("rows", N):
        implicit("z", e)


def both_noises_behind_local_sites():
    e = noise()
    with numpyro.plate("rows", N):
        own = numpyro.sample("own", dist.Normal(), infer=AUXILIARY)
        implicit("z", e * own)


def nested_plates():
    g = normal("g")
    with numpyro.plate("groups", N, dim=-2):
        e = numpyro.sample("e_groups", dist.Normal(), infer=AUXILIARY)
        a = implicit("a", g + jnp.exp(e))
        with numpyro.plate("rows", 3, dim=-1):
            e = numpyro.sample("e_rows", dist.Normal(), infer=AUXILIARY)
            implicit("z", a * jnp.sin(e))


def noise_one_plate_up():
    with numpyro.plate("groups", N, dim=-2):
        e = numpyro.sample("e_groups", dist.Normal(), infer=AUXILIARY)
        implicit("a", jnp.exp(e))
        with numpyro.plate("rows", 3, dim=-1):
            own = numpyro.sample("e_rows", dist.Normal(), infer=AUXILIARY)
            implicit("z", e * own)


def semi_implicit_rows():
    with numpyro.plate("rows", N):
        e = numpyro.sample("e", dist.Normal(), infer=AUXILIARY)
        normal("z", loc=jnp.sin(e))


def rows_drawn_by_a_plate():
    with numpyro.plate("rows", 10, subsample_size=N) as index:
        e = numpyro.sample("e", dist.Normal(), infer=AUXILIARY)
        implicit("z", jnp.arange(10.0)[index] + e)


class Closure(dist.Distribution):
    """A distribution whose arrays are hidden from JAX."""

    support = dist.constraints.real

    def __init__(self, loc):
        self._loc = loc
        super().__init__(jnp.shape(loc), ())

    def sample(self, key, sample_shape=()):
        return self._loc + random.normal(key, sample_shape + self.batch_shape)


def hidden_in_a_closure():
    a = numpyro.sample("a", Closure(noise()))
    numpyro.sample("b", Closure(2.0 * a))


def names_of_arguments():
    a = implicit("fn", noise())
    normal("given", loc=a)


def a_parameter_that_starts_at_random():
    weight = numpyro.param("weight", lambda key: random.normal(key, (2,)))
    normal("a", loc=weight[0])
    implicit("b", weight[1] * noise())


ZOO = [
    (hidden_in_a_closure, "*a | []; b | a []"),
    (names_of_arguments, "*fn | []; given | fn []"),
    (a_parameter_that_starts_at_random, "a | []; *b | []"),
    (explicit_sites, "a | []; b | []"),
    (explicit_chain, "a | []; b | a []"),
    (one_network, "*a b | []"),
    (two_networks, "*a | []; *b | []"),
    (semi_implicit, "*a b | []"),
    (mixed_sites, "a | []; *b | []"),
    (implicit_given_explicit, "a | []; *b | a []"),
    (explicit_given_implicit, "*a | []; b | a []"),
    (implicit_chain, "*a | []; *b | a []"),
    (chain_that_shares_noise, "*a b | []"),
    (noise_behind_noise, "*a b | []"),
    (noise_given_a_latent, "a | []; *b | a []"),
    (bare_keys, "*a b | []"),
    (circle_through_an_explicit_site, "*a b c | []"),
    (overridden, "*a | []; b | []"),
    (transformed, "*a | []; *b | []"),
    (global_and_local, "*g | []; *z | g [rows]"),
    (global_noise_behind_local_sites, "*z | []"),
    (both_noises_behind_local_sites, "*z | []"),
    (nested_plates, "g | []; *a | g [groups]; *z | a [groups rows]"),
    (noise_one_plate_up, "*a z | [groups]"),
    (semi_implicit_rows, "*z | [rows]"),
    (rows_drawn_by_a_plate, "*z | [rows]"),
]


def described(block):
    star = "*" if block.is_implicit else ""
    parents = "".join(f"{name} " for name in block.parents)
    return f"{star}{' '.join(block.sites)} | {parents}[{' '.join(sorted(block.plates))}]"


@pytest.mark.parametrize(("guide", "expected"), ZOO, ids=[guide.__name__ for guide, _ in ZOO])
def test_blocks_of_a_guide(guide, expected):
    blocks = find_blocks(trace_guide(guide, (), {}, {}, random.key(0)))
    assert sorted(described(block) for block in blocks) == sorted(expected.split("; "))
    # Parents come first.
    seen = set()
    for block in blocks:
        assert set(block.parents) <= seen
        seen |= set(block.sites)


def test_blocks_do_not_depend_on_the_jit_or_on_data():
    def guide(scale):
        implicit("a", scale * noise())

    @jax.jit
    def found(scale):
        blocks = find_blocks(trace_guide(guide, (scale,), {}, {}, random.key(0)))
        assert [described(block) for block in blocks] == ["*a | []"]
        return scale

    found(jnp.ones(()))


def test_no_tracer_leaks():
    guide, model = rows_drawn_by_a_plate, rows_model
    with jax.checking_leaks():
        jax.eval_shape(lambda key: structure_of(model, guide) and key, random.key(0))


def rows_model():
    with numpyro.plate("rows", 10, subsample_size=N):
        numpyro.sample("z", dist.Normal(0.0, 1.0))


def gaussian_model():
    numpyro.sample("a", dist.Normal(0.0, 1.0))
    numpyro.sample("b", dist.HalfNormal(1.0).expand([2]).to_event(1))


def structure_of(model, guide, *args):
    params = handlers.trace(handlers.seed(guide, random.key(0))).get_trace(*args)
    params = {name: site["value"] for name, site in params.items() if site["type"] == "param"}
    return inspect_program(random.key(1), Program(params, model, guide, args, {}, {}))


def test_automatic_guides_and_lists_of_them():
    def parts(guide):
        found = []
        # Traced only: operation by operation, compiling would take most of the time.
        jax.eval_shape(lambda: found.extend(structure_of(gaussian_model, guide).parts))
        return {part.sites: part.is_implicit for part in found}

    assert parts(AutoImplicit(gaussian_model, warm_start=False)) == {("a", "b"): True}
    assert parts(AutoNormal(gaussian_model)) == {("a",): False, ("b",): False}
    # Its sites are values computed from one auxiliary draw.
    assert parts(AutoMultivariateNormal(gaussian_model)) == {("a", "b"): True}
    mixed = AutoGuideList(gaussian_model)
    mixed.append(AutoImplicit(handlers.block(gaussian_model, hide=["a"]), warm_start=False))
    mixed.append(AutoNormal(handlers.block(gaussian_model, hide=["b"]), prefix="normal"))
    assert parts(mixed) == {("b",): True, ("a",): False}


def test_layout_of_nested_plates():
    """Coordinates by element; those of parents are repeated where elements share them."""

    def guide():
        g = implicit("g", noise("e"))
        with numpyro.plate("groups", 2, dim=-2):
            e = numpyro.sample("e_groups", dist.Normal(), infer=AUXILIARY)
            a = implicit("a", g * e)
            with numpyro.plate("rows", 6, dim=-1, subsample_size=3):
                unit = dist.Normal(jnp.zeros(5), 1.0).to_event(1)
                e = numpyro.sample("e_rows", unit, infer=AUXILIARY)
                numpyro.sample("z", Implicit(a[..., None] + e, event_dim=1))

    def model():
        g = numpyro.sample("g", dist.Normal(0.0, 1.0))
        with numpyro.plate("groups", 2, dim=-2):
            a = numpyro.sample("a", dist.Normal(g, 1.0))
            with numpyro.plate("rows", 6, dim=-1, subsample_size=3):
                unit = dist.Normal(a[..., None] * jnp.ones(5), 1.0).to_event(1)
                numpyro.sample("z", unit)

    structure = structure_of(model, guide)
    by_name = {part.sites: part for part in structure.parts}
    assert structure.size == 1 + 2 + 2 * 3 * 5
    assert by_name[("g",)].columns.tolist() == [[0]]
    assert by_name[("a",)].columns.tolist() == [[1], [2]]
    assert by_name[("a",)].context.tolist() == [[0], [0]]
    z = by_name[("z",)]
    assert z.columns.tolist() == jnp.arange(3, 33).reshape(6, 5).tolist()
    assert z.context.tolist() == [[1], [1], [1], [2], [2], [2]]
    assert z.scale == 2.0
    assert structure.shared_plates == ("rows",)
    assert structure.dim == 6


def test_plates_inside_control_flow():
    """A Markov chain for each row; the chain's rows are one joint block, since it is one call."""

    def chains(draw):
        def step(previous, _):
            with numpyro.plate("rows", 3):
                z = draw(previous)
            return jnp.log(z), None

        scan(step, jnp.zeros(3), None, length=4)

    def guide_draw(previous):
        e = numpyro.sample("e", dist.Normal(), infer=AUXILIARY)
        return implicit("z", jnp.exp(previous + e))

    def model_draw(previous):
        return numpyro.sample("z", dist.LogNormal(previous, 1.0))

    structure = structure_of(lambda: chains(model_draw), lambda: chains(guide_draw))
    (site,) = structure.sites
    assert site.shape == (4, 3)
    (frame,) = site.frames
    assert (frame.axis, frame.size, frame.full_size) == (1, 3, 3)


def test_latents_of_no_size():
    """They have no entropy and no coordinates to condition on."""

    def model():
        empty = numpyro.sample("empty", dist.Normal(jnp.zeros(0), 1.0))
        numpyro.sample("a", dist.Normal(jnp.sum(empty), 1.0))

    def guide():
        empty = implicit("empty", noise("e1", (0,)))
        implicit("a", jnp.sum(empty) + noise("e2"))

    (part,) = structure_of(model, guide).parts
    assert part.sites == ("a",)
    assert part.context is None


# ------------------------------------------------------------------------------------ misuse


def blocks_of(guide):
    return find_blocks(trace_guide(guide, (), {}, {}, random.key(0)))


def test_points_are_refused():
    def guide():
        implicit("a", numpyro.param("value", 0.0))

    with pytest.raises(ValueError, match=r"(?s)expected.*got a point.*'a'.*Implicit"):
        blocks_of(guide)


def test_functions_of_other_latents_are_refused():
    def guide():
        implicit("b", 2.0 * normal("a"))

    with pytest.raises(ValueError, match=r"(?s)expected noise.*'b'.*function of \['a'\]"):
        blocks_of(guide)


def test_noise_is_not_said_to_be_a_density():
    def guide():
        normal("a", loc=noise(), implicit=False)

    with pytest.raises(ValueError, match=r"(?s)'implicit': False.*got 'a'.*noise.*Drop"):
        blocks_of(guide)


def test_an_explicit_site_in_a_circle_is_refused_if_forced():
    def guide():
        e = noise(shape=(2,))
        b = normal("b", loc=implicit("a", e[0]), implicit=False)
        implicit("c", b + e[1] * e[0])

    with pytest.raises(ValueError, match=r"(?s)'implicit': False.*got \['b'\].*\['a', 'c'\]"):
        blocks_of(guide)


def test_settings_that_are_no_truth_values():
    with pytest.raises(ValueError, match=r"(?s)expected infer=.*'a'.*'yes'"):
        blocks_of(lambda: normal("a", implicit="yes"))


def rows_of_z(fn):
    def guide():
        e = noise()
        with numpyro.plate("rows", 4):
            numpyro.sample("z", fn(e), infer={"implicit": True})

    return guide


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda e: dist.Normal(e, 1.0).mask(jnp.arange(4) < 3), "without a mask.*got 'z'.*Drop it"),
        (lambda e: Implicit(e * jnp.ones(4)).mask(False), "apart from those.*got 'z' with infer"),
        (Implicit, r"each of the 4 coordinates of 'z'.*shape \(\).*Copies"),
        (lambda e: dist.VonMises(e, 1.0), "differentiable.*'z' from.*no reparameterized sampler"),
    ],
    ids=["masked", "masked-implicit", "copies", "no-derivative"],
)
def test_draws_that_have_no_entropy_to_estimate(fn, message):
    def model():
        with numpyro.plate("rows", 4):
            numpyro.sample("z", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match=f"(?s)guide: expected.*{message}"):
        structure_of(model, rows_of_z(fn))


def test_copies_by_a_sample_shape_are_refused():
    def guide():
        numpyro.sample("z", Implicit(noise()), sample_shape=(3,))

    def model():
        numpyro.sample("z", dist.Normal(0.0, 1.0), sample_shape=(3,))

    with pytest.raises(ValueError, match=r"(?s)each of the 3 coordinates of 'z'.*sample_shape"):
        structure_of(model, guide)
