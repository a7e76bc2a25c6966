"""Sliced score matching: a neural network as score estimator."""

from numpyro_kscore.sliced._estimator import SlicedScoreMatching
from numpyro_kscore.sliced._network import NeuralInfo, NeuralScore, SlicedState, sliced_loss

__all__ = [
    "NeuralInfo",
    "NeuralScore",
    "SlicedScoreMatching",
    "SlicedState",
    "sliced_loss",
]
