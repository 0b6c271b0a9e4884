"""Which child loads, on vLLM's real scheduler: a ticket and a disk tier, in every combination of which has more."""

from collections import Counter
from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from connector.counters import ReadOutcome
from tests.connector.harness import BLOCK, DENSE, Node, make_node, prompt, take_ticket
from tests.connector.tiers.harness import Several, loaded, make_several, pull, shelve, tier

pytestmark = pytest.mark.usefixtures("every_pace")

TOKENS = prompt(10 * BLOCK + 5)


@pytest.fixture
def prefill() -> Node:
    return make_node("kv_producer", engine_id="engine-p")


@pytest.fixture(params=["tier first", "ticket first"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Several:
    children = [tier(tmp_path), pull()]
    return make_several(children if request.param == "tier first" else children[::-1])


def cached(node: Several, prefill: Node, tokens: list[int], name: str = "before") -> None:
    """Have the node decode a prompt, so that its attention is cached, and its state nowhere."""
    node.add(name, tokens, take_ticket(prefill, tokens, f"p-{name}"))
    node.step()
    node.step(node.pulled(name))
    node.run_out(name)


@pytest.mark.parametrize("blocks", [0, 1, 9, 10])
def test_a_ticket_is_worth_more_than_any_part_of_its_prompt(
    node: Several, prefill: Node, tmp_path: Path, blocks: int
) -> None:
    shelve(tmp_path, TOKENS, blocks)
    node.add("d", TOKENS, take_ticket(prefill, TOKENS))
    node.step()
    assert node.reads() == {"d": len(TOKENS) - 1}
    assert node.loads() == []
    node.step(node.pulled("d"))
    assert len(node.run_out("d")) == 4
    assert node.counts("prompt_tokens") == {"pulled": len(TOKENS) - 1, "computed": 1}
    assert node.selected("pull") == {"queries": 1, "wins": 1, "tokens_won": len(TOKENS) - 1}
    assert node.selected("disk") == {"queries": 1, "losses" if blocks else "misses": 1}
    assert node.pending == {"disk": 0, "pull": 0}


@pytest.mark.parametrize(("blocks", "wins"), [(10, True), (6, True), (5, False), (1, False)])
def test_a_tier_that_is_twice_as_fast_needs_half_as_much(
    prefill: Node, tmp_path: Path, blocks: int, wins: bool
) -> None:
    node = make_several([pull(), tier(tmp_path, load_weight=2)])
    shelve(tmp_path, TOKENS, blocks)
    node.add("d", TOKENS, take_ticket(prefill, TOKENS))
    node.step()
    assert node.loads() == (["d"] if wins else [])
    assert node.reads() == {"d": 0 if wins else len(TOKENS) - 1}


def test_a_ticket_that_lost_is_given_back_in_the_same_step(prefill: Node, tmp_path: Path) -> None:
    """The prefill node gets its notice with the step in which the tier begins, not when the request ends."""
    node = make_several([tier(tmp_path, load_weight=9), pull()])
    shelve(tmp_path, TOKENS, 10)
    request = node.add("d", TOKENS, take_ticket(prefill, TOKENS))
    node.step()
    given_back = node.metas[-1].reqs_to_recv["d"]
    assert not any(given_back.local_block_ids)
    assert not given_back.awaiting_kvs
    assert node.counts("unused_tickets") == {"": 1}
    assert node.pending == {"disk": 1, "pull": 0}
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    node.step(loaded("d"))
    assert len(node.run_out("d")) == 4
    assert node.disk().calls.count("d received") == 1
    assert node.selected("disk") == {"queries": 1, "wins": 1, "tokens_won": 10 * BLOCK}
    assert node.selected("pull") == {"queries": 1, "losses": 1}


def test_a_ticket_counts_the_state_that_it_brings(node: Several, prefill: Node, tmp_path: Path) -> None:
    """Attention is cached up to block 6, state nowhere. The ticket brings 69 tokens beyond, and the state that makes
    the 96 usable; the tier would bring 160 from nothing. 165 tokens saved are more than 160."""
    cached(node, prefill, TOKENS[: 6 * BLOCK + 3])
    shelve(tmp_path, TOKENS, 10)
    node.add("d", TOKENS, take_ticket(prefill, TOKENS))
    node.step()
    assert node.reads() == {"d": 4 * BLOCK + 4}
    assert node.disk().asked[-1] == ("d", 0)


@pytest.mark.parametrize("with_ticket", [True, False])
def test_a_tier_that_wins_starts_where_all_groups_agree(prefill: Node, tmp_path: Path, with_ticket: bool) -> None:
    """The tier cannot complete a hit of attention alone, so the request is looked up again, in the shared way."""
    node = make_several([pull(), tier(tmp_path, load_weight=9)])
    cached(node, prefill, TOKENS[: 6 * BLOCK + 3])
    shelve(tmp_path, TOKENS, 10)
    free = node.free_blocks
    request = node.add("d", TOKENS, take_ticket(prefill, TOKENS) if with_ticket else None)
    node.step()
    assert node.loads() == []
    assert node.free_blocks == free
    node.step()
    assert node.loads() == ["d"]
    assert request.num_computed_tokens == 10 * BLOCK
    assert node.disk().calls[-1] == f"d loads {10 * BLOCK}"
    node.step(loaded("d"))
    assert len(node.run_out("d")) == 4


def test_a_ticket_is_put_off_for_one_step_at_most(prefill: Node, tmp_path: Path) -> None:
    """In the step in which everything is looked up in the shared way, a ticket would pull what is there already."""
    node = make_several([pull(), tier(tmp_path)])
    cached(node, prefill, TOKENS[: 6 * BLOCK + 3])
    shelve(tmp_path, TOKENS, 10)
    node.add("plain", TOKENS)
    node.step()
    longer = [*TOKENS[: 6 * BLOCK], *prompt(50, seed=4)]
    node.add("ticket", longer, take_ticket(prefill, longer, "p-ticket"))
    node.step()
    assert (node.loads(), node.reads()) == (["plain"], {})
    node.step()
    assert node.reads() == {"ticket": 49}


def test_without_an_offer_the_node_resumes_where_all_groups_agree(node: Several, prefill: Node) -> None:
    cached(node, prefill, TOKENS[: 6 * BLOCK + 3])
    node.add("plain", TOKENS)
    node.step()
    assert node.selected("disk")["misses"] == 2
    assert len(node.run_out("plain")) == 4


def test_a_dense_model_asks_every_child_for_the_same_hit(tmp_path: Path) -> None:
    node = make_several([pull(), tier(tmp_path)], DENSE)
    node.add("before", TOKENS[: 3 * BLOCK])
    node.run_out("before")
    shelve(tmp_path, TOKENS, 10)
    node.add("d", TOKENS)
    node.step()
    assert node.disk().asked[-1] == ("d", 3 * BLOCK)
    assert node.loads() == ["d"]


def test_a_failed_tier_falls_back_to_the_next_best(tmp_path: Path) -> None:
    """And is not asked again: it would say the same, and the request would go round for ever."""
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    node = make_several([pull(), tier(fast, "fast", load_weight=2), tier(slow, "slow")])
    shelve(fast, TOKENS, 10)
    shelve(slow, TOKENS, 8)
    node.add("d", TOKENS)
    node.step()
    assert node.loads("fast") == ["d"]
    node.step(loaded("d", failed=["d"]))
    node.step()
    assert node.loads("slow") == ["d"]
    node.step(loaded("d"))
    assert len(node.run_out("d")) == 4
    assert node.selected("fast") == {"queries": 1, "wins": 1, "tokens_won": 10 * BLOCK, "failed_loads": 1}
    assert node.selected("slow") == {"queries": 2, "losses": 1, "wins": 1, "tokens_won": 8 * BLOCK}
    assert node.disk("slow").calls[:2] == ["d loads 0", f"d loads {8 * BLOCK}"]
    assert len(node.connector._loads) == 0


@pytest.mark.parametrize("outcome", [ReadOutcome.NOT_HELD, ReadOutcome.TRANSFER_FAILED])
def test_a_failed_ticket_falls_back_to_the_tier(
    node: Several, prefill: Node, tmp_path: Path, outcome: ReadOutcome
) -> None:
    shelve(tmp_path, TOKENS, 4)
    node.add("d", TOKENS, take_ticket(prefill, TOKENS))
    node.step()
    node.step(node.pulled("d", failed=["d"], outcome=outcome))
    node.step()
    assert node.loads() == ["d"]
    node.step(loaded("d"))
    assert len(node.run_out("d")) == 4


def test_where_the_cache_holds_the_prompt_once_only_a_failed_ticket_is_computed(prefill: Node, tmp_path: Path) -> None:
    """vLLM reserves the blocks of the failed read: with a second load nobody would be admitted any more."""
    node = make_several([pull(), tier(tmp_path)], num_blocks=20)
    shelve(tmp_path, TOKENS, 4)
    node.add("d", TOKENS, take_ticket(prefill, TOKENS))
    node.step()
    node.add("behind", prompt(20, seed=9))
    node.step(node.pulled("d", failed=["d"]))
    said = Counter(output.request_id for _ in range(20) for output in node.step())
    assert said == {"d": 4, "behind": 4}
    assert node.loads() == []


def test_when_everything_failed_the_prompt_is_computed(node: Several, prefill: Node, tmp_path: Path) -> None:
    shelve(tmp_path, TOKENS, 4)
    free = node.free_blocks
    node.add("d", TOKENS, take_ticket(prefill, TOKENS))
    node.step()
    node.step(node.pulled("d", failed=["d"]))
    node.step()
    node.step(loaded("d", failed=["d"]))
    assert len(node.run_out("d")) == 4
    assert node.free_blocks == free
    assert len(node.connector._loads) == 0


def test_an_aborted_load_is_passed_to_all_and_its_end_to_its_child(node: Several, tmp_path: Path) -> None:
    shelve(tmp_path, TOKENS, 4)
    free = node.free_blocks
    node.add("d", TOKENS)
    node.step()
    node.abort("d")
    assert "d finished" in node.disk().calls
    assert node.free_blocks < free
    node.step(loaded("d"))
    assert node.disk().calls[-1] == "d received"
    assert node.free_blocks == free
    assert len(node.connector._loads) == 0


def test_an_aborted_ticket_is_given_back(node: Several, prefill: Node) -> None:
    """Before it was scheduled at all."""
    node.add("d", TOKENS, take_ticket(prefill, TOKENS))
    node.abort("d")
    node.step()
    assert node.reads() == {"d": 0}


class TestHesitation:
    @pytest.fixture
    def looking(self, tmp_path: Path) -> Path:
        tmp_path.joinpath("looking").touch()
        shelve(tmp_path, TOKENS, 10)
        return tmp_path / "looking"

    def test_a_child_that_may_have_more_is_waited_for(self, prefill: Node, tmp_path: Path, looking: Path) -> None:
        node = make_several([tier(tmp_path, kind="SlowTier", load_weight=9), pull()], pdproxy_decide_within=60)
        node.add("d", TOKENS, take_ticket(prefill, TOKENS))
        for _ in range(3):
            node.step()
        assert (node.loads(), node.reads()) == ([], {})
        looking.unlink()
        node.step()
        assert node.loads() == ["d"]
        assert node.selected("disk") == {"queries": 1, "wins": 1, "tokens_won": 10 * BLOCK}

    def test_not_beyond_its_deadline(self, prefill: Node, tmp_path: Path, looking: Path) -> None:
        node = make_several([tier(tmp_path, kind="SlowTier", load_weight=9), pull()], pdproxy_decide_within=0)
        node.add("d", TOKENS, take_ticket(prefill, TOKENS))
        node.step()
        assert node.reads() == {"d": len(TOKENS) - 1}
        assert node.selected("disk") == {"queries": 1, "misses": 1}

    def test_not_when_it_cannot_have_more(self, prefill: Node, tmp_path: Path, looking: Path) -> None:
        """Even the whole prompt would be worth less than the ticket."""
        node = make_several([pull(), tier(tmp_path, kind="SlowTier", load_weight=0.5)], pdproxy_decide_within=60)
        node.add("d", TOKENS, take_ticket(prefill, TOKENS))
        node.step()
        assert node.reads() == {"d": len(TOKENS) - 1}


@pytest.mark.parametrize("answer", [-5, len(TOKENS) + 1, 10**9])
def test_a_child_that_answers_nonsense_has_nothing(prefill: Node, tmp_path: Path, answer: int) -> None:
    """vLLM's scheduler asserts on either, which would end the engine."""
    tmp_path.joinpath("says").write_text(str(answer))
    node = make_several([tier(tmp_path, kind="RashTier", load_weight=9), pull()])
    node.add("d", TOKENS, take_ticket(prefill, TOKENS))
    node.step()
    assert node.reads() == {"d": len(TOKENS) - 1}
    assert node.selected("disk") == {"queries": 1, "misses": 1}


def test_a_child_that_could_not_take_back_a_load_does_not_begin_it(tmp_path: Path) -> None:
    shelve(tmp_path, TOKENS, 10)
    hybrid = make_several([tier(tmp_path, kind="InstantTier"), pull()])
    hybrid.add("d", TOKENS)
    hybrid.step()
    assert hybrid.loads() == []
    dense = make_several([tier(tmp_path, kind="InstantTier"), pull()], DENSE)
    dense.add("d", TOKENS)
    dense.step()
    assert dense.loads() == ["d"]


def test_a_request_that_reads_no_cache_counts_as_no_win(tmp_path: Path) -> None:
    """vLLM drops the offer after it was chosen: what counts is what is loaded, so that nothing is ever subtracted."""
    shelve(tmp_path, TOKENS, 10)
    node = make_several([tier(tmp_path), pull()])
    node.add("d", TOKENS, sampling={"prompt_logprobs": 1})
    node.step()
    assert node.loads() == []
    assert node.selected("disk") == {"queries": 1, "losses": 1}
    assert node.pending == {"disk": 0, "pull": 0}


def test_a_child_of_weight_zero_only_saves(tmp_path: Path) -> None:
    shelve(tmp_path, TOKENS, 10)
    node = make_several([tier(tmp_path, load_weight=0), pull()])
    node.add("d", TOKENS)
    node.step()
    assert node.loads() == []
