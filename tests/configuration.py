"""The page of the configuration's keys, from the classes that read them.

python -m tests.configuration            write docs/configuration.md
python -m tests.configuration --check    exit with 1 where docs/configuration.md is out of date
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from cluster.config import Config, DrafterConfig, TargetConfig
from cluster.sections import Autoscaling, CertificatePair, ClientTls, PeerTls, Resources, RouterScaling, Section

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

HEAD = """\
# Configuration

Written by `python -m tests.configuration` from the classes in `cluster/config.py` and `cluster/sections.py`;
`tests/cluster/test_configuration_page.py` compares it.

A configuration is one YAML file. Only `targets`, and in it `checkpoint`, is required. An unknown key is refused by its
path, an invalid value by the name of its field. Relative folders start at the file's folder.
[Serve your own pair](serve.md) has examples.
"""

PLACES: tuple[tuple[str, type[Section]], ...] = (
    ("targets.NAME", TargetConfig),
    ("drafters.NAME", DrafterConfig),
    ("targets.NAME.resources", Resources),
    ("targets.NAME.autoscaling", Autoscaling),
    ("router.autoscaling", RouterScaling),
    ("tls.clients", ClientTls),
    ("tls.peers", PeerTls),
    ("tls.peers.router", CertificatePair),
)
"""Sections whose path has a name that the file chooses, or that several keys have."""
ALSO_AT = {
    "targets.NAME.resources": "The same keys are at `drafters.NAME.resources` and `router.resources`.",
    "tls.peers.router": "The same keys are at `tls.peers.drafter` and `tls.peers.verifier`.",
    "targets.NAME.autoscaling": "The same keys are at `drafters.NAME.autoscaling`.",
}
BOUNDS = {
    "ge": "at least {}",
    "gt": "more than {}",
    "le": "at most {}",
    "lt": "less than {}",
    "min_length": "at least {}",
}


def docstrings(section: type[Section]) -> dict[str, str]:
    """The texts below a section's fields, by field; a base's where the section has none of its own."""
    found: dict[str, str] = {}
    for each in reversed(section.__mro__):
        if not issubclass(each, Section):
            continue
        (body,) = ast.parse(inspect.getsource(each)).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a key holds; None where it holds another value."""
    found = next((each for each in (annotation, *get_args(annotation)) if isinstance(each, type)), None)
    return found if found is not None and issubclass(found, Section) else None


def about(section: type[Section]) -> str:
    return " ".join((inspect.getdoc(section) or "").split())


def meaning(section: type[Section], name: str) -> str:
    """What a key means: the text below it, else that of the section that it holds."""
    held = section_of(section.model_fields[name].annotation)
    return docstrings(section).get(name) or (about(held) if held is not None else "")


def kind(annotation: Any) -> str:
    """A field's type, as one writes its value in YAML."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind(inside[0])
    if origin in (Union, UnionType):
        return kind(next(each for each in inside if each is not type(None)))
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in inside)
    if origin is tuple:
        return f"list of {kind(inside[0])}"
    if origin is dict:
        return "mapping"
    if annotation is Path:
        return "path or name"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "mapping"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}.get(
        annotation.__name__, "text"
    )


def default(field: FieldInfo) -> str:
    """A field's default, as YAML."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        found = type(value).model_fields
        changed = {name: each for name, each in value if each != found[name].get_default(call_default_factory=True)}
        return f"`{{{', '.join(f'{name}: {each}' for name, each in changed.items())}}}`" if changed else ""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f"`{value}`" if value else "empty"
    if isinstance(value, tuple | dict):
        return ", ".join(f"`{each}`" for each in value) if value else "empty"
    return f"`{_number(value)}`"


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def bounds(field: FieldInfo) -> str:
    """A field's bounds, from its checks."""
    found = [
        text.format(_number(getattr(check, name)))
        for check in field.metadata
        for name, text in BOUNDS.items()
        if getattr(check, name, None) is not None
    ]
    return ", ".join(found)


def sections() -> Iterator[tuple[str, type[Section]]]:
    """Every section with its path, in the order of the file."""
    yield "", Config
    yield from PLACES[:4]
    for name, field in Config.model_fields.items():
        if (own := section_of(field.annotation)) is not None:
            yield name, own
            yield from ((path, section) for path, section in PLACES[4:] if path.startswith(f"{name}."))


def linked(text: str) -> str:
    """A text whose references to pages are links."""
    return re.sub(r"\(docs/([\w-]+)\.md\)", r"([\1](\1.md))", text)


def undescribed() -> list[str]:
    """Keys without a text."""
    return [
        f"{path}.{name}" for path, section in sections() for name in section.model_fields if not meaning(section, name)
    ]


def page() -> str:
    """The text of docs/configuration.md."""
    parts = [HEAD]
    for path, section in sections():
        parts.append(f"\n## {f'`{path}`' if path else 'The file'}\n\n{textwrap.fill(linked(about(section)), 120)}\n")
        if path in ALSO_AT:
            parts.append(f"\n{ALSO_AT[path]}\n")
        parts.append("\n| key | type | default | bounds | meaning |\n|---|---|---|---|---|\n")
        for name, field in section.model_fields.items():
            text = linked(meaning(section, name)).replace("|", "\\|")
            cells = (f"`{name}`", kind(field.annotation), default(field), bounds(field), text)
            parts.append(f"| {' | '.join(cells)} |\n")
    return "".join(parts)


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit("docs/configuration.md is out of date: run it without --check" if PAGE.read_text() != page() else 0)
    PAGE.write_text(page())
