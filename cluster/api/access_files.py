"""Finds faults of the files that decide who may call: keys and certificates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dendro.certificates import ROLES
from dendro.errors import BadRequest

from cluster.api.keys import read_keys
from cluster.config import Config


def access_problems(config: Config) -> list[BadRequest]:
    """Faults of the files that `auth` and `tls` name; each error names its field."""
    reads: list[Callable[[], object]] = []
    if config.auth.keys is not None:
        reads.append(partial(read_keys, config.auth.keys))
    if config.tls.clients is not None:
        reads.append(config.tls.clients.files)
    if config.tls.peers is not None:
        reads += [partial(config.tls.peers.files, role) for role in ROLES]
    problems = []
    for read in reads:
        try:
            read()
        except BadRequest as error:
            problems.append(error)
    return problems
