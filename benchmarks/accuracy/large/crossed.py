"""Answers by person and item, and votes by five kinds of groups: effects that are crossed."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from benchmarks.accuracy.large.compared import LargePosterior
from benchmarks.accuracy.targets import Draws, Target
from benchmarks.accuracy.textbook.coordinates import NONCENTERED, in_coordinates, to_arrays

__all__ = ["crossed", "items", "poll"]


def crossed(name: str, persons: int, questions: int, rows: int) -> LargePosterior:
    """Right answers by person and question, non-centered: d = persons + questions + 3."""
    rng = np.random.default_rng(501)
    person, question = rng.integers(0, persons, rows), rng.integers(0, questions, rows)
    ability, ease = rng.normal(0, 1.2, persons), rng.normal(0, 0.8, questions)
    answers = rng.random(rows) < 1 / (1 + np.exp(-(0.2 + ability[person] + ease[question])))

    def model(person: Array, question: Array, answers: Array) -> None:
        level = numpyro.sample("level", dist.Normal(0, 2))
        person_scale = numpyro.sample("person_scale", dist.HalfNormal(1))
        question_scale = numpyro.sample("question_scale", dist.HalfNormal(1))
        with numpyro.plate("persons", persons):
            of_person = numpyro.sample("of_person", dist.Normal(0, 1))
        with numpyro.plate("questions", questions):
            of_question = numpyro.sample("of_question", dist.Normal(0, 1))
        logits = level + person_scale * of_person[person] + question_scale * of_question[question]
        with numpyro.plate("rows", rows):
            numpyro.sample("answers", dist.Bernoulli(logits=logits), obs=answers)

    def effects(draws: Draws) -> Array:
        by_person = draws["person_scale"][:, None] * draws["of_person"]
        by_question = draws["question_scale"][:, None] * draws["of_question"]
        return jnp.concatenate([by_person, by_question], 1)

    return LargePosterior(
        Target(name, model, to_arrays(person, question, answers.astype(int))),
        scales=("level", "person_scale", "question_scale"),
        effects=effects,
        local=("of_person",),
        others=("of_question", "level"),
        near={"person_scale": 1.2, "question_scale": 0.8},
    )


_GROUPS = {"district": 800, "interviewer": 250, "occupation": 100, "cell": 40, "week": 10}
_SCALES = {"district": 0.5, "interviewer": 0.25, "occupation": 0.3, "cell": 0.3, "week": 0.1}


def poll() -> LargePosterior:
    """12 000 votes by district, interviewer, occupation, cell and week, centered: d = 1208."""
    rng = np.random.default_rng(502)
    rows = 12_000
    sizes = rng.dirichlet(np.full(800, 3.0))
    groups = {name: rng.integers(0, count, rows) for name, count in _GROUPS.items()}
    groups["district"] = rng.choice(800, rows, p=sizes)
    income, woman = rng.normal(size=800), rng.integers(0, 2, rows)
    logits = -0.2 + 0.25 * woman + 0.3 * income[groups["district"]]
    for name, count in _GROUPS.items():
        logits = logits + rng.normal(0, _SCALES[name], count)[groups[name]]
    votes = (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(int)

    def model(groups: Array, income: Array, woman: Array, votes: Array) -> None:
        level = numpyro.sample("level", dist.Normal(0, 1.5))
        of_woman = numpyro.sample("of_woman", dist.Normal(0, 1))
        of_income = numpyro.sample("of_income", dist.Normal(0, 1))
        logits = level + of_woman * woman
        for k, (name, count) in enumerate(_GROUPS.items()):
            scale = numpyro.sample(f"{name}_scale", dist.HalfNormal(1))
            center = of_income * income if name == "district" else 0.0
            with numpyro.plate(f"{name}s", count):
                effect = numpyro.sample(name, dist.Normal(center, scale))
            logits = logits + effect[groups[k]]
        with numpyro.plate("rows", rows):
            numpyro.sample("votes", dist.Bernoulli(logits=logits), obs=votes)

    data = to_arrays(np.stack(list(groups.values())), income, woman, votes)
    target = in_coordinates("large_poll", model, data, dict.fromkeys(_GROUPS, NONCENTERED))
    return LargePosterior(
        target,
        scales=("level", "of_woman", "of_income", *(f"{name}_scale" for name in _GROUPS)),
        effects=lambda draws: jnp.concatenate([draws[name] for name in _GROUPS], 1),
        local=("district_decentered",),
        others=(
            *("level", "of_woman", "of_income"),
            *(f"{name}_decentered" for name in _GROUPS if name != "district"),
        ),
        near={f"{name}_scale": scale for name, scale in _SCALES.items()},
    )


def items() -> LargePosterior:
    """25 answers of 1000 persons: ability, difficulty and discrimination, d = 1054."""
    rng = np.random.default_rng(503)
    ability, difficulty = rng.normal(size=1_000), rng.normal(-0.3, 1, 25)
    slope = np.exp(rng.normal(0.2, 0.35, 25))
    logits = slope * (ability[:, None] - difficulty)
    answers = (rng.random((1_000, 25)) < 1 / (1 + np.exp(-logits))).astype(int)

    def model(answers: Array) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 2))
        scale = numpyro.sample("scale", dist.HalfNormal(2))
        slope_mean = numpyro.sample("slope_mean", dist.Normal(0, 1))
        slope_scale = numpyro.sample("slope_scale", dist.HalfNormal(1))
        with numpyro.plate("items", 25):
            difficulty = numpyro.sample("difficulty", dist.Normal(mean, scale))
            slope = numpyro.sample("slope", dist.LogNormal(slope_mean, slope_scale))
        with numpyro.plate("persons", 1_000):
            ability = numpyro.sample("ability", dist.Normal(0, 1))
        logits = slope * (ability[:, None] - difficulty)
        numpyro.sample("answers", dist.Bernoulli(logits=logits).to_event(2), obs=answers)

    return LargePosterior(
        Target("item_responses", model, to_arrays(answers)),
        scales=("mean", "scale", "slope_mean", "slope_scale"),
        effects=lambda draws: jnp.concatenate(
            [draws["ability"], draws["difficulty"], jnp.log(draws["slope"])], 1
        ),
        local=("ability",),
        others=("difficulty",),
        near={"mean": -0.3, "scale": 1.0, "slope_mean": 0.2, "slope_scale": 0.35, "slope": slope},
    )
