"""`pdproxy check` asks the discovered as well as the configured nodes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdproxy.__main__ import main
from pdproxy.app import hand_over_check
from pdproxy.app.check import Report, check, inspect
from pdproxy.app.host import HostEnvironment, ServiceAccount
from pdproxy.nodes.node import Node
from pdproxy.nodes.node import Role as PoolRole
from pdproxy.request import Endpoint
from pdproxy.settings.model import ConfiguredNode, Discovery, Settings
from pdproxy.settings.types import DiscoveryKind, Role
from tests.app.zone import Zone
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.loopback import LoopbackNode
from tests.fakes.node import FakeNode, Script
from tests.nodes.discovery.apiserver import ApiServer

NOBODY = "http://127.0.0.1:1"


@pytest.fixture
async def node() -> AsyncIterator[LoopbackNode]:
    """A node that works."""
    async with LoopbackNode(FakeNode("d", FakeKvTransfer())) as there:
        yield there


@contextlib.asynccontextmanager
async def cluster(
    folder: Path, *hosts: str, port: int = 8000
) -> AsyncIterator[tuple[HostEnvironment, Discovery, ApiServer]]:
    """A cluster whose one slice holds these hosts."""
    (folder / "namespace").write_text("ai")
    async with ApiServer() as server:
        await server.put("slice", *hosts)
        server.slices["slice"]["ports"][0]["port"] = port
        told = Discovery(decode=DiscoveryKind.KUBERNETES, decode_selector="role=decode", api=server.url)
        yield HostEnvironment(account=ServiceAccount(folder)), told, server


def verdicts(report: Report) -> dict[str, bool]:
    """Whether each node would be admitted, by address and role."""
    return {f"{','.join(row.node.roles)} {row.node.url}": row.good() for row in report.rows}


def also_in_a_file(folder: Path, listed: str, entry: ConfiguredNode) -> Settings:
    """A node that is named, beside a file of nodes."""
    path = folder / "nodes.yaml"
    path.write_text(listed)
    return Settings(nodes=(entry,), discovery=Discovery(decode=DiscoveryKind.FILE, file=path))


async def test_discovered_nodes_are_checked_after_configured_ones(tmp_path: Path, node: LoopbackNode) -> None:
    listed = f"[{{url: '{node.url}', role: decode}}, {{url: '{NOBODY}', role: decode}}]"
    told = also_in_a_file(tmp_path, listed, ConfiguredNode(url=node.url, roles=(Role.PREFILL,)))
    report = await inspect(told, HostEnvironment())
    assert list(verdicts(report).items()) == [
        (f"prefill,decode {node.url}", True),
        (f"decode {NOBODY}", False),
    ]
    assert report.empty_sources == []
    assert not report.good()


async def test_a_node_that_is_configured_and_discovered_is_checked_once(tmp_path: Path, node: LoopbackNode) -> None:
    listed = f"[{{url: '{node.url}', role: decode, name: found}}]"
    told = also_in_a_file(tmp_path, listed, ConfiguredNode(url=node.url, roles=(Role.DECODE,)))
    report = await inspect(told, HostEnvironment())
    assert [row.node.name for row in report.rows] == ["decode-0"]
    assert report.good()


async def test_advice_about_caches_is_printed_and_is_no_failure(
    node: LoopbackNode, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Settings(nodes=(ConfiguredNode(url=node.url, roles=(Role.DECODE,)),))
    assert await asyncio.to_thread(check, told) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("decode-0: advice: it does not tell how its prefix cache works")


async def test_names_are_looked_up(node: LoopbackNode) -> None:
    zone = Zone({}, {"d": (("127.0.0.1", node.port),)})
    told = Settings(discovery=Discovery(decode=DiscoveryKind.DNS, decode_name="d"))
    assert verdicts(await inspect(told, HostEnvironment(resolver=zone))) == {f"decode {node.url}": True}


async def test_endpoint_slices_are_listed_once(tmp_path: Path, node: LoopbackNode) -> None:
    async with cluster(tmp_path, "127.0.0.1", port=node.port) as (around, told, server):
        report = await inspect(Settings(discovery=told), around)
        assert len(server.asked) == 1
    assert verdicts(report) == {f"decode {node.url}": True}
    assert report.good()


async def test_a_source_that_cannot_be_read_is_named_and_the_rest_is_checked(
    tmp_path: Path, node: LoopbackNode
) -> None:
    absent = tmp_path / "absent.yaml"
    absent.touch()
    lost = Discovery(prefill=DiscoveryKind.FILE, file=absent, decode=DiscoveryKind.DNS, decode_name="a..b", dns_port=80)
    settings = Settings(nodes=(ConfiguredNode(url=node.url, roles=(Role.DECODE,)),), discovery=lost)
    absent.unlink()
    report = await inspect(settings, HostEnvironment())
    assert verdicts(report) == {f"decode {node.url}": True}
    first, second = report.empty_sources
    assert first.startswith(f"the file {absent} cannot be read: ")
    assert second.startswith("the name a..b cannot be read: ")
    assert not report.good()


async def test_a_refusal_of_the_api_is_shown(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (around, told, server):
        server.refusals = [403]
        report = await inspect(Settings(discovery=told), around)
    assert report.rows == []
    assert "EndpointSlices role=decode in ai cannot be read: " in report.empty_sources[0]
    assert "403" in report.empty_sources[0]


async def test_a_source_without_nodes_is_no_success(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (around, told, _):
        report = await inspect(Settings(discovery=told), around)
    assert report.empty_sources == ["EndpointSlices role=decode in ai: there are no nodes now"]
    assert not report.good()


def test_the_command_prints_it_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(f"[{{url: '{NOBODY}', role: decode}}]")
    words = ["check", "--discovery-decode", "file", "--discovery-file", str(path)]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "unreachable" in said
    assert said.endswith("cannot be reached: 127.0.0.1:1: connection refused\n")
    path.write_text("[]")
    assert main(words) == 1
    assert capsys.readouterr().out == f"the file {path}: there are no nodes now\n"


@contextlib.asynccontextmanager
async def pairs(fabric: FakeKvTransfer, decodes: int = 1) -> AsyncIterator[tuple[Settings, FakeNode]]:
    """A prefill node and decode nodes, and the former."""
    give = FakeNode("p", fabric)
    async with contextlib.AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(LoopbackNode(give))
        fakes = [FakeNode(f"d{each}", fabric) for each in range(decodes)]
        others = [await stack.enter_async_context(LoopbackNode(each)) for each in fakes]
        entries = [ConfiguredNode(url=prefill.url, roles=(Role.PREFILL,), model="m")]
        entries += [ConfiguredNode(url=each.url, roles=(Role.DECODE,), model="m") for each in others]
        yield Settings(nodes=tuple(entries)), give


async def test_a_prompt_is_handed_over_between_the_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    async with pairs(fabric := FakeKvTransfer(), decodes=2) as (told, _):
        assert await asyncio.to_thread(check, told) == 0
        assert fabric.pulled == 2
        assert fabric.held == {}
        fabric.deaf, fabric.told = True, {"cause": "peer_unreachable", "why": "[Errno 111] Connection refused"}
        assert await asyncio.to_thread(check, told) == 1
        assert fabric.held == {}, "what was not read is released"
    lines = capsys.readouterr().out.splitlines()
    failing = [line for line in lines if line.startswith("hand-overs fail: ")]
    assert [line.split()[2] for line in failing] == ["decode-0", "decode-1"]
    assert (
        "cannot reach prefill-0 at 10.0.0.1:5600 ([Errno 111] Connection refused): nothing listens there" in failing[0]
    )


@pytest.mark.parametrize("kind", [FaultKind.RESET, FaultKind.NO_TICKET, FaultKind.STATUS])
async def test_a_prefill_node_without_tickets_is_named(kind: FaultKind, capsys: pytest.CaptureFixture[str]) -> None:
    async with pairs(FakeKvTransfer()) as (told, give):
        respond = give.respond

        def failing(path: str, raw: bytes, headers: tuple[tuple[str, str], ...] = ()) -> Script:
            give.fault = InjectedFault(kind, status=500) if path == Endpoint.COMPLETIONS else None
            return respond(path, raw, headers)

        give.respond = failing  # type: ignore[method-assign]
        assert await asyncio.to_thread(check, told) == 1
    assert "hand-overs fail: prefill-0 to decode-0: prefill-0 gave no ticket: " in capsys.readouterr().out


def test_of_very_many_nodes_each_is_tried_once() -> None:
    nodes = [Node(f"{role}-{each}", "http://n", (PoolRole(role),), "m") for role in Role for each in range(40)]
    tried = hand_over_check._pairs(nodes)
    assert len(tried) < 100
    assert {name for prefill, decode in tried for name in (prefill.name, decode.name)} == {node.name for node in nodes}
    assert len(hand_over_check._pairs(nodes[36:44])) == 16
