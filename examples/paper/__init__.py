"""The experiments of Zhou, Shi and Zhu (2020)."""
