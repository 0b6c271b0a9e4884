"""How many of the proxy's files one streamed chat runs through: who follows a request has to read as many."""

import sys
from pathlib import Path
from types import FrameType

import pdproxy
from pdproxy.settings.model import Health, Settings
from tests.app.running_proxy import running_proxy

ROOT = Path(pdproxy.__file__).parent
MOST = 40
"""With spans, latency by model, an account of its key, a queue and a record of its answer. Who needs one more file on a
request's way finds one there that only passes on, or two that hold one thought."""
QUIET = 600.0
"""Seconds between health checks, so that only the request runs while it is watched."""
CHAT = {"model": "m", "messages": [{"role": "user", "content": "one two three"}], "max_tokens": 4, "stream": True}


async def test_a_streamed_chat_runs_through_few_files() -> None:
    touched: set[str] = set()

    def record(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            touched.add(frame.f_code.co_filename.removeprefix(f"{ROOT}/"))

    async with running_proxy(Settings(health=Health(interval=QUIET, silence=0))) as running:
        await running.client.post("/v1/chat/completions", json=CHAT)
        sys.setprofile(record)
        try:
            answered = await running.client.post("/v1/chat/completions", json=CHAT)
        finally:
            sys.setprofile(None)
    assert answered.text.endswith("data: [DONE]\n\n")
    print(len(touched), *sorted(touched), sep="\n")
    assert len(touched) <= MOST
