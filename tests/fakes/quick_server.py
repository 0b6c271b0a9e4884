"""The proxy's server, which ends as soon as it is told to."""

import asyncio

from pdproxy.server.server import Server

TICK = 0.01
"""Seconds; uvicorn's are 0.1, which is most of what a small test takes."""


class QuickServer(Server):
    """uvicorn's loop with shorter ticks: at each it looks whether it shall end, at every tenth it renews the date."""

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):
            counter = (counter + 1) % 864_000
            await asyncio.sleep(TICK)
