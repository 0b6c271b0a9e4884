"""Sends each case to a single engine and to the proxy in front of a pair, and tells where the answers differ."""

import asyncio
import time
from collections.abc import Sequence

import httpx

from tests.differential.answers import Aspects, aspects, differences
from tests.differential.grid import Case
from tests.differential.ledger import Difference

AT_ONCE = 6
WITHIN_S = 120.0
SHOWN = 300
"""Characters of each answer that a difference tells."""
EVERY_S = 10.0


async def compare(alone: str, proxied: str, cases: Sequence[Case]) -> list[Difference]:
    """All differences. ``alone``, ``proxied``: base URLs. Prints its progress."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # vLLM closes some without a word
    found, waiting, began = list[Difference](), iter(list(cases)), time.monotonic()
    done = 0

    async def work(client: httpx.AsyncClient) -> None:
        nonlocal done
        for each in waiting:
            difference = await _difference(client, alone, proxied, each)
            found.extend([difference] if difference else [])
            done += 1

    async def tell() -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            print(f"{done} of {len(cases)} cases, {len(found)} differ, {time.monotonic() - began:.0f} s", flush=True)

    telling = asyncio.create_task(tell())
    try:
        async with httpx.AsyncClient(timeout=WITHIN_S, limits=limits, trust_env=False) as client:
            await asyncio.gather(*(work(client) for _ in range(AT_ONCE)))
    finally:
        telling.cancel()
    return found


async def _difference(client: httpx.AsyncClient, alone: str, proxied: str, case: Case) -> Difference | None:
    (one, one_told), (other, other_told) = await asyncio.gather(
        _asked(client, alone, case), _asked(client, proxied, case)
    )
    differ = differences(one, other)
    if not differ:
        return None
    told = "\n".join(f"  {name}: {str(one.get(name))[:SHOWN]} | {str(other.get(name))[:SHOWN]}" for name in differ)
    return Difference(case, differ, f"{told}\n  alone:   {one_told}\n  proxied: {other_told}")


async def _asked(client: httpx.AsyncClient, base: str, case: Case) -> tuple[Aspects, str]:
    headers = {"content-type": "application/json"}
    try:
        got = await client.post(base + case.endpoint, content=case.body, headers=headers)
    except httpx.HTTPError as error:
        return {"broken": type(error).__name__}, repr(error)
    told = f"{got.status_code} {got.text[:SHOWN]}"
    return aspects(got.status_code, got.headers.get("content-type", ""), got.content), told
