"""Each of the ten incidents: what the page says, and that its link leads to a section of the documentation."""

import asyncio
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from pdproxy.admin.next_step import DOCS, PAGE, PageSection
from tests.test_docs import ROOT, anchors, text_of
from tests.watch.incidents import HOSTS, INCIDENTS, BothDecodesKilled, Incident, happened, told

LESS_ROOM = "loss: Served, with less room: 1 of 2 decode nodes take requests as usual."
SLOWER = "loss: Served, slower: decode nodes compute the prompts themselves."
LOADS_OR_ENDED = "vLLM is loading its model (wait: minutes for a large one), or no process runs: start it"
CHECK = " ".join(["pdproxy check", *(f"--{name.partition('-')[0]} http://{host}:" for name, host in HOSTS.items())])
"""The command that asks all nodes, without their ports, which are free ones."""


def processes(name: str) -> str:
    """The command that lists a node's processes."""
    return f"ssh {HOSTS[name]} \"ps -eo pid,stat,args | grep -i '[v]llm'\""


SAID: dict[str, tuple[list[str], PageSection | None]] = {
    "decode-killed": (
        [
            "cause: node decode-0",
            LESS_ROOM,
            "now: decode-0 has been down for",
            processes("decode-0"),
            "start it",
        ],
        PageSection.A_NODE_IS_DOWN,
    ),
    "prefill-killed": (
        ["cause: node prefill-0", SLOWER, "ready: degraded; nothing is handed over: no prefill node serves"],
        PageSection.A_NODE_IS_DOWN,
    ),
    "both-decodes-killed": (
        [
            "cause: node decode-0, decode-1",
            "loss: New requests get a 503: no decode node serves.",
            "now: Streams that ran wait for a decode node, up to 10 min (limits.queue_seconds), and go on there.",
            processes("decode-0"),
            processes("decode-1"),
            "restart the proxy with policy.on_no_decode: prefill",
        ],
        PageSection.A_NODE_IS_DOWN,
    ),
    "decode-frozen": (
        ["cause: node decode-0", LESS_ROOM, "Nothing comes back from it.", processes("decode-0"), "kill -CONT PID"],
        PageSection.A_NODE_IS_SILENT,
    ),
    "port-closed": (
        [
            "cause: node decode-1",
            LESS_ROOM,
            "has been trying to join for",
            "connection refused). It has not served here yet.",
            LOADS_OR_ENDED,
            "is not its address, correct it where discovery reads it, or in nodes",
        ],
        PageSection.A_NODE_DOES_NOT_JOIN,
    ),
    "data-path-cut": (
        [
            "cause: hand_overs",
            "loss: Served, slower",
            "no bytes come to its reads",
            "ready: degraded",
            "next: Let UCX connect the two hosts on any port (or on those of UCX_TCP_PORT_RANGE)",
            " on both, and restart both. Then see whether it works:",
            CHECK,
        ],
        PageSection.NOTHING_IS_HANDED_OVER,
    ),
    "drained": (
        [
            "cause: nothing",
            LESS_ROOM,
            "now: decode-0 has been draining for",
            " on it",
            "-X POST {here}/nodes/decode-0/",
        ],
        PageSection.A_NODE_GOES_AWAY,
    ),
    "recovered": (
        ["cause: nothing", "loss: nothing", "earlier: decode-0 was out for", "next: Nothing need be"],
        PageSection.A_NODE_IS_DOWN,
    ),
    "queue-full": (
        [
            "cause: load",
            " requests get a 429: ",
            "now: Requests were turned away: all nodes are full, and so is",
            "now: Of prompts, ",
            " run (limits.concurrency is 4), and ",
            " wait (limits.queue is 4)",
            "curl -sS {here}/nodes | jq -c .queue",
        ],
        PageSection.REQUESTS_ARE_TURNED_AWAY,
    ),
    "address-forgotten": (
        [
            "cause: hand_overs",
            SLOWER,
            "at 127.0.0.1:5600: set NODE_ADDRESS on prefill-0's host",
            "next: Set NODE_ADDRESS on prefill-0's host",
            " and restart prefill-0. Then see whether it works:",
            CHECK,
        ],
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
    page = re.sub(r"(http://127\.0\.0\.\d:)\d+", r"\1", told(state))
    if name == "both-decodes-killed":
        outs = [node for node in state["incident"]["now"] if "has been down" in node["what"]]
        assert state["incident"]["since"] == pytest.approx(min(node["began"] for node in outs), abs=0.5), "the last one"
    if name == "recovered":
        assert re.search(r"was out for \d+ s \((last fault|health): ", page), "why it was out"
    assert (state["incident"]["since"] is None) == (name == "recovered"), "since when?"
    assert [each for each in words if each not in page] == [], page
    link = state["incident"]["next"] and state["incident"]["next"]["docs"]
    assert link == (None if section is None else f"{DOCS}/{PAGE}#{section}")


async def test_the_command_for_hand_overs_asks_every_node_as_it_stands(tmp_path: Path) -> None:
    """These nodes do not tell their model, so no prompt is handed over."""
    async with happened(INCIDENTS["address-forgotten"], tmp_path) as fleet:
        [command] = (await fleet.state())["incident"]["next"]["commands"]
        program, *options = shlex.split(command)
        pipe = asyncio.subprocess.PIPE
        check = await asyncio.create_subprocess_exec(
            sys.executable, "-m", program, *options, cwd=ROOT, stdout=pipe, env={**os.environ, "NO_PROXY": "*"}
        )
        printed = (await check.communicate())[0].decode()
    assert check.returncode == 0, printed
    asked = dict(re.findall(r"^(\S+) +(?:prefill|decode) .* (\S+)$", printed, re.MULTILINE))
    assert asked == dict.fromkeys(HOSTS, "ok")


def test_each_incident_has_a_picture_of_the_page() -> None:
    shown = re.findall(r"\(incident-([\w-]+)\.png\)", text_of(ROOT / "docs/incidents.md"))
    assert sorted(shown) == sorted(INCIDENTS)
    assert set(PageSection) <= anchors(ROOT / "docs" / PAGE)
