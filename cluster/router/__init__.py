"""The router: from a checked request to the loop of rounds and the session's record."""
