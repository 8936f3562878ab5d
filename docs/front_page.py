"""The site's front page is README.md: mkdocs calls this file's functions when it builds the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parent.parent / "README.md"


def front_page(readme: str) -> str:
    """README with its links to pages of docs/, and with the names of other files in place of links to them.

    >>> front_page("[start](docs/start.md), [ARCHITECTURE.md](ARCHITECTURE.md), [its card](cluster/README.md)")
    '[start](start.md), `ARCHITECTURE.md`, its card (`cluster/README.md`)'
    """
    readme = readme.replace("](docs/", "](/docs/")
    readme = re.sub(r"\[([^\]]+)\]\(\1\)", r"`\1`", readme)
    readme = re.sub(r"\[([^\]]+)\]\((?!/docs/|[a-z]+:)([^)]+)\)", r"\1 (`\2`)", readme)
    return readme.replace("](/docs/", "](")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    files.append(File.generated(config, "index.md", content=front_page(README.read_text())))
    return files
