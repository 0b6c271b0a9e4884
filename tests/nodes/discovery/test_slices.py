"""The watch protocol without I/O."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.errors import NodeFault
from pdproxy.nodes.discovery.slices import Book, Event, Gone, Lines, Sort
from tests.nodes.discovery.apiserver import a_slice


def listed(version: int, *slices: dict[str, object]) -> bytes:
    return json.dumps({"metadata": {"resourceVersion": str(version)}, "items": slices}).encode()


@given(st.lists(st.integers(1, 40), max_size=30))
def test_events_are_the_same_however_they_are_cut(cuts: list[int]) -> None:
    events = [Event(Sort.ADDED, a_slice(f"s{index}", "10.0.0.1", version=index)) for index in range(4)]
    raw = b"".join(json.dumps({"type": each.sort, "object": each.object}).encode() + b"\n" for each in events)
    lines, seen = Lines(), []
    for cut in cuts:
        seen += lines.feed(raw[:cut])
        raw = raw[cut:]
    assert seen + lines.feed(raw) == events


@pytest.mark.parametrize("line", [b"x\n", b"[]\n", b"{}\n", b'{"type": "OTHER", "object": {}}\n', b"\xff\n"])
def test_a_line_that_is_no_event_is_a_fault(line: bytes) -> None:
    with pytest.raises(NodeFault):
        Lines().feed(line)


def test_a_line_that_never_ends_is_a_fault() -> None:
    lines = Lines()
    assert lines.feed(b"x" * 16 * 1024 * 1024) == []
    with pytest.raises(NodeFault):
        lines.feed(b"x")


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"metadata": {"resourceVersion": "1"}, "items": 3}'])
def test_a_list_that_is_none_is_a_fault(body: bytes) -> None:
    with pytest.raises(NodeFault):
        Book("").listed(body)


def test_a_list_without_items_is_empty() -> None:
    book = Book("")
    book.listed(b'{"metadata": {"resourceVersion": "7"}, "items": null}')
    assert (book.addresses(), book.version) == ((), "7")


def test_the_port_is_chosen_by_name() -> None:
    two = a_slice("a", "10.0.0.1", version=1) | {"ports": [{"name": "side", "port": 5600}, {"name": "http", "port": 8}]}
    for name, address in (("http", (("10.0.0.1", 8),)), ("", (("10.0.0.1", 5600),)), ("other", ())):
        book = Book(name)
        book.listed(listed(1, two))
        assert book.addresses() == address


def test_versions_that_are_no_numbers_are_taken_in_their_order() -> None:
    book = Book("")
    book.listed(listed(1))
    for version in ("abc", "²", "aaa"):
        slice_ = a_slice("a", f"host-{version}")
        slice_["metadata"]["resourceVersion"] = version
        book.told(Event(Sort.MODIFIED, slice_))
        assert book.version == version
    assert book.addresses() == (("host-aaa", 8000),)


def test_an_error_means_listing_again() -> None:
    book = Book("")
    book.listed(listed(5))
    with pytest.raises(Gone):
        book.told(Event(Sort.ERROR, {"code": 500}))
    assert book.version == ""
