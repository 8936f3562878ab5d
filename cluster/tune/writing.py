"""Writes arms into a configuration's YAML text; the rest of it, comments included, is unchanged."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from dendro.errors import BadRequest
from yaml.nodes import MappingNode, Node, SequenceNode

from cluster.config import Config
from cluster.distinct_keys import RepeatedKey, yaml_of
from cluster.replaced_files import replace_text, text_with_its_line_ends

Keys = tuple[str, ...]
"""Keys from a configuration's root: `("speculation", "arms")`, or `("targets", "big", "arms")`."""


def field_of_arms(config: Config, target: str) -> Keys:
    """Where new arms of a target are written. Its own `arms`, where it has them or another target takes its arms from
    `speculation.arms`, which then stay as they are; else `speculation.arms`."""
    others = (served for name, served in config.targets.items() if name != target)
    if config.targets[target].arms is not None or any(served.arms is None for served in others):
        return "targets", target, "arms"
    return "speculation", "arms"


def with_arms(text: str, field: Keys, arms: Sequence[str]) -> str:
    """Replace the arms at `field` in a YAML text. Raises BadRequest if the edit would change anything else, or lose a
    comment."""
    old = yaml_of(text)
    root = yaml.compose(text, yaml.SafeLoader)
    if not isinstance(root, MappingNode) or not isinstance(old, dict):
        raise BadRequest("config", "holds no mapping of sections")
    new = with_line_ends_of(text, _edited(text, root, field, arms))
    try:
        edited = yaml_of(new)
    except (yaml.YAMLError, RepeatedKey):
        edited = None
    if edited != _replaced(old, field, arms):
        reason = f"its YAML is too unusual to edit; write {'.'.join(field)}: {_flow(arms)} into it"
        raise BadRequest("config", reason)
    return new


def _replaced(old: dict[str, Any] | None, field: Keys, arms: Sequence[str]) -> dict[str, Any]:
    """The values with other arms at `field`."""
    key, *rest = field
    return (old or {}) | {key: _replaced((old or {}).get(key), tuple(rest), arms) if rest else list(arms)}


def _flow(arms: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{arm}"' for arm in arms) + "]"


def _entry(field: Keys, arms: Sequence[str]) -> str:
    """`speculation: {arms: ["off"]}`"""
    key, *rest = field
    return f"{key}: {{{_entry(tuple(rest), arms)}}}" if rest else f"{key}: {_flow(arms)}"


def _edited(text: str, mapping: MappingNode, field: Keys, arms: Sequence[str]) -> str:
    """The text with other arms at `field`, whose first key is in `mapping` or is to be."""
    key, *rest = field
    value = value_of(mapping, key)
    if value is None:
        if mapping.flow_style or not rest:
            return inserted(text, mapping, _entry(field, arms))
        return f"{text.rstrip()}\n\n{key}:\n  {_entry(tuple(rest), arms)}\n"  # a section that the file lacks
    if rest and isinstance(value, MappingNode):
        return _edited(text, value, tuple(rest), arms)
    start, stop = value.start_mark.index, value.end_mark.index
    space = "" if stop > start else " "  # needed after the colon of an empty value
    if rest:
        return f"{text[:start]}{space}{{{_entry(tuple(rest), arms)}}}{text[stop:]}"
    if isinstance(value, SequenceNode) and _has_comments(text, value):
        reason = f"the list at {key} has comments between its arms, which would be lost; write {key}: {_flow(arms)}"
        raise BadRequest("config", reason)
    if isinstance(value, SequenceNode) and value.value and not value.flow_style:
        stop = value.value[-1].end_mark.index  # a block's end mark is at the next token, past comments
        indent = "\n" + " " * value.start_mark.column
        return text[:start] + indent.join(f'- "{arm}"' for arm in arms) + text[stop:]
    return f"{text[:start]}{space}{_flow(arms)}{text[stop:]}"


def _has_comments(text: str, arms: SequenceNode) -> bool:
    """True if there are comments between a list's first and last item; in brackets, beside these too."""
    begin, end = arms.start_mark.index, arms.end_mark.index
    items = [(each.start_mark.index, each.end_mark.index) for each in arms.value]
    stops, starts = [begin, *(stop for _, stop in items)], [*(start for start, _ in items), end]
    between = list(zip(stops, starts, strict=True))
    return any("#" in text[stop:start] for stop, start in (between if arms.flow_style else between[:-1]))


def with_line_ends_of(text: str, new: str) -> str:
    """`new` with the line ends of `text`, if each of these is CRLF; its added lines end in LF."""
    alone = r"(?<!\r)\n"
    return new if "\r\n" not in text or re.search(alone, text) else re.sub(alone, "\r\n", new)


def inserted(text: str, mapping: MappingNode, entry: str) -> str:
    """The text with an entry before a mapping's others."""
    start = mapping.start_mark.index
    if mapping.flow_style:
        return text[: start + 1] + entry + (", " if mapping.value else "") + text[start + 1 :]
    return text[:start] + entry + "\n" + " " * mapping.start_mark.column + text[start:]


def value_of(mapping: MappingNode, key: str) -> Node | None:
    """The value under a key; None where the mapping lacks it."""
    return next((value for name, value in mapping.value if name.value == key), None)


def config_text(source: Path | None, config: Config) -> str:
    """The YAML to write arms into: the file's text, or a dump of a configuration that has no file."""
    if source is not None:
        return text_with_its_line_ends(source)
    return yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True), sort_keys=False, width=120)


def check_writable(source: Path | None, write: bool, out: Path | None, force: bool) -> Path | None:
    """The file to write, or None without --write and --out. Raises BadRequest; called before anything is measured."""
    if write and out is not None:
        raise BadRequest("--write", "cannot be given together with --out")
    if force and out is None:
        raise BadRequest("--force", "belongs to --out")
    if write:
        if source is None:
            raise BadRequest("--write", "needs a configuration to write to; name one, or give --out FILE")
        return source
    if out is not None and out.exists() and not force:
        raise BadRequest("--out", f"{out} is there already; name another file, or give --force")
    if out is not None and source is not None and out.parent.resolve() != source.parent.resolve():
        checkpoints = [
            model.get("checkpoint", "")
            for pool in ("targets", "drafters")
            for model in (yaml_of(source.read_text()).get(pool) or {}).values()
        ]
        if not all(Path(path).expanduser().is_absolute() for path in checkpoints):
            raise BadRequest("--out", f"must lie in the folder of {source}, where its relative checkpoints start")
    return out


def write_arms(source: Path | None, text: str, goal: Path, field: Keys, arms: Sequence[str]) -> None:
    """Write `text`, that of `source`, to `goal`, with these arms at `field`. Raises BadRequest if `source` changed."""
    if source is not None and text_with_its_line_ends(source) != text:
        raise BadRequest("config", f"{source} has changed while we measured; nothing was written")
    goal.parent.mkdir(parents=True, exist_ok=True)
    replace_text("--write" if goal == source else "--out", goal, with_arms(text, field, arms))
