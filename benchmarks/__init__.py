"""Benchmarks, in folders by the question they answer."""
