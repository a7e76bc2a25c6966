"""The posterior of one study as the prior of the next, without its data.

A first study is over, and only its posterior draws are left. ``KernelExponentialFamily`` turns
them into a density, which can be used as a prior:

    prior = KernelExponentialFamily(first_draws)        # (n, d)
    weights = numpyro.sample("weights", prior)          # in the model of the second study

Here both studies are logistic regressions on tumors. The smaller the first study, the less Gaussian
is its posterior: ten tumors are separated by a line, and only the prior keeps the weights finite.
This script analyzes the second study under that prior and under the Gaussian with the draws'
moments, and compares both posteriors with the joint analysis of all data. It prints a table and
saves a picture:

    python examples/start/posterior_as_prior.py [--seed 0] [--figure FILE] [--quick]
"""

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro.infer import MCMC, NUTS
from sklearn.datasets import load_breast_cancer

from numpyro_kscore import KernelExponentialFamily
from numpyro_kscore.diagnostics import sliced_wasserstein

SIZES = ((10, 40), (30, 100), (284, 285))  # tumors of the first and of the second study
NAMES = ("intercept", "radius", "texture")
PRIOR_DRAWS = 2_000  # draws of the first study in the prior; a step evaluates as many kernels


class Tumors(NamedTuple):
    """Standardized features of the cell nuclei, (n, 2), and the diagnoses, (n,)."""

    features: Array
    malignant: Array

    def part(self, start: int, stop: int) -> "Tumors":
        """Tumors from ``start`` to ``stop``."""
        return Tumors(self.features[start:stop], self.malignant[start:stop])


def load_tumors() -> Tumors:
    """569 tumors in random order, two features each."""
    table = load_breast_cancer()
    order = np.random.default_rng(0).permutation(len(table.target))
    features = table.data[order, :2]
    features = (features - features.mean(0)) / features.std(0)
    return Tumors(jnp.asarray(features, jnp.float32), jnp.asarray(table.target[order] == 0, int))


def study(tumors: Tumors, prior: dist.Distribution) -> None:
    """Logistic regression; intercept and weights are one site with a joint prior."""
    weights = numpyro.sample("weights", prior)
    logits = weights[0] + tumors.features @ weights[1:]
    numpyro.sample("malignant", dist.Bernoulli(logits=logits), obs=tumors.malignant)


def run_nuts(
    what: str, tumors: Tumors, prior: dist.Distribution, options: argparse.Namespace
) -> tuple[Array, float]:
    """Concatenated draws of two chains, and seconds with compilation."""
    print(f"\n{what}", file=sys.stderr, flush=True)  # where the progress bar goes
    start = time.perf_counter()
    mcmc = MCMC(
        NUTS(study, target_accept_prob=0.9),
        num_warmup=options.num_draws // 2,
        num_samples=options.num_draws,
        num_chains=2,
        chain_method="vectorized",
    )
    mcmc.run(random.key(options.seed), tumors, prior)
    draws = jax.block_until_ready(mcmc.get_samples()["weights"])
    return draws, time.perf_counter() - start


def table_row(name: str, draws: Array, joint: Array, seconds: float) -> str:
    """Means, standard deviations, and the distance to the joint analysis in its units."""
    cells = [
        f"{mean:7.2f} ±{sd:5.2f}" for mean, sd in zip(draws.mean(0), draws.std(0), strict=True)
    ]
    distance = sliced_wasserstein(draws / joint.std(0), joint / joint.std(0), random.key(0))
    return f"{name:28}{''.join(f'{cell:>16}' for cell in cells)}{distance:11.3f}{seconds:9.1f}"


def compare(
    tumors: Tumors, sizes: tuple[int, int], options: argparse.Namespace
) -> tuple[list[str], dict[str, Array]]:
    """Analyze two studies of the given sizes: lines of the table, and draws by name."""
    middle, end = sizes[0], sum(sizes)
    title = f"{middle} tumors, then {sizes[1]}"
    weak = dist.Normal(jnp.zeros(len(NAMES)), 10.0).to_event(1)
    first, first_seconds = run_nuts(f"{title}: first study", tumors.part(0, middle), weak, options)
    both, joint_seconds = run_nuts(f"{title}: all data", tumors.part(0, end), weak, options)
    joint, other_chain = jnp.split(both, 2)

    start = time.perf_counter()
    kernel = KernelExponentialFamily(first[:: max(1, len(first) // PRIOR_DRAWS)])
    kernel.score.info.raise_if_failed()
    fit_seconds = time.perf_counter() - start
    gaussian = dist.MultivariateNormal(first.mean(0), jnp.cov(first.T))
    second = tumors.part(middle, end)
    by_kernel, seconds = run_nuts(f"{title}: prior from draws", second, kernel, options)
    by_gaussian, gaussian_seconds = run_nuts(f"{title}: Gaussian prior", second, gaussian, options)

    header = "".join(f"{name:>16}" for name in NAMES)
    lines = [
        "",
        f"{title:28}{header}{'sliced W1':>11}{'seconds':>9}",
        table_row("first study alone", first, joint, first_seconds),
        table_row("Gaussian prior", by_gaussian, joint, gaussian_seconds),
        table_row("KernelExponentialFamily", by_kernel, joint, seconds + fit_seconds),
        table_row("joint analysis", other_chain, joint, joint_seconds),
    ]
    draws = {"first study": first, "joint": joint, "Gaussian": by_gaussian, "kernel": by_kernel}
    return lines, draws


def plot(row: np.ndarray, sizes: tuple[int, int], draws: dict[str, Array]) -> None:
    """Plot the first posterior with its Gaussian, and both priors' results with the joint one."""
    columns = np.array([NAMES.index("radius"), NAMES.index("texture")])
    first, joint = draws["first study"], draws["joint"]
    moments = dist.MultivariateNormal(first.mean(0), jnp.cov(first.T))
    fake = moments.sample(random.key(0), (len(first),))
    panels = (
        ("First study, and a Gaussian", {"first study": first, "Gaussian": fake}, "C1"),
        (
            "Both, with a Gaussian prior",
            {"joint": joint, "Gaussian prior": draws["Gaussian"]},
            "C1",
        ),
        ("Both, with a prior from draws", {"joint": joint, "from draws": draws["kernel"]}, "C0"),
    )
    rng = np.random.default_rng(0)
    for panel, (title, sets, color) in zip(row, panels, strict=True):
        picked = [rng.choice(np.asarray(x)[:, columns], min(1_500, len(x))) for x in sets.values()]
        colors = np.repeat(["0.25", color], [len(x) for x in picked])
        points = np.concatenate(picked)
        # In random order, so that neither set hides the other.
        order = rng.permutation(len(points))
        panel.scatter(*points[order].T, c=list(colors[order]), s=4, alpha=0.5, linewidths=0)
        for label, shade in zip(sets, ("0.25", color), strict=True):
            panel.plot([], [], "o", color=shade, ms=5, label=label)
        low, high = np.quantile(points, [0.002, 0.998], axis=0)
        panel.set(title=title, xlabel="weight of radius")
        panel.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
        panel.legend(loc="upper right", fontsize="small")
    row[0].set_ylabel(f"{sizes[0]} tumors, then {sizes[1]}\n\nweight of texture")
    # The two panels that are compared have the same limits.
    row[2].set(xlim=row[1].get_xlim(), ylim=row[1].get_ylim())


def main() -> None:
    """Analyze every pair of studies, print the table and save the figure."""
    parser = argparse.ArgumentParser(description="a posterior as the prior of the next study")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, default=Path("posterior_as_prior.png"))
    parser.add_argument("--quick", action="store_true", help="a few draws only, to see it run")
    options = parser.parse_args()
    options.num_draws = 50 if options.quick else 2_000
    all_sizes = SIZES[:1] if options.quick else SIZES

    tumors = load_tumors()
    figure, panels = plt.subplots(
        len(all_sizes), 3, figsize=(11, 3.4 * len(all_sizes)), squeeze=False, layout="constrained"
    )
    table = []
    for sizes, row in zip(all_sizes, panels, strict=True):
        lines, draws = compare(tumors, sizes, options)
        table += lines
        plot(row, sizes, draws)
    print(*table, sep="\n")
    print(
        "\nMean ± standard deviation of intercept and weights. Sliced W1 is the distance to one "
        "chain of the\njoint analysis, in its standard deviations; its other chain shows the "
        "sampling noise. Seconds include compilation."
    )
    options.figure.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.figure, dpi=110)


if __name__ == "__main__":
    main()
