"""A drafter's entry in a configuration: as a line, and written into the file; the rest of it is unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from dendro.errors import BadRequest
from yaml.nodes import MappingNode

from cluster.distinct_keys import RepeatedKey, yaml_of
from cluster.replaced_files import replace_text, text_with_its_line_ends
from cluster.tune.writing import inserted, value_of, with_line_ends_of


def entry_line(entry: Mapping[str, Any]) -> str:
    """An entry as YAML on one line."""
    return yaml.safe_dump(dict(entry), default_flow_style=True, sort_keys=False, width=1 << 20).strip()


def with_drafter(text: str, name: str, entry: Mapping[str, Any]) -> str:
    """Add a drafter to a YAML text, before the others, since a fixed shape that names no drafter is the first one's.
    The text is unchanged if it has the entry.

    Raises BadRequest for a name that is taken, and if the edit would change anything else.
    """
    old, root = yaml_of(text), yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, MappingNode), "the configuration was loaded"
    drafters = old.get("drafters") or {}
    if drafters.get(name) == dict(entry):
        return text
    if name in drafters:
        raise BadRequest("--write", f"the configuration has another drafter {name!r}; name another --out")
    new = with_line_ends_of(text, _edited(text, root, f"{name}: {entry_line(entry)}"))
    try:
        edited = yaml_of(new)
    except (yaml.YAMLError, RepeatedKey):
        edited = None
    if edited != old | {"drafters": {name: dict(entry), **drafters}}:
        raise BadRequest("--write", "the configuration's YAML is too unusual to edit; add the lines that are printed")
    return new


def _edited(text: str, root: MappingNode, entry: str) -> str:
    section = value_of(root, "drafters")
    if section is None:
        if root.flow_style:
            return inserted(text, root, f"drafters: {{{entry}}}")
        return f"{text.rstrip()}\n\ndrafters:\n  {entry}\n"
    if isinstance(section, MappingNode):
        return inserted(text, section, entry)
    start, stop = section.start_mark.index, section.end_mark.index
    return f"{text[:start]}{'' if stop > start else ' '}{{{entry}}}{text[stop:]}"


def write_drafter(config: Path, name: str, entry: Mapping[str, Any]) -> None:
    """Write an entry into a configuration's file. Raises BadRequest."""
    replace_text("--write", config, with_drafter(text_with_its_line_ends(config), name, entry))


def with_head(text: str, drafter: str, head: str) -> str:
    """Add an acceptance head to a drafter's entry in a YAML text. Raises BadRequest if the entry has another head, or
    if the edit would change anything else."""
    old, root = yaml_of(text), yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, MappingNode), "the configuration was loaded"
    own = old["drafters"][drafter]
    if own.get("head") == head:
        return text
    if "head" in own:
        raise BadRequest("--write", f"drafters.{drafter} has another head, {own['head']!r}; remove that line")
    section = value_of(root, "drafters")
    entry = value_of(section, drafter) if isinstance(section, MappingNode) else None
    new = inserted(text, entry, entry_line({"head": head})[1:-1]) if isinstance(entry, MappingNode) else text
    new = with_line_ends_of(text, new)
    try:
        edited = yaml_of(new)
    except (yaml.YAMLError, RepeatedKey):
        edited = None
    if edited != old | {"drafters": old["drafters"] | {drafter: own | {"head": head}}}:
        raise BadRequest("--write", "the configuration's YAML is too unusual to edit; add the line that is printed")
    return new


def write_head_entry(config: Path, drafter: str, head: str) -> None:
    """Write a head into a drafter's entry of a configuration's file. Raises BadRequest."""
    replace_text("--write", config, with_head(text_with_its_line_ends(config), drafter, head))
