"""The tables of docs/metrics.md, from the declarations in `cluster/api/metrics.py`.

python -m tests.metrics_page            write them
python -m tests.metrics_page --check    exit with 1 where they are out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.api import metrics
from cluster.api.metrics import MetricFamily

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
SECTIONS = {
    "Every process": metrics.REDIS,
    "Routers": metrics.ROUTER,
    "Verifiers": metrics.VERIFIER,
    "Drafters": metrics.DRAFTER,
}
HEAD = "| metric | type | labels | meaning | query |\n|---|---|---|---|---|"


def table(families: tuple[MetricFamily, ...]) -> str:
    """A row for each metric."""
    rows = (
        f"| `{each.name}` | {each.type} | {', '.join(f'`{label}`' for label in each.labels)} | {each.text} | "
        f"`{each.query}` |"
        for each in families
    )
    return "\n".join((HEAD, *rows))


def page(text: str) -> str:
    """The page with its tables written anew. They follow the text before the first of their headings."""
    head = text[: text.index(f"\n## {next(iter(SECTIONS))}\n")]
    return head + "".join(f"\n## {title}\n\n{table(families)}\n" for title, families in SECTIONS.items())


if __name__ == "__main__":
    old = PAGE.read_text()
    new = page(old)
    if "--check" in sys.argv:
        sys.exit(f"{PAGE} is out of date: run python -m tests.metrics_page" if old != new else 0)
    PAGE.write_text(new)
