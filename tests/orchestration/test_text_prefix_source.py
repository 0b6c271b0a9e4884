"""The approximation's hits for prompts that go on from earlier ones, by the forms in which clients send them."""

from typing import Any

import pytest

from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.pool import Pool
from pdproxy.orchestration.text_prefix_source import TextPrefixSource
from pdproxy.planning.plan_types import Plan
from pdproxy.planning.prefix import Hit, Place
from pdproxy.request import Endpoint
from tests.events.test_prefix_source import request
from tests.fakes.clock import FakeClock
from tests.orchestration.test_cache_route import CachingCluster

WORDS = [f"word{number} " for number in range(600)]
FORMS: dict[str, tuple[Endpoint, Any]] = {
    "text": (Endpoint.COMPLETIONS, lambda words: {"prompt": "".join(WORDS[:words])}),
    "ids": (Endpoint.COMPLETIONS, lambda words: {"prompt": list(range(words))}),
}


@pytest.mark.parametrize("form", FORMS)
async def test_a_completion_is_resumed_where_the_prompt_before_it_ended(form: str) -> None:
    """Wherever that is: prompts grow by less than what lies between two marks, and by more."""
    cluster, (endpoint, prompt_of) = CachingCluster(nodes=2, resumes=True), FORMS[form]
    routes = []
    for number, words in enumerate((300, 305, 311, 480, 490)):
        body = {**prompt_of(words), "max_tokens": 4, "stream": True, "temperature": 0}
        got = await cluster.ask(endpoint, body, name=f"r-{number}")
        assert got.status == 200
        routes.append(got.route)
    assert routes == ["disaggregated", "local", "local", "local", "local"]
    assert len(cluster.legs_on()) == 1
    await cluster.settle()


async def test_a_message_is_not_resumed_where_a_shorter_one_ended() -> None:
    cluster = CachingCluster(nodes=2, resumes=True)
    for number, words in enumerate((300, 305)):
        messages = [{"role": "user", "content": "".join(WORDS[:words])}]
        body = {"messages": messages, "max_tokens": 4, "stream": True, "temperature": 0}
        got = await cluster.ask(Endpoint.CHAT, body, name=f"r-{number}")
        assert got.headers["x-pdproxy-route"].startswith("disaggregated")
    await cluster.settle()


@pytest.mark.parametrize(("unit", "prefill", "decode"), [(16, Hit(640, 624), Hit(640, 640)), (0, Hit(512, 512), None)])
async def test_a_prefill_leg_ends_before_the_prompt_and_keeps_its_state_earlier(
    unit: int, prefill: Hit, decode: Hit | None
) -> None:
    """A leg computes 640 of 650 tokens, and keeps the state after 624; the decode node keeps the one after 640."""
    clock = FakeClock()
    pool = Pool(clock)
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        pool.add(Node(name, f"http://{name}", (role,), "tiny", block_size=256, prefix_match_unit=unit))
        pool.bring_up(pool.view(name).node)
    source = TextPrefixSource(pool, clock)
    first, second = request(tuple(range(650))), request(tuple(range(800)))
    source.routed(first, Plan(pool.view("p").node, pool.view("d").node))
    found = await source.look_up(second)
    assert found is not None
    assert found.by_place()[Place("p")] == prefill
    assert decode is None or found.by_place()[Place("d")] == decode
