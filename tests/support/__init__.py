"""Code that several tests use: models, draws, compilation, and the dense reference."""
