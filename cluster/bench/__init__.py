"""The laboratory: benches of the bundled models, each run by `dendro bench NAME` and imported by nothing else."""
