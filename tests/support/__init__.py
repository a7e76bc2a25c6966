"""What several tests use: models, draws, compilation, and the reference by dense algebra."""
