"""Solvers: how a regularizer is applied to the kernel operator."""

from numpyro_kscore.solvers._operator import Operator, Solution
from numpyro_kscore.solvers._solvers import ConjugateGradient, Dense, Krylov, Recursion
from numpyro_kscore.solvers._spectrum import Solver

__all__ = [
    "ConjugateGradient",
    "Dense",
    "Krylov",
    "Operator",
    "Recursion",
    "Solution",
    "Solver",
]
