"""Steps of answers that wait for their client."""

import asyncio

from deploy.bench.lockstep import Lockstep


class Written(asyncio.WriteTransport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.pieces.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closing


async def test_a_step_goes_out_when_the_client_has_read_the_one_before() -> None:
    lockstep, one = Lockstep(), Written()
    lockstep.play(one, ((b"a", b"b"), (), (b"c",), (b"d",)))
    assert one.pieces == []
    await asyncio.sleep(0)
    assert one.pieces == [b"a", b"b"]
    lockstep.advance()
    assert one.pieces == [b"a", b"b", b"c"]
    lockstep.advance()
    lockstep.advance()
    assert one.pieces == [b"a", b"b", b"c", b"d"]


async def test_an_answer_that_nobody_reads_any_more_is_dropped() -> None:
    lockstep, gone, other = Lockstep(), Written(), Written()
    lockstep.play(gone, ((b"a",), (b"b",)))
    await asyncio.sleep(0)
    gone.closing = True
    lockstep.play(other, ((b"c",), (b"d",)))
    await asyncio.sleep(0)
    lockstep.advance()
    assert (gone.pieces, other.pieces) == ([b"a"], [b"c", b"d"])
