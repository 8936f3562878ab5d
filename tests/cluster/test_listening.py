"""Ports at which processes of one machine listen."""

from __future__ import annotations

import socket

from cluster.api.listening import bind


def test_two_sockets_that_are_bound_at_once_have_different_ports():
    """Both may bind one port until one of them listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        first = free.getsockname()[1]
    ports = tuple(range(first, first + 8))
    with bind("127.0.0.1", ports, "grpc.status_port") as one, bind("127.0.0.1", ports, "grpc.status_port") as other:
        assert one.getsockname()[1] != other.getsockname()[1]
