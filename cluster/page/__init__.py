"""The page that a router serves at `/`, and that `dendro explain` writes: one file, whose script and style are
allowed by their hashes alone."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
_DATA = '<script type="application/json" id="explained">null</script>'
_POLICY_PLACE = "<!--policy-->"


def _hashes(tag: str) -> str:
    """The sources of a policy that allow the page's own blocks of a tag."""
    blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() for block in blocks)
    return " ".join(f"'sha256-{each}'" for each in digests)


_OWN = (
    f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; img-src data:; base-uri 'none'"
)
"""What the page loads: its own script and style."""
POLICY = (
    f"{_OWN}; connect-src 'self'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
"""The content policy of the page that a router serves, which calls that router alone."""


def explained_page(answers: list[dict[str, Any]]) -> str:
    """The page with the rounds of a request's answers, as a file that calls nobody."""
    data = json.dumps(answers).replace("<", "\\u003c")  # the text of an answer must not end the block
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_OWN}; form-action \'none\'">'
    return PAGE.replace(_POLICY_PLACE, policy, 1).replace(_DATA, _DATA.replace("null", data), 1)
