"""Requests with one odd value each, made from a node's own OpenAPI document. Pure."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pdproxy.request import Endpoint

LONG = 1_000_000
"""Characters of a long text."""
MANY = 2_000
"""Values in a long list. Half a million of them in the place of messages take vLLM's own API server 22 GiB: pydantic
writes an error for each value and each type that it might have had."""
ODD_VALUES: Mapping[str, str] = {
    "missing": "",
    "null": "null",
    "empty text": '""',
    "0": "0",
    "-1": "-1",
    "1": "1",
    "1.0": "1.0",
    "0.5": "0.5",
    "1e400": "1e400",
    "beyond 64 bits": "99999999999999999999",
    "true": "true",
    '"true"': '"true"',
    '"1"': '"1"',
    "empty list": "[]",
    "nested lists": "[[[]]]",
    "object": "{}",
    "nested object": '{"a":{"b":[1]}}',
    "lone surrogate": '"\\ud800"',
    "long text": f'"{"x" * LONG}"',
    "long list": f"[{','.join(['1'] * MANY)}]",
}
"""Name → JSON as it is written; the missing field is left out. Not by `json.dumps`, which cannot write 1e400."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One request of the grid.

    Attributes:
        field: the name whose value is odd.
        value: the odd value's name in `ODD_VALUES`.
    """

    endpoint: Endpoint
    field: str
    value: str
    stream: bool
    body: bytes = dataclasses.field(repr=False)

    @property
    def name(self) -> str:
        """As the ledger and messages have it."""
        return f"{self.endpoint} {'streamed' if self.stream else 'whole'} {self.field} = {self.value}"


def fields_of(document: Mapping[str, Any], endpoint: str) -> tuple[str, ...]:
    """The names that an endpoint's JSON body may have, in the document's order. Raises KeyError for no endpoint."""
    content = document["paths"][endpoint]["post"]["requestBody"]["content"]["application/json"]
    schema = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    return tuple(schema["properties"])


def cases(document: Mapping[str, Any], bodies: Mapping[Endpoint, Mapping[str, Any]]) -> Iterator[Case]:
    """Every field with every odd value, streamed and not. ``bodies``: a good request for each endpoint."""
    for endpoint, good in bodies.items():
        ways = itertools.product(fields_of(document, endpoint), ODD_VALUES, (False, True))
        for field, value, stream in ways:
            yield case(endpoint, good, field, value, stream=stream)


def case(endpoint: Endpoint, good: Mapping[str, Any], field: str, value: str, *, stream: bool) -> Case:
    """One of them."""
    fields = {name: json.dumps(content) for name, content in {**good, "stream": stream}.items()}
    if value == "missing":
        fields.pop(field, None)
    else:
        fields[field] = ODD_VALUES[value]
    body = "{" + ",".join(f"{json.dumps(name)}:{content}" for name, content in fields.items()) + "}"
    return Case(endpoint, field, value, stream, body.encode())


def some_of(whole: list[Case]) -> list[Case]:
    """A slice in which every field of every endpoint and every odd value has its turn."""
    values = list(ODD_VALUES)
    fields = dict.fromkeys((each.endpoint, each.field) for each in whole)
    chosen = {
        (endpoint, field, values[(number * 7 + turn * 3) % len(values)], bool((number + turn) % 2))
        for number, (endpoint, field) in enumerate(fields)
        for turn in range(2)
    }
    return [each for each in whole if (each.endpoint, each.field, each.value, each.stream) in chosen]
