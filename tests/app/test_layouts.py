"""The proxy recognises a node's answers whatever blanks it writes between JSON's values."""

import itertools
import json

import pytest

from pdproxy.request import Endpoint
from pdproxy.settings.model import Settings
from tests.app.running_proxy import RunningProxy, running_proxy
from tests.fakes.faults import FaultKind, InjectedFault
from tests.orchestration.answers import read_answer
from tests.orchestration.prompts import body_for, right

LAYOUTS = [(", ", ": "), (" ,\t", " : ")]


def laid_out(proxy: RunningProxy, layout: tuple[str, str], *, resumes: bool) -> None:
    """Both nodes write JSON so."""
    for node in (proxy.prefill, proxy.decode):
        node.separators = layout
    proxy.decode.can_resume = resumes


@pytest.mark.parametrize(("layout", "resumes"), list(itertools.product(LAYOUTS, (False, True))))
async def test_streams_are_complete_and_have_only_what_was_asked_for(layout: tuple[str, str], resumes: bool) -> None:
    async with running_proxy(Settings()) as proxy:
        laid_out(proxy, layout, resumes=resumes)
        before = proxy.decode.fabric.pulled  # by the known-answer test
        for endpoint in Endpoint:
            body = {"model": "m", **body_for(endpoint, stream=True)}
            got = await proxy.client.post(endpoint, json=body)
            answer = read_answer(endpoint, got.content)
            assert (answer.texts, answer.error, answer.ended) == ({0: right(endpoint)}, None, True)
            assert answer.usage is None
            assert b"do_remote" not in got.content
        assert proxy.decode.fabric.pulled == before + len(Endpoint)
        asked = body_for(Endpoint.CHAT, stream=True, stream_options={"include_usage": True})
        got = await proxy.client.post(Endpoint.CHAT, json={"model": "m", **asked})
        assert read_answer(Endpoint.CHAT, got.content).usage


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_ticket_in_a_streams_event_is_not_shown(layout: tuple[str, str]) -> None:
    async with running_proxy(Settings()) as proxy:
        event = {"id": "a", "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]}
        ticket = {**event, "kv_transfer_params": {"remote_host": "10.0.0.1"}}
        last = {"id": "a", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        pieces = tuple(
            b"data: " + json.dumps(each, separators=layout).encode() + b"\n\n" for each in (event, event, ticket, last)
        )
        proxy.decode.can_resume = False
        proxy.decode.stream_pieces = (*pieces, b"data: [DONE]\n\n")
        got = await proxy.client.post(Endpoint.CHAT, json={"model": "m", **body_for(Endpoint.CHAT, stream=True)})
        assert got.content.endswith(b"data: [DONE]\n\n")
        assert b"10.0.0.1" not in got.content


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_an_error_event_is_noticed(layout: tuple[str, str]) -> None:
    async with running_proxy(Settings()) as proxy:
        laid_out(proxy, layout, resumes=True)
        for endpoint in Endpoint:
            proxy.decode.fault = InjectedFault(FaultKind.ERROR_EVENT, at=3, times=1)
            got = await proxy.client.post(endpoint, json={"model": "m", **body_for(endpoint, stream=True)})
            assert read_answer(endpoint, got.content).error, endpoint
