"""Refuses what a web page of another site makes a browser send: a page must not use a server on its reader's machine.

A browser names the page's site in `Origin`. A page whose site's name is changed to lead to the loopback has that name
in `Host` (DNS rebinding).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dendro.destinations import is_loopback

from cluster.api.openai.errors import HttpRefused

FORBIDDEN = 403
_HOST = re.compile(r"(?:\[([^]]*)\]|([^:]*))(?::\d*)?")
"""`host`, `host:port` or `[address]:port`."""


def check_page(headers: Mapping[str, str], loopback_alone: bool) -> None:
    """Raise HttpRefused for a call of a foreign page. loopback_alone: whether `Host` must name this machine, as whoever
    reaches it may call. A call without a `Host`, which HTTP/1.0 allows, is of no browser: all of them send it"""
    host = headers.get("host")
    if loopback_alone and host is not None and not is_loopback(_name_of(host)):
        raise HttpRefused(FORBIDDEN, "names another host; a server without keys answers for the loopback alone", "host")
    origin = headers.get("origin")
    if origin is not None and (not host or origin.partition("://")[2].lower() != host.lower()):
        raise HttpRefused(FORBIDDEN, "is another site, whose pages may not call this server", "origin")


def _name_of(host: str) -> str:
    found = _HOST.fullmatch(host)
    return (found[1] or found[2] or "").lower() if found is not None else ""
