"""A Wasserstein autoencoder, whose aggregate posterior is matched to the prior by estimated scores.

    python -m examples.wae.run                          # scikit-learn's digits, no download
    python -m examples.wae.run --dataset mnist --data FOLDER --latent-dim 128 --epochs 100
        --decay --learning-rate 1e-3 --weight 0.5   # the best of docs/wae_report
    python -m examples.wae.run --dataset FOLDER_OF_PICTURES --latent-dim 64
    python -m examples.wae.run --prior vamp             # or mixture, flow: a prior that is learned

An encoder maps every image to a Gaussian code and a decoder maps codes to images. The codes of all
images together should be distributed like the prior, so that decoded draws of the prior look like
images. The gradient for that needs the score of the *aggregate* distribution of all codes, which
cannot be evaluated; any estimator of this library can estimate it from the codes of a batch.

After training, the script reports the log likelihood of test images by annealed importance
sampling, the distance between codes and prior, and the distance between samples and images in the
features of a classifier. It also draws a figure.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from examples.common.compiled import keep_compiled
from examples.common.output import output_file
from examples.wae.ais import Annealing
from examples.wae.data import Images, load_images
from examples.wae.figures import plot_run
from examples.wae.metrics import (
    measure_aggregate,
    measure_likelihood,
    measure_samples,
    train_features,
)
from examples.wae.networks import WIDTH
from examples.wae.objectives import ESTIMATORS
from examples.wae.priors import PRIORS
from examples.wae.rivals import RIVALS, make_autoencoder
from examples.wae.training import COSTS, Autoencoder, Settings, Trained, batches_of, train


def make_parser() -> ArgumentParser:
    """The options of the command."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--dataset", default="digits", help="digits, patches, mnist, celeba or a folder"
    )
    parser.add_argument("--data", type=Path, help="folder with the files of mnist or celeba")
    parser.add_argument("--limit", type=int, help="largest number of training images")
    parser.add_argument("--estimator", choices=[*ESTIMATORS, *RIVALS], default="default",
                        help="of scores; or a rival, vae or mmd")  # fmt: skip
    parser.add_argument("--prior", choices=PRIORS, default="normal", help="of a code")
    parser.add_argument("--weight", type=float, default=1.0,
                        help="of the divergence from the prior, next to the cost")  # fmt: skip
    parser.add_argument("--value", type=float, help="regularization parameter of the estimator")
    parser.add_argument("--latent-dim", type=int, default=8)
    parser.add_argument("--cost", choices=COSTS, help="reconstruction cost; default: norm for gray "
                        "images, squared for colors")  # fmt: skip
    parser.add_argument("--epochs", type=int, help="default: 200 for digits, otherwise 100")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float,
                        help="default: 1e-3 for digits, otherwise 1e-4")  # fmt: skip
    parser.add_argument("--decay", action="store_true",
                        help="let the learning rate fall to zero over all epochs")  # fmt: skip
    parser.add_argument("--width", type=int, default=WIDTH, help="channels of convolutions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=output_file, help="file to write, and to resume from")
    parser.add_argument("--ais-images", type=int, help="test images behind the NLL; default: 50 "
                        "for digits, otherwise 0 (no NLL)")  # fmt: skip
    parser.add_argument("--temperatures", type=int, default=1000, help="of the annealing")
    parser.add_argument("--figure", type=output_file, default=Path("wae.png"))
    parser.add_argument("--quick", action="store_true", help="two epochs on few digits")
    return parser


def fill_in(options: Namespace, images: Images) -> Namespace:
    """Set defaults that depend on the data set: digits need more epochs and larger steps."""
    is_small = images.name == "digits"
    defaults = {
        "cost": "norm" if images.is_binary else "squared",
        "epochs": 200 if is_small else 100,
        "learning_rate": 1e-3 if is_small else 1e-4,
        "ais_images": 50 if is_small else 0,
    }
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def figures_of(
    options: Namespace, autoencoder: Autoencoder, trained: Trained, images: Images
) -> list[tuple[str, str, str]]:
    """Rows of the table: the name of a figure, its value and the best possible value."""
    params = trained.params
    found = measure_aggregate(autoencoder, params, images)
    of_draws = "{:.3f}, that of draws of the prior".format
    rows = [
        ("reconstruction cost of test images", f"{found.cost:.2f}", "0"),
        ("codes: sd, mean over coordinates", f"{found.sd:.3f}", of_draws(found.prior_sd)),
        ("codes: rms mean", f"{found.mean:.3f}", of_draws(found.prior_mean)),
        (
            "codes: sliced Wasserstein distance to the prior",
            f"{found.distance:.3f}",
            of_draws(found.distance_floor),
        ),
        ("codes: MMD² to the prior", f"{found.mmd:.5f}", "0"),
    ]
    if images.train_labels is not None:
        features, accuracy = train_features(images)
        distance = measure_samples(autoencoder, params, images, features)
        rows.append(
            (
                f"samples: Fréchet distance, features of a classifier ({accuracy:.0%} right)",
                f"{distance:.2f}",
                "0",
            )
        )
    if options.ais_images:
        likelihood = measure_likelihood(
            autoencoder,
            params,
            images,
            options.ais_images,
            Annealing(options.temperatures),
            progress=True,
        )
        nll = -likelihood.log_likelihood
        error = nll.std(ddof=1) / np.sqrt(len(nll)) if len(nll) > 1 else float("nan")
        rows.append(
            (f"NLL of {len(nll)} test images, in nats", f"{nll.mean():.2f} ± {error:.2f}", "")
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure, print a table and draw a figure."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.quick:
        options.dataset, options.limit, options.epochs = "digits", 256, 2
        options.ais_images, options.temperatures = 4, 20
    keep_compiled()
    start = time.perf_counter()
    try:
        images = load_images(options.dataset, options.data, options.limit)
        options = fill_in(options, images)
        settings = Settings(
            estimator=options.estimator,
            value=options.value,
            latent_dim=options.latent_dim,
            batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            decay_steps=options.decay * options.epochs * batches_of(images, options.batch_size),
            cost=options.cost,
            seed=options.seed,
            width=options.width,
            weight=options.weight,
            prior=options.prior,
        )
        autoencoder = make_autoencoder(settings, images.shape)
        trained = train(autoencoder, images, options.epochs, options.checkpoint)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    # The first epoch compiles.
    seconds = float(np.median(trained.seconds[1:])) if len(trained.seconds) > 1 else np.nan
    rows = figures_of(options, autoencoder, trained, images)
    title = (
        f"{images.name}, estimator {options.estimator}, prior {options.prior}, "
        f"latent dimension {options.latent_dim}, {len(trained.losses)} epochs"
    )
    plt.switch_backend("agg")
    plot_run(options.figure, autoencoder, trained, images, title)
    print(f"\n{title} of {seconds:.2f} s\n")
    width = max(len(name) for name, _, _ in rows)
    print(f"{'':{width}}  {'value':>14}  at best")
    for name, value, best in rows:
        print(f"{name:{width}}  {value:>14}  {best}")
    print(f"\n{time.perf_counter() - start:.0f} s in all; pictures in {options.figure}")


if __name__ == "__main__":
    main()
