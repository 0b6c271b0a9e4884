"""Each of the ten incidents: what the page says, and that its link leads to a section of the documentation."""

import re
from pathlib import Path

import pytest

from pdproxy.admin.next_step import DOCS, PAGE, PageSection
from tests.test_docs import ROOT, anchors, text_of
from tests.watch.incidents import INCIDENTS, BothDecodesKilled, Incident, happened, told

LESS_ROOM = "loss: Served, with less room: 1 of 2 decode nodes take requests as usual."
SLOWER = "loss: Served, slower: decode nodes compute the prompts themselves."
SAID: dict[str, tuple[list[str], PageSection | None]] = {
    "decode-killed": (
        ["cause: node decode-0", LESS_ROOM, "now: decode-0 has been down for"],
        PageSection.A_NODE_IS_DOWN,
    ),
    "prefill-killed": (["cause: node prefill-0", SLOWER, "no prefill node serves"], PageSection.A_NODE_IS_DOWN),
    "both-decodes-killed": (
        ["cause: node decode-0, decode-1", "loss: New requests get a 503: no decode node serves."],
        PageSection.A_NODE_IS_DOWN,
    ),
    "decode-frozen": (["cause: node decode-0", LESS_ROOM, "Nothing comes back from it."], PageSection.A_NODE_IS_SILENT),
    "port-closed": (
        ["cause: node decode-1", LESS_ROOM, "has been trying to join for", "connection refused"],
        PageSection.A_NODE_DOES_NOT_JOIN,
    ),
    "data-path-cut": (
        ["cause: hand_overs", "loss: Served, slower", "no bytes come to its reads", "ready: degraded"],
        PageSection.NOTHING_IS_HANDED_OVER,
    ),
    "drained": (["cause: nothing", LESS_ROOM, "now: decode-0 has been draining for"], PageSection.A_NODE_GOES_AWAY),
    "recovered": (["cause: nothing", "loss: nothing", "earlier: decode-0 was out for"], None),
    "queue-full": (
        [
            "cause: load",
            "loss: Some requests get a 429: ",
            "now: Requests were turned away: all nodes are full, and so is",
        ],
        PageSection.REQUESTS_ARE_TURNED_AWAY,
    ),
    "address-forgotten": (
        ["cause: hand_overs", SLOWER, "at 127.0.0.1:5600: set NODE_ADDRESS on prefill-0's host"],
        PageSection.NOTHING_IS_HANDED_OVER,
    ),
}


def test_each_incident_has_its_sentences() -> None:
    assert set(SAID) == set(INCIDENTS)
    assert len(SAID) == 10


@pytest.mark.parametrize("name", SAID)
async def test_the_page_says_what_happened_and_where_to_go_on(name: str, tmp_path: Path) -> None:
    words, section = SAID[name]
    incident: Incident = BothDecodesKilled(2.0) if name == "both-decodes-killed" else INCIDENTS[name]
    async with happened(incident, tmp_path) as fleet:
        state = await fleet.state()
    page = told(state)
    if name == "both-decodes-killed":
        outs = [node for node in state["incident"]["now"] if "has been down" in node["what"]]
        assert state["incident"]["since"] == pytest.approx(min(node["began"] for node in outs), abs=0.5), "the last one"
    assert (state["incident"]["since"] is None) == ("cause: nothing" in page), "since when?"
    assert [each for each in words if each not in page] == [], page
    link = state["incident"]["next"] and state["incident"]["next"]["docs"]
    assert link == (None if section is None else f"{DOCS}/{PAGE}#{section}")


def test_each_incident_has_a_picture_of_the_page() -> None:
    shown = re.findall(r"\(incident-([\w-]+)\.png\)", text_of(ROOT / "docs/incidents.md"))
    assert sorted(shown) == sorted(INCIDENTS)
    assert set(PageSection) <= anchors(ROOT / "docs" / PAGE)
