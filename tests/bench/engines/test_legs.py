"""First tokens, one at a time: the two legs by hand, and turns."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from deploy.bench.engines.legs import FIRST, SHAPE, TO_HAND_OVER, Connection, First, by_hand, compare, through
from deploy.bench.engines.loads import question
from deploy.bench.rounds import BenchError
from tests.fakes.http_server import HOST, QuietHandler, running

TICKET = {"do_remote_prefill": True, "name": "of this very prompt"}


class Node(QuietHandler):
    """A node that answers with the list's own lines; what it was asked is kept in ``bodies`` of its server."""

    protocol_version = "HTTP/1.1"
    server: "Server"

    def do_POST(self) -> None:
        body = json.loads(self.body())
        self.server.bodies.append(body)
        if not body.get("stream"):
            self.answer_json(self.server.status, {"choices": [{"text": "x"}], "kv_transfer_params": TICKET})
            return
        choices = [{"choices": [{"text": text}]} for text in ("", *recited(body["prompt"])[:2])]
        events = [*choices, {"choices": [], "usage": {}}] if self.server.error is None else [self.server.error]
        said = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self.answer(self.server.status, said.encode())


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((HOST, 0), Node)
        self.bodies: list[dict[str, Any]] = []
        self.error: dict[str, Any] | None = None
        self.status = 200


def recited(prompt: str) -> list[str]:
    """The model's answer: the lines from the one that is asked for on, the first one without its name."""
    *lines, asked = prompt.split("\n")
    name = asked.split()[1]
    start = next(at for at, line in enumerate(lines) if line.startswith(f"{name} "))
    return [f"{lines[start].removeprefix(name)}\n", *(f"{line}\n" for line in lines[start + 1 :])]


@contextmanager
def served() -> Iterator[tuple[Server, Connection]]:
    server = Server()
    with running(server) as port, closing(Connection(f"http://{HOST}:{port}")) as connection:
        yield server, connection


def test_by_hand_the_ticket_of_the_first_leg_goes_with_the_second() -> None:
    asked = question(SHAPE, 1)
    with served() as (one, prefill), served() as (other, decode):
        first = by_hand(prefill, decode)(asked.prompt)
    assert [(body["max_tokens"], body["kv_transfer_params"]) for body in one.bodies] == [(1, TO_HAND_OVER)]
    assert [(body["max_tokens"], body["kv_transfer_params"]) for body in other.bodies] == [(SHAPE.answer, TICKET)]
    assert asked.answer.startswith(first.text)
    assert first.milliseconds > 0


def test_a_proxy_gets_one_request_and_its_connection_is_kept() -> None:
    with served() as (proxy, connection):
        for seed in (1, 2):
            asked = question(SHAPE, seed)
            assert asked.answer.startswith(through(connection)(asked.prompt).text)
    assert [body.get("kv_transfer_params") for body in proxy.bodies] == [None, None]


def test_an_error_is_no_first_token() -> None:
    prompt = question(SHAPE, 1).prompt
    with served() as (proxy, connection):
        proxy.error = {"error": {"message": "no node"}}
        with pytest.raises(BenchError, match="no node"):
            through(connection)(prompt)
    with served() as (proxy, connection):
        proxy.status = 503
        with pytest.raises(BenchError, match="503"):
            through(connection)(prompt)


def test_every_way_is_asked_in_every_turn_another_one_first_each_time() -> None:
    order, prompts = list[str](), list[str]()

    def way(name: str) -> Any:
        def ask(prompt: str) -> First:
            order.append(name)
            prompts.append(prompt)
            return First(float(len(order)), recited(prompt)[0])

        return ask

    taken = compare({name: way(name) for name in "abc"}, 4, 1)
    assert "".join(order[:9]) == "abcbcacab"
    assert len(order) == len(set(prompts)) == 3 * (FIRST + 4)
    assert {name: len(times) for name, times in taken.items()} == dict.fromkeys("abc", 4)
    assert min(time for times in taken.values() for time in times) == 3 * FIRST + 1


@pytest.mark.parametrize("text", ["", " 000\n"])
def test_a_wrong_answer_ends_it(text: str) -> None:
    with pytest.raises(BenchError, match="a answered"):
        compare({"a": lambda prompt: First(1.0, text)}, 1, 1)
