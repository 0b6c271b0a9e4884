"""A simulated node keeps conversations, and gives blocks up in order."""

from deploy.bench.hybrid_cache import CacheShape, HashedPrompt
from deploy.bench.node_keeps import NodeKeeps
from deploy.bench.traces import Segment, hashed
from tests.fakes.clock import FakeClock

SHAPE = CacheShape(blocks=40, state_groups=1)
"""A prompt of 1,500 tokens takes five blocks and a state."""


def prompt(*names: int) -> HashedPrompt:
    return hashed(tuple(Segment(name, 1500) for name in names), SHAPE.step)


class Node:
    """A node on a clock that is set."""

    def __init__(self, share: float = 0.3) -> None:
        self.clock = FakeClock()
        self.keeps = NodeKeeps(SHAPE, share, self.clock.now)

    def computes(self, *names: int, keep: str = "", seconds: float = 60.0) -> int:
        order = {"id": keep, "seconds": seconds} if keep else None
        return self.keeps.compute(prompt(*names), order)[0]

    def told(self, *names: int, keep: str, seconds: float = 60.0) -> dict[str, object]:
        return self.keeps.compute(prompt(*names), {"id": keep, "seconds": seconds})[1]

    def others(self, first: int, count: int) -> None:
        for name in range(first, first + count):
            self.computes(name)


def test_a_kept_conversation_outlives_what_pushes_others_out() -> None:
    node = Node()
    node.computes(1, keep="a")
    node.computes(2)
    node.others(100, 8)
    assert (node.computes(1, 3), node.computes(2, 3)) == (3000 - 1280, 3000)


def test_without_a_share_nothing_is_kept() -> None:
    node = Node(share=0.0)
    assert node.told(1, keep="a") == {}
    node.others(100, 8)
    assert node.computes(1, 3) == 3000


def test_it_tells_what_it_keeps_and_what_was_hit() -> None:
    node = Node()
    assert node.told(1, keep="a") == {"hit": 0, "tokens": 1280, "blocks": 6, "why": ""}
    assert node.told(1, 2, keep="a") == {"hit": 1280, "tokens": 2816, "blocks": 12, "why": ""}
    assert node.told(1, 2, 3, keep="a") == {"hit": 2816, "tokens": 0, "blocks": 0, "why": "too_large"}
    assert node.told(5, keep="b", seconds=0)["why"] == "not_asked"
    assert (
        NodeKeeps(SHAPE, 0.3, node.clock.now).compute(hashed((Segment(1, 100),), 256), {"id": "c", "seconds": 9})[1][
            "why"
        ]
        == "nothing_cached"
    )


def test_a_full_share_refuses_a_further_keep() -> None:
    node = Node(share=0.2)
    node.computes(1, keep="a")
    assert node.told(2, keep="b")["why"] == "too_large"
    node.others(100, 8)
    assert (node.computes(1, 3), node.computes(2, 3)) == (3000 - 1280, 3000)


def test_a_full_share_takes_a_keep_in_the_place_of_one_whose_time_is_over() -> None:
    node = Node(share=0.2)
    node.computes(1, keep="a", seconds=5.0)
    node.clock.advance(5)
    assert node.told(2, keep="b")["tokens"] == 1280
    node.others(100, 8)
    assert (node.computes(2, 3), node.computes(1, 3)) == (3000 - 1280, 3000)


def test_a_full_share_takes_a_keep_in_the_place_of_one_that_is_overdue() -> None:
    node = Node(share=0.35)
    node.computes(1, keep="a", seconds=600.0)
    node.computes(2, keep="b", seconds=600.0)
    node.clock.advance(2)
    node.computes(2, 4)
    node.clock.advance(1)
    assert node.told(2, 4, keep="b", seconds=600.0)["why"] == "too_large", "next turns come after 3 s"
    node.clock.advance(10)
    assert node.told(2, 4, keep="b", seconds=600.0)["tokens"] == 2816, "the first one is 13 s old"


def test_need_ends_keeps_whose_time_is_over_first_and_a_keep_never_blocks() -> None:
    node = Node(share=1.0)
    node.computes(1, keep="a", seconds=5.0)
    node.clock.advance(10)
    for name in range(2, 7):
        node.computes(name, keep=f"k{name}", seconds=600.0)
        node.clock.advance(1)
    node.computes(50)
    assert node.computes(2, 3) == 3000 - 1280, "that of the first one was over"
    node.others(100, 8)
    assert node.keeps.cache.used <= SHAPE.blocks


def test_a_conversation_that_is_to_be_forgotten_goes_like_any_other() -> None:
    node = Node()
    node.computes(1, keep="a")
    node.keeps.forget(["a", "unknown"])
    node.others(100, 9)
    assert node.computes(1, 3) == 3000


def test_what_a_waiting_prompt_resumes_from_is_held_until_its_turn() -> None:
    node = Node()
    node.computes(1)
    waiting = prompt(1, 2)
    node.keeps.wait(waiting)
    node.others(100, 8)
    assert node.keeps.compute(waiting)[0] == 3000 - 1280
    node.others(200, 9)
    assert node.computes(1, 2) == 3000
