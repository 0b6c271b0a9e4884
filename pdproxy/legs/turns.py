"""Work on long bodies in steps, between which everything else that waits for the event loop has its turn."""

import asyncio

from pdproxy.legs.outline import PromptFacts, long_facts, small_facts
from pdproxy.raw_json import Result, Steps
from pdproxy.request import Endpoint, Json


async def in_turns(steps: Steps[Result]) -> Result:
    """The result of all steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        await asyncio.sleep(0)


async def prompt_facts(endpoint: Endpoint, body: Json) -> PromptFacts:
    """What is known of the prompt of a body; a long one is gone through in turns with everything else."""
    small = small_facts(endpoint, body)
    return await in_turns(long_facts(endpoint, body)) if small is None else small
