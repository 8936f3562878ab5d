"""The public APIs: thin shells of the router."""
