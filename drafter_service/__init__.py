"""The drafters: small Mambas that guess, and the training that makes them agree with their target."""
