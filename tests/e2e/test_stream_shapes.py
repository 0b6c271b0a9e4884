"""The decode node of a stream of any shape is killed: its client reads the uncut answer, and no error.

Reasoning, tools, grammars, penalties, several choices, any API: stream_shapes.py lists the shapes, stream_contents.py
compares the answers.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.fleet import Fleet, running_fleet
from tests.e2e.metrics_reader import read
from tests.e2e.stream_contents import contents_of, differences
from tests.e2e.stream_cuts import SPREAD_S, Cut, FollowedStream, Round, cut_short, uncut
from tests.e2e.stream_shapes import MESSAGES, NODE_FLAGS, Shape, nudged, shapes

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.timeout(3000)]

IMPATIENT = {"PDPROXY_HEALTH_INTERVAL": "1", "PDPROXY_HEALTH_COOL_DOWN": "1", "PDPROXY_HEALTH_SLOW_START": "0"}
CUTS = 5
"""The least number of cuts of each shape, in all rounds together."""
MOST_ROUNDS = 24
COPIES = 2
"""The least number of streams of each shape in a round; about half are on the node that dies."""
STREAMS = 24
"""The least number of streams in a round: fewer would end before the node dies."""
SLACK_S = 0.5
"""Seconds by which a pause in the proxy's log and the client's may differ on a busy machine."""
SEED = 20261123


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Three nodes with our parsers and a proxy. Logs: `.run/e2e-shapes`."""
    with running_fleet("e2e-shapes", IMPATIENT, decode=(), more=NODE_FLAGS) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def answers(fleet: Fleet) -> dict[str, bytes]:
    """Undisturbed answers by the shape's name; each shows its shape."""
    return asyncio.run(uncut(fleet.proxy.url, shapes()))


async def test_one_kill_with_every_shape_under_way(whole: Fleet, answers: dict[str, bytes]) -> None:
    source = random.Random(SEED)
    seen = await one_round(whole, answers, "decode-0", source, shapes())
    assert not seen.wrong()
    assert not [
        f"{cut}: {cut.how}, {cut.told}" for cut in seen.cuts if not cut.how or abs(cut.told - cut.stall) > SLACK_S
    ]
    assert 4 * len(seen.cuts) >= len(seen.streams), "too few of the streams were cut"


@pytest.mark.long
async def test_every_shape_at_random_places(whole: Fleet, answers: dict[str, bytes]) -> None:
    """Shapes with enough cuts are left out of later rounds."""
    source, cuts = random.Random(SEED + 1), list[Cut]()
    failed = read(whole.proxy.admin_url, "pdproxy_migrations_total", outcome="failed")
    wrong = ""
    for number in range(MOST_ROUNDS):
        often = Counter(cut.stream.shape.name for cut in cuts)
        if not (rest := [shape for shape in shapes() if often[shape.name] < CUTS]):
            break
        await asyncio.to_thread(whole.heal)
        seen = await one_round(
            whole, answers, f"decode-{number % 2}", source, rest * max(COPIES, -(-STREAMS // len(rest)))
        )
        wrong += seen.wrong()
        cuts += seen.cuts
    print("\n".join(f"{shape.name}: {told(shape, cuts)}" for shape in shapes()))
    assert not wrong
    assert min(Counter(cut.stream.shape.name for cut in cuts)[shape.name] for shape in shapes()) >= CUTS
    assert read(whole.proxy.admin_url, "pdproxy_migrations_total", outcome="failed") == failed


@pytest.mark.long
@pytest.mark.parametrize("shape", [shape for shape in shapes() if shape.path != MESSAGES], ids=lambda shape: shape.name)
async def test_no_answer_hangs_on_rounding(fleet: Fleet, answers: dict[str, bytes], shape: Shape) -> None:
    """Otherwise a stream that moved could differ without being wrong."""
    expected = contents_of(answers[shape.name])
    async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
        for seed in range(4):
            moved = await client.post(fleet.proxy.url + shape.path, json=nudged(shape.body, seed))
            differ = differences(expected, contents_of(moved.content))
            assert not [each for each in differ if "logprobs" not in each]


async def one_round(
    fleet: Fleet, answers: dict[str, bytes], victim: str, source: random.Random, asked: list[Shape]
) -> Round:
    """Kill a node under these streams, and print the result."""
    streams = [FollowedStream(shape, answers[shape.name], source.uniform(0, SPREAD_S)) for shape in asked]
    seen = await cut_short(fleet, streams, victim, source)
    print(f"\n{seen}{seen.wrong()}")
    return seen


def told(shape: Shape, cuts: list[Cut]) -> str:
    """Where a shape was cut, and how long its clients waited."""
    own = [cut for cut in cuts if cut.stream.shape.name == shape.name]
    return ", ".join(f"{cut.place}/{cut.stream.all_events} ({cut.stall:.2f} s)" for cut in own)
