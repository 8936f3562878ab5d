"""Checkpoints for a module's tests, each made at its first use."""

from __future__ import annotations

from typing import Any


def made_once(tmp_path_factory, make_checkpoint):
    """A function of a family and its settings. It returns the folder of a tiny checkpoint and what `make_checkpoint`
    returned; the same settings give the same checkpoint."""
    made: dict[tuple[str, str], Any] = {}

    def make(family, **settings):
        key = (family, repr(settings))
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = folder, make_checkpoint(folder, family, **settings)
        return made[key]

    return make
