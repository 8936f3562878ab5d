"""docs/ as a site: built strictly, so that every link and anchor leads somewhere and every page is in the navigation;
it loads nothing from outside."""

from __future__ import annotations

import doctest
import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "object": "data",
    "embed": "src",
}
"""Tags that load the address in an attribute. A `link` does too, unless it only names a relation."""
NAMES = {"canonical", "prev", "next", "author", "license", "alternate"}
"""Relations of a `link` that load nothing."""
LOADS_MORE = ("mermaid", 'data-md-component="source"')
"""What makes Material's script load from outside: diagrams, and a repository's stars."""


def build(into: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(into)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    into = tmp_path_factory.mktemp("site")
    done = build(into)
    assert done.returncode == 0, done.stdout + done.stderr
    return into


class Loads(HTMLParser):
    """The addresses that a page loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "link" and given.get("rel", "") not in NAMES:
            self.found.append(given.get("href", ""))
        if LOADED.get(tag) in given:
            self.found.append(given[LOADED[tag]])


def outside(address: str) -> bool:
    """Whether an address is of another host."""
    return re.match(r"(?!data:)[a-z]+:|//", address) is not None


@pytest.mark.slow
def test_no_page_loads_anything_from_outside(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    found = {page.name: [each for each in Loads(page.read_text()).found if outside(each)] for page in pages}
    assert not {name: loads for name, loads in found.items() if loads}
    assert not [page.name for page in pages for more in LOADS_MORE if more in page.read_text()]


@pytest.mark.slow
def test_no_style_loads_anything_from_outside(site):
    styles = list(site.rglob("*.css"))
    assert styles
    found = [each for style in styles for each in re.findall(r"(?:url\(|@import )[\"']?([^\"')]+)", style.read_text())]
    assert not [each for each in found if outside(each)]


@pytest.mark.slow
def test_what_a_page_loads_is_part_of_the_site(site):
    for page in site.rglob("*.html"):
        base = site if page.name == "404.html" else page.parent  # 404.html is served at any path
        for address in Loads(page.read_text()).found:
            if not address.startswith("data:"):
                assert (base / address.split("?")[0].lstrip("/")).exists(), f"{page.name}: {address}"


@pytest.mark.slow
def test_the_front_page_is_the_readme_with_its_pictures(site):
    text = (site / "index.html").read_text()
    assert 'src="pictures/tree.svg"' in text and 'src="pictures/gains.svg"' in text
    assert 'href="start.html"' in text and "<code>ARCHITECTURE.md</code>" in text
    assert not re.findall(r'href="[^"]*\.md', text)


def test_the_readme_can_be_read_in_a_minute():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_links_of_the_readme_are_rewritten_for_the_site():
    spec = importlib.util.spec_from_file_location("front_page", DOCS / "front_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert doctest.testmod(module) == doctest.TestResults(failed=0, attempted=1)


def test_every_plot_and_picture_is_on_a_page():
    pages = "".join(path.read_text() for path in [ROOT / "README.md", *DOCS.rglob("*.md")])
    pictures = [path for path in DOCS.rglob("*") if path.suffix in (".png", ".svg")]
    assert len(pictures) >= 10
    assert not [path.name for path in pictures if f"{path.parent.name}/{path.name})" not in pages]


def misread(text: str) -> list[str]:
    """Lines that GitHub reads otherwise than the site does: a list item goes on after a blank line, or holds another
    list, where a line is indented by four."""
    faults, fenced, before = [], False, ""
    for line in text.splitlines():
        begins = re.match(r" {1,3}(?=\S)", line)
        if line.lstrip().startswith("```"):
            fenced = not fenced
            begins = begins if fenced else None
        elif fenced or (begins and before and not re.match(r" +(?:[-*]|\d+\.) ", line)):
            begins = None
        faults += [line] if begins else []
        before = line
    return faults


def test_github_and_the_site_read_lists_alike():
    faults = {path.name: misread(path.read_text()) for path in [ROOT / "README.md", *DOCS.rglob("*.md")]}
    assert not {name: lines for name, lines in faults.items() if lines}


def test_what_is_indented_by_two_in_a_list_is_a_fault():
    assert misread("- a\n\n  more\n") == ["  more"]
    assert misread("- a\n  - b\n") == ["  - b"]
    assert misread("- a\n  ```sh\n  b\n  ```\n") == ["  ```sh"]
    assert not misread("- a\n  goes on\n\n    more\n    - b\n\n```\n  code\n```\n")


def test_addresses_of_other_hosts_are_outside():
    assert all(map(outside, ("https://fonts.example/x", "//cdn.example/x", "http://a")))
    assert not any(map(outside, ("assets/x.js", "../x.css", "data:image/png;base64,", "#top")))
