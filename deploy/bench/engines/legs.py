"""The time that a proxy adds to the first token, one request at a time: beside the two legs, sent by hand.

No load generator sends a request in two legs, so the client is our own. It is the same for all three ways, which take
turns with every single request: what else the machine does, and what the client itself costs, is in none of the
differences.
"""

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from deploy.bench.engines.loads import Question, Shape, question
from deploy.bench.rounds import BenchError
from deploy.local.node import SERVED_NAME

DIRECT = "the two legs, sent by hand"
SHAPE = Shape("one at a time", 300, 4)
PATIENCE_S = 60.0
FIRST = 5
"""Turns that are in no figure."""
DATA = b"data: "
TO_HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False}
"""The transfer parameters that ask a prefill node for a ticket."""

Way = Callable[[str], "First"]


class First(NamedTuple):
    """Milliseconds to the first text, and all of the text."""

    milliseconds: float
    text: str


class Connection:
    """A connection that is kept; requests on it follow one another. `patience`: seconds for each piece of an answer."""

    def __init__(self, url: str, patience: float = PATIENCE_S) -> None:
        self._http = http.client.HTTPConnection(urlsplit(url).netloc, timeout=patience)

    def close(self) -> None:
        """At the end."""
        self._http.close()

    def whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """An answer in one piece. Raises BenchError where it is an error."""
        answer: dict[str, Any] = json.loads(self._post(body).read())
        return answer

    def pieces(self, body: Mapping[str, Any]) -> Iterator[str]:
        """The texts of a stream, as they come. Raises BenchError where it holds an error."""
        response = self._post({**body, "stream": True})
        while line := response.readline():
            if not line.startswith(DATA + b"{"):
                continue
            event = json.loads(line.removeprefix(DATA))
            if "error" in event:
                raise BenchError(f"a stream ended with an error: {event['error']}")
            yield from (choice["text"] for choice in event["choices"] if choice["text"])
        response.read()  # an answer with a length counts as read only then, and the connection as free

    def _post(self, body: Mapping[str, Any]) -> http.client.HTTPResponse:
        self._http.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = self._http.getresponse()
        if response.status != http.client.OK:
            raise BenchError(f"{self._http.port} answered {response.status}: {response.read()[:500]!r}")
        return response


def by_hand(prefill: Connection, decode: Connection) -> Way:
    """The two legs."""

    def ask(prompt: str) -> First:
        began = time.perf_counter()
        ticket = prefill.whole({**_body(prompt), "max_tokens": 1, "kv_transfer_params": TO_HAND_OVER})
        return _first(decode, {**_body(prompt), "kv_transfer_params": ticket["kv_transfer_params"]}, began)

    return ask


def through(proxy: Connection) -> Way:
    """One request to a proxy."""
    return lambda prompt: _first(proxy, _body(prompt), time.perf_counter())


def compare(ways: Mapping[str, Way], turns: int, seed: int) -> dict[str, list[float]]:
    """Ask in turn, another way first each time; milliseconds to the first text, by way, one for each turn.

    Raises:
        BenchError: an answer was an error, or wrong.
        OSError, http.client.HTTPException: a connection was lost, or an answer took longer than PATIENCE_S.
    """
    names = list(ways)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(FIRST + turns):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            first = _right(name, ways[name], question(SHAPE, seed + turn * len(names) + place))
            if turn >= FIRST:
                taken[name].append(first.milliseconds)
    return taken


def _right(name: str, way: Way, asked: Question) -> First:
    first = way(asked.prompt)
    if not first.text or not asked.answer.startswith(first.text):
        raise BenchError(f"{name} answered {first.text!r} instead of {asked.answer!r}")
    return first


def _body(prompt: str) -> dict[str, Any]:
    return {"model": SERVED_NAME, "prompt": prompt, "max_tokens": SHAPE.answer, "temperature": 0}


def _first(connection: Connection, body: Mapping[str, Any], began: float) -> First:
    texts, at = list[str](), began
    for text in connection.pieces(body):
        at = at if texts else time.perf_counter()
        texts.append(text)
    return First(1000 * (at - began), "".join(texts))
