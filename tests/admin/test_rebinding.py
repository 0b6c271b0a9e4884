"""A real browser with a stranger's page: by its own name for our address (DNS rebinding), and from another origin."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn

from pdproxy.admin.context import AdminContext
from pdproxy.admin.guard import Receive, Scope, Send, send_answer
from pdproxy.server.server import Server, bind
from pdproxy.settings.model import Settings
from tests.admin.attack import ASK, EVIL, NODE
from tests.admin.browser import CHROMIUM, Page, new_page, running_chromium, served
from tests.admin.test_browser import context_of
from tests.app.running_proxy import running_proxy
from tests.orchestration.cluster import FakeCluster

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")

READS = ("/nodes", "/ui/state", "/metrics", "/health", "/prometheus/targets")
CHANGES = (("POST", "/nodes", NODE), ("DELETE", "/nodes/d0?seconds=0", None), ("POST", "/nodes/d0/drain", None))


@pytest.fixture(scope="module")
def rebound() -> Iterator[str]:
    """A browser for which the page's name is this machine; the address at which it is asked for pages."""
    with running_chromium(f"--host-resolver-rules=MAP {EVIL} 127.0.0.1") as url:
        yield url


@contextlib.asynccontextmanager
async def strangers_site() -> AsyncIterator[str]:
    """An empty page on a port of its own; its address, by its name."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send_answer(send, 200, "text/html", b"<!doctype html><title>hello</title>")

    server = Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"), bind("127.0.0.1", 0, "here"))
    serving = asyncio.create_task(server.run_port())
    try:
        yield f"http://{EVIL}:{server.address.rpartition(':')[2]}"
    finally:
        server.should_exit = True
        await serving


async def fetched(page: Page, url: str, **options: Any) -> Any:
    """The status that a script of the page sees; "opaque" for an answer that it cannot look into, "failed" for none."""
    script = f"fetch({json.dumps(url)}, {json.dumps(options)})"
    return await page.value(f"{script}.then(a => a.type === 'opaque' ? a.type : a.status, () => 'failed')")


def nodes(context: AdminContext) -> list[tuple[str, str]]:
    return [(view.node.name, view.state) for view in context.pool.state().nodes]


async def open_page(page: Page, url: str) -> None:
    await page.show(url)
    await page.until(f"location.hostname === {EVIL!r} && document.readyState === 'complete'")


async def test_a_page_that_rebinds_its_name_reads_nothing_and_changes_nothing(rebound: str) -> None:
    cluster = FakeCluster(prefills=1, decodes=2)
    context, before = context_of(cluster), nodes(context_of(cluster))
    async with served(context) as address, new_page(rebound) as page:
        await open_page(page, f"{address.replace('127.0.0.1', EVIL)}/ui")
        assert {await fetched(page, path) for path in READS} == {403}
        for method, path, body in CHANGES:
            sent = {"method": method, "body": body, "headers": {"content-type": "application/json"}}
            assert await fetched(page, path, **sent) == 403
    assert nodes(context) == before


async def test_a_page_of_another_origin_changes_nothing_and_reads_nothing(rebound: str) -> None:
    cluster = FakeCluster(prefills=1, decodes=2)
    context, before = context_of(cluster), nodes(context_of(cluster))
    async with strangers_site() as site, served(context) as address, new_page(rebound) as page:
        await open_page(page, site)
        for path in READS:
            assert await fetched(page, address + path) == "failed"
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            for path, body in (("/nodes", NODE), ("/nodes/d0/drain?seconds=0", None)):
                sent = {"method": "POST", "body": body, "headers": {"content-type": kind}}
                assert await fetched(page, address + path, mode="no-cors", **sent) == "opaque"
        assert await fetched(page, f"{address}/nodes/d0", method="DELETE") == "failed"
    assert nodes(context) == before


async def test_a_page_of_another_origin_computes_nothing_at_the_clients_port(rebound: str) -> None:
    async with running_proxy(Settings()) as proxy, strangers_site() as site, new_page(rebound) as page:
        await open_page(page, site)
        for path in ("/v1/completions", "/v1/embeddings"):
            url = str(proxy.client.base_url).rstrip("/") + path
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
                sent = {"method": "POST", "body": ASK, "headers": {"content-type": kind}}
                assert await fetched(page, url, mode="no-cors", **sent) == "opaque"
            asked = {"method": "POST", "body": ASK, "headers": {"content-type": "application/json"}}
            assert await fetched(page, url, **asked) == "failed", "its preflight is refused"
        asked_nodes = [seen for node in (proxy.prefill, proxy.decode) for seen in node.seen]
        assert not [seen for seen in asked_nodes if seen.body.get("prompt") == json.loads(ASK)["prompt"]]
