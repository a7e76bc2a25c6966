"""One picture: the draws of a Gaussian guide and of ``AutoImplicit`` over those of NUTS.

    python -m examples.start.picture [--seed 0] [--out FOLDER] [--quick]

The posterior is that of eight schools, centered; see ``bend.py``. The picture is ``picture.png``,
drawn so that it can be read on a phone.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from jax import Array, random
from numpyro.infer.autoguide import AutoMultivariateNormal

from examples.common.output import output_folder
from examples.start import bend
from examples.start.methods import fit_explicit, fit_implicit, run_nuts

FONT = {"font.size": 19, "axes.titlesize": 21}


def draw(path: Path, guides: dict[str, Array], reference: Array) -> None:
    """Save the picture: log tau and the effect of the first school."""
    with plt.rc_context(FONT):
        figure, panels = plt.subplots(
            1, len(guides), figsize=(10, 5), sharex=True, sharey=True, layout="constrained"
        )
        for panel, (name, draws) in zip(panels, guides.items(), strict=True):
            panel.plot(reference[:, 1], reference[:, 2], ".", color="0.7", ms=6, label="NUTS")
            panel.plot(draws[:, 1], draws[:, 2], ".", color="C0", ms=4, alpha=0.6, label="guide")
            panel.set(title=name, xlabel="log tau", xlim=(-4, 4), ylim=(-16, 32))
            panel.set_xticks([-4, 0, 4])
        panels[0].set_ylabel("effect, first school")
        panels[0].legend(loc="upper left", markerscale=3, handletextpad=0.1, frameon=False)
        figure.savefig(path, dpi=90)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit both guides, run NUTS and save the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers")
    parser.add_argument("--out", type=output_folder, default=Path(), help="folder for the picture")
    parser.add_argument("--quick", action="store_true", help="few steps, to see it run")
    options = parser.parse_args(arguments)
    keys = random.split(random.key(options.seed), 3)
    steps, draws = (50, 100) if options.quick else (5_000, 2_000)
    exact = run_nuts(keys[0], bend.noncentered, bend.DATA, bend.flatten, draws // 2)
    task = bend.model, bend.DATA, bend.flatten, draws, steps
    implicit = fit_implicit(keys[1], *task)
    gaussian = fit_explicit(keys[2], AutoMultivariateNormal(bend.model), *task, num_particles=32)
    guides = {"AutoMultivariateNormal": gaussian.draws, "AutoImplicit": implicit.draws}
    draw(options.out / "picture.png", guides, exact.draws)


if __name__ == "__main__":
    main()
