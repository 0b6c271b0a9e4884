"""Hundreds of wrong tickets against real nodes: the text is always right, each refusal is counted, nothing dies.

Tickets are not signed here, as on a laptop. A well-formed lie shows in the prefill node's answer after the read. Lies
that only a signature finds (the block ids of another living ticket) are left out.
"""

import itertools
import random
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx
import pytest
import zmq

from deploy.local.model.quiz import Quiz, quiz
from deploy.local.node import SERVED_NAME, Node
from deploy.local.ports import HOST, free_ports
from tests.e2e.conftest import REQUEST_TIMEOUT_S, Pair
from tests.e2e.legs import Params, complete, hand_over, prefill, release
from tests.e2e.metrics_reader import PATIENCE_S, watch
from tests.e2e.wrong_params import NESTED, WrongParams, altered, at_random, for_decode_node, for_prefill_node

pytestmark = pytest.mark.e2e

AT_ONCE = 8
RANDOM_ONES = 60
LIES = 10
OPEN_AGAIN_S = 20.0
"""Seconds until an engine that was barred is read from again, on a busy machine."""


@dataclass(frozen=True)
class Paper:
    """A question, and a ticket for it that nobody reads."""

    question: Quiz
    ticket: Params


@pytest.fixture
def papers(pair: Pair) -> Iterator[list[Paper]]:
    """The first two are of one length. All are released at the end."""
    questions = [quiz(seed, size) for seed, size in zip(range(700, 706), (200, 200, 300, 60, 120, 280), strict=True)]
    named = [(question, secrets.token_hex(16)) for question in questions]
    yield [Paper(one, prefill(pair.prefill.url, one.prompt(), pdproxy_hand_over=name)) for one, name in named]
    for _, name in named:
        release(pair.prefill.url, name)


def ask(node: Node, question: Quiz, **more: Any) -> httpx.Response:
    """A completion with more fields in its body."""
    body = {"model": SERVED_NAME, "prompt": question.prompt(), "max_tokens": 8, "temperature": 0, **more}
    return httpx.post(f"{node.url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False)


def wrong_with(node: Node, question: Quiz, forgery: WrongParams) -> str:
    """The error in the node's answer to a forgery; empty where there is none."""
    params = {"kv_transfer_params": forgery.params}
    got = ask(node, question, **({"vllm_xargs": params} if forgery.smuggled else params))
    if got.status_code != forgery.status:
        return f"{forgery.name}: {got.status_code} {got.text[:300]}"
    if got.status_code != HTTPStatus.OK:
        return ""
    text, ticket = got.json()["choices"][0]["text"], got.json().get("kv_transfer_params")
    return "" if text == question.answer and ticket is None else f"{forgery.name}: {text!r}, ticket {ticket}"


def send_all(node: Node, forged: Sequence[tuple[Quiz, WrongParams]]) -> None:
    """Send them, eight at once. Each answer must be right, and every refusal be counted in the node's metrics."""
    reasons = Counter(forgery.reason for _, forgery in forged if forgery.reason is not None)
    refused = {reason: watch(node.url, "refused", reason=reason) for reason in reasons}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = [said for said in pool.map(lambda one: wrong_with(node, *one), forged) if said]
    assert not wrong, "\n".join(wrong)
    for reason, count in reasons.items():
        refused[reason].reaches(count)
    assert {reason: refused[reason].grown() for reason in reasons} == reasons


def still_works(pair: Pair, seed: int) -> None:
    """Hand a prompt over: it is read, verified and right."""
    hand_over(pair.prefill.url, pair.decode.url, quiz(seed, 300))


@pytest.fixture(scope="module", autouse=True)
def acquainted(pair: Pair) -> None:
    """The nodes have made their handshake."""
    still_works(pair, 5990)


def test_a_decode_node_refuses_what_is_wrong_and_answers_right(pair: Pair, papers: list[Paper]) -> None:
    first, alike, longer = papers[0], papers[1], papers[2]
    table = [(first.question, one) for one in for_decode_node(first.ticket, alike.ticket, longer.ticket)]
    source = random.Random(20261121)
    drawn = [(paper.question, at_random(paper.ticket, source)) for paper in source.choices(papers, k=RANDOM_ONES)]
    assert len(table) + len(drawn) >= 200
    send_all(pair.decode, table + drawn)
    still_works(pair, 6000)


def test_a_prefill_node_refuses_what_is_wrong_and_answers_right(pair: Pair, papers: list[Paper]) -> None:
    turns = itertools.cycle(papers)
    send_all(pair.prefill, [(next(turns).question, one) for one in for_prefill_node(papers[0].ticket)])
    still_works(pair, 6010)


def test_what_the_front_end_cannot_pass_on_ends_nothing(pair: Pair) -> None:
    """Strings in place of objects and numbers of more than 64 bits fail in vLLM's own API server, one request each."""
    question = quiz(713, 120)
    bodies: list[dict[str, Any]] = [
        {"vllm_xargs": {"kv_transfer_params": junk}} for junk in ("text", 7, 0.5, ["do_remote_prefill"])
    ]
    bodies += [{"kv_transfer_params": {"do_remote_prefill": True, "remote_port": 1 << bits}} for bits in (64, 70, 4000)]
    bodies += [{"kv_transfer_params": {"do_remote_prefill": True, "remote_port": NESTED}}]
    for node in (pair.prefill, pair.decode):
        for body in bodies:
            got = ask(node, question, **body)
            assert got.status_code >= HTTPStatus.BAD_REQUEST or got.json()["choices"][0]["text"] == question.answer
    still_works(pair, 6020)


def test_prompt_a_with_the_ticket_of_b_and_then_b_with_its_own(pair: Pair) -> None:
    a, b = quiz(720, 800), quiz(721, 800)
    ticket = prefill(pair.prefill.url, b.prompt())
    refused = watch(pair.decode.url, "refused", reason="digest")
    assert complete(pair.decode.url, a.prompt(), params=ticket).text == a.answer
    refused.reaches(1)
    verified = watch(pair.decode.url, "reads", outcome="verified")
    assert complete(pair.decode.url, b.prompt(), params=ticket).text == b.answer
    verified.reaches(1)
    assert complete(pair.decode.url, a.prompt(), params=prefill(pair.prefill.url, a.prompt())).text == a.answer


def lies(ticket: Params) -> Iterator[tuple[str, Params]]:
    """Well-formed tickets that name things which do not exist, each with the outcome of the read."""
    nobody = {"remote_port": free_ports(1)[0]}
    counts = [len(ids) for ids in ticket["remote_block_ids"]]
    unknown: list[Params] = [
        nobody,
        {"remote_host": "127.0.0.2", "remote_engine_id": "elsewhere", **nobody},
        {"remote_engine_id": "another"},
        {"remote_engine_id": "a-third", **nobody},
    ]
    forged = ("cmpl-forged-0", "cmpl#forged#0123456789abcdef:1", ":::1", "HB:1")
    no_blocks = [[[first + at for at in range(count)] for count in counts] for first in (1_000_000, (1 << 31) - 100)]
    yield from (("peer_unreachable", altered(ticket, change)) for change in unknown)
    yield from (("not_held", altered(ticket, {"remote_request_id": name})) for name in forged)
    yield from (("transfer_failed", altered(ticket, {"remote_block_ids": ids})) for ids in no_blocks)


def is_read_again(pair: Pair, seed: int) -> None:
    """The last lies named the honest engine, whose prompts are computed for some seconds, until its probes pass."""
    verified, limit = watch(pair.decode.url, "reads", outcome="verified"), time.monotonic() + OPEN_AGAIN_S
    while not verified.grown():
        assert time.monotonic() < limit, "the engine stays barred"
        question = quiz(seed, 300)
        ticket = prefill(pair.prefill.url, question.prompt())
        assert complete(pair.decode.url, question.prompt(), params=ticket).text == question.answer
        seed += 1
        time.sleep(0.2)


def test_lies_in_the_right_form_are_found_out(pair: Pair) -> None:
    still_works(pair, 6030)
    for at in range(LIES):
        question = quiz(731 + at, 300)
        end, lie = list(lies(prefill(pair.prefill.url, question.prompt())))[at]
        ended = watch(pair.decode.url, "reads", outcome=end)
        assert complete(pair.decode.url, question.prompt(), params=lie).text == question.answer, lie
        ended.reaches(1)
    is_read_again(pair, 6100)
    still_works(pair, 6040)


def test_a_ticket_that_comes_again_is_not_read_again(pair: Pair) -> None:
    """The blocks that it brought are cached, with the state. (The test below covers a ticket of freed blocks.)"""
    question = quiz(750, 700)
    ticket = prefill(pair.prefill.url, question.prompt())
    ended = watch(pair.prefill.url, "leases_ended", how="read")
    assert complete(pair.decode.url, question.prompt(), params=ticket).text == question.answer
    ended.reaches(1)
    reads, unused = watch(pair.decode.url, "reads"), watch(pair.decode.url, "unused_tickets")
    assert complete(pair.decode.url, question.prompt(), params=ticket).text == question.answer
    unused.reaches(1)
    assert reads.grown() == 0
    still_works(pair, 6050)


def test_blocks_stay_for_as_many_readers_as_were_declared(pair: Pair) -> None:
    question = quiz(751, 700)
    ticket = prefill(pair.prefill.url, question.prompt(), pdproxy_readers=3)
    ended = watch(pair.prefill.url, "leases_ended", how="read")
    verified, unused = watch(pair.decode.url, "reads", outcome="verified"), watch(pair.decode.url, "unused_tickets")
    both = ask(pair.decode, question, n=2, temperature=0.01, seed=1, kv_transfer_params=ticket).json()
    assert [choice["text"] for choice in both["choices"]] == [question.answer] * 2
    assert complete(pair.decode.url, question.prompt(), params=ticket).text == question.answer
    ended.reaches(1)
    unused.reaches(1)
    assert verified.grown() + unused.grown() == 3, "what one reader brought, a later one may find in the cache"


def test_a_release_frees_what_was_prefilled_and_comes_before_it(pair: Pair) -> None:
    question, name = quiz(752, 700), secrets.token_hex(16)
    ticket = prefill(pair.prefill.url, question.prompt(), pdproxy_hand_over=name)
    released = watch(pair.prefill.url, "leases_ended", how="released")
    release(pair.prefill.url, name)
    released.reaches(1)
    not_held = watch(pair.decode.url, "reads", outcome="not_held")
    assert complete(pair.decode.url, question.prompt(), params=ticket).text == question.answer
    not_held.reaches(1)
    late = {"do_remote_decode": True, "pdproxy_hand_over": name}
    assert complete(pair.prefill.url, question.prompt(), 1, late).ticket is None


def test_a_release_of_what_nobody_knows_changes_nothing(pair: Pair) -> None:
    question = quiz(753, 300)
    ticket = prefill(pair.prefill.url, question.prompt(), pdproxy_hand_over=secrets.token_hex(16))
    release(pair.prefill.url, secrets.token_hex(16))
    verified = watch(pair.decode.url, "reads", outcome="verified")
    assert complete(pair.decode.url, question.prompt(), params=ticket).text == question.answer
    verified.reaches(1)


def test_junk_on_the_side_channel_ends_nothing(pair: Pair) -> None:
    port = pair.prefill.spec.side_channel_port
    junk = watch(pair.prefill.url, "junk", where="side_channel")
    source = random.Random(1)
    with zmq.Context() as context:
        for at in range(40):
            with context.socket(zmq.DEALER) as dealer:
                dealer.linger = 5000
                dealer.connect(f"tcp://{HOST}:{port}")
                frames = [source.randbytes(source.randrange(60)) for _ in range(at % 5 + 1)]
                dealer.send_multipart(frames)
    for _ in range(10):
        with socket.create_connection((HOST, port), 30) as raw:
            raw.sendall(source.randbytes(300))
    limit = time.monotonic() + PATIENCE_S
    while junk.grown() < 40:
        assert time.monotonic() < limit, f"{junk.grown():g} of 40 were counted"
        question = quiz(754, 300)
        assert complete(pair.prefill.url, question.prompt()).text == question.answer
    still_works(pair, 6060)
