"""Work on long bodies in steps, between which everything else that waits for the event loop has its turn."""

import asyncio

from pdproxy.legs.outline import LONG_AT_ONCE, PromptFacts, long_facts, small_facts
from pdproxy.raw_json import Result, Steps
from pdproxy.request import Json


async def in_turns(steps: Steps[Result]) -> Result:
    """The result of all steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        await asyncio.sleep(0)


class PromptReader:
    """Finds out what planning needs to know of prompts. Of long ones it reads a few at once: there is one event loop,
    and to begin with all would only have all of them hold what they have read so far."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(LONG_AT_ONCE)

    async def read(self, body: Json) -> PromptFacts:
        """The facts of a body's prompt; a long one is gone through in turns with everything else."""
        small = small_facts(body)
        if small is not None:
            return small
        async with self._places:
            return await in_turns(long_facts(body))
