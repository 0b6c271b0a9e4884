"""Makes docs/ui.png: ``python -m tests.admin.picture docs/ui.png [width] [height]``."""

import asyncio
import sys
from pathlib import Path

from tests.admin.browser import chromium, served
from tests.admin.sample_state import SampleState


async def picture(path: Path, width: int, height: int) -> None:
    """A screenshot of the live page with much going on."""
    async with served(SampleState().context()) as address:
        await chromium(f"{address}/ui", f"--window-size={width},{height}", f"--screenshot={path}")


if __name__ == "__main__":
    where, *size = sys.argv[1:]
    across, down = map(int, size or (1100, 1420))
    asyncio.run(picture(Path(where).absolute(), across, down))
