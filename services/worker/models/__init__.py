"""Models: configuration, weights, and the decoder that runs them. Knows no request and no step."""
