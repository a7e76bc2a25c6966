"""Nested groups, lines by group, sites that are visited, and outcomes with heavy tails."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from benchmarks.accuracy.large.compared import LargePosterior
from benchmarks.accuracy.targets import Draws, Target
from benchmarks.accuracy.textbook.coordinates import NONCENTERED, in_coordinates, to_arrays

__all__ = ["lines", "microcredit", "occupancy", "pupils"]


def pupils() -> LargePosterior:
    """Marks of 13 000 pupils in 1650 classes of 330 schools, centered: d = 1986."""
    rng = np.random.default_rng(511)
    schools, classes, rows = 330, 1_650, 13_000
    school_of_class = np.sort(rng.integers(0, schools, classes))
    of_class = np.sort(rng.integers(0, classes, rows))
    school = rng.normal(52, 4, schools)
    room = rng.normal(school[school_of_class], 3)
    before, girl = rng.normal(size=rows), rng.integers(0, 2, rows)
    marks = np.round(room[of_class] + 5 * before + 1.5 * girl + rng.normal(0, 9, rows), 1)

    def model(
        school_of_class: Array, of_class: Array, before: Array, girl: Array, marks: Array
    ) -> None:
        level = numpyro.sample("level", dist.Normal(50, 20))
        of_before = numpyro.sample("of_before", dist.Normal(0, 10))
        of_girl = numpyro.sample("of_girl", dist.Normal(0, 10))
        school_scale = numpyro.sample("school_scale", dist.HalfNormal(10))
        class_scale = numpyro.sample("class_scale", dist.HalfNormal(10))
        noise = numpyro.sample("noise", dist.HalfNormal(20))
        with numpyro.plate("schools", schools):
            school = numpyro.sample("school", dist.Normal(level, school_scale))
        with numpyro.plate("classes", classes):
            room = numpyro.sample("room", dist.Normal(school[school_of_class], class_scale))
        mean = room[of_class] + of_before * before + of_girl * girl
        with numpyro.plate("pupils", rows):
            numpyro.sample("marks", dist.Normal(mean, noise), obs=marks)

    data = to_arrays(school_of_class, of_class, before, girl, marks)
    coordinates = dict.fromkeys(("school", "room"), NONCENTERED)
    return LargePosterior(
        in_coordinates("pupils", model, data, coordinates),
        scales=("level", "of_before", "of_girl", "school_scale", "class_scale", "noise"),
        effects=lambda draws: jnp.concatenate([draws["school"], draws["room"]], 1),
        local=("room_decentered",),
        others=("school_decentered", "level", "of_before", "of_girl"),
        near={"school_scale": 4.0, "class_scale": 3.0, "noise": 9.0},
    )


def lines() -> LargePosterior:
    """A line for each of 500 groups, level and slope correlated, 12 rows each: d = 1006."""
    rng = np.random.default_rng(512)
    groups = 500
    group, x = np.repeat(np.arange(groups), 12), rng.normal(size=12 * groups)
    covariance = np.array([[0.8, -0.35 * 0.9 * 0.4], [-0.35 * 0.9 * 0.4, 0.16]])
    true_lines = rng.multivariate_normal([1.5, -0.4], covariance, groups)
    y = true_lines[group, 0] + true_lines[group, 1] * x + rng.normal(0, 1.2, len(x))

    def model(group: Array, x: Array, y: Array) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 5).expand([2]).to_event(1))
        scales = numpyro.sample("scales", dist.HalfNormal(2).expand([2]).to_event(1))
        correlation = numpyro.sample("correlation", dist.LKJCholesky(2, 2.0))
        noise = numpyro.sample("noise", dist.HalfNormal(2))
        factor = scales[:, None] * correlation
        with numpyro.plate("groups", groups):
            lines = numpyro.sample("lines", dist.MultivariateNormal(mean, scale_tril=factor))
        center = lines[group, 0] + lines[group, 1] * x
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(center, noise), obs=y)

    return LargePosterior(
        Target("varying_lines", model, to_arrays(group, x, np.round(y, 3))),
        scales=("mean", "scales", "correlation", "noise"),
        effects=lambda draws: draws["lines"].reshape(len(draws["lines"]), -1),
    )


def occupancy() -> LargePosterior:
    """A bird at 940 sites in six years, seen on some of five visits if there: d = 1893.

    Whether it is there is summed out. A site has an effect on that and one on being seen.
    """
    rng = np.random.default_rng(513)
    sites, years, visits = 940, 6, 5
    height, cover = rng.normal(size=sites), rng.normal(size=sites)
    there = 0.3 + 0.8 * height[:, None] + rng.normal(0, 1, sites)[:, None]
    there = there + rng.normal(0, 0.4, years)
    seen = -0.4 + 0.5 * cover + rng.normal(0, 0.7, sites)
    present = rng.random((sites, years)) < 1 / (1 + np.exp(-there))
    counts = rng.binomial(visits, present / (1 + np.exp(-seen[:, None])))

    def model(height: Array, cover: Array, counts: Array) -> None:
        level = numpyro.sample("level", dist.Normal(0, 1.5))
        of_height = numpyro.sample("of_height", dist.Normal(0, 1))
        seen_level = numpyro.sample("seen_level", dist.Normal(0, 1.5))
        of_cover = numpyro.sample("of_cover", dist.Normal(0, 1))
        there_scale = numpyro.sample("there_scale", dist.HalfNormal(1))
        seen_scale = numpyro.sample("seen_scale", dist.HalfNormal(1))
        year_scale = numpyro.sample("year_scale", dist.HalfNormal(1))
        with numpyro.plate("years", years):
            year = numpyro.sample("year", dist.Normal(0, 1))
        with numpyro.plate("sites", sites):
            there_z = numpyro.sample("there_z", dist.Normal(0, 1))
            seen_z = numpyro.sample("seen_z", dist.Normal(0, 1))
        there = level + of_height * height + there_scale * there_z
        there = there[:, None] + year_scale * year
        seen = seen_level + of_cover * cover + seen_scale * seen_z
        if_there = dist.Binomial(visits, logits=seen[:, None]).log_prob(counts)
        if_there = if_there + jax.nn.log_sigmoid(there)
        if_not = jnp.where(counts == 0, jax.nn.log_sigmoid(-there), -jnp.inf)
        summed = jax.scipy.special.logsumexp(jnp.stack([if_there, if_not]), axis=0)
        numpyro.factor("counts", summed.sum())

    def effects(draws: Draws) -> Array:
        names = {"there_z": "there_scale", "seen_z": "seen_scale", "year": "year_scale"}
        return jnp.concatenate([draws[z] * draws[s][:, None] for z, s in names.items()], 1)

    return LargePosterior(
        Target("occupancy", model, to_arrays(height, cover, counts)),
        scales=(
            *("level", "of_height", "seen_level", "of_cover"),
            *("there_scale", "seen_scale", "year_scale"),
        ),
        effects=effects,
        near={"there_scale": 1.0, "seen_scale": 0.7, "year_scale": 0.4},
        local=("there_z", "seen_z"),
        others=("level", "of_height", "seen_level", "of_cover", "year"),
    )


def microcredit() -> LargePosterior:
    """Losses, zeros and profits of 4000 households in eight places: d = 124.

    As in Meager's analysis: the probabilities of the three kinds, and the logarithms of losses and
    of profits, depend on a loan, by place; logarithms have Student's distribution. Centered.
    """
    rng = np.random.default_rng(514)
    places, rows = 8, 4_000
    place, loan = rng.integers(0, places, rows), rng.integers(0, 2, rows)
    kinds = rng.normal([[0.5, 0.2], [1.2, 0.1]], [[0.5, 0.15], [0.6, 0.15]], (places, 2, 2))
    logits = np.concatenate(
        [np.zeros((rows, 1)), kinds[place, :, 0] + kinds[place, :, 1] * loan[:, None]], 1
    )
    kind = (logits + rng.gumbel(size=(rows, 3))).argmax(1)  # loss, zero, profit
    means = rng.normal([[3.0, 0.1], [3.6, 0.15]], [[0.7, 0.15], [0.8, 0.15]], (places, 2, 2))
    widths = rng.normal([[0.1, 0.0], [0.2, 0.05]], [[0.2, 0.08], [0.2, 0.08]], (places, 2, 2))
    tail = (kind == 2).astype(int)
    center = means[place, tail, 0] + means[place, tail, 1] * loan
    width = np.exp(widths[place, tail, 0] + widths[place, tail, 1] * loan)
    sizes = center + width * rng.standard_t(np.array([5.0, 4.0])[tail])
    sizes = np.where(kind == 1, 0.0, np.round(sizes, 3))
    parts = {"kind": (2.0, 1.0), "mean": (5.0, 1.0), "width": (1.0, 0.5)}

    def model(place: Array, loan: Array, kind: Array, sizes: Array) -> None:
        of_rows = {}
        for part, (wide, narrow) in parts.items():
            # Rows are two kinds or tails, columns what is without a loan and what it adds.
            spread = jnp.array([wide, narrow])
            mean = numpyro.sample(f"{part}_mean", dist.Normal(0, spread).expand([2, 2]).to_event(2))
            scale = numpyro.sample(
                f"{part}_scale", dist.HalfNormal(narrow).expand([2, 2]).to_event(2)
            )
            with numpyro.plate(f"{part}_places", places):
                effect = numpyro.sample(part, dist.Normal(mean, scale).to_event(2))
            of_rows[part] = effect[place, :, 0] + effect[place, :, 1] * loan[:, None]
        freedom = numpyro.sample("freedom", dist.Gamma(2, 0.1).expand([2, 2]).to_event(2))
        logits = jnp.concatenate([jnp.zeros((rows, 1)), of_rows["kind"]], 1)
        tail = jnp.where(kind == 2, 1, 0)
        center, log_width = (
            jnp.take_along_axis(of_rows[part], tail[:, None], 1)[:, 0] for part in ("mean", "width")
        )
        with numpyro.plate("households", rows):
            numpyro.sample("kind_seen", dist.Categorical(logits=logits), obs=kind)
            fn = dist.StudentT(freedom[tail, loan], center, jnp.exp(log_width))
            numpyro.sample("sizes", fn.mask(kind != 1), obs=sizes)

    data = to_arrays(place, loan, kind, sizes)
    target = in_coordinates("microcredit", model, data, dict.fromkeys(parts, NONCENTERED))
    return LargePosterior(
        target,
        scales=(
            *(f"{part}_mean" for part in parts), *(f"{part}_scale" for part in parts), "freedom",
        ),
        effects=lambda draws: jnp.concatenate(
            [draws[part].reshape(len(draws[part]), -1) for part in parts], 1
        ),
        others=tuple(f"{part}{end}" for part in parts for end in ("_mean", "_decentered")),
        near={
            "kind_scale": [[0.5, 0.15], [0.6, 0.15]],
            "mean_scale": [[0.7, 0.15], [0.8, 0.15]],
            "width_scale": [[0.2, 0.08], [0.2, 0.08]],
            "freedom": [[5.0, 5.0], [4.0, 4.0]],
        },
        accept=0.9,
    )  # fmt: skip
