"""A model with few scales all of whose other latents depend on each other."""

import jax
import numpy as np

from numpyro_kscore._starts.laplace import make_others, mode_at


def dense_others(energy, scales, size):
    """The others of an energy of scales, then ``size`` latents; a point (d,), and the mode there.

    It runs in the precision that is set.
    """
    both = jax.jit(jax.vmap(jax.value_and_grad(energy)))
    hessian = jax.jit(jax.hessian(energy))

    def evaluate(points):
        return tuple(np.asarray(a) for a in both(points))

    def products(points, vectors):
        return np.mean([vectors @ np.asarray(hessian(point)) for point in points], axis=0)

    at = np.concatenate([scales, np.zeros(size)])
    indices = np.arange(len(scales), len(at))
    others = make_others(evaluate, products, at[None], indices, np.random.default_rng(5))
    return others, at, mode_at(others, at)
