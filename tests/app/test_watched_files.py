"""Keys, tokens and certificates change while the proxy runs."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.app.build import proxy
from pdproxy.app.files import INTERVAL, FileWatcher
from pdproxy.app.host import HostEnvironment, PreflightTransport, transports
from pdproxy.app.run import clients_config
from pdproxy.background import Background
from pdproxy.credential import Secret, read_secret
from pdproxy.errors import Fault, SettingsError
from pdproxy.observe.labels import WatchedSetting
from pdproxy.observe.metrics import Metrics
from pdproxy.server.server import bind
from pdproxy.settings.model import Health, Keys, Listen, Settings, Upstream
from pdproxy.settings.types import Credential
from pdproxy.transport.h1_client import H1Transport
from tests.app.running_proxy import SOON, RunningProxy, bearer, running_proxy
from tests.fakes.certificates import Identity, identity
from tests.fakes.clock import FakeClock
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.quick_server import QuickServer
from tests.transport.asking import PATIENT, ask, fault_of, post
from tests.transport.peer import Visit, always, answer, peer

STREAM = {"model": "m", "prompt": "one two", "max_tokens": 5, "stream": True}
TOKEN = WatchedSetting.ADMIN_TOKEN


class MountedSecret:
    """A secret as the kubelet mounts it: a link to a link into a folder, and a change swaps the inner one."""

    def __init__(self, folder: Path, **content: str) -> None:
        self._folder = folder
        self._turn = 0
        self.put(**content)
        for name in content:
            (folder / name).symlink_to(Path("..data") / name)

    def put(self, **content: str) -> None:
        self._turn += 1
        version = self._folder / f"..{self._turn}"
        version.mkdir()
        for name, text in content.items():
            (version / name).write_text(text)
        (self._folder / "..new").symlink_to(version.name)
        (self._folder / "..new").rename(self._folder / "..data")

    def __getitem__(self, name: str) -> Path:
        return self._folder / name


class Watched:
    """One word in a mounted secret, and a watcher on a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.registry = FakeClock(), CollectorRegistry()
        self.watcher = FileWatcher(Metrics(self.registry))
        self.mount, self.secret, self.loads = MountedSecret(folder, token="old"), Secret(), 0
        self.watcher.add(TOKEN, (self.mount["token"],), self._load)

    def _load(self) -> None:
        self.loads += 1
        self.secret.replace(read_secret(self.mount["token"], TOKEN))

    def counted(self, outcome: str) -> float | None:
        labels = {"setting": TOKEN, "outcome": outcome}
        return self.registry.get_sample_value("pdproxy_file_changes_total", labels)

    def unusable(self) -> float | None:
        return self.registry.get_sample_value("pdproxy_file_unusable", {"setting": TOKEN})


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


async def test_a_swapped_link_is_seen_at_the_next_look(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert (watched.secret.word, watched.counted("taken"), watched.unusable()) == ("old", 0, 0)
    async with asyncio.timeout(SOON), running(watched):
        watched.mount.put(token="new")
        await asyncio.sleep(0)
        watched.clock.advance(INTERVAL)
        while watched.secret.word != "new":  # noqa: ASYNC110 - a thread reads the file
            await asyncio.sleep(0.001)
    assert watched.counted("taken") == 1
    assert "listen.admin_token_file: what the file holds now is in use" in caplog.text


async def test_a_file_that_is_as_it_was_is_not_loaded(watched: Watched) -> None:
    watched.mount.put(token="old")  # another file, and other times
    await watched.watcher.look()
    assert (watched.loads, watched.counted("taken")) == (1, 0)


@pytest.mark.parametrize("wrong", ["", "two words", None, "\udcff\udcfe"], ids=["empty", "words", "gone", "binary"])
async def test_what_cannot_be_used_is_logged_once_and_changes_nothing(
    watched: Watched, wrong: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    if wrong is None:
        watched.mount.put()
    else:
        watched.mount.put()
        (watched.mount["token"].parent / "..data" / "token").write_bytes(wrong.encode("utf-8", "surrogateescape"))
    for _ in range(3):
        await watched.watcher.look()
    assert (watched.secret.word, watched.counted("refused"), watched.unusable()) == ("old", 1, 1)
    [said] = [each for each in caplog.messages if "stays in use" in each]
    assert said.startswith("listen.admin_token_file: ")
    watched.mount.put(token="old")
    await watched.watcher.look()
    assert (watched.secret.word, watched.counted("taken"), watched.unusable()) == ("old", 1, 0)


def test_at_the_start_an_unusable_file_is_an_error(tmp_path: Path) -> None:
    watcher = FileWatcher(Metrics(CollectorRegistry()))
    with pytest.raises(SettingsError):
        watcher.add(TOKEN, (tmp_path / "absent",), lambda: Secret().replace(read_secret(tmp_path / "absent", TOKEN)))


@contextlib.asynccontextmanager
async def running(watched: Watched) -> AsyncIterator[None]:
    """Its task runs meanwhile."""
    background = Background(watched.clock)
    background.every("files", INTERVAL, watched.watcher.look)
    await asyncio.sleep(0)
    try:
        yield
    finally:
        await background.aclose()


async def asked(server: RunningProxy, key: str) -> int:
    """The status that a request with this key gets."""
    body = {**STREAM, "stream": False}
    return (await server.client.post("/v1/completions", json=body, headers=bearer(key))).status_code


async def test_api_keys_change_and_streams_go_on(tmp_path: Path) -> None:
    mount = MountedSecret(tmp_path, keys="sk-old alice")
    async with running_proxy(Settings(keys=Keys(file=mount["keys"])), key="sk-old") as server:
        assert (await asked(server, "sk-old"), await asked(server, "sk-new")) == (200, 401)
        server.decode.fault = InjectedFault(FaultKind.STALL, at=2)
        async with server.client.stream("POST", "/v1/completions", json=STREAM) as stream:
            pieces = stream.aiter_bytes()
            await anext(pieces)
            server.decode.fault = None
            mount.put(keys="sk-new alice")
            await server.running.files.look()
            assert (await asked(server, "sk-old"), await asked(server, "sk-new")) == (401, 200)
            server.client.headers.update(bearer("sk-new"))
            await server.until("pdproxy_requests_active 1.0")


async def test_the_nodes_credential_and_the_admin_token_change(tmp_path: Path) -> None:
    mount = MountedSecret(tmp_path, node="node-old", admin="admin-old")
    upstream = Upstream(credential=Credential.REPLACE, credential_file=mount["node"])
    settings = Settings(listen=Listen(admin_token_file=mount["admin"]), upstream=upstream, health=Health(interval=0.05))
    async with running_proxy(settings) as server:

        async def nodes(token: str) -> int:
            return (await server.operator.get("/nodes", headers=bearer(token))).status_code

        assert (await asked(server, "any"), credential_seen(server)) == (200, "Bearer node-old")
        assert (await nodes("admin-old"), await nodes("admin-new")) == (200, 401)
        mount.put(node="node-new", admin="admin-new")
        await server.running.files.look()
        assert (await asked(server, "any"), credential_seen(server)) == (200, "Bearer node-new")
        assert (await nodes("admin-old"), await nodes("admin-new")) == (401, 200)
        async with asyncio.timeout(SOON):
            while credential_seen(server, "/health") != "Bearer node-new":  # noqa: ASYNC110 - the health check comes
                await asyncio.sleep(0.01)


def credential_seen(server: RunningProxy, path: str = "/v1/completions") -> str:
    """The credential of the last request of a kind to the decode node; "" before there is one."""
    seen = [each for each in server.decode.seen if each.path == path]
    if not seen:
        return ""
    last = seen[-1]
    return dict(last.headers)["authorization"]


async def shown_at(port: int) -> bytes:
    """The certificate that a new connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return shown


def der(of: Identity) -> bytes:
    return ssl.PEM_cert_to_DER_cert(of.certificate.decode())


async def test_the_clients_port_shows_its_new_certificate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second, third = map(identity, ("first", "second", "third"))
    mount = MountedSecret(tmp_path, crt=first.certificate.decode(), key=first.key.decode())
    settings = Settings(listen=Listen(tls_certificate=mount["crt"], tls_key=mount["key"]))
    bound = bind("127.0.0.1", 0, "listen.port")
    port = bound.getsockname()[1]
    async with proxy(settings, HostEnvironment()) as running:
        server = QuickServer(clients_config(settings, running), bound)
        task = asyncio.create_task(server.serve(sockets=[bound]))
        try:
            while not server.started:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(first))
            mount.put(crt=second.certificate.decode(), key=third.key.decode())
            await running.files.look()
            assert await shown_at(port) == der(first)
            mount.put(crt=second.certificate.decode(), key=second.key.decode())
            await running.files.look()
            assert await shown_at(port) == der(second)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            writer.close()
        finally:
            server.should_exit = True
            await task
    [said] = [each for each in caplog.messages if "stays in use" in each]
    assert "are no certificate and its key" in said


def made_for(upstream: Upstream) -> tuple[H1Transport, PreflightTransport]:
    """Both transports, as the proxy makes them."""
    metrics = Metrics(CollectorRegistry())
    return transports(upstream, FakeClock(), FileWatcher(metrics), metrics)


def trusting(whom: Identity) -> ssl.SSLContext:
    """A client's context that trusts this authority alone."""
    return ssl.create_default_context(cadata=whom.certificate.decode())


async def test_without_a_file_nodes_are_checked_by_the_systems_authorities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are read when the first connection is made."""
    ours = identity("ours")
    certificate, _ = ours.write(tmp_path)
    both = made_for(Upstream())
    try:
        async with peer(always(b"well"), tls=serving(ours, tmp_path)) as there:
            for wary in made_for(Upstream()):
                assert await fault_of(wary, post(there)) is Fault.REFUSED
                await wary.aclose()
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))  # OpenSSL's own name for it
            for transport in both:
                assert await ask(transport, post(there)) == (200, b"well")
    finally:
        for transport in both:
            await transport.aclose()


async def test_nodes_are_checked_by_the_new_authorities(tmp_path: Path) -> None:
    """By new connections: the open one of a stream under way stays."""
    ours, other = identity("ours"), identity("other")
    mount = MountedSecret(tmp_path, ca=ours.certificate.decode())
    metrics, clock = Metrics(CollectorRegistry()), FakeClock()
    watcher = FileWatcher(metrics)
    both = transports(Upstream(ca_file=mount["ca"]), clock, watcher, metrics)
    go_on = asyncio.Event()

    async def slow(visit: Visit) -> None:
        await visit.request()
        await visit.say(answer(b"well")[:-2])
        await go_on.wait()
        await visit.say(b"ll")

    try:
        async with peer(slow, always(b"well"), tls=serving(ours, tmp_path)) as there:
            under_way = await both[0].send(post(there), PATIENT)
            mount.put(ca=other.certificate.decode())
            await watcher.look()
            for transport in both:
                assert await fault_of(transport, post(there)) is Fault.REFUSED
            mount.put(ca="no certificate")
            await watcher.look()
            assert await fault_of(both[0], post(there)) is Fault.REFUSED
            mount.put(ca=other.certificate.decode() + ours.certificate.decode())
            await watcher.look()
            for transport in both:
                assert await ask(transport, post(there)) == (200, b"well")
            go_on.set()
            assert b"".join([piece async for piece in under_way]) == b"well"
            await under_way.aclose()
    finally:
        for transport in both:
            await transport.aclose()


@pytest.mark.parametrize(
    ("in_certificate", "asked_for", "served"),
    [("nodes", "nodes", True), ("nodes", "", False), ("nodes", "others", False), ("", "", True), ("", "nodes", False)],
)
async def test_nodes_at_addresses_that_no_certificate_knows_show_one_name(
    tmp_path: Path, in_certificate: str, asked_for: str, served: bool
) -> None:
    """Pods; without ``server_name`` the address must be in the certificate."""
    ours = identity("ours", in_certificate)
    certificate, _ = ours.write(tmp_path)
    upstream = Upstream(ca_file=certificate, server_name=asked_for)
    both = made_for(upstream)
    try:
        async with peer(always(b"well"), tls=serving(ours, tmp_path)) as there:
            for transport in both:
                if served:
                    assert await ask(transport, post(there)) == (200, b"well")
                else:
                    assert await fault_of(transport, post(there)) is Fault.REFUSED
    finally:
        for transport in both:
            await transport.aclose()


def serving(whom: Identity, folder: Path) -> ssl.SSLContext:
    """A server's context."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*whom.write(folder))
    return context
