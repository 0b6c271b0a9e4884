"""The documentation as a site: built strictly, the same pages as at GitHub, and nothing in it that another host has."""

import asyncio
import html.parser
import json
import re
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from deploy.local.paths import ROOT
from deploy.site import GUIDES, SOURCE, build, with_links, with_tabs, write_source
from tests.admin.browser import CHROMIUM, Page, new_page, running_chromium
from tests.test_docs import slug
from tests.test_troubleshooting import rows_of, sections

pytestmark = pytest.mark.together("site")

COUNTED = {"li": "list item", "tr": "row", "pre": "block of code"}
PAGES = {f"docs/{page.relative_to(ROOT / 'docs')}" for page in (ROOT / "docs").rglob("*.md")} | set(GUIDES)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    write_source()
    assert build(folder) == 0, "run: make docs"
    return folder


def test_a_link_to_nowhere_ends_the_build(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_source()
    page = SOURCE / "README.md"
    page.write_text(f"{page.read_text()}\n[gone](nodes.md#gone)\n")
    assert build(tmp_path / "site") != 0
    assert "does not contain an anchor '#gone'" in capfd.readouterr().err


class Elements(html.parser.HTMLParser):
    """The elements of a page: how many there are of each within the article, and what the page loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.loads: list[str] = []
        self._in_article = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self._in_article |= tag == "article"
        self.count[tag] += self._in_article
        if tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(found.get("href") or "")
        elif tag != "a":
            self.loads.append(found.get("src") or "")

    def handle_endtag(self, tag: str) -> None:
        self._in_article &= tag != "article"


def made_of(source: str) -> str:
    name = GUIDES.get(source, source.removeprefix("docs/"))
    return re.sub(r"README\.md$", "index.md", name).removesuffix(".md") + ".html"


def test_every_page_is_in_the_site(site: Path) -> None:
    built = {str(page.relative_to(site)) for page in site.rglob("*.html")} - {"404.html"}
    assert built == {made_of(page) for page in PAGES}


@pytest.mark.parametrize("source", sorted(PAGES))
def test_a_page_has_the_lists_tables_and_code_that_github_shows(site: Path, source: str) -> None:
    at_github = MarkdownIt("commonmark").enable("table").render((ROOT / source).read_text())
    here = Elements((site / made_of(source)).read_text()).count
    there = Elements(f"<article>{at_github}</article>").count
    assert {COUNTED[tag]: here[tag] for tag in COUNTED} == {COUNTED[tag]: there[tag] for tag in COUNTED}


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    loads = {load for page in site.rglob("*.html") for load in Elements(page.read_text()).loads}
    assert "assets/iframe-worker.js" in loads
    assert [load for load in loads if re.match(r"(\w+:)?//", load)] == []


@pytest.fixture(scope="module")
def browser() -> Iterator[str]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    with running_chromium("--host-resolver-rules=MAP * ~NOTFOUND") as address:
        yield address


async def typed(page: Page, words: str) -> None:
    """Search for some words, as a reader does."""
    await page.call("Emulation.setFocusEmulationEnabled", enabled=True)
    await page.value("document.querySelector('label[for=__search]').click()")
    field = "document.querySelector('input.md-search__input')"
    await page.until(f"{field}.focus() || document.activeElement === {field}")
    await page.call("Input.insertText", text=words)
    await page.value(f"{field}.dispatchEvent(new Event('keyup'))")


async def test_from_a_disk_and_without_a_network_the_search_finds_a_page(site: Path, browser: str) -> None:
    async with asyncio.timeout(60), new_page(browser) as page:
        await page.show(f"{site.as_uri()}/index.html")
        await page.until("document.readyState === 'complete' && !!window.document$")
        await typed(page, "rotating keys")
        await page.until("!!document.querySelector('.md-search-result__link[href*=\"security.html\"]')")
        asked = await page.value("performance.getEntriesByType('resource').map((each) => each.name)")
        assert [each for each in asked if not each.startswith("file:")] == []
        assert page.complaints == []


Searches = dict[str, set[str]]
"""Words, and the sections of which the search must list one before all others."""
SYMPTOMS, INCIDENTS = ROOT / "docs/troubleshooting.md", ROOT / "docs/incidents.md"
OTHER_WORDS: Mapping[str, Sequence[str]] = {
    "troubleshooting.html#first-minute-where-is-the-fault-us-a-node-or-the-network": (
        "proxy or node at fault",
        "is it the network or the node",
        "users complain where is the fault",
    ),
    "troubleshooting.html#the-proxy-itself-is-down-or-slow": ("proxy down", "port 8081 refused"),
    "troubleshooting.html#a-gateway-or-load-balancer-answers-for-the-proxy": ("gateway 503", "load balancer 503"),
    "troubleshooting.html#slow-but-everything-is-up": ("slow but all nodes are up", "slow and ready"),
    "upgrading.html#take-a-node-out-reboot-maintenance": (
        "reboot",
        "maintenance",
        "drain a node",
        "reboot decode node host drain and bring back",
        "drain a node before a reboot",
    ),
    "upgrading.html#start-or-restart-a-node": ("start a node", "restart a node"),
    "sizing.html#how-many-nodes-are-needed": ("how many nodes", "how many prefill nodes"),
    "troubleshooting.html#what-clients-get": ("clients get 503", "503 service unavailable", "503 no_decode"),
    "troubleshooting.html#requests-are-turned-away": (
        "429 too many requests",
        "who is rate limited",
        "clients get 429 which limit",
    ),
    "troubleshooting.html#why-a-request-was-local": ("local_reason", "request not disaggregated", "all requests local"),
    "troubleshooting.html#nothing-is-handed-over": ("hand-overs fail", "degraded", "served slower"),
    "troubleshooting.html#follow-one-request-what-happened-to-it-by-its-id": (
        "trace one request",
        "x-pdproxy-request-id",
        "find request in log",
        "what happened to one request by its id",
    ),
    "troubleshooting.html#blocks-that-stay": ("kv blocks not freed", "gpu memory not released"),
    "troubleshooting.html#turn-hand-overs-off": ("disable hand-overs", "switch off disaggregation"),
    "troubleshooting.html#roll-back": ("rollback", "downgrade", "go back to old release"),
    "troubleshooting.html#a-node-is-down": ("decode node down", "prefill down"),
    "troubleshooting.html#a-node-is-silent": ("node frozen", "node hangs"),
    "troubleshooting.html#a-node-does-not-join": ("node does not join",),
    "incidents.html#both-decode-nodes-are-killed": ("no decode node serves",),
    "incidents.html#the-data-path-is-cut": ("firewall between nodes",),
    "incidents.html#a-node-is-drained": ("take back drained node",),
    "incidents.html#the-queue-is-full": ("queue full", "neither: too much is asked"),
    "incidents.html#the-prefill-nodes-address-is-forgotten": (
        "cannot reach prefill-0 at 127.0.0.1:5600",
        "NODE_ADDRESS",
    ),
}
"""By section: what somebody may type who has not read the tables."""


def searches() -> Searches:
    """The words that the pages of symptoms and incidents tell a reader to search for, with those above.

    A question is answered by the sections that it links to; an incident by its own section, and by those that this one
    links to.
    """
    found: Searches = {words: {section} for section, all_words in OTHER_WORDS.items() for words in all_words}
    for _, words, answer, _ in rows_of(sections(SYMPTOMS)["Ten questions on call"]):
        found[words.strip("*")] = sections_of(answer, "troubleshooting.html")
    texts = {slug(heading): text for heading, text in sections(INCIDENTS).items()}
    for what, _, _, words, _ in rows_of(texts["incidents"]):
        [own] = sections_of(what, "incidents.html")
        found[words.strip("*")] = {own} | sections_of(texts[own.partition("#")[2]], "incidents.html")
    return found


def sections_of(markdown: str, here: str) -> set[str]:
    """The sections that a text of a page links to."""
    links = re.findall(r"\]\(([\w-]+\.md)?#([\w-]+)\)", markdown)
    return {f"{page.removesuffix('.md')}.html#{anchor}" if page else f"{here}#{anchor}" for page, anchor in links}


async def test_a_search_lists_the_section_that_answers_first(site: Path, browser: str) -> None:
    wrong: dict[str, str] = {}
    assert len(searches()) > 50
    first = "document.querySelector('.md-search-result__link[href*=\"#\"]')"
    async with asyncio.timeout(240), new_page(browser) as page:
        for words, answers in searches().items():
            await page.show(f"{site.as_uri()}/index.html?q={urllib.parse.quote(words)}")
            await page.until(f"document.URL.includes({urllib.parse.quote(words)!r}) && !!{first}")
            address = urllib.parse.urlsplit(str(await page.value(f"{first}.href")))
            if (found := f"{Path(address.path).name}#{address.fragment}") not in answers:
                wrong[words] = found
    assert wrong == {}


def test_each_section_is_found_by_the_words_of_its_comment(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())
    words = {section["location"]: section.get("tags", []) for section in index["docs"]}
    assert "frozen" in words["troubleshooting.html#a-node-is-silent"]
    pages = (ROOT / "docs").rglob("*.md")
    named = [line for page in pages for line in page.read_text().splitlines() if line.startswith("<!-- search:")]
    assert sum(map(bool, words.values())) == len(named)
    script = (site / "search/search_index.js").read_text()
    assert json.loads(script.removeprefix("var __index = ")) == index


async def test_the_copy_button_takes_the_commands_alone(site: Path, browser: str) -> None:
    async with asyncio.timeout(60), new_page(browser) as page:
        await page.show(f"{site.as_uri()}/watching.html")
        await page.until("document.readyState === 'complete' && !!document.querySelector('.highlight .gp')")
        await page.value("document.querySelector('.highlight code').setAttribute('data-md-copying', '')")
        copied = await page.value("document.querySelector('.highlight code').innerText")
    ready, check = (line for line in copied.splitlines() if line.strip())
    assert ready == "curl -s 127.0.0.1:8081/ready"
    assert check.startswith("pdproxy check --prefill")


def test_links_lead_to_the_same_place_from_the_site() -> None:
    page = "[a](../docs/nodes.md#data-parallel-nodes), [b](../helm/pdproxy/README.md#keys), [c](../compose.yaml) and [d](https://e.f/)"
    assert with_links(page, "docs/gateway.md") == (
        "[a](nodes.md#data-parallel-nodes), [b](chart.md#keys), [c](https://github.com/pdproxy/pdproxy/blob/main/compose.yaml)"
        " and [d](https://e.f/)"
    )
    assert with_links("[a](../nodes.md) [b](#here)", "docs/decisions/sizing.md") == "[a](../nodes.md) [b](#here)"
    assert with_links("[a](../../docs/decisions/sizing.md)", "helm/pdproxy/README.md") == "[a](decisions/sizing.md)"


def test_marked_headings_become_tabs() -> None:
    page = "before\n\n<!-- tabs -->\n### One\n\n```sh\na\n```\n\n### Two\n\nb\n<!-- end of tabs -->\n\n### After\n"
    assert with_tabs(page) == (
        'before\n\n=== "One"\n\n    ```sh\n    a\n    ```\n\n=== "Two"\n\n    b\n\n\n### After\n'
    )
