"""A list and a watch together, without I/O."""

from typing import Any, cast

import pytest
from lightkube.resources.discovery_v1 import EndpointSlice

from pdproxy.nodes.discovery.endpoint_slices import EndpointSlices, Lost
from tests.nodes.discovery.apiserver import a_bookmark, a_slice


def read(raw: dict[str, Any]) -> EndpointSlice:
    return cast(EndpointSlice, EndpointSlice.from_dict(raw))


def listed(port: str, version: str, *raws: dict[str, Any]) -> EndpointSlices:
    slices = EndpointSlices(port)
    slices.replace(map(read, raws), version)
    return slices


def test_an_empty_list_is_one() -> None:
    slices = listed("", "7")
    assert (slices.addresses(), slices.version) == ((), "7")


def test_the_port_is_chosen_by_name() -> None:
    two = a_slice("a", "10.0.0.1", version=1) | {"ports": [{"name": "side", "port": 5600}, {"name": "http", "port": 8}]}
    for name, address in (("http", (("10.0.0.1", 8),)), ("", (("10.0.0.1", 5600),)), ("other", ())):
        assert listed(name, "1", two).addresses() == address


@pytest.mark.parametrize("field", ["endpoints", "ports"])
def test_what_is_null_is_nothing(field: str) -> None:
    """As an API server writes a service without pods."""
    assert listed("", "1", a_slice("a", "10.0.0.1") | {field: None}).addresses() == ()


def test_an_endpoint_without_conditions_is_ready_and_one_without_an_address_is_none() -> None:
    raw = a_slice("a") | {"endpoints": [{"addresses": ["10.0.0.1", "10.0.0.2"]}, {"addresses": []}]}
    assert listed("", "1", raw).addresses() == (("10.0.0.1", 8000),)


def test_versions_that_are_no_numbers_are_taken_in_their_order() -> None:
    slices = listed("", "1")
    for version in ("abc", "²", "aaa"):
        raw = a_slice("a", f"host-{version}")
        raw["metadata"]["resourceVersion"] = version
        slices.apply("MODIFIED", read(raw))
        assert slices.version == version
    assert slices.addresses() == (("host-aaa", 8000),)


def test_a_deleted_slice_that_an_old_event_shows_stays_deleted() -> None:
    slices = listed("", "5", a_slice("a", "10.0.0.1", version=5))
    slices.apply("DELETED", read(a_slice("a", "10.0.0.1", version=7)))
    slices.apply("MODIFIED", read(a_slice("a", "10.0.0.1", version=6)))
    assert (slices.addresses(), slices.version) == ((), "7")


def test_a_bookmark_moves_only_the_version() -> None:
    slices = listed("", "5", a_slice("a", "10.0.0.1", version=5))
    slices.apply("BOOKMARK", read(a_bookmark(9)))
    assert (slices.addresses(), slices.version) == ((("10.0.0.1", 8000),), "9")


def test_an_unknown_event_means_listing_again() -> None:
    with pytest.raises(Lost, match="LAUGHED"):
        EndpointSlices("").apply("LAUGHED", read(a_slice("a")))


@pytest.mark.parametrize(
    ("conditions", "known"),
    [
        ({"ready": True, "serving": True, "terminating": False}, "ready"),
        ({"ready": False, "serving": True, "terminating": True}, "terminating"),
        ({"ready": True, "serving": True, "terminating": True}, "terminating"),  # publishNotReadyAddresses
        ({"ready": True, "terminating": True}, "terminating"),  # an API server before 1.22
        ({"ready": False, "terminating": True}, "gone"),
        ({"ready": True, "serving": False, "terminating": True}, "gone"),
        ({"ready": False, "serving": False, "terminating": False}, "gone"),
    ],
)
def test_what_terminates_and_serves_is_listed_apart(conditions: dict[str, Any], known: str) -> None:
    slices, address = listed("", "1", a_slice("a", "10.0.0.1", **conditions)), (("10.0.0.1", 8000),)
    assert slices.addresses() == (address if known == "ready" else ())
    assert slices.terminating() == (address if known == "terminating" else ())


def test_an_address_that_is_ready_in_any_slice_terminates_in_none() -> None:
    """A pod may get the address of one that ends."""
    going = a_slice("a", "10.0.0.1", ready=False, serving=True, terminating=True)
    slices = listed("", "1", going, a_slice("b", "10.0.0.1"))
    assert (slices.addresses(), slices.terminating()) == ((("10.0.0.1", 8000),), ())
