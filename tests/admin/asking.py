"""Requests to the operator's application in memory."""

from typing import Any

import httpx


async def state_of(app: Any) -> Any:
    """What the live page would be told now."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        return (await client.get("/ui/state")).json()
