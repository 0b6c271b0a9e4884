"""A large request does not keep others from the event loop for long, whatever its prompt is made of."""

import pytest

from deploy.bench.blocked import BODIES, MB, metered_proxy, request

MOST = 30.0
"""Milliseconds of CPU time for the longest callback. On a machine with nothing else to do it is 7 to 15; to parse such
a body and look at its parts at once takes 45 to 100."""


@pytest.mark.timeout(180)
async def test_no_callback_of_a_large_request_takes_long() -> None:
    """With a policy by what is cached, which looks at most of a prompt."""
    async with metered_proxy() as proxy:
        found = {kind: await proxy.measure(request(make(8 * MB)), 2) for kind, make in BODIES.items()}
    assert {kind: each for kind, each in found.items() if each.longest > MOST} == {}
