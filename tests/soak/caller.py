"""A plain HTTP/1.1 client: it keeps connections, and holds no memory that a search for leaks would find."""

import asyncio

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Caller:
    """Posts JSON. A call that is cancelled cuts its connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []

    async def post(self, path: str, body: bytes, name: str) -> tuple[int, bytes]:
        """Status and body of the answer."""
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        try:
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\nx-request-id: {name}\r\ncontent-length: {len(body)}\r\n"
            writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
            answer = await _answer(reader)
        except BaseException:
            writer.transport.abort()
            raise
        self._idle.append((reader, writer))
        return answer

    def close(self) -> None:
        """Let go of every connection."""
        while self._idle:
            self._idle.pop()[1].close()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head.split()[1])
    if b"transfer-encoding: chunked" in head:
        return status, await _chunks(reader)
    return status, await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    pieces = []
    while True:
        size = int(await reader.readline(), 16)
        pieces.append((await reader.readexactly(size + 2))[:-2])
        if not size:
            return b"".join(pieces)
