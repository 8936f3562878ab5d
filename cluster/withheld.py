"""Secrets in this process's environment, which its children do not get: each of them would show it to whoever may read
`/proc`, and Ray's dashboard to its users."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.command_options import KEY_VARIABLE
from cluster.config import Config


@contextmanager
def without_secrets(config: Config) -> Iterator[None]:
    """Context in which started processes get neither Redis' password nor an API key. Read the password before it."""
    names = filter(None, (config.redis.password_variable, config.redis.sentinel_password_variable, KEY_VARIABLE))
    withheld = {name: value for name in names if (value := os.environ.pop(name, None)) is not None}
    try:
        yield
    finally:
        os.environ.update(withheld)
