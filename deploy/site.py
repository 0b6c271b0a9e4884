"""Build the documentation as a site (`make docs`), of the pages that GitHub shows as they are.

Five things differ in the site. For the first four the pages are written anew before MkDocs reads them:

- Guides that lie outside of `docs/` are pages, too.
- A link to any other file of the repository leads to the file at GitHub.
- Headings between `<!-- tabs -->` and `<!-- end of tabs -->` become tabs.
- The search lists the pages for somebody on call first.
- Words in a comment below a heading, such as `<!-- search: frozen hangs -->`, find its section before all others:
  people ask in other words than headings have.
"""

import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

from deploy.local.paths import ROOT, RUNS

DOCS = ROOT / "docs"
SOURCE = RUNS / "site-source"
SITE = RUNS / "site"
REPOSITORY = "https://github.com/pdproxy/pdproxy/blob/main"
GUIDES = {"helm/pdproxy/README.md": "chart.md", "CHANGELOG.md": "changelog.md"}
"""Pages from outside of `docs/`, each with its name in the site."""
RANKS = {"troubleshooting.md": 6, "incidents.md": 4, "upgrading.md": 4, "sizing.md": 2}
"""How much more a hit in a page counts in the search than one elsewhere."""

_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- end of tabs -->$", re.MULTILINE | re.DOTALL)
_TAB = re.compile(r"^#+ (.+)\n", re.MULTILINE)
_WORDS = re.compile(r'<h\d id="([^"]+)">.*\n\s*<!-- search: (.+) -->')


def with_links(markdown: str, source: str) -> str:
    """The links of a page, as they lead from its place in the site.

    Args:
        markdown: the page.
        source: its path in the repository.
    """

    def led(match: re.Match[str]) -> str:
        opening, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        return f"{opening}{_way(place_of(source), place_of(path))}{anchor}"

    return _LINK.sub(led, markdown)


def place_of(path: str) -> str:
    """Where a file of the repository is found: a path in the site, or an address at GitHub."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return GUIDES.get(path, f"{REPOSITORY}/{path}")


def _way(here: str, there: str) -> str:
    return there if there.startswith(REPOSITORY) else posixpath.relpath(there, posixpath.dirname(here) or ".")


def with_tabs(markdown: str) -> str:
    """Each marked row of headings as tabs."""

    def tabbed(match: re.Match[str]) -> str:
        _, *parts = _TAB.split(match[1])
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return "\n".join(f'=== "{title}"\n\n{textwrap.indent(text.strip(), "    ")}\n' for title, text in pairs)

    return _TABS.sub(tabbed, markdown)


def with_rank(markdown: str, place: str) -> str:
    """The page with its rank in the search, which MkDocs reads from lines before the first heading."""
    rank = RANKS.get(place)
    return markdown if rank is None else f"---\nsearch:\n  boost: {rank}\n---\n\n{markdown}"


def write_source() -> None:
    """Write the site's pages, and what they show, to where `mkdocs.yml` says."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(DOCS, SOURCE)
    pages = {f"docs/{page.relative_to(DOCS)}": page.relative_to(DOCS) for page in DOCS.rglob("*.md")}
    for source, name in (pages | GUIDES).items():
        text = (ROOT / source).read_text(encoding="utf-8")
        page = with_rank(with_tabs(with_links(text, source)), str(name))
        (SOURCE / name).write_text(page, encoding="utf-8")


def build(folder: Path) -> int:
    """Make the site of the pages, strictly: a warning, such as a link to nowhere, is an error. The exit status."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--site-dir", str(folder)]
    # Material for MkDocs advertises its successor at every build.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if status == 0:
        add_words(folder)
    return status


def add_words(folder: Path) -> None:
    """Give sections in the search's index the words that their comments name, as tags, which weigh more than a heading.

    The index is there twice: as JSON, and as a script for who reads the site from a disk.
    """
    words = {
        f"{page.relative_to(folder)}#{anchor}": named.split()
        for page in folder.rglob("*.html")
        for anchor, named in _WORDS.findall(page.read_text(encoding="utf-8"))
    }
    index = folder / "search/search_index.json"
    found = json.loads(index.read_text(encoding="utf-8"))
    for section in found["docs"]:
        if section["location"] in words:
            section["tags"] = words[section["location"]]
    text = json.dumps(found)
    index.write_text(text, encoding="utf-8")
    index.with_suffix(".js").write_text(f"var __index = {text}", encoding="utf-8")


if __name__ == "__main__":
    write_source()
    status = build(SITE)
    if status == 0:
        print(f"Open {SITE}/index.html in a browser.")
    sys.exit(status)
