"""What the approximation tells of prompts that go on from earlier ones, by the forms in which clients send them."""

from typing import Any

import pytest

from pdproxy.request import Endpoint
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
        routes.append(got.headers["x-pdproxy-route"].split(";")[0])
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
