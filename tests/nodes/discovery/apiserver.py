"""A small Kubernetes API server: EndpointSlices, listed and watched over real HTTP on 127.0.0.1."""

import asyncio
import contextlib
import json
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from typing import Any

GONE = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}


def a_slice(
    name: str,
    *hosts: str,
    version: int = 0,
    port: int = 8000,
    labels: Mapping[str, str] | None = None,
    **conditions: bool,
) -> dict[str, Any]:
    """A slice with these endpoints, all in the same condition. Without labels every selector finds it."""
    endpoints = [{"addresses": [host], "conditions": conditions or {"ready": True}} for host in hosts]
    metadata: dict[str, Any] = {"name": name, "namespace": "ai", "resourceVersion": str(version)}
    if labels is not None:
        metadata["labels"] = dict(labels)
    kind = {"addressType": "IPv4", "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice"}
    return {**kind, "metadata": metadata, "ports": [{"name": "http", "port": port}], "endpoints": endpoints}


def a_bookmark(version: int) -> dict[str, Any]:
    """As API servers send it: nothing but the version is filled in."""
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {"resourceVersion": str(version), "creationTimestamp": None},
        "addressType": "",
        "endpoints": None,
        "ports": None,
    }


class ApiServer:
    """Sends what tests change to every watch; keeps its history until it is compacted."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.slices: dict[str, dict[str, Any]] = {}
        self.version = 100
        self.oldest = 100
        self.asked: list[Mapping[str, str]] = []
        """The query of every request, and its authorization."""
        self.refusals: list[int] = []
        """Statuses to answer the next requests with."""
        self.page = 500
        """Slices in one answer to a list."""
        self.token = ""
        """The only one that is not refused; "" takes any."""
        self._history: list[tuple[int, bytes, Mapping[str, str] | None]] = []
        """Each event's version, its line, and the labels of what it is about; None concerns every watch."""
        self._changed = asyncio.Condition()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._ending = asyncio.Event()
        self._silent: set[asyncio.Task[None] | None] = set()

    async def __aenter__(self) -> "ApiServer":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def all_gone(self) -> None:
        """Return when the other side has closed every connection; the limit only ends a hang."""
        async with asyncio.timeout(60):
            await asyncio.gather(*self._connections, return_exceptions=True)

    def lists(self) -> int:
        return sum("watch" not in query for query in self.asked)

    async def put(
        self,
        name: str,
        *hosts: str,
        port: int = 8000,
        labels: Mapping[str, str] | None = None,
        **conditions: bool,
    ) -> None:
        """A slice is made or changed."""
        self.version += 1
        sort = "MODIFIED" if name in self.slices else "ADDED"
        self.slices[name] = a_slice(name, *hosts, version=self.version, port=port, labels=labels, **conditions)
        await self.send_event(sort, self.slices[name])

    async def delete(self, name: str) -> None:
        """A slice is deleted."""
        self.version += 1
        gone = self.slices.pop(name)
        gone["metadata"]["resourceVersion"] = str(self.version)
        await self.send_event("DELETED", gone)

    async def send_event(self, sort: str, item: Mapping[str, Any]) -> None:
        """Send an event as it is; it belongs to the present version."""
        labels = item.get("metadata", {}).get("labels")
        await self.send(json.dumps({"type": sort, "object": item}).encode() + b"\n", labels)

    async def send(self, line: bytes, labels: Mapping[str, str] | None = None) -> None:
        """Send bytes to every watch that selects these labels, now and (from its version on) later."""
        async with self._changed:
            self._history.append((self.version, line, labels))
            self._changed.notify_all()

    async def end_watches(self) -> None:
        """End every watch as a server does whose time is over."""
        async with self._changed:
            self._ending.set()
            self._changed.notify_all()
        await self._closed()
        self._ending.clear()

    def fall_silent(self) -> None:
        """Every connection that is open now stays open and silent, as if its other end had vanished."""
        self._silent.update(self._connections)

    async def cut(self) -> None:
        """Cut every connection."""
        for task in tuple(self._connections):
            task.cancel()
        await self._closed()

    def compact(self) -> None:
        """Forget how it came to this."""
        self.version += 1
        self.oldest = self.version
        self._history.clear()

    async def _closed(self) -> None:
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request a connection."""
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                async with _while_there(reader):
                    await self._answer(self._read(head), writer)
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        finally:
            writer.transport.abort()

    def _read(self, head: str) -> Mapping[str, str]:
        first, *lines = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        target = urllib.parse.urlsplit(first.split(" ")[1])
        query = dict(urllib.parse.parse_qsl(target.query)) | {"path": target.path}
        query |= {"authorization": headers.get("authorization", "")}
        self.asked.append(query)
        return query

    async def _answer(self, query: Mapping[str, str], writer: asyncio.StreamWriter) -> None:
        if self.refusals:
            _whole(writer, self.refusals.pop(0), {"message": "not now"})
        elif self.token and query["authorization"] != f"Bearer {self.token}":
            _whole(writer, 401, {"message": "Unauthorized"})
        elif "watch" not in query:
            _whole(writer, 200, self._listed(int(query.get("continue", "0")), query))
        elif int(query["resourceVersion"]) < self.oldest:
            _whole(writer, 410, GONE)
        else:
            await self._watch(int(query["resourceVersion"]), query, writer)

    def _listed(self, first: int, query: Mapping[str, str]) -> dict[str, Any]:
        found = [each for each in self.slices.values() if _selects(query, each["metadata"].get("labels"))]
        rest = first + self.page
        metadata = {"resourceVersion": str(self.version)} | ({"continue": str(rest)} if rest < len(found) else {})
        return {"metadata": metadata, "items": found[first:rest]}

    async def _watch(self, since: int, query: Mapping[str, str], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        await writer.drain()
        sent = sum(version <= since for version, _, _ in self._history)
        while not self._ending.is_set():
            for _, line, labels in self._history[sent:]:
                sent += 1
                if not _selects(query, labels):
                    continue
                # Half a line at a time: events do not come in one piece.
                for piece in (line[: len(line) // 2], line[len(line) // 2 :]):
                    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    await writer.drain()
            async with self._changed:
                while len(self._history) <= sent and not self._ending.is_set():
                    await self._changed.wait()
            if asyncio.current_task() in self._silent:
                await asyncio.Event().wait()
        writer.write(b"0\r\n\r\n")


@contextlib.asynccontextmanager
async def _while_there(reader: asyncio.StreamReader) -> AsyncIterator[None]:
    """Cancel what is inside when the other side hangs up."""
    inside = asyncio.current_task()
    assert inside is not None
    waiting = asyncio.get_running_loop().create_task(reader.read())
    waiting.add_done_callback(lambda done: done.cancelled() or inside.cancel())
    try:
        yield
    finally:
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await waiting


def _selects(query: Mapping[str, str], labels: Mapping[str, str] | None) -> bool:
    """Whether a query's label selector, of equalities alone, finds what has these labels."""
    wanted = (pair.partition("=") for pair in query.get("labelSelector", "").split(",") if pair)
    return labels is None or all(labels.get(name) == value for name, _, value in wanted)


def _whole(writer: asyncio.StreamWriter, status: int, body: Mapping[str, Any]) -> None:
    raw = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
