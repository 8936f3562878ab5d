"""The verifier: a Transformer target that says what it makes of draft trees, for many texts at once."""
