"""How long others wait while a long body is read; it measures, and so runs with the soak."""

import asyncio
import json
import time

from pdproxy.legs.outline import facts_of
from pdproxy.legs.parse import reading
from pdproxy.legs.shape import shape
from pdproxy.legs.turns import PromptReader, in_turns
from pdproxy.request import Endpoint, read_json

LINE = 'She said: "no", and\nwent on to über-long texts, \\o/ дальше. '


async def test_others_have_their_turn_while_a_long_body_is_read() -> None:
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        began = time.thread_time()
        while True:
            await asyncio.sleep(0)
            longest, began = max(longest, time.thread_time() - began), time.thread_time()

    body = {"model": "m", "messages": [{"role": "user", "content": LINE}] * 120_000}
    raw = json.dumps(body).encode()
    began = time.thread_time()
    read_json(raw)
    shape(Endpoint.CHAT, body), facts_of(body).tokens
    at_once = time.thread_time() - began
    watching = asyncio.create_task(watch())
    await PromptReader().read(await in_turns(reading(raw)))
    watching.cancel()
    assert longest < at_once / 3
