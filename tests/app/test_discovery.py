"""Discovery in a whole proxy."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdproxy.app.build import Proxy, proxy
from pdproxy.app.host import HostEnvironment, ServiceAccount, Sources
from pdproxy.errors import SettingsError
from pdproxy.settings.model import ConfiguredNode, Discovery, Health, Settings
from pdproxy.settings.types import DiscoveryKind, Role
from tests.app.zone import Zone
from tests.fakes.clock import FakeClock
from tests.nodes.discovery.apiserver import ApiServer

NEVER = Health(interval=3600)


async def state_of(app: Any) -> Any:
    """The live page's state of now."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        return (await client.get("/ui/state")).json()


async def found(running: Proxy, count: int) -> dict[str, str]:
    """Role by address, once there are so many; the limit only ends a hang."""
    async with asyncio.timeout(60):
        while True:
            nodes = (await state_of(running.operators))["nodes"]
            if len(nodes) == count:
                return {node["url"]: ",".join(node["roles"]) for node in nodes}
            await asyncio.sleep(0.01)


async def test_a_file_is_used_for_the_roles_that_name_it(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text("[{url: 'http://127.0.0.1:1', role: decode}, {url: 'http://127.0.0.1:2', role: prefill}]")
    one = Settings(
        nodes=(ConfiguredNode(url="http://127.0.0.1:3", roles=(Role.PREFILL,)),),
        discovery=Discovery(decode=DiscoveryKind.FILE, file=path, file_interval=0.05),
        health=NEVER,
    )
    async with proxy(one, HostEnvironment()) as running:
        assert await found(running, 2) == {"http://127.0.0.1:3": "prefill", "http://127.0.0.1:1": "decode"}
        path.write_text("[{url: 'http://127.0.0.1:1', role: decode}, {url: 'http://127.0.0.1:4', role: decode}]")
        assert "http://127.0.0.1:4" in await found(running, 3)


async def test_names_are_looked_up_with_a_port_or_for_services() -> None:
    zone = Zone({"p": ("127.0.0.7",), "d": ("127.0.0.8",)}, {"p": (("127.0.0.9", 9),)})
    both = Discovery(prefill=DiscoveryKind.DNS, prefill_name="p", decode=DiscoveryKind.DNS, decode_name="d", dns_port=4)
    around = HostEnvironment(resolver=zone)
    async with proxy(Settings(discovery=both, health=NEVER), around) as running:
        assert await found(running, 2) == {"http://127.0.0.7:4": "prefill", "http://127.0.0.8:4": "decode"}
    services = Discovery(prefill=DiscoveryKind.DNS, prefill_name="p")
    async with proxy(Settings(discovery=services, health=NEVER), around) as running:
        assert await found(running, 1) == {"http://127.0.0.9:9": "prefill"}


async def test_endpoint_slices_are_watched_with_the_service_account(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t0ken")
    (tmp_path / "namespace").write_text("ai")
    async with ApiServer() as server:
        await server.put("slice", "127.0.0.81")
        told = Discovery(
            decode=DiscoveryKind.KUBERNETES, decode_selector="role=decode", port_name="http", api=server.url
        )
        around = HostEnvironment(account=ServiceAccount(tmp_path))
        async with proxy(Settings(discovery=told, health=NEVER), around) as running:
            assert await found(running, 1) == {"http://127.0.0.81:8000": "decode"}
            await server.put("more", "127.0.0.82")
            assert "http://127.0.0.82:8000" in await found(running, 2)
        asked = server.asked[0]
    assert asked["path"] == "/apis/discovery.k8s.io/v1/namespaces/ai/endpointslices"
    assert (asked["labelSelector"], asked["authorization"]) == ("role=decode", "Bearer t0ken")


def test_outside_a_cluster_kubernetes_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    told = Discovery(decode=DiscoveryKind.KUBERNETES, decode_selector="x")
    account, inside = ServiceAccount(tmp_path), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    with pytest.raises(SettingsError, match="KUBERNETES_SERVICE_HOST"):
        Sources(told, FakeClock(), HostEnvironment())
    with pytest.raises(SettingsError, match=r"ca\.crt"):
        Sources(told, FakeClock(), HostEnvironment(inside, account))


def test_without_the_client_the_start_ends_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightkube", None)
    monkeypatch.delitem(sys.modules, "pdproxy.nodes.discovery.kubernetes", raising=False)
    told = Discovery(prefill=DiscoveryKind.KUBERNETES, prefill_selector="x")
    with pytest.raises(SettingsError, match=r"lightkube is missing: pip install 'pdproxy\[kubernetes\]'"):
        Sources(told, FakeClock(), HostEnvironment())


def test_heavy_clients_are_loaded_only_where_they_are_asked_for() -> None:
    """They would make every start slower."""
    code = "import sys, pdproxy.app.run; print(*sorted({'dns', 'lightkube', 'httpx2'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout == "\n"
