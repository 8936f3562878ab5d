"""Sockets at which a process listens."""

from __future__ import annotations

import socket

from dendro.errors import EngineFailed


def bind(host: str, ports: tuple[int, ...], field: str, share_port: bool = False) -> socket.socket:
    """A socket, whose connections inherit its options, bound to the first of `ports` that is free; at `::` also for
    clients of IPv4. field: of the configuration, which has the ports. Raises EngineFailed where none is free."""
    for port in ports:
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # uvicorn writes headers and body apart, and asyncio sets this only where a socket names its protocol.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if share_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            listening.bind((host, port))
            if not share_port:  # two sockets may be bound to one port until one of them listens
                listening.listen()
        except OSError:  # the port is taken
            listening.close()
            continue
        listening.setblocking(False)
        return listening
    raise EngineFailed(f"{field}: this process cannot listen at {host} on {', '.join(map(str, ports))}")
