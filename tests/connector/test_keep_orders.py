"""Orders about keeps, whatever a client writes."""

from typing import Any

import pytest

from connector.keep_orders import LONGEST_KEEP, MOST_FORGOTTEN, KeepOrder, Orders, orders_in
from connector.ticket_fields import Refusal, RefusalReason

ID = "conversation-0123456789"
OTHER = "conversation-9876543210"


@pytest.mark.parametrize("params", [None, {}, [], "x", 3, True, {"do_remote_decode": True}, {"pdproxy_release": ID}])
def test_params_without_orders(params: Any) -> None:
    assert orders_in(params) == Orders()


@pytest.mark.parametrize(
    ("keep", "seconds"),
    [
        ({"id": ID}, 0.0),
        ({"id": ID, "seconds": 0}, 0.0),
        ({"id": ID, "seconds": 2.5}, 2.5),
        ({"id": ID, "seconds": LONGEST_KEEP, "more": 1}, LONGEST_KEEP),
    ],
)
def test_a_turn_of_a_conversation(keep: dict[str, Any], seconds: float) -> None:
    assert orders_in({"pdproxy_keep": keep, "do_remote_decode": True}) == Orders(KeepOrder(ID, seconds))


def test_conversations_are_forgotten_beside_a_turn_of_another_one() -> None:
    params = {"pdproxy_keep": {"id": ID, "seconds": 1}, "pdproxy_forget": [OTHER]}
    assert orders_in(params) == Orders(KeepOrder(ID, 1.0), (OTHER,))


KEEPS: tuple[Any, ...] = (
    *(None, [], ID, 1, {}, {"id": 7}, {"id": "short"}, {"id": ID + "\n"}),
    *(
        {"id": ID, "seconds": each}
        for each in (-1, LONGEST_KEEP + 1, float("nan"), float("inf"), True, "60", None, [60])
    ),
    {"id": ID, "seconds": 10**400},
)
FORGETS: tuple[Any, ...] = (None, ID, 7, {}, [7], ["short"], [[ID]], [ID] * (MOST_FORGOTTEN + 1))


@pytest.mark.parametrize(
    "params", [*({"pdproxy_keep": each} for each in KEEPS), *({"pdproxy_forget": each} for each in FORGETS)]
)
def test_what_makes_no_sense_is_refused(params: dict[str, Any]) -> None:
    refusal = orders_in(params)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefusalReason.BAD_FIELD
