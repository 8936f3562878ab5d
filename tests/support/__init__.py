"""What several tests use: fakes of the services, builders of tiny checkpoints and of requests, oracles."""
