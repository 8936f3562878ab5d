"""OpenAI's HTTP API: a shell of the router's ingress, on a port of the router's own (docs/http.md)."""
